"""Fleets for tests: real workers in separate processes, without Ray, driven by the worker protocol.

Processes are kept and serve the next case too.
"""

import contextlib
import faulthandler
import multiprocessing
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Any, Protocol

import zmq
from tests.limits import HANG_SECONDS

from moeyard_worker.config.engine_config import EngineConfig
from moeyard_worker.config.placement import Placement, partition
from moeyard_worker.config.worker_spec import AS_STARTED, ServedWeights
from moeyard_worker.keys import FleetKeys, RouterKeys
from moeyard_worker.models.shapes import served_model
from moeyard_worker.protocol import (
    Abort,
    Done,
    ExpertLoads,
    Hello,
    Inspect,
    Message,
    PromptExperts,
    PromptLogprobs,
    Rejected,
    SamplingParams,
    Snapshot,
    Submit,
    TokenBatch,
    TokenLogprob,
    Tokens,
)
from moeyard_worker.sockets import make_keys, unlock
from moeyard_worker.wire import decode, encode

CALL_SECONDS = HANG_SECONDS  # bench/gpu_ranks.py and bench/gpu_http.py set another


def serve(connection: Connection) -> None:
    """Run a rank's process: build a Worker for each case and call its methods on request."""
    from moeyard.clients.bench.profile import Recording
    from moeyard_worker.config.worker_spec import WorkerSpec
    from moeyard_worker.engine.assembly.worker import Worker

    faulthandler.register(signal.SIGUSR1)
    worker: Any = None
    recording: Any = None
    while True:
        try:
            name, args = connection.recv()
        except EOFError:
            return
        try:
            if name == "setup":
                worker = Worker(WorkerSpec(**args[0]))
                result = worker.endpoints()
            elif name == "counters":
                counters = worker.experts.look(wait=True).counters
                result = (dict(counters.hits), dict(counters.misses), dict(counters.evictions))
            elif name == "graphs":
                runner = worker.runner
                counts = ("num_replayed", "num_eager", "num_rows", "num_padded_rows")
                result = {n: getattr(runner, n, 0) for n in counts}
            elif name == "profile":
                # The first call starts the recording, and the next one returns it.
                if recording is None:
                    recording, result = Recording(*args), None
                else:
                    recording.stop()
                    recording, result = None, recording.lines()
            elif name == "budget":
                worker.scheduler.config = replace(worker.scheduler.config, mixed_prefill_tokens=args[0])
                result = None
            elif name == "eager":
                # Set whether this rank launches every step kernel by kernel, whatever was captured.
                worker.runner.eager, result = args[0], None
            elif name == "pace":
                # Set whether steps are planned when they are due, or as soon as there is room.
                own = vars(worker._engine._pacing)
                own.pop("due", None)
                own.update({} if args[0] else {"due": lambda now: 0.0})
                result = None
            elif name == "fall_silent":
                fall_silent(worker._engine._exchange)
                result = None
            elif name == "hang":
                # Its host, in the next step: what it has launched, it has.
                worker._engine._exchange.steps.begin = lambda *_step: threading.Event().wait()
                result = None
            elif name == "validate":
                worker.experts.validate()
                worker.scheduler.validate()
                result = None
            elif name == "stats":
                stats = worker.scheduler.stats
                result = {
                    n: getattr(stats, n)
                    for n in ("num_preemptions", "prefix_hit_tokens", "prefill_tokens", "drafts", "accepted")
                }
                result["num_free"] = worker.scheduler.pool.num_free
                result["num_pages"] = worker.scheduler.pool.num_pages
            else:
                result = getattr(worker, name)(*args)
            connection.send((True, result))
        except Exception as error:  # boundary: the test process raises it
            connection.send((False, f"{type(error).__name__}: {error}"))


def fall_silent(exchange: Any) -> None:
    """Keep a rank alive that sends no more rows."""
    if hasattr(exchange, "_window"):
        # Its launches take part in no exchange from here on, and it does not notice.
        exchange._window.poison()
    else:
        # Its host never returns from its next layer's rows until the process ends. A graph asks no host, so its host
        # stops at the next step.
        wait = lambda *_args, **_rows: threading.Event().wait()  # noqa: E731
        if exchange.traits.graphs_per_epoch:
            exchange.steps.set_rows = wait
        else:
            exchange.dispatch = wait


