"""Connections to the processes that hold compiled grammars (`grammar_process.py`), and the start of these processes."""

import contextlib
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from moeyard_worker.engine.sampling.grammar_process import ANSWER, ERROR, FORGET, GRAMMAR, PID, QUESTION
from moeyard_worker.protocol import Grammar

log = logging.getLogger(__name__)

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from moeyard_worker.engine.sampling.grammar_process import main; main()"
)
# Limits of one grammar: seconds of processor time for its compilation, and bytes of memory that its process may add. A
# schema of 20,000 values takes 0.1 s and 20 MiB.
COMPILE_SECONDS, MEMORY_BYTES = 3.0, 256 << 20
# Wall-clock seconds after which a process counts as hung: for a mask, and for a compilation on a busy machine.
_MASK_PATIENCE, _COMPILE_PATIENCE = 2.0, 30.0
# A longer compilation runs at lower priority than steps, and is not repeated within a step.
SHORT_SECONDS = 0.1
_NICENESS = 10


class GrammarError(ValueError):
    """A grammar that cannot be compiled, with the reason."""


class GrammarsFull(RuntimeError):
    """There is no capacity for another grammar now."""


@dataclass(frozen=True, slots=True)
class MaskReply:
    """The reply of a process: a status, the seconds of processor time, and a mask or an error."""

    status: int
    seconds: float
    payload: bytes


class MaskClient(Protocol):
    """A sequence that requests masks."""

    def on_reply(self, reply: MaskReply, waited: float) -> None:
        """Take the reply to the oldest question, after a wait of `waited` seconds."""

    def on_exit(self, *, at_fault: bool) -> None:
        """Handle the exit of the process before it replied; `at_fault` if it was computing this sequence's mask."""


