"""Shared test set-up: compute as workers do, Triton's interpreter where there is no GPU, seeds from the test's name."""

import os
import signal
import zlib

import hypothesis
import pytest

from moeyard_worker.config.cpu_config import set_cpu_environment

# Before torch is imported anywhere: one thread, and bits that keep (docs/architecture.md).
set_cpu_environment()

import torch  # noqa: E402 - after its settings

# Other processes of a machine may take its cores for a while; what a property says does not depend on that. The suite
# tries the same examples every time: what it finds is a fault of a change. `--hypothesis-profile search` tries others.
hypothesis.settings.register_profile("search", deadline=None)
hypothesis.settings.register_profile("same examples", deadline=None, derandomize=True)
hypothesis.settings.load_profile("same examples")

# Under nohup it is ignored, and by every child: then a server rightly does not end by it.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

if not torch.cuda.is_available():
    # Triton reads it when its own library is decorated, so before anything imports triton.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed that is stable for a test and differs between tests."""
    return zlib.crc32(request.node.nodeid.encode())
