"""Log lines: their two formats, what they omit, and that logging never blocks."""

import contextlib
import io
import json
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.limits import HANG_SECONDS

from moeyard import logs
from moeyard.logs import LogConfig, _Lossy

SECRET = "words of a prompt"


class Stuck(io.StringIO):
    """A pipe without a reader until `read` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.read = threading.Event()

    def write(self, text: str) -> int:
        self.read.wait(HANG_SECONDS)
        return super().write(text)


@pytest.fixture
def started() -> Callable[..., io.StringIO]:
    """Log into a string during the test."""

    def begin(stream: io.StringIO | None = None, **fields: str) -> io.StringIO:
        stream = stream or io.StringIO()
        logs.start(LogConfig(**fields), context=lambda: {"request_id": "r-1"}, stream=stream)
        return stream

    return begin


def written(stream: io.StringIO) -> list[str]:
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logs._QueuedLines):
            handler._lines.join()  # its own `flush` gives up after a second
    return stream.getvalue().splitlines()


def test_text(started: Callable[..., io.StringIO]) -> None:
    stream = started()
    log = logging.getLogger("moeyard.supervisor")
    log.warning("worker %d ended: %s", 0, "a\nb\x1b[31m\u2028c")
    log.debug("not said")
    logging.getLogger("somebody.else").info("not said")
    fields = {"method": "GET", "status": 200}
    logging.getLogger("moeyard.access").info("method=GET status=200", extra={"fields": fields})
    first, second = written(stream)
    when = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
    assert re.fullmatch(
        when + r" WARNING moeyard\.supervisor worker 0 ended: a\\nb\\x1b\[31m\\u2028c request_id=r-1", first
    )
    assert re.fullmatch(when + r" INFO    moeyard\.access method=GET status=200", second)


def test_json(started: Callable[..., io.StringIO]) -> None:
    stream = started(format="json")
    logging.getLogger("moeyard_router.fleet").error("a\nb")
    logging.getLogger("moeyard.access").info("x", extra={"fields": {"method": "GET", "status": 200}})
    first, second = map(json.loads, written(stream))
    assert (first["level"], first["logger"], first["message"]) == ("error", "moeyard_router.fleet", "a\nb")
    assert first["request_id"] == second["request_id"] == "r-1"
    assert (second["method"], second["status"]) == ("GET", 200)
    assert "message" not in second


@pytest.mark.parametrize("form", logs.FORMATS)
def test_exception_text_is_logged_at_debug_only(started: Callable[..., io.StringIO], form: str) -> None:
    for level, shown in (("info", False), ("debug", True)):
        stream = started(format=form, level=level)
        try:
            raise KeyError(SECRET)
        except KeyError:
            logging.getLogger("uvicorn.error").exception("Exception in ASGI application\n")
        text = "\n".join(written(stream))
        assert "KeyError" in text
        assert "test_logs.py" in text
        assert (SECRET in text) is shown


def test_levels(started: Callable[..., io.StringIO]) -> None:
    stream = started(level="error")
    for level in (logging.INFO, logging.WARNING, logging.ERROR):
        logging.getLogger("moeyard.access").log(level, "one")
    assert len(written(stream)) == 1


def test_flood_is_limited_except_errors(started: Callable[..., io.StringIO], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "LINES_PER_SECOND", 10)
    stream = started()
    log = logging.getLogger("moeyard.access")
    second = [1000.0]

    class Record(logging.LogRecord):
        """All records have the same second, however long the test takes."""

        def __init__(self, *args: object, **named: object) -> None:
            super().__init__(*args, **named)  # type: ignore[arg-type]
            self.created = second[0]

    before = logging.getLogRecordFactory()
    logging.setLogRecordFactory(Record)
    try:
        for _ in range(30):
            log.info("many")
        log.error("important")
        second[0] += 1
        log.info("later")
    finally:
        logging.setLogRecordFactory(before)
    lines = written(stream)
    assert sum("many" in line for line in lines) == 10
    assert sum("important" in line for line in lines) == 1
    assert sum("20 lines left out" in line for line in lines) == 1
    assert "later" in lines[-1]


def test_logging_does_not_wait_for_a_reader(
    started: Callable[..., io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "QUEUE_LINES", 8)
    stuck = started(Stuck())
    for _ in range(100):
        logging.getLogger("moeyard").warning("a line")
    assert stuck.getvalue() == "", "the first write must still block"
    stuck.read.set()


def test_closed_stream_ends_nothing(started: Callable[..., io.StringIO]) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as stream:
        started(stream)
        for _ in range(3):
            logging.getLogger("moeyard").warning("nobody reads this")
        again = started()
        logging.getLogger("moeyard").warning("this somebody does")
        assert len(written(again)) == 1
        with pytest.raises(BrokenPipeError):
            stream.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


_FULL = """
import logging, sys
from moeyard import logs
from moeyard.logs import outlive_full_disk
outlive_full_disk()
logs.start(logs.LogConfig())
for _ in range(3):
    print("ready", flush=True)
    print("loading", file=sys.stderr)
    logging.getLogger("moeyard").info("a line " + "x" * 20_000)
logging.getLogger().handlers[0].close()
sys.exit(7)
"""


def test_full_disk_ends_nothing() -> None:
    """stdout and stderr are /dev/full, like Docker's log file on a full disk."""
    code = f"import sys; sys.path[:] = {sys.path!r}\n{_FULL}"
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-c", code], stdout=full, stderr=full, timeout=HANG_SECONDS, check=False
        )
    assert ended.returncode == 7


def test_closed_pipe_is_still_noticed() -> None:
    read, write = os.pipe()
    os.close(read)
    stream = _Lossy(os.fdopen(write, "w"))
    stream.write("x")
    with pytest.raises(BrokenPipeError):
        stream.flush()
    with contextlib.suppress(BrokenPipeError):
        stream.close()