class ForkServer:
    """The process that has read the tokenizer and forks once for each grammar. It is replaced when it dies."""

    def __init__(self, vocabulary: bytes) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._closed = False
        self.refusal = self._start()
        if self.refusal:
            self.close()

    def _start(self) -> str:
        """Start the process. Return why it cannot read the tokenizer, or an empty string."""
        self._control, theirs = socket.socketpair()
        with theirs:
            # Pass sys.path on, for programs with a module search path of their own. A separate session keeps the
            # terminal's Ctrl-C away from the process. It exits when its control socket closes, so it never outlives
            # this process.
            command = [sys.executable, "-c", _START, json.dumps(sys.path), str(theirs.fileno())]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, pass_fds=(theirs.fileno(),), start_new_session=True
            )
        assert self._process.stdin is not None, "stdin is a pipe"
        with contextlib.suppress(BrokenPipeError), self._process.stdin as given:  # boundary: the reply has the reason
            given.write(self._vocabulary)
        reply = self._control.recv(1000)
        return "" if reply == b"\0" else reply.decode() or "its process has ended"

    def open(self) -> socket.socket:
        """Return a connection to a new fork. Raises GrammarsFull if no process can fork."""
        with self._lock:
            for _ in range(2):
                if self._closed:
                    break
                ours, theirs = socket.socketpair()
                with theirs:
                    try:
                        socket.send_fds(self._control, [b"\0"], [theirs.fileno()])
                        return ours
                    except OSError:
                        ours.close()
                log.error("the process that forks for grammars has ended with exit code %s", self._end())
                self._start()
        raise GrammarsFull("the process that compiles grammars has ended")

    def _end(self) -> int:
        self._control.close()
        return self._process.wait()

    def close(self) -> None:
        """Stop the process; forks exit when their connections close."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._end()


class CompiledGrammar:
    """A compiled grammar: the connection to the process that holds it. Used by one thread at a time.

    `first` has the mask of the first token and the seconds of the compilation; `num_bytes` is the memory that the
    process has added. The process of a grammar that is not `usable` has exited; a `worn` grammar takes no further
    requests. `generation` counts earlier processes. Raises GrammarError when the grammar cannot be compiled within its
    limits.
    """

    def __init__(self, grammar: Grammar, forks: ForkServer) -> None:
        self.grammar = grammar
        self.usable, self.worn, self.num_bytes, self.generation = True, False, 0, 0
        self.successor: CompiledGrammar | None = None
        # Numbers of ended sequences. Finalizers append to it, in any thread.
        self.over: deque[int] = deque()
        # Clients in the order of their questions. Weak, because a request may end before its reply.
        self._clients: deque[weakref.ref[MaskClient]] = deque()
        self._socket = forks.open()
        self._socket.setblocking(False)
        weakref.finalize(self, self._socket.close)
        self._patience = _COMPILE_PATIENCE
        try:
            (self._pid,) = PID.unpack(self._read(PID.size))
        except OSError as error:
            self._socket.close()
            raise GrammarsFull("no process can be started for another grammar") from error
        try:
            kind, text = grammar.kind.encode(), grammar.text.encode()
            self._send(GRAMMAR.pack(len(kind), len(text), COMPILE_SECONDS, MEMORY_BYTES) + kind + text)
            if not self._poll(select.POLLIN, SHORT_SECONDS):
                with contextlib.suppress(ProcessLookupError):  # boundary: it has just exited
                    os.setpriority(os.PRIO_PROCESS, self._pid, _NICENESS)
            self.first = self._receive()
        except OSError as error:
            self._end(error)
            raise GrammarError(
                f"it takes more than {COMPILE_SECONDS:g} s of processor time or {MEMORY_BYTES >> 20} MiB of memory"
            ) from error
        self._patience = _MASK_PATIENCE
        if self.first.status == ERROR:
            self._end()
            raise GrammarError(self.first.payload.decode())

    def request(self, client: MaskClient, question: bytes) -> bool:
        """Request a mask without waiting for it; return False when the process has exited."""
        over = [QUESTION.pack(self.over.popleft(), FORGET, 0, 0.0) for _ in range(len(self.over))]
        try:
            self._send(b"".join([*over, question]))
        except OSError as error:
            self._end(error)
            return False
        self._clients.append(weakref.ref(client))
        return True

    def take(self) -> None:
        """Wait for the next reply and pass it to its client, or tell all clients that the process has exited."""
        begun = time.monotonic()
        try:
            reply = self._receive()
        except OSError as error:
            self._end(error)
            return
        if (client := self._clients.popleft()()) is not None:
            client.on_reply(reply, time.monotonic() - begun)

    def _receive(self) -> MaskReply:
        status, seconds, self.num_bytes, size = ANSWER.unpack(self._read(ANSWER.size))
        return MaskReply(status, seconds, self._read(size))

    def _read(self, size: int) -> bytes:
        data, count = bytearray(size), 0
        while count < size:
            try:
                received = self._socket.recv_into(memoryview(data)[count:])
            except BlockingIOError:
                self._wait(select.POLLIN)
                continue
            if not received:
                raise ConnectionError("the process has ended")
            count += received
        return bytes(data)

    def _send(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            try:
                left = left[self._socket.send(left) :]
            except BlockingIOError:
                # The process reads no questions until its own replies are read.
                if self._wait(select.POLLIN | select.POLLOUT) & select.POLLIN and self._clients:
                    self.take()

    def _wait(self, events: int) -> int:
        found = self._poll(events, self._patience)
        if not found:
            raise TimeoutError(f"the process has not answered within {self._patience:g} s")
        return found

    def _poll(self, events: int, seconds: float) -> int:
        poll = select.poll()
        poll.register(self._socket, events)
        return next((found for _, found in poll.poll(seconds * 1000)), 0)

    def _end(self, error: OSError | None = None) -> None:
        """Abandon the process. Its current question caused the exit; the others move to another process."""
        self.usable = False
        self._socket.close()
        if isinstance(error, TimeoutError):
            with contextlib.suppress(ProcessLookupError):  # boundary: it has just exited
                os.kill(self._pid, signal.SIGKILL)
        waiting = [each() for each in self._clients]
        self._clients.clear()
        for place, client in enumerate(waiting):
            if client is not None:
                client.on_exit(at_fault=place == 0)
