"""Rank processes for the tests: start them, call functions in all, collect each result or exception."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import torch
import zmq
from exchange_reference import Observed, Scenario, expert_outputs, generator, make_layer, random_rows
from tests.fleet import rank_context
from tests.limits import HANG_SECONDS

from moeyard_worker.config.placement import Placement, partition
from moeyard_worker.exchange.base import Exchange, ExchangeError, PeerRows
from moeyard_worker.exchange.factory import build_exchange, build_mesh
from moeyard_worker.exchange.membership.frames import Phase
from moeyard_worker.exchange.membership.lockstep import Lockstep
from moeyard_worker.exchange.membership.mesh import Mesh
from moeyard_worker.exchange.membership.rendezvous import MeshEndpoint
from moeyard_worker.exchange.shape import ExchangeShape
from moeyard_worker.exchange.transports.nccl.exchange import NcclExchange


@dataclass(slots=True)
class Rank:
    """State of a rank process between calls."""

    rank: int
    pipe: Connection
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    mesh: Mesh = field(init=False)
    exchange: Exchange = field(init=False)


@dataclass(frozen=True, slots=True)
class Failed:
    """An exception of a rank: its text, and when it was raised (monotonic seconds, the same clock on all ranks)."""

    message: str
    at: float


class Fleet:
    """`num_ranks` processes, killed on exit."""

    def __init__(self, num_ranks: int) -> None:
        context = rank_context()
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for process in self.processes:
            process.kill()  # also if only the fork server has noticed the exit
            process.join()
        for pipe in self.pipes:
            pipe.close()

    def start(self, rank: int, function: Callable[..., Any], *args: Any) -> None:
        """Start function(its `Rank`, *args) on one rank."""
        self.pipes[rank].send((function, args))

    def result(self, rank: int) -> Any:
        """Return the result of the rank's oldest open call, or a `Failed`."""
        assert self.pipes[rank].poll(HANG_SECONDS), f"no reply of rank {rank}"
        return self.pipes[rank].recv()

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Run function(Rank, *args) on all ranks at once; return the results by rank."""
        for rank in range(len(self.pipes)):
            self.start(rank, function, *args)
        return [self.result(rank) for rank in range(len(self.pipes))]

    def connect(
        self,
        kind: str,
        shape: ExchangeShape,
        *,
        deadline: float = 30.0,
        hosts: str | None = None,
        placement: Placement | None = None,
        members: Sequence[int] | None = None,
        stall: float | None = None,
        patience: float | None = None,
        device: str = "cpu",
    ) -> list[MeshEndpoint]:
        """Build mesh and exchange on all ranks; `hosts[r]` is the pretended host of rank r.

        A living rank is awaited for `stall`, as in a fleet; with `patience` only if it has said that it is slow, as on
        GPUs. On "cuda" each rank has its own GPU. Process i is rank members[i]; without a `placement` ranks own
        contiguous shards.
        """
        members = range(len(self.pipes)) if members is None else members
        endpoints = self.call(open_mesh, kind, shape, members, deadline, hosts, stall, patience)
        if placement is None:
            placement = Placement.of_shards(range(6), partition(shape.num_experts, len(endpoints)))
        results = self.call(connect_exchange, kind, shape, endpoints, placement, device)
        assert results == [None] * len(self.pipes), results
        return endpoints


def _serve(rank: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    state = Rank(rank, pipe)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            reply = function(state, *args)
        except ExchangeError as error:
            reply = Failed(str(error), time.perf_counter())
        pipe.send(reply)


def open_mesh(
    state: Rank,
    kind: str,
    shape: ExchangeShape,
    members: Sequence[int],
    deadline: float,
    hosts: str | None,
    stall: float | None,
    patience: float | None,
) -> MeshEndpoint:
    """Open a rank's mesh: the first phase of the rendezvous."""
    host_id = hosts[state.rank] if hosts else None
    state.rank = members[state.rank]
    state.mesh = build_mesh(
        kind,
        shape=shape,
        rank=state.rank,
        world_size=max(members) + 1,
        members=members,
        deadline=deadline,
        stall=stall,
        patience=patience,
        host_id=host_id,
    )
    return state.mesh.endpoint()