def rank_context() -> ForkServerContext:
    """Return a context that starts processes in milliseconds, as forks of one with a rank's imports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["moeyard.clients.bench.profile", "moeyard_worker.engine.assembly.worker"])
    return context


class RankProcess:
    """One rank's process and the pipe to it."""

    def __init__(self, run: Callable[..., None] = serve, *args: Any) -> None:
        context = rank_context()
        self._connection, child = context.Pipe()
        self.process = context.Process(target=run, args=(child, *args), daemon=True)
        self.process.start()
        child.close()

    def send(self, name: str, *args: Any) -> None:
        self._connection.send((name, args))

    def result(self) -> Any:
        if not self._connection.poll(CALL_SECONDS):
            self.tell_stacks()
            raise TimeoutError(f"rank process {self.process.pid} did not answer")
        try:
            ok, value = self._connection.recv()
        except EOFError:
            self.process.join()
            raise RuntimeError(f"rank process {self.process.pid} ended with {self.process.exitcode}") from None
        if not ok:
            raise RuntimeError(value)
        return value

    def call(self, name: str, *args: Any) -> Any:
        self.send(name, *args)
        return self.result()

    def tell_stacks(self) -> None:
        """Have the process print the stacks of its threads to its standard error."""
        if self.process.pid is not None and self.process.is_alive():
            os.kill(self.process.pid, signal.SIGUSR1)
            time.sleep(0.2)  # No event marks the last line.

    def hang_up(self) -> None:
        """Ask the process to exit, without waiting for it."""
        self._connection.close()

    def join(self) -> None:
        self.process.join(HANG_SECONDS)
        if self.process.is_alive():
            self.kill()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


class ProcessPool:
    """Rank processes that live as long as the test session; killed ones are replaced."""

    def __init__(self) -> None:
        self._ranks: list[RankProcess] = []

    def take(self, count: int) -> list[RankProcess]:
        self._ranks = [r for r in self._ranks if r.process.is_alive()]
        self._ranks += [RankProcess() for _ in range(count - len(self._ranks))]
        return self._ranks[:count]

    def keep(self, ranks: Sequence[RankProcess]) -> None:
        """Keep processes that replaced killed ones, too, for the next fleets."""
        self._ranks += [rank for rank in ranks if rank not in self._ranks]

    def close(self) -> None:
        for rank in self._ranks:
            rank.hang_up()
        for rank in self._ranks:
            rank.join()


