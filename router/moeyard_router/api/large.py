"""Large request bodies, made into jobs by processes of their own (`main`).

A thread would not help the event loop, because each step holds the interpreter lock: loading 16 MB of JSON takes 50 to
450 ms (dense objects 1.3 s), a template joins strings in one call, and 131,072 ids become a list in 5 ms. The memory of
a long text is freed with its process. Measured on 2026-11-22 with orjson 3.13 and tokenizers 0.23, on two cores.
"""

import asyncio
import contextlib
import gc
import json
import logging
import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from typing import Any, BinaryIO

import psutil
from pydantic import TypeAdapter

from moeyard_router.api.intake import Intake, Job, Prompt
from moeyard_router.api.surfaces import COUNTED, SURFACES
from moeyard_router.config import DoorConfig, RouterConfig
from moeyard_router.errors import ApiError, bad_request
from moeyard_router.text import exact_json
from moeyard_router.text.answer_formats import AnswerFormats
from moeyard_router.text.chat import open_codec
from moeyard_router.text.extraction import Extraction
from moeyard_router.text.tool_formats import JSON_CALLS
from moeyard_worker.protocol import TokenIds

LARGE_BODY = 64 * 1024  # bytes; what is smaller is read here, in a thread if it takes more than a millisecond or two
_SECONDS = 120.0  # then the process is killed
_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from moeyard_router.api.large import main; main()"
_REQUEST = struct.Struct("<16pQ")  # the API's name in `SURFACES`, bytes of the body that follows
_ANSWER = struct.Struct("<Q")  # bytes of the JSON object that follows, which says what follows it
JOBS: TypeAdapter[Job] = TypeAdapter(Job)
CONFIGS: TypeAdapter[RouterConfig] = TypeAdapter(RouterConfig)


def _pack(job: Job) -> tuple[dict[str, Any], list[bytes]]:
    """Return the head of an answer with a job, and the ids and texts that follow it."""
    blobs: list[bytes] = []
    for prompt in job.prompts:
        blobs += TokenIds.of(prompt.token_ids).data, prompt.text.encode()
    sizes = list(zip(map(len, blobs[::2]), map(len, blobs[1::2]), strict=True))
    plain = JOBS.dump_python(replace(job, prompts=(), extraction=None), mode="json")
    return {"job": plain, "extraction": _plain_extraction(job.extraction), "prompts": sizes}, blobs


def _plain_extraction(extraction: Extraction | None) -> dict[str, Any] | None:
    """Without what both processes have: the model's formats, of which it is said whether they are meant."""
    if extraction is None:
        return None
    plain = {field.name: getattr(extraction, field.name) for field in fields(extraction) if field.name != "visible"}
    tools, reasoning = extraction.tools, extraction.reasoning is not None
    return plain | {"tools": None if tools is None else tools.name, "reasoning": reasoning}


def _extraction(plain: dict[str, Any] | None, formats: AnswerFormats) -> Extraction | None:
    if plain is None:
        return None
    name, reasoning = plain.pop("tools"), plain.pop("reasoning")
    tools = None if name is None else JSON_CALLS if name == JSON_CALLS.name else formats.tools
    return Extraction(
        visible=formats.visible(tools), tools=tools, reasoning=formats.reasoning if reasoning else None, **plain
    )


def _read_config(source: BinaryIO) -> RouterConfig | None:
    """The configuration, which a process is told before anything else; None if its router ended before that."""
    head = source.read(_ANSWER.size)
    data = b"" if len(head) < _ANSWER.size else source.read(_ANSWER.unpack(head)[0])
    return CONFIGS.validate_json(data) if data else None


def _read_request(source: BinaryIO) -> tuple[str, bytes] | None:
    """(the API, the body) of the next request, None at the end."""
    head = source.read(_REQUEST.size)
    if len(head) < _REQUEST.size:
        return None
    api, size = _REQUEST.unpack(head)
    return api.decode(), source.read(size)