def connect_exchange(
    state: Rank, kind: str, shape: ExchangeShape, endpoints: list[MeshEndpoint], placement: Placement, device: str
) -> None:
    """Connect the mesh and build the exchange: the second phase."""
    state.mesh.connect(endpoints, HANG_SECONDS)
    if device != "cpu":
        state.device = torch.device(device, state.mesh.members.index(state.rank))
        torch.cuda.set_device(state.device)
    state.exchange = build_exchange(kind, mesh=state.mesh, shape=shape, placement=placement, device=state.device)
    state.exchange.attach(state.mesh, placement)


def set_rows(state: Rank, scenario: Scenario) -> None:
    """Set what plan frames announce; absent ranks bring no rows."""
    ranks = range(state.mesh.world_size)
    counts = tuple(scenario.tokens[rank] if rank in state.mesh.members else 0 for rank in ranks)
    prompts = tuple(round(count * scenario.prefill) for count in counts)
    state.exchange.steps.set_rows(PeerRows(max(counts), prompts, counts))


def run_layers(state: Rank, shape: ExchangeShape, scenario: Scenario, step: int, num_layers: int) -> list[Observed]:
    """Run one lockstep step over `num_layers` layers; return copies of everything observed.

    Rows that need no local expert are ignored, because an exchange may bring them too.
    """
    seen = []
    state.exchange.steps.begin(step)
    set_rows(state, scenario)
    for number in range(num_layers):
        layer = make_layer(shape, scenario, state.rank, number)
        x, ids = layer.x.to(state.device), layer.topk_ids.to(state.device)
        got = state.exchange.dispatch(x, ids, layer=2 * number, num_prompt=layer.num_prompt)
        state.exchange.steps.drain()
        rows, experts = got.rows.cpu().clone(), got.experts.cpu()
        keep = (experts >= 0).any(1)
        outputs = random_rows(shape, experts.numel(), generator("beside", state.rank, number))
        outputs = outputs.view(*experts.shape, shape.hidden)
        outputs[keep] = expert_outputs(shape, experts[keep], state.rank, number)
        assert torch.equal(got.rows.cpu().view(torch.uint8), rows.view(torch.uint8)), "rows changed before combine"
        home = state.exchange.combine(outputs.to(state.device), got.handle)
        state.exchange.steps.drain()
        prompt = torch.zeros(len(rows), dtype=torch.bool) if got.prompt is None else got.prompt.cpu()
        seen.append(
            Observed(
                rows=rows[keep], experts=experts[keep].tolist(), prompt=prompt[keep].tolist(), home=home.cpu().clone()
            )
        )
    return seen


def stop_victim(state: Rank, victim: int, number: int) -> None:
    """Let rank `victim` report the time and stop for good: `number` is SIGKILL or SIGSTOP.

    It first waits for every peer's frame of this phase. A peer sends it after the victim's frame of the last phase.
    """
    if state.rank == victim:
        while len(state.mesh.arrived()) < len(state.mesh.peers):
            time.sleep(0.001)
        # Give the peers time to block in their wait, which must be interrupted. No result depends on the duration.
        time.sleep(0.05)
        state.pipe.send(time.perf_counter())
        os.kill(os.getpid(), number)
    elif isinstance(state.exchange, NcclExchange):
        # Its rows do not use the mesh.
        state.mesh.send(victim, b"a frame")