@dataclass(slots=True)
class Answer:
    """All messages about one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    experts: bytes = b""
    num_routed: int = 0
    versions: list[tuple[str, int]] = field(default_factory=list)
    end: Done | Rejected | None = None


class Client:
    """Speaks the worker protocol to all ranks of a fleet, like a router."""

    def __init__(self, frontends: Sequence[str], keys: RouterKeys | None = None) -> None:
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._keys = keys
        self.sockets = [self._connect(frontend) for frontend in frontends]
        self.answers: dict[str, Answer] = {}
        self.submits: dict[str, tuple[int, Submit]] = {}
        self.snapshots: dict[int, Snapshot] = {}
        self.loads: dict[int, ExpertLoads] = {}

    def _connect(self, frontend: str) -> "zmq.Socket[bytes]":
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        if self._keys is not None:
            unlock(socket, self._keys.own, self._keys.worker)
        socket.connect(frontend)
        self._poller.register(socket, zmq.POLLIN)
        return socket

    def reconnect(self, rank: int, frontend: str) -> None:
        """Replace a rank's connection, with all unread messages, by that of its new process."""
        self.drop(rank)
        self.sockets[rank] = self._connect(frontend)

    def drop(self, rank: int) -> None:
        """Drop a rank's connection with all unread messages."""
        if not self.sockets[rank].closed:
            self._poller.unregister(self.sockets[rank])
            self.sockets[rank].close(0)

    def send(self, rank: int, message: Message) -> None:
        self.sockets[rank].send(encode(message))

    def hello(self) -> None:
        for rank in range(len(self.sockets)):
            self.send(rank, Hello())

    def inspect(self) -> list[ExpertLoads]:
        """Ask each rank what its experts have computed."""
        self.loads = {}
        for rank in range(len(self.sockets)):
            self.send(rank, Inspect())
        self.wait_for(lambda: len(self.loads) == len(self.sockets))
        return [self.loads[rank] for rank in range(len(self.sockets))]

    def submit(self, rank: int, request_id: str, prompt: Sequence[int], **sampling: Any) -> None:
        self.answers[request_id] = Answer()
        params = SamplingParams(**sampling)
        submit = Submit(request_id=request_id, prompt_token_ids=tuple(prompt), sampling=params)
        self.submits[request_id] = (rank, submit)
        self.send(rank, submit)

    def carry_over(self, lost: Sequence[int], to: Sequence[int]) -> list[str]:
        """Move the requests of lost ranks to others in turn, like a router; return their names."""
        for rank in set(lost).difference(to):
            self.drop(rank)
        names = [n for n, (rank, _) in self.submits.items() if rank in lost and self.answers[n].end is None]
        for i, name in enumerate(names):
            answer, rank = self.answers[name], to[i % len(to)]
            submit = replace(
                self.submits[name][1],
                output_token_ids=tuple(answer.token_ids),
                num_scored=len(answer.prompt_logprobs),
                num_routed=answer.num_routed,
            )
            self.submits[name] = (rank, submit)
            self.send(rank, submit)
        return names

    def abort(self, rank: int, request_id: str) -> None:
        self.send(rank, Abort(request_id=request_id))

    def pump(self, timeout: float) -> bool:
        """Read the messages that arrive within `timeout` seconds; return False if none did."""
        ready = self._poller.poll(int(timeout * 1000))
        for socket, _ in ready:
            while True:
                try:
                    message = decode(socket.recv(zmq.NOBLOCK))
                except zmq.Again:
                    break
                for each in message.rows if isinstance(message, TokenBatch) else (message,):
                    self._take(each)
        return bool(ready)

    def _take(self, message: Message) -> None:
        if isinstance(message, Snapshot):
            self.snapshots[message.rank] = message
            return
        if isinstance(message, ExpertLoads):
            self.loads[message.rank] = message
            return
        assert isinstance(message, PromptLogprobs | PromptExperts | Tokens | Done | Rejected), message
        answer = self.answers[message.request_id]
        assert answer.end is None, f"{message.request_id} was answered after its end: {message}"
        if isinstance(message, Tokens):
            assert message.start == len(answer.token_ids), "tokens out of order"
            if message.weight_version is not None:
                answer.versions.append((message.weight_version, message.start))
            answer.token_ids += message.token_ids
            answer.logprobs += message.logprobs
            answer.experts += message.routed_experts
        elif isinstance(message, PromptExperts):
            if answer.num_routed and message.start == self._first_routed(message.request_id):
                answer.experts, answer.num_routed = b"", 0  # the weights have changed
            assert message.start == (answer.num_routed or message.start), "positions out of order or repeated"
            assert not answer.token_ids, "output before the prompt"
            answer.experts += message.experts
            answer.num_routed = message.start + message.count
        elif isinstance(message, PromptLogprobs):
            if message.start == 1:
                answer.prompt_logprobs = []  # the weights may have changed
            assert message.start == len(answer.prompt_logprobs) + 1, "prompt tokens out of order or repeated"
            assert not answer.token_ids, "output before the prompt"
            answer.prompt_logprobs += message.logprobs
        else:
            answer.end = message

    def _first_routed(self, request_id: str) -> int | None:
        return self.submits[request_id][1].sampling.routed_experts_start

    def wait(self, *request_ids: str, timeout: float = CALL_SECONDS) -> list[Answer]:
        """Pump until these requests (all by default) have ended."""
        ids = request_ids or tuple(self.answers)
        self.wait_for(lambda: all(self.answers[i].end is not None for i in ids), timeout)
        return [self.answers[i] for i in ids]

    def wait_for(self, done: Callable[[], bool], timeout: float = CALL_SECONDS) -> None:
        """Pump until `done()` is true."""
        deadline = time.monotonic() + timeout
        while not done():
            left = deadline - time.monotonic()
            open_ids = [name for name, answer in self.answers.items() if answer.end is None]
            assert left > 0, f"not reached within {timeout} s; without an end: {open_ids}"
            self.pump(left)

    def close(self) -> None:
        self._context.destroy(linger=0)