class _Process:
    """One process: a body in, a job or an error out. Used by one thread at a time."""

    def __init__(self, config: bytes, formats: AnswerFormats) -> None:
        self._formats = formats
        # The path is handed over, for a program that found its modules in a way of its own. In a session of its own it
        # is spared the terminal's Ctrl-C; it ends with its standard input, so with us, however we end.
        command = [sys.executable, "-c", _START, json.dumps(sys.path)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        assert self._process.stdin is not None, "a pipe was asked for"
        assert self._process.stdout is not None, "a pipe was asked for"
        self._in, self._out = self._process.stdin, self._process.stdout
        self._unsaid = _ANSWER.pack(len(config)) + config
        self.usable = True

    def ask(self, parts: Sequence[bytes], *, api: str) -> Job:
        """The job of a body in pieces; raises `ApiError`, also a 503 where the process ends before it answers."""
        timer = threading.Timer(_SECONDS, self._process.kill)
        timer.start()
        answered = False
        try:
            self._in.write(self._unsaid + _REQUEST.pack(api.encode(), sum(map(len, parts))))
            self._unsaid = b""
            for part in parts:
                self._in.write(part)
            self._in.flush()
            head = exact_json.loads(self._read(_ANSWER.unpack(self._read(_ANSWER.size))[0]))
            prompts = tuple(
                Prompt(token_ids=TokenIds(self._read(ids)), text=self._read(text).decode())
                for ids, text in head.get("prompts", ())
            )
            answered = True
        except (OSError, ValueError) as error:  # ValueError: `close` came between
            if self._ended_by() == signal.SIGPROF:
                message = "the chat template takes too long for these messages: it was stopped"
                raise bad_request(message, "messages") from error
            raise ApiError(503, "the process that read this request has ended; try again", reason="intake") from error
        finally:
            timer.cancel()
            self.usable = answered and not head["last"]
        if "error" in head:
            given = head["error"]
            raise ApiError(given.pop("status"), given.pop("message"), **given)
        if "crash" in head:
            raise RuntimeError(head["crash"])
        extraction = _extraction(head["extraction"], self._formats)
        return replace(JOBS.validate_python(head["job"]), prompts=prompts, extraction=extraction)

    def _ended_by(self) -> int | None:
        """The signal that has ended the process, None for any other end."""
        with contextlib.suppress(subprocess.TimeoutExpired):  # boundary: it has closed its output and goes on
            return -self._process.wait(1.0)
        return None

    def _read(self, size: int) -> bytes:
        data = self._out.read(size)
        if len(data) < size:
            raise OSError("the process has ended")
        return data

    def close(self) -> None:
        self.usable = False
        self._process.kill()
        with contextlib.suppress(OSError):  # boundary: what was not written yet has no reader any more
            self._in.close()
        self._process.wait()
        self._out.close()


def _shutting_down() -> ApiError:
    return ApiError(503, "the router is shutting down", reason="not_ready")


class Bodies:
    """The request bodies that are being read: their bytes, and the processes for large ones.

    At most `config.intake_processes` run, and bodies hold at most `config.max_buffered_bytes` until their jobs are
    made.
    """

    def __init__(self, config: RouterConfig, formats: AnswerFormats) -> None:
        self._formats = formats
        self._limit = config.max_buffered_bytes
        self._count = config.intake_processes
        self._held = 0
        # Those processes let nobody in: they need no keys.
        self._config = CONFIGS.dump_json(replace(config, door=DoorConfig()))
        self._threads = ThreadPoolExecutor(config.intake_processes, thread_name_prefix="large-body")
        self._writing = ThreadPoolExecutor(1, thread_name_prefix="long-answer")
        self._lock = threading.Lock()
        self._idle: list[_Process] = []
        self._busy: set[_Process] = set()
        self._closed = False

    def start(self) -> None:
        """Start all processes now: to start one takes up to 30 ms, in which nothing else runs here."""
        with self._lock:
            self._idle += [
                _Process(self._config, self._formats) for _ in range(self._count - len(self._idle) - len(self._busy))
            ]

    @contextlib.contextmanager
    def room(self) -> Iterator[Callable[[int], None]]:
        """For one body: what is to be told of its bytes as they come; raises `ApiError` 503 when there are too many."""
        mine = 0

        def take(size: int) -> None:
            nonlocal mine
            if self._held + size > self._limit:
                message = f"requests of {self._held} bytes are being read, {self._limit} are allowed; try again"
                raise ApiError(503, message, reason="busy", retry_after=1.0)
            mine += size
            self._held += size

        try:
            yield take
        finally:
            self._held -= mine

    async def write(self, write: Callable[..., list[bytes]], *given: Any) -> list[bytes]:
        """What a call gives that takes long, from the one thread there is for such: several would keep the event loop
        waiting for each in turn.
        """
        return await asyncio.get_running_loop().run_in_executor(self._writing, write, *given)

    async def job(self, parts: Sequence[bytes], *, api: str) -> Job:
        """The job of an API's request body that came in these pieces; raises `ApiError`. First come, first served."""
        if self._closed:  # an executor that was shut down would raise a bare RuntimeError, which clients see as a 500
            raise _shutting_down()
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._ask, parts, api)

    def close(self) -> None:
        """End all processes; whoever still waits gets a 503. Called where `job` is, in the event loop."""
        with self._lock:
            self._closed = True
            processes = [*self._idle, *self._busy]
            self._idle.clear()
        self._threads.shutdown(wait=False)  # what waits for a process finds that there is none, and says so
        self._writing.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.close()

    def _ask(self, parts: Sequence[bytes], api: str) -> Job:
        with self._process() as process:
            return process.ask(parts, api=api)

    @contextlib.contextmanager
    def _process(self) -> Iterator[_Process]:
        with self._lock:
            if self._closed:
                raise _shutting_down()
            process = self._idle.pop() if self._idle else _Process(self._config, self._formats)
            self._busy.add(process)
        try:
            yield process
        finally:
            with self._lock:
                self._busy.discard(process)
                keep = process.usable and not self._closed
                if keep:
                    self._idle.append(process)
            if not keep:
                process.close()