def run_until(state: Rank, shape: ExchangeShape, scenario: Scenario, victim: int, phase: str, number: int) -> None:
    """Run steps without end; in step 2, layer 1, rank `victim` gets signal `number` just before its part in `phase`."""
    for step in range(1000):
        state.exchange.steps.begin(step)
        set_rows(state, scenario)
        for layer in range(2):
            made = make_layer(shape, scenario, state.rank, layer)
            x, ids = made.x.to(state.device), made.topk_ids.to(state.device)
            if (step, layer, phase) == (2, 1, "dispatch"):
                stop_victim(state, victim, number)
            got = state.exchange.dispatch(x, ids, layer=layer, num_prompt=made.num_prompt)
            state.exchange.steps.drain()
            if (step, layer, phase) == (2, 1, "combine"):
                stop_victim(state, victim, number)
            outputs = expert_outputs(shape, got.experts.cpu(), state.rank, layer).to(state.device)
            state.exchange.combine(outputs, got.handle)
            state.exchange.steps.drain()


def run_with_delay(
    state: Rank, shape: ExchangeShape, scenario: Scenario, victim: int, seconds: float, sign: Phase | None, steps: int
) -> float:
    """Run steps; in the second, rank `victim` sends `sign` and reaches layer 1 `seconds` late.

    Return when the delay began.
    """
    begun = 0.0
    for step in range(steps):
        state.exchange.steps.begin(step)
        set_rows(state, scenario)
        for layer in range(2):
            made = make_layer(shape, scenario, state.rank, layer)
            if (step, layer) == (1, 1):
                begun = time.perf_counter()
                if state.rank == victim:
                    if sign is not None:
                        state.mesh.send_sign(sign)
                    time.sleep(seconds)
            got = state.exchange.dispatch(made.x, made.topk_ids, layer=layer, num_prompt=made.num_prompt)
            state.exchange.steps.drain()
            outputs = expert_outputs(shape, got.experts.cpu(), state.rank, layer)
            state.exchange.combine(outputs, got.handle)
            state.exchange.steps.drain()
        state.exchange.steps.finish(step, lambda: True)
    return begun


def use_device(state: Rank) -> int:
    """Compute on a device that was waiting for a peer."""
    return int(torch.arange(1000, device=state.device).sum())


def idle(state: Rank, seconds: float) -> float:
    """Wait for a peer like an idle engine; return the share of that time in which the process used a CPU."""
    lockstep = Lockstep(state.mesh)
    poller = zmq.Poller()
    for socket in state.mesh.poll_sockets():
        poller.register(socket, zmq.POLLIN)
    used, begun = time.process_time(), time.perf_counter()
    while (remaining := begun + seconds - time.perf_counter()) > 0:
        poller.poll(int(remaining * 1000) + 1)
        assert not lockstep.peer_started(0)
    return (time.process_time() - used) / (time.perf_counter() - begun)


def join_when_started(state: Rank, step: int, num_tokens: int) -> tuple[int, ...]:
    """Block until a peer starts `step`, then join it."""
    lockstep = Lockstep(state.mesh)
    poller = zmq.Poller()
    for socket in state.mesh.poll_sockets():
        poller.register(socket, zmq.POLLIN)
    while not lockstep.peer_started(step):
        poller.poll()
    return lockstep.agree(step, num_tokens).num_tokens


def agree(state: Rank, step: int, num_tokens: int) -> tuple[int, ...]:
    """Start `step`."""
    return Lockstep(state.mesh).agree(step, num_tokens).num_tokens


def close_full(state: Rank, peer: int) -> None:
    """Close while frames that `peer` does not read are queued."""
    wires, frame = state.mesh._open_wires(), memoryview(bytes(1 << 16))
    while wires.send_in_place(peer, frame) is not None:
        time.sleep(0.001)
    state.pipe.send("closing")
    state.mesh.close()


def send_and_exit(state: Rank, peer: int, seconds: float) -> None:
    """Send to `peer`, which has closed, and exit."""
    limit = time.perf_counter() + seconds
    while time.perf_counter() < limit:
        state.mesh._open_wires().send(peer, b"still here")
        time.sleep(0.001)
    os._exit(0)


def close(state: Rank) -> None:
    """Close twice; the second call must be harmless."""
    state.exchange.close()
    state.exchange.close()
    state.mesh.close()
