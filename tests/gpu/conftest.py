"""Tests that need NVIDIA GPUs: each file is marked `gpu`, and a machine with fewer GPUs deselects it."""

from collections.abc import Iterator

import pytest
from tests.fleet import ProcessPool


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPool]:
    """Rank processes, which keep a module's GPUs."""
    found = ProcessPool()
    yield found
    found.close()
