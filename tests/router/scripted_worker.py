"""A worker behind a real ZMQ socket whose answers follow a script."""

import dataclasses
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil
import zmq

from moeyard_worker.keys import WorkerKeys
from moeyard_worker.protocol import (
    FIRST_VERSION,
    Abort,
    Done,
    ExpertLoads,
    Hello,
    Inspect,
    Message,
    PromptExperts,
    PromptLogprobs,
    Rejected,
    Snapshot,
    Submit,
    TokenLogprob,
    Tokens,
)
from moeyard_worker.sockets import Gate, lock
from moeyard_worker.wire import decode, encode

VOCAB_SIZE = 400  # more than the tokenizer has, like padded embeddings
MAX_MODEL_LEN = 256


def ready_snapshot(
    *, rank: int = 0, world_size: int = 1, epoch: int = 0, max_model_len: int = 64, vocab_size: int = 10, **fields: Any
) -> Snapshot:
    """Return the snapshot of a ready rank without load. `fields` replace its other fields."""
    ready = Snapshot(
        rank=rank,
        world_size=world_size,
        epoch=epoch,
        step=1,
        state="ready",
        failure=None,
        num_running=0,
        num_waiting=0,
        num_waiting_tokens=0,
        kv_pages_total=9,
        kv_pages_free=9,
        page_size=16,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
    )
    return dataclasses.replace(ready, **fields)


@dataclasses.dataclass
class _Running:
    peer: bytes
    submit: Submit
    output: list[int]
    sent: int = 0
    scored: int = 0
    routed: int = 0