@dataclass(slots=True)
class Fleet:
    """A started fleet: its processes, addresses and a client."""

    ranks: list[RankProcess]
    endpoints: list[dict[str, Any]]
    reports: list[dict[str, Any]]
    client: Client
    config: EngineConfig
    keys: FleetKeys
    placement: Placement

    def take_over(self, dead: Sequence[int], *, room: int = 1000) -> list[dict[str, Any]]:
        """Continue without dead ranks: survivors take their experts. Return the survivors' reports of the loss."""
        alive = [rank for rank in self.placement.ranks if rank not in dead]
        losses = [self.ranks[rank].call("wait") for rank in alive]
        self.begin_epoch(self.placement.without(dead), losses, room=room)
        return losses

    def start_again(self, ranks: Sequence[int]) -> None:
        """Start new processes for dead ranks, which load their shards while the others serve."""
        for rank in ranks:
            self.ranks[rank].kill()
            self.ranks[rank] = RankProcess()
            self.ranks[rank].send("setup", _spec(self.config, rank, 0, self.keys, self.whole, self.hosts))
        for rank in ranks:
            self.endpoints[rank] = self.ranks[rank].result()
        for rank in ranks:
            self.ranks[rank].call("load", 1)
            self.client.reconnect(rank, self.endpoints[rank]["frontend"])

    def move_to(self, placement: Placement, *, room: int = 1000) -> None:
        """End the epoch between steps, and begin another with the ranks of this placement."""
        before = self.placement.ranks
        self.ranks[before[0]].call("end_epoch", "the test moves experts")
        losses = [self.ranks[rank].call("wait") for rank in before]
        assert all(not loss["ranks"] for loss in losses), losses
        self.begin_epoch(placement, losses, room=room)

    def update(self, weights: ServedWeights) -> list[dict[str, Any]]:
        """Serve other weights on all ranks, like a launcher. Return what the ranks report of them."""
        found = call_all(self.ranks, "stage_weights", [(weights,)] * len(self.ranks))
        self.ranks[0].call("end_epoch", "the test changes the weights")
        losses = [rank.call("wait") for rank in self.ranks]
        call_all(self.ranks, "use_weights", [(weights,)] * len(self.ranks))
        self.begin_epoch(self.placement, losses)
        return found

    def begin_epoch(self, placement: Placement, losses: Sequence[dict[str, Any]], *, room: int = 1000) -> None:
        """Connect all ranks of a placement, which continue or start."""
        started, self.placement = set(self.placement.ranks).difference(self.lost_for_good()), placement
        ranks, epoch = placement.ranks, secrets.randbits(31)
        there = [self.ranks[rank] for rank in ranks]
        met = call_all(there, "rebind", [(epoch, placement)] * len(ranks))
        call_all(there, "connect", [([each["mesh"] for each in met],)] * len(ranks))
        call_all(there, "prepare", [(placement, room)] * len(ranks))
        step = max((loss["steps"] for loss in losses), default=0)
        for rank in ranks:
            self.ranks[rank].call("rejoin" if rank in started else "start", step)

    def lost_for_good(self) -> list[int]:
        """Ranks whose processes have ended."""
        return [rank for rank, each in enumerate(self.ranks) if not each.process.is_alive()]

    @property
    def whole(self) -> Placement:
        """The placement with which all ranks began."""
        return first_placement(self.config)

    hosts: Sequence[str]
    make: Callable[[int], RankProcess]

    def recover(
        self, dead: Sequence[int], losses: list[dict[str, Any]] | None = None, weights: ServedWeights = AS_STARTED
    ) -> list[dict[str, Any]]:
        """Replace dead processes and begin a new epoch, like a launcher. New processes load `weights`.

        Return the survivors' reports of the loss, which may have been read before (`losses`).
        """
        survivors = [rank for rank in range(len(self.ranks)) if rank not in dead]
        losses = losses or [self.ranks[rank].call("wait") for rank in survivors]
        epoch = secrets.randbits(31)
        for rank in dead:
            self.ranks[rank].kill()
            self.ranks[rank] = self.make(rank)
            spec = _spec(self.config, rank, epoch, self.keys, self.placement, self.hosts)
            self.ranks[rank].send("setup", {**spec, "weights": weights})
        for rank in survivors:
            self.ranks[rank].send("rebind", epoch)
        self.endpoints = [rank.result() for rank in self.ranks]
        call_all(self.ranks, "connect", [([e["mesh"] for e in self.endpoints],)] * len(self.ranks))
        for rank in dead:
            self.ranks[rank].call("load", len(dead))
        step = max((loss["steps"] for loss in losses), default=0)
        call_all([self.ranks[rank] for rank in dead], "start", [(step,)] * len(dead))
        call_all([self.ranks[rank] for rank in survivors], "rejoin", [(step,)] * len(survivors))
        for rank in dead:
            self.client.reconnect(rank, self.endpoints[rank]["frontend"])
        return losses

    def call(self, name: str) -> list[Any]:
        """Make one inspection call on every rank (see `serve`)."""
        return call_all(self.ranks, name, [()] * len(self.ranks))