_NICENESS = 5  # streams go first where cores are few
_MOST_MEMORY = 512 * 1024 * 1024  # bytes: a process that has kept more gives them back by ending


def main() -> None:
    """Answer until standard input ends."""
    if (config := _read_config(sys.stdin.buffer)) is None:
        return
    # Whatever prints writes to standard error, so that nothing stands between answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    os.nice(_NICENESS)
    intake = Intake(config, open_codec(config.model_path, config.chat_template, killable=True))
    gc.disable()  # a body is one tree of JSON without cycles; nothing to find, and much to look through
    with asyncio.Runner() as runner:
        while (request := _read_request(sys.stdin.buffer)) is not None:
            head, blobs = runner.run(_answer(intake, *request))
            last = head["last"] = "crash" in head or psutil.Process().memory_info().rss > _MOST_MEMORY
            data = exact_json.dumps(head)
            try:
                answers.write(b"".join((_ANSWER.pack(len(data)), data, *blobs)))
                answers.flush()
            except BrokenPipeError:
                return
            if last:
                return
            del request, head, blobs, data
            gc.collect()


async def _answer(intake: Intake, api: str, body: bytes) -> tuple[dict[str, Any], list[bytes]]:
    """Return the head of the answer, with a job, an error or the words of a bug, and the blobs behind it."""
    try:
        return _pack(await (COUNTED.get(api) or SURFACES[api].read)(intake, body))
    except ApiError as error:
        names = ("status", "message", "param", "reason", "retry_after")
        return {"error": {name: getattr(error, name) for name in names}}, []
    except Exception as error:  # boundary: a bug is the router's to answer for
        logging.getLogger(__name__).exception("a large request could not be read")
        return {"crash": f"{type(error).__name__}: {error}"}, []