class ScriptedWorker:
    """Speak the worker's side of protocol.py over a real socket and emit the tokens that the script returns.

    A sequence that arrives with output continues after it, and `scripted_logprob` depends on the token alone, so an
    answer does not depend on the worker.

    Test knobs: `script` maps a Submit to output ids. `chunk` is the number of tokens per message, `score_chunk` of
    prompt log-probabilities or experts. `pace` is the seconds per message, `phases` the seconds of queue and prefill in
    each Done, `waits` those for peers and for expert weights. `experts` maps a position to its routed experts. `paused`
    accepts requests but emits nothing. `reject` and `loads` answer every Submit and Inspect. `do` runs a function in
    the worker's thread. `sent_at` maps a request id to the monotonic seconds of its tokens. `hold` and `go_on` act as a
    survivor does while a peer is missing.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        script: Callable[[Submit], list[int]],
        *,
        epoch: int = 0,
        state: str = "ready",
        keys: WorkerKeys | None = None,
    ) -> None:
        self.rank = rank
        self.default_script = script
        self.submits: list[Submit] = []
        self.aborts: list[str] = []
        self.snapshot = ready_snapshot(
            rank=rank,
            world_size=world_size,
            epoch=epoch,
            step=0,
            state=state,
            kv_pages_total=64,
            kv_pages_free=64,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
        )
        self.reset()
        self._todo: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._peers: set[bytes] = set()
        # The key includes the client, because two routers begin with a probe of the same name.
        self._running: dict[tuple[bytes, str], _Running] = {}
        self._sampled = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # Workers set this too: this one writes faster than the router reads.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 0)
        if keys is not None:
            Gate(self._context, key=keys.router)
            lock(self._socket, keys.own)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self._alive = True
        self._thread = threading.Thread(target=self._run, name=f"worker-{rank}")
        self._thread.start()

    def reset(self) -> None:
        """Restore the defaults and clear the records."""
        self.script = self.default_script
        self.chunk, self.pace, self.paused = 1, 0.0, False
        self.score_chunk = 4
        self.experts: Callable[[int], bytes] = scripted_experts
        self.phases = (0.0, 0.0)
        self.waits: tuple[float | None, float | None] = (None, None)
        self.reject: Rejected | None = None
        self.failure: str | None = None  # of every request, at its end
        self.weight_version = FIRST_VERSION
        self.loads: ExpertLoads | None = None
        self.sent_at: dict[str, list[float]] | None = None
        self.submits.clear()
        self.aborts.clear()

    def die(self) -> None:
        """Close the socket at once, as the kernel does for a killed process."""
        self._alive = False
        self._thread.join()

    def do(self, action: Callable[[], None]) -> None:
        """Run `action` in the worker's thread, where `say` is allowed."""
        self._todo.put(action)

    def say(self, message: Message) -> None:
        """Send a message to every router. Call it in the worker's thread only."""
        self.say_raw(encode(message))

    def say_raw(self, frame: bytes) -> None:
        """Send bytes to every router. Call it in the worker's thread only."""
        for peer in self._peers:
            self._socket.send_multipart([peer, frame])

    def report(self, **fields: Any) -> None:
        """Report from any thread a snapshot with `fields` in place of its own. A sequence that ends resets its load."""

        def change() -> None:
            self.snapshot = dataclasses.replace(self.snapshot, **fields)
            self.say(self.snapshot)

        self.do(change)

    def fail(self, failure: str) -> None:
        """Report from any thread that the fleet is broken."""
        self.snapshot = dataclasses.replace(self.snapshot, state="failed", failure=failure)
        self.do(lambda: self.say(self.snapshot))

    def hold(self, why: str) -> None:
        """Report from any thread that a peer is lost, and run nothing."""
        self.report(state="recovering", failure=why)

    def go_on(self, epoch: int) -> None:
        """Report from any thread that the fleet is whole again, under a new epoch."""
        self.report(state="ready", failure=None, epoch=epoch)

    def hang_up(self) -> None:
        """Break all connections of this process to the worker, which continues to listen. Any thread may call it."""
        port = int(self.endpoint.rpartition(":")[2])
        for connection in psutil.Process().net_connections("tcp"):
            if connection.raddr and connection.raddr.port == port:
                with socket.socket(fileno=os.dup(connection.fd)) as end:
                    end.shutdown(socket.SHUT_RDWR)

    @property
    def busy(self) -> bool:
        """Whether a living worker runs a sequence, probes included."""
        return self._alive and not self.paused and bool(self._running)

    @property
    def runs(self) -> list[str]:
        """Client sequences that run now."""
        return [name for _, name in self._running.copy() if not name.startswith("canary-")]

    def forget(self, name: str) -> _Running | None:
        """Drop a client's sequence silently."""
        return next((self._running.pop(key) for key in list(self._running) if key[1] == name), None)

    def _run(self) -> None:
        while self._alive:
            busy = bool(self._running) and not self.paused and self.snapshot.state != "recovering"
            if self._socket.poll(0 if busy else 5):
                self._take()
            while not self._todo.empty():
                self._todo.get()()
            if busy:
                if self.pace:
                    time.sleep(self.pace)
                for running in list(self._running.values()):
                    self._emit(running)
        self._socket.close(0)
        self._context.term()

    def _take(self) -> None:
        peer, frame = self._socket.recv_multipart()
        message = decode(frame)
        if isinstance(message, Hello):
            self._peers.add(peer)
            self._socket.send_multipart([peer, encode(self.snapshot)])
        elif isinstance(message, Inspect):
            if self.loads is not None:
                self._socket.send_multipart([peer, encode(self.loads)])
        elif isinstance(message, Abort):
            self.aborts.append(message.request_id)
            running = self._running.pop((peer, message.request_id), None)
            if running is not None:
                self._end(running, "abort")
        elif isinstance(message, Submit):
            canary = message.request_id.startswith("canary-")
            if not canary:
                self.submits.append(message)
                if self.reject is not None:
                    answer = dataclasses.replace(self.reject, request_id=message.request_id)
                    self._socket.send_multipart([peer, encode(answer)])
                    return
            output = [1] * message.sampling.max_tokens if canary else self.script(message)
            routed = max(message.num_routed, message.sampling.routed_experts_start or 0)
            running = _Running(peer, message, output, len(message.output_token_ids), message.num_scored, routed)
            assert list(message.output_token_ids) == output[: running.sent], "the output differs from the script"
            reason = self._ended(running) if running.sent else None
            if reason is not None:
                self._end(running, reason, output[running.sent - 1] if reason == "stop" else None)
                return
            self._running[peer, message.request_id] = running
            self._load()

    def _load(self) -> None:
        self.snapshot = dataclasses.replace(
            self.snapshot,
            num_running=len(self._running),
            step=self.snapshot.step + 1,
            generation_tokens=self._sampled,
            kv_pages_free=self.snapshot.kv_pages_total - len(self._running),
        )
        self.say(self.snapshot)

    def _emit(self, running: _Running) -> None:
        sampling = running.submit.sampling
        if sampling.prompt_logprobs is not None and self._score(running):
            return
        if sampling.routed_experts_start is not None and self._route(running):
            return
        if not sampling.max_tokens:
            del self._running[running.peer, running.submit.request_id]
            self._end(running, "length")
            return
        ids: list[int] = []
        reason, start = None, running.sent
        while reason is None and len(ids) < self.chunk and running.sent < len(running.output):
            ids.append(running.output[running.sent])
            running.sent += 1
            reason = self._ended(running)
        logprobs: tuple[TokenLogprob, ...] = ()
        if sampling.logprobs is not None:
            logprobs = tuple(scripted_logprob(i, sampling.logprobs) for i in ids)
        message = Tokens(
            request_id=running.submit.request_id,
            start=start,
            token_ids=tuple(ids),
            logprobs=logprobs,
            cached_tokens=None if start else 3,
            weight_version=None if start > len(running.submit.output_token_ids) else self.weight_version,
        )
        self._sampled += len(ids)
        if self.sent_at is not None:
            self.sent_at.setdefault(running.submit.request_id, []).extend([time.monotonic()] * len(ids))
        if sampling.routed_experts_start is not None:
            before = len(running.submit.prompt_token_ids) - 1 + start
            message.routed_experts = b"".join(self.experts(before + i) for i in range(len(ids)))
        self._socket.send_multipart([running.peer, encode(message)])
        if reason is not None:
            del self._running[running.peer, running.submit.request_id]
            self._end(running, reason, ids[-1] if reason == "stop" else None)

    def _ended(self, running: _Running) -> str | None:
        """Return the finish reason if the last token ended the sequence."""
        sampling, token_id = running.submit.sampling, running.output[running.sent - 1]
        ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos and not sampling.grammar else {1})
        if token_id in ends and running.sent > sampling.min_tokens:
            return "stop"
        return "length" if running.sent == sampling.max_tokens else None

    def _score(self, running: _Running) -> bool:
        """Send the next `score_chunk` log-probabilities of the prompt; return False if none are left."""
        top, ids = running.submit.sampling.prompt_logprobs or 0, running.submit.prompt_token_ids
        start = running.scored + 1
        some = tuple(scripted_logprob(i, top) for i in ids[start : start + self.score_chunk])
        if not some:
            return False
        running.scored += len(some)
        message = PromptLogprobs(request_id=running.submit.request_id, start=start, logprobs=some)
        self._socket.send_multipart([running.peer, encode(message)])
        return True

    def _route(self, running: _Running) -> bool:
        """Send the experts of the next `score_chunk` prompt positions; return False if none are left."""
        start, end = running.routed, len(running.submit.prompt_token_ids) - 1
        count = min(self.score_chunk, end - start)
        if count <= 0:
            return False
        running.routed += count
        experts = b"".join(map(self.experts, range(start, start + count)))
        message = PromptExperts(request_id=running.submit.request_id, start=start, count=count, experts=experts)
        self._socket.send_multipart([running.peer, encode(message)])
        return True

    def _end(self, running: _Running, reason: str, stop_token_id: int | None = None) -> None:
        done = Done(
            request_id=running.submit.request_id,
            finish_reason=reason if self.failure is None else "error",
            error=self.failure,
            retryable=self.failure is None,
            prompt_tokens=len(running.submit.prompt_token_ids),
            cached_tokens=3,
            completion_tokens=running.sent,
            stop_token_id=stop_token_id,
            queue_seconds=self.phases[0],
            prefill_seconds=self.phases[1],
            lockstep_seconds=self.waits[0],
            fetch_seconds=self.waits[1],
            weight_version=self.weight_version,
        )
        self._socket.send_multipart([running.peer, encode(done)])
        self._load()


def scripted_experts(position: int) -> bytes:
    """Return the experts of a position in 3 layers with 2 experts each, of one byte."""
    return bytes((7 * position + i) % 256 for i in range(6))


def scripted_logprob(token_id: int, top: int) -> TokenLogprob:
    """Return a score in which the chosen token has rank 2."""
    likeliest = tuple((token_id + 1 + i, -0.25 * (i + 1)) for i in range(top))
    return TokenLogprob(logprob=-1.5, rank=2, top=likeliest)
