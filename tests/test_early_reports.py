"""A cut test run reports its failures and the tests that still ran."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.limits import HANG_SECONDS

TESTS = """
import time

import pytest


@pytest.mark.parametrize("number", range(4))
def test_number(number):
    assert number != 1, "one is wrong"


@pytest.fixture
def broken():
    raise ValueError("nothing to build on")


def test_fixture(broken):
    pass


def test_long():
    time.sleep(600)
"""


# The user's process knows that a test began: this hook runs after the plugin's own.
CONFTEST = """
import os

import pytest


@pytest.hookimpl(trylast=True)
def pytest_runtest_logstart(nodeid):
    if nodeid.endswith("test_long") and "PYTEST_XDIST_WORKER" not in os.environ:
        open("long", "w").close()
"""


@pytest.mark.sampled(0)
@pytest.mark.parametrize("workers", [0, 2])
def test_failures_are_reported_at_once_and_running_tests_at_the_end(workers: int, tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.early_reports", "-p", "no:cacheprovider", "-rf"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    said = tmp_path / "said"
    with said.open("w") as file:
        # A separate group gets the signal as a whole, like from `timeout`, and the first process gets it twice.
        run = subprocess.Popen(
            [*command, "-n", str(workers), "--tb=no"],
            cwd=tmp_path,
            env=environment,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
        try:
            until = time.monotonic() + HANG_SECONDS
            named = (
                "FAILED in call: test_some.py::test_number[1]",
                "E   AssertionError: one is wrong",
                "FAILED in setup: test_some.py::test_fixture",
                "ValueError: nothing to build on",
            )
            while not ((tmp_path / "long").exists() and all(name in said.read_text() for name in named)):
                assert time.monotonic() < until, said.read_text()
                assert run.poll() is None, said.read_text()
                time.sleep(0.05)
            assert "RUNNING" not in said.read_text()
            run.send_signal(signal.SIGTERM)
            os.killpg(run.pid, signal.SIGTERM)
            assert run.wait(HANG_SECONDS) == pytest.ExitCode.INTERRUPTED, said.read_text()
        finally:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGKILL)
                run.wait()
    at_the_end = said.read_text()
    assert re.search(r"^RUNNING for \d+ s: test_some.py::test_long$", at_the_end, re.MULTILINE)
    assert at_the_end.count("RUNNING") == 1
    assert "FAILED test_some.py::test_number[1] - AssertionError: one is wrong" in at_the_end
    assert re.match(r"1 failed, 3 passed, 1 error in ", at_the_end.splitlines()[-1])
