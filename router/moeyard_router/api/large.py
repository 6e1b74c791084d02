"""Make jobs of large request bodies in separate processes (`main`).

A thread would not help, because each step holds the interpreter lock. Loading 16 MB of JSON takes 50 to 450 ms (1.3 s
for dense objects). A template joins strings in one call, and 131,072 ids become a list in 5 ms. A process also frees
the memory of a long text when it ends. Measured on 2026-11-22 with orjson 3.13 and tokenizers 0.23 on two cores.
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
from dataclasses import asdict, fields, replace
from typing import IO, Any

import psutil
from pydantic import TypeAdapter

from moeyard_router.api.intake import Intake, Job, Prompt
from moeyard_router.api.surfaces import READERS
from moeyard_router.config import AccessConfig, RouterConfig
from moeyard_router.errors import ApiError, bad_request
from moeyard_router.text import exact_json
from moeyard_router.text.answer_formats import AnswerFormats
from moeyard_router.text.chat import open_codec
from moeyard_router.text.extraction import Extraction
from moeyard_router.text.tool_formats import JSON_CALLS
from moeyard_worker.protocol import TokenIds

LARGE_BODY = 64 * 1024  # bytes; smaller bodies are read in the router, in a thread if that takes more than 1 or 2 ms
_SECONDS = 120.0  # per request, then the process is killed
_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from moeyard_router.api.large import main; main()"
_REQUEST = struct.Struct("<16pQ")  # the API's name in `READERS`, and the size of the body that follows
_SIZE = struct.Struct("<Q")  # bytes of the JSON object that follows
JOBS: TypeAdapter[Job] = TypeAdapter(Job)
CONFIGS: TypeAdapter[RouterConfig] = TypeAdapter(RouterConfig)


def _pack(job: Job) -> tuple[dict[str, Any], list[bytes]]:
    """Return a job as the JSON head of an answer, and its prompts' ids and texts as blobs behind it."""
    blobs: list[bytes] = []
    for prompt in job.prompts:
        blobs += TokenIds.of(prompt.token_ids).data, prompt.text.encode()
    sizes = list(zip(map(len, blobs[::2]), map(len, blobs[1::2]), strict=True))
    plain = JOBS.dump_python(replace(job, prompts=(), extraction=None), mode="json")
    return {"job": plain, "extraction": _pack_extraction(job.extraction), "prompts": sizes}, blobs


def _pack_extraction(extraction: Extraction | None) -> dict[str, Any] | None:
    """Return an extraction as JSON. The model's formats, which both processes have, are replaced by references."""
    if extraction is None:
        return None
    plain = {field.name: getattr(extraction, field.name) for field in fields(extraction) if field.name != "visible"}
    tools, reasoning = extraction.tools, extraction.reasoning is not None
    return plain | {"tools": None if tools is None else tools.name, "reasoning": reasoning}


def _unpack_extraction(plain: dict[str, Any] | None, formats: AnswerFormats) -> Extraction | None:
    if plain is None:
        return None
    name, reasoning = plain.pop("tools"), plain.pop("reasoning")
    tools = None if name is None else JSON_CALLS if name == JSON_CALLS.name else formats.tools
    return Extraction(
        visible=formats.visible(tools), tools=tools, reasoning=formats.reasoning if reasoning else None, **plain
    )


def _read(source: IO[bytes], size: int) -> bytes:
    """Return the next `size` bytes of a pipe. Raises `EOFError` if the process at its other end has ended."""
    data = source.read(size)
    if len(data) < size:
        raise EOFError("the process has ended")
    return data


def _read_sized(source: IO[bytes]) -> bytes:
    (size,) = _SIZE.unpack(_read(source, _SIZE.size))
    return _read(source, size)


