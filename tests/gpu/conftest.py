"""Tests that need NVIDIA GPUs: each file has the marker `gpu`. A machine with fewer GPUs deselects it."""

from collections.abc import Iterator

import pytest
from tests.fleet import ProcessPool


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPool]:
    """Rank processes that keep one module's GPUs."""
    found = ProcessPool()
    yield found
    found.close()
