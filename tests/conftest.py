"""Shared test set-up: compute as workers do, Triton's interpreter without a GPU, seeds from the test's name."""

import gc
import os
import signal
import sys
import zlib
from collections.abc import Generator
from typing import Any

import hypothesis
import pytest

from moeyard_worker.config.cpu_config import set_cpu_environment

# Before torch is imported anywhere: one thread, and settings that keep the bits of rows (config/cpu_config.py).
set_cpu_environment()

import torch  # noqa: E402 - after its settings
from tests import interpreter  # noqa: E402 - after its settings
from tests.cover import chosen, part_of_this_commit  # noqa: E402 - after its settings

# Other processes may take a machine's cores for a while, so no property has a deadline, and slow examples are no error.
# The suite always tries the same examples, so that a failure comes from a change. `--hypothesis-profile search` tries
# others.
unhurried: Any = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("search", **unhurried)
hypothesis.settings.register_profile("same examples", derandomize=True, **unhurried)
hypothesis.settings.load_profile("same examples")

# A shell ignores these signals for a background command and its children, so that a server would rightly not stop.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

if not torch.cuda.is_available():
    # Triton reads it when its own library is decorated, so set it before anything imports triton.
    os.environ["TRITON_INTERPRET"] = "1"


# These files begin first, in this order, so that no process has much more left than the others at the end.
LONGEST = (
    *("e2e/test_one_answer.py", "deploy/test_serve.py", "engine/test_peer_steps.py", "e2e/test_weight_update.py"),
    *("deploy/test_trainer_clients.py", "engine/test_as_decoded_cuda.py", "engine/test_sleep.py"),
    *("deploy/test_bench_engine.py", "models/test_deepseek_v4.py", "router/test_page_operator.py"),
    *("router/test_recovery.py", "models/test_gguf_writing.py"),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run every test (default: the fast tier)")
    parser.addoption("--part", type=int, help="the part of sampled tests to run, 0 to 31 (default: by commit)")


def chosen_part(config: pytest.Config) -> int:
    """Return the part of sampled tests that this run includes."""
    given = config.getoption("part")
    return part_of_this_commit() if given is None else given


def place(item: pytest.Item) -> tuple[int, int]:
    """Return a key that orders files: longest first, the others mixed, so that few start fleets at the same time."""
    path = item.nodeid.partition("::")[0].removeprefix("tests/")
    return LONGEST.index(path) if path in LONGEST else len(LONGEST), zlib.crc32(path.encode())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests of the other tier and those that need more GPUs than there are; order a parallel run's files."""
    if hasattr(config, "workerinput"):
        items.sort(key=place)
    present = torch.cuda.device_count()
    kept = {item for item in items if all((mark.args or (1,))[0] <= present for mark in item.iter_markers("gpu"))}
    if not config.getoption("all"):
        # A test named on the command line always runs.
        named = {item for item in kept if any("::" in arg and item.nodeid.startswith(arg) for arg in config.args)}
        sampled = [item for item in items if item in kept and item.get_closest_marker("sampled")]
        kept -= {item for item in kept if item.get_closest_marker("slow")} | set(sampled)
        kept |= named | chosen(sampled, chosen_part(config))
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep imported modules and test items from garbage collection: they last, and a full collection took 0.4 s."""
    gc.disable()
    collected = yield
    gc.freeze()
    gc.enable()
    return collected


def pytest_collection_finish(session: pytest.Session) -> None:
    """Make Triton's interpreter fast if a test has imported Triton."""
    if "triton" in sys.modules and not torch.cuda.is_available():
        interpreter.install(check_overflow=session.config.getoption("all"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print which tests ran, so that the run can be repeated."""
    tier = "everything (--all)" if config.getoption("all") else f"the fast tier (--part {chosen_part(config)})"
    terminalreporter.write_line(f"tier: {tier}")


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed that is stable for a test and differs between tests."""
    return zlib.crc32(request.node.nodeid.encode())


@pytest.fixture(autouse=True)
def same_draws(seed: int) -> None:
    """Let torch draw the same numbers in each run of a test, so that a failure can be repeated."""
    torch.manual_seed(seed)