def call_all(ranks: Sequence[RankProcess], name: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
    for rank, each in zip(ranks, args, strict=True):
        rank.send(name, *each)
    return [rank.result() for rank in ranks]


class Pool(Protocol):
    """The source of processes, to which they return after a fleet has ended."""

    def take(self, count: int) -> list[RankProcess]: ...

    def keep(self, ranks: Sequence[RankProcess]) -> None: ...


@contextlib.contextmanager
def start_fleet(
    pool: Pool,
    config: EngineConfig,
    placement: Placement | None = None,
    *,
    hosts: Sequence[str] = (),
    make: Callable[[int], RankProcess] = lambda rank: RankProcess(),
) -> Iterator[Fleet]:
    """Start a fleet for one case on processes of the pool; at the end check invariants and stop everything.

    `hosts` are the addresses of the ranks (default: all on this host); `make` makes a lost rank's replacement.
    """
    ranks, keys = pool.take(config.num_workers), make_keys()
    placement = placement or first_placement(config)
    count, epoch = len(ranks), secrets.randbits(31)
    with _killed_on_failure(ranks):
        endpoints = call_all(
            ranks, "setup", [(_spec(config, rank, epoch, keys, placement, hosts),) for rank in range(count)]
        )
        call_all(ranks, "connect", [([e["mesh"] for e in endpoints],)] * count)
        reports = call_all(ranks, "load", [(count,)] * count)
        call_all(ranks, "start", [()] * count)
    client = Client([e["frontend"] for e in endpoints], keys.of_router())
    try:
        yield Fleet(
            ranks=ranks,
            endpoints=endpoints,
            reports=reports,
            client=client,
            config=config,
            keys=keys,
            placement=placement,
            hosts=hosts,
            make=make,
        )
        alive = [rank for rank in ranks if rank.process.is_alive()]
        call_all(alive, "validate", [()] * len(alive))
    finally:
        client.close()
        with _killed_on_failure(ranks):
            alive = [rank for rank in ranks if rank.process.is_alive()]
            call_all(alive, "stop", [()] * len(alive))
        pool.keep(ranks)


@contextlib.contextmanager
def _killed_on_failure(ranks: Sequence[RankProcess]) -> Iterator[None]:
    """Kill processes that failed to start or stop: open answers or threads would disturb the next fleet."""
    try:
        yield
    except BaseException:
        for rank in ranks:
            rank.kill()
        raise


def first_placement(config: EngineConfig) -> Placement:
    """Return contiguous shards for all ranks."""
    model = served_model(config)
    return Placement.of_shards(model.moe_layers, partition(model.num_experts, config.num_workers))


def _spec(
    config: EngineConfig, rank: int, epoch: int, keys: FleetKeys, placement: Placement, hosts: Sequence[str] = ()
) -> dict[str, Any]:
    host = hosts[rank] if hosts else "127.0.0.1"
    spec = {"config": config, "rank": rank, "epoch": epoch, "host": host, "version": "test", "gpu": rank}
    spec["peer_gpus"] = tuple(range(config.num_workers))
    return {**spec, "keys": keys.of_worker(), "placement": placement}
