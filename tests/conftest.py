"""Shared test set-up: seeds from the test's own name, one OpenMP thread."""

import os
import zlib

# Before torch is imported anywhere: two OpenMP threads beside a busy process collapse (docs/architecture.md).
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed that is stable for a test and differs between tests."""
    return zlib.crc32(request.node.nodeid.encode())
