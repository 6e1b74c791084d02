"""Shared test set-up: seeds from the test's own name, one OpenMP thread."""

import zlib

import pytest

from moeyard_worker.cpu_config import set_cpu_environment

# Before torch is imported anywhere: test processes compute as workers do (docs/architecture.md).
set_cpu_environment()


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed that is stable for a test and differs between tests."""
    return zlib.crc32(request.node.nodeid.encode())