class _Process:
    """One process: a body in, a job or an error out. One thread at a time uses it."""

    def __init__(self, config: bytes, formats: AnswerFormats) -> None:
        self._formats = formats
        # The child gets this process's sys.path, which an embedding program may have changed. Its own session shields
        # it from the terminal's Ctrl-C. It ends when its standard input closes, however this process ends.
        command = [sys.executable, "-c", _START, json.dumps(sys.path)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        assert self._process.stdin is not None, "stdin is a pipe"
        assert self._process.stdout is not None, "stdout is a pipe"
        self._in, self._out = self._process.stdin, self._process.stdout
        self._unsent_config = _SIZE.pack(len(config)) + config
        self.usable = True

    def ask(self, parts: Sequence[bytes], *, api: str) -> Job:
        """Return the job of a body in parts. Raises `ApiError`, 503 if the process ends before it answers."""
        timer = threading.Timer(_SECONDS, self._process.kill)
        timer.start()
        answered = False
        try:
            self._in.write(self._unsent_config + _REQUEST.pack(api.encode(), sum(map(len, parts))))
            self._unsent_config = b""
            for part in parts:
                self._in.write(part)
            self._in.flush()
            head = exact_json.loads(_read_sized(self._out))
            prompts = tuple(
                Prompt(token_ids=TokenIds(_read(self._out, ids)), text=_read(self._out, text).decode())
                for ids, text in head.get("prompts", ())
            )
            answered = True
        except (OSError, EOFError, ValueError) as error:  # ValueError: `close` closed the pipes meanwhile
            if self._ended_by() == signal.SIGPROF:
                message = "the chat template takes too long for these messages: it was stopped"
                raise bad_request(message, "messages") from error
            raise ApiError(503, "the process that read this request has ended; try again", reason="intake") from error
        finally:
            timer.cancel()
            self.usable = answered and not head["last"]
        if "error" in head:
            raise ApiError(**head["error"])
        if "crash" in head:
            raise RuntimeError(head["crash"])
        extraction = _unpack_extraction(head["extraction"], self._formats)
        return replace(JOBS.validate_python(head["job"]), prompts=prompts, extraction=extraction)

    def _ended_by(self) -> int | None:
        """Return the signal that ended the process, None for any other end."""
        with contextlib.suppress(subprocess.TimeoutExpired):  # boundary: it closed its output but still runs
            return -self._process.wait(1.0)
        return None

    def close(self) -> None:
        self.usable = False
        self._process.kill()
        with contextlib.suppress(OSError):  # boundary: the process has no use for the rest
            self._in.close()
        self._process.wait()
        self._out.close()


def _shutting_down() -> ApiError:
    return ApiError(503, "the router is shutting down", reason="not_ready")


class Bodies:
    """The request bodies that are being read: their bytes in memory, and the processes for large ones.

    At most `config.intake_processes` run. Bodies hold at most `config.max_buffered_bytes` until their jobs are made.
    """

    def __init__(self, config: RouterConfig, formats: AnswerFormats) -> None:
        self._formats = formats
        self._limit = config.max_buffered_bytes
        self._count = config.intake_processes
        self._held = 0
        # Without `AccessConfig`: the processes serve no clients and need no API keys.
        self._config = CONFIGS.dump_json(replace(config, access=AccessConfig()))
        self._threads = ThreadPoolExecutor(config.intake_processes, thread_name_prefix="large-body")
        self._writing = ThreadPoolExecutor(1, thread_name_prefix="long-answer")
        self._lock = threading.Lock()
        self._idle: list[_Process] = []
        self._busy: set[_Process] = set()
        self._closed = False

    def start(self) -> None:
        """Start all processes, because starting one blocks the event loop for up to 30 ms."""
        with self._lock:
            self._idle += [
                _Process(self._config, self._formats) for _ in range(self._count - len(self._idle) - len(self._busy))
            ]

    @contextlib.contextmanager
    def buffer(self) -> Iterator[Callable[[int], None]]:
        """Yield a function that counts the bytes of one body. It raises `ApiError` 503 above the common limit."""
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
        """Run a long call in a thread. There is one, because several would each take turns from the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._writing, write, *given)

    async def job(self, parts: Sequence[bytes], *, api: str) -> Job:
        """Return the job of a body in parts, first come, first served. Raises `ApiError`."""
        if self._closed:  # a closed executor raises RuntimeError, which clients would see as a 500
            raise _shutting_down()
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._ask, parts, api)

    def close(self) -> None:
        """End all processes; waiting requests get a 503. Call it in the event loop, as `job`."""
        with self._lock:
            self._closed = True
            processes = [*self._idle, *self._busy]
            self._idle.clear()
        self._threads.shutdown(wait=False)  # requests that wait for a process get the 503 of `_ask`
        self._writing.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.close()

    def _ask(self, parts: Sequence[bytes], api: str) -> Job:
        with self._lock:
            if self._closed:
                raise _shutting_down()
            process = self._idle.pop() if self._idle else _Process(self._config, self._formats)
            self._busy.add(process)
        try:
            return process.ask(parts, api=api)
        finally:
            with self._lock:
                self._busy.discard(process)
                keep = process.usable and not self._closed
                if keep:
                    self._idle.append(process)
            if not keep:
                process.close()


_NICENESS = 5  # streams go first where cores are few
_MAX_MEMORY = 512 * 1024 * 1024  # bytes; a larger process ends after its answer to free them


def main() -> None:
    """Answer requests until standard input ends."""
    source = sys.stdin.buffer
    # Redirect prints to standard error, so that only answers are on standard output.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with contextlib.suppress(EOFError, BrokenPipeError):  # boundary: the router has ended
        config = CONFIGS.validate_json(_read_sized(source))
        os.nice(_NICENESS)
        intake = Intake(config, open_codec(config.model_path, config.chat_template, killable=True))
        gc.disable()  # a body is one tree of JSON without cycles, so collections would only cost time
        with asyncio.Runner() as runner:
            last = False
            while not last:
                api, size = _REQUEST.unpack(_read(source, _REQUEST.size))
                head, blobs = runner.run(_answer(intake, api.decode(), _read(source, size)))
                last = head["last"] = "crash" in head or psutil.Process().memory_info().rss > _MAX_MEMORY
                data = exact_json.dumps(head)
                answers.write(b"".join((_SIZE.pack(len(data)), data, *blobs)))
                answers.flush()
                del head, blobs, data
                gc.collect()


async def _answer(intake: Intake, api: str, body: bytes) -> tuple[dict[str, Any], list[bytes]]:
    """Return the head of the answer (a job, an error or a crash) and the blobs behind it."""
    try:
        return _pack(await READERS[api](intake, body))
    except ApiError as error:
        return {"error": asdict(error)}, []
    except Exception as error:  # boundary: the router reports the bug to the client
        logging.getLogger(__name__).exception("a large request could not be read")
        return {"crash": f"{type(error).__name__}: {error}"}, []
