"""A pytest plugin for runs that may be cut: it reports failures at once, and at the end the tests that still ran.

`pytest -p tests.early_reports`, with or without xdist. The plugin prints a failure with the end of its traceback when
it happens. SIGTERM, which `timeout` sends, ends the session like ctrl-c, with pytest's summary and the tests that had
begun, including one that hangs in a driver's call.
"""

import signal
import time
from types import FrameType
from typing import Any

import pytest

# The last lines of a traceback: the raise and its message.
_LINES = 30


class EarlyReports:
    """The part in the user's process; workers of xdist report to it."""

    def __init__(self, config: pytest.Config) -> None:
        self._out: Any = config.pluginmanager.get_plugin("terminalreporter")
        self._began = time.monotonic()
        self._running: dict[str, float] = {}
        self._ending = False
        signal.signal(signal.SIGTERM, self._end)

    def _end(self, _signal: int, _frame: FrameType | None) -> None:
        # `timeout` sends the signal twice: to its child and to its group. SIG_IGN would race with the second one.
        if not self._ending:
            self._ending = True
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


# After the reporter's own hook.
@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Let a worker ignore the signal, which its whole group gets: the process that it reports to ends it."""
    if hasattr(config, "workerinput"):
        # Servers that tests start would inherit SIG_IGN and hang.
        signal.signal(signal.SIGTERM, lambda *_: None)
    else:
        config.pluginmanager.register(EarlyReports(config), "early reports")
