"""A pytest plugin for runs that may be cut: failures are named as they come, and what still ran at the end.

`pytest -p tests.named_at_once`, beside xdist or alone. A failure is printed with the end of its traceback when it
happens. SIGTERM, which `timeout` sends, ends the session as ctrl-c does: with pytest's summary, and the tests that had
begun. One that hangs in a driver's call is named there, too.
"""

import signal
import time
from types import FrameType
from typing import Any

import pytest

# Of a traceback the last: where it was raised, and what was said.
_LINES = 30


class NamedAtOnce:
    """The part of the process that the user started; workers of xdist report to it."""

    def __init__(self, config: pytest.Config) -> None:
        self._out: Any = config.pluginmanager.get_plugin("terminalreporter")
        self._began = time.monotonic()
        self._running: dict[str, float] = {}
        signal.signal(signal.SIGTERM, self._end)

    def _end(self, _signal: int, _frame: FrameType | None) -> None:
        # `timeout` sends it to its child and to its group: twice.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt("SIGTERM")

    def _seconds(self) -> float:
        return time.monotonic() - self._began

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running[nodeid] = self._seconds()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._running.pop(nodeid, None)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.failed:
            return
        self._out.ensure_newline()
        self._out.write_line(f"[{self._seconds():.0f} s] FAILED in {report.when}: {report.nodeid}")
        for line in report.longreprtext.splitlines()[-_LINES:]:
            self._out.write_line(f"    {line}")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for nodeid, began in self._running.items():
            terminalreporter.write_line(f"RUNNING for {self._seconds() - began:.0f} s: {nodeid}")


# Behind the reporter's own.
@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Let a worker outlive the signal, which its whole group gets: the process that it reports to ends it."""
    if hasattr(config, "workerinput"):
        # Not SIG_IGN: the servers that tests start would inherit it, and hang.
        signal.signal(signal.SIGTERM, lambda *_: None)
    else:
        config.pluginmanager.register(NamedAtOnce(config), "named at once")
