"""The exchange over memory that all ranks map: ranks in threads of this process, reference kernels on CPU tensors.

`tests/gpu/test_one_answer_ranks.py` tests the GPU's part: launches that wait, graphs, torch's mapping.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.checkpoints import make_checkpoint
from tests.exchange.meshes import connect_all
from tests.exchange.test_staged_exchange import backend, check_alone, fleet_of, rank_runner, run_steps, steps_of
from tests.limits import HANG_SECONDS

from moeyard_kernels import ops
from moeyard_kernels.types.fetch_window import SHARED, FetchWindow
from moeyard_kernels.types.peer_shape import (
    KEPT_TIMES,
    NUM_COUNTS,
    NUM_TIMES,
    RECEIVED,
    SENT,
    TIMES,
    FetchShape,
    LentMemory,
)
from moeyard_kernels.types.peer_window import (
    ABORT,
    COMBINE,
    DISPATCH,
    FETCH,
    NUM_FAULT,
    POISONED,
    SILENT,
    SPENT,
    PeerWindow,
)
from moeyard_kernels.types.weight_form import plain_expert
from moeyard_worker.config.placement import Placement, partition
from moeyard_worker.exchange.base import ExchangeError, ExchangeStats, PeerRows
from moeyard_worker.exchange.factory import build_mesh
from moeyard_worker.exchange.membership.frames import Phase
from moeyard_worker.exchange.membership.lockstep import Lockstep
from moeyard_worker.exchange.membership.mesh import Mesh
from moeyard_worker.exchange.shape import ExchangeShape
from moeyard_worker.exchange.transports.nvlink import exchange as nvlink
from moeyard_worker.exchange.transports.nvlink.exchange import NvlinkExchange
from moeyard_worker.exchange.transports.nvlink.expert_fetch import FetchOffer, PeerFetch
from moeyard_worker.exchange.transports.nvlink.memory import MeshStore
from moeyard_worker.exchange.transports.nvlink.steps import PeerCounts

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="ranks of one process share host memory; tests/gpu covers GPUs"
)
DEADLINE = 30.0
# The original, because tests replace it.
FETCH_EXPERTS = ops.fetch_experts.reference
SMALL = ExchangeShape(num_experts=6, top_k=2, hidden=8, dtype="bfloat16", max_tokens=8)


class Turns:
    """`ops` of ranks in threads: all send, then all wait, because no row arrives on a CPU during a wait."""

    def __init__(self, world: int) -> None:
        self._barrier, self._lock = threading.Barrier(world, timeout=HANG_SECONDS), threading.Lock()
        # Exchanges in which ranks fetched experts together.
        self.num_fetches = 0

    def dispatch_rows(self, x: torch.Tensor, ids: torch.Tensor, window: PeerWindow, **at: int) -> Any:
        return self._run(ops.dispatch_rows.reference, window, x, ids, window, **at)

    def combine_rows(self, out: torch.Tensor, window: PeerWindow, **at: int) -> Any:
        return self._run(ops.combine_rows.reference, window, out, window, **at)

    def _run(self, op: Callable[..., Any], window: PeerWindow, *given: Any, **at: int) -> Any:
        if window.state[POISONED]:
            return op(*given, send=True, wait=True, **at)
        with self._lock:
            op(*given, send=True, wait=False, **at)
        self._barrier.wait()
        with self._lock:
            return op(*given, send=False, wait=True, **at)

    def fetch_experts(self, *given: Any, **at: Any) -> None:
        """Ranks that share publish, read and move in turn, and count the fetches."""
        window: FetchWindow = given[-1]
        if not window.state[SHARED] or window.peer.state[POISONED]:
            FETCH_EXPERTS(*given, tell=True, read=True, move=True, **at)
            return
        self.num_fetches += window.peer.rank == 0
        for part in ("tell", "read", "move"):
            with self._lock:
                FETCH_EXPERTS(*given, **{"tell": False, "read": False, "move": False, part: True}, **at)
            self._barrier.wait()


class Memory:
    """The ranks' memory, which this process can access as a whole."""

    def __init__(self, rank: int, of_all: Sequence[torch.Tensor]) -> None:
        self.own, self._of_all = of_all[rank], of_all

    def drain(self) -> None:
        """Return at once: calls are synchronous."""

    def mark(self) -> Callable[[], bool]:
        return lambda: True

    def meet(self, mesh: Mesh) -> Sequence[torch.Tensor]:
        mesh.gather(b"here")
        return [self._of_all[rank] for rank in range(mesh.world_size)]


def together(jobs: Sequence[Callable[[], Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(jobs)) as pool:
        return [each.result(timeout=HANG_SECONDS) for each in [pool.submit(job) for job in jobs]]


def open_meshes(world: int, shape: ExchangeShape, *, epoch: int = 1, deadline: float = DEADLINE) -> list[Mesh]:
    meshes = [
        build_mesh("nvlink", shape=shape, rank=rank, world_size=world, epoch=epoch, deadline=deadline)
        for rank in range(world)
    ]
    assert connect_all(meshes) == [None] * world
    return meshes


def open_exchanges(world: int, shape: ExchangeShape, placement: Placement) -> list[NvlinkExchange]:
    memory = [torch.zeros(shape.window(world).num_bytes, dtype=torch.uint8) for _ in range(world)]
    return [
        NvlinkExchange(
            Memory(rank, memory), rank=rank, world_size=world, shape=shape, placement=placement, seconds=DEADLINE
        )
        for rank in range(world)
    ]


def attach(exchanges: Sequence[Any], meshes: Sequence[Mesh], placement: Placement) -> None:
    together([lambda e=e, m=m: e.attach(m, placement) for e, m in zip(exchanges, meshes, strict=True)])


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[NvlinkExchange], list[Mesh]]]:
    """Two connected ranks with four layers."""
    placement = Placement.of_shards(range(4), partition(6, 2))
    monkeypatch.setattr(nvlink, "ops", Turns(2))
    exchanges, meshes = open_exchanges(2, SMALL, placement), open_meshes(2, SMALL, deadline=2.0)
    attach(exchanges, meshes, placement)
    yield exchanges, meshes
    for mesh in meshes:
        mesh.close()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("nvlink"), "qwen3_moe", dtype=torch.bfloat16)


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_ranks_equal_one_rank(checkpoint: Path, world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward before the ranks meet joins no exchange and leaves nothing behind."""
    shape, placement, plans = fleet_of(checkpoint, world)
    monkeypatch.setattr(nvlink, "ops", Turns(world))
    exchanges = open_exchanges(world, shape, placement)
    most = [max(step.num_tokens for step in steps) for steps in zip(*plans, strict=True)]
    runners = [rank_runner(checkpoint, exchange) for exchange in exchanges]
    for exchange, runner in zip(exchanges, runners, strict=True):
        exchange.steps.set_rows(PeerRows(48))
        runner.forward(steps_of(50)[0])
    meshes = open_meshes(world, shape)
    attach(exchanges, meshes, placement)

    def run(rank: int) -> list[torch.Tensor]:
        exchange = exchanges[rank]

        def begin(number: int) -> None:
            exchange.steps.begin(number + 1)
            # Room for more rows than any rank has changes nothing, and ranks may have different amounts.
            exchange.steps.set_rows(
                PeerRows(most[number] + rank, tuple(plan[number].num_prefill_tokens for plan in plans))
            )

        seen = run_steps(runners[rank], plans[rank], begin)
        exchange.steps.finish(6, lambda: True)
        return seen

    seen = together([lambda rank=rank: run(rank) for rank in range(world)])
    for mesh in meshes:
        mesh.close()
    check_alone(checkpoint, seen)


def test_owners_depend_on_layer_and_epoch(
    pair: tuple[list[NvlinkExchange], list[Mesh]],
) -> None:
    exchanges, meshes = pair
    owners = ((0, 1, 0, 1, 0, 1), (1, 1, 1, 0, 0, 0), (0, 0, 0, 0, 0, 1), (1, 0, 0, 1, 1, 0))
    window = exchanges[0]._windows[2]
    window.state[POISONED] = 1
    for mesh in meshes:
        mesh.close()
    copies = ((), (), ((1, 1),), ((0, 0), (5, 1)))
    again, placement = open_meshes(2, SMALL, epoch=2), Placement((0, 1, 2, 3), owners, copies)
    attach(exchanges, again, placement)
    # Captured graphs keep their tensors. Rank 1 has expert 1 first and expert 5 second.
    assert window.owner.tolist() == [[0, 0], [0, 1], [0, 0], [0, 0], [0, 0], [1, 1]]
    assert window.local.tolist() == [[0, 0], [1, 0], [2, 2], [3, 3], [4, 4], [1, 1]]
    assert window.state.tolist() == [0] * 8
    x = torch.arange(16, dtype=torch.float32).to(torch.bfloat16).view(2, 8)
    ids = torch.tensor([[5, 1], [4, 5]])

    def step(rank: int, layer: int) -> list[list[int]]:
        exchanges[rank].steps.set_rows(PeerRows(3))
        got = exchanges[rank].dispatch(x, ids if rank == 0 else ids[:0], layer=layer, num_prompt=0)
        experts = got.experts.tolist()
        exchanges[rank].combine(torch.zeros(6, 2, 8, dtype=torch.bfloat16), got.handle)
        return experts

    nothing = [-1, -1]
    assert together([lambda rank=rank: step(rank, 2) for rank in range(2)]) == [
        [[-1, 1], nothing, [4, -1], nothing, nothing, nothing],
        [[1, -1], nothing, [-1, 1], nothing, nothing, nothing],
    ]
    assert together([lambda rank=rank: step(rank, 1) for rank in range(2)]) == [
        [[2, -1], nothing, [1, 2], nothing, nothing, nothing],
        [[-1, 1], nothing, nothing, nothing, nothing, nothing],
    ]
    for mesh in again:
        mesh.close()


def test_prompt_rows_are_marked_by_the_agreement(pair: tuple[list[NvlinkExchange], list[Mesh]]) -> None:
    exchanges, _ = pair
    exchanges[0].steps.set_rows(PeerRows(3, (0, 2)))
    marked = exchanges[0]._prompt
    assert marked is not None
    assert marked.view(3, 2).tolist() == [[False, True], [False, True], [False, False]]
    exchanges[0].steps.set_rows(PeerRows(3, (0, 0)))
    assert exchanges[0]._prompt is None
    with pytest.raises(AssertionError, match="most=9"):
        exchanges[0].steps.set_rows(PeerRows(9))


def test_bytes_are_reported_from_the_devices_counts(pair: tuple[list[NvlinkExchange], list[Mesh]]) -> None:
    """The device's counts include an earlier epoch's, and are read a few times per second at most."""
    exchanges, _ = pair
    x = torch.arange(16, dtype=torch.float32).to(torch.bfloat16).view(2, 8)

    def step(rank: int, ids: torch.Tensor) -> None:
        exchanges[rank].steps.set_rows(PeerRows(3))
        got = exchanges[rank].dispatch(x, ids, layer=2, num_prompt=0)
        exchanges[rank].combine(torch.zeros(6, 2, 8, dtype=torch.bfloat16), got.handle)

    # Experts 0 to 2 are rank 0's: two rows go to rank 1, and three results come back.
    ids = torch.tensor([[5, 1], [4, 3]])
    together([lambda: step(0, ids), lambda: step(1, ids[:0])])
    for exchange in exchanges:
        exchange.steps.begin(1)
        exchange.steps.finish(1, lambda: True)
    there, back = 2 * (2 * 4 + 16), 3 * 16
    stats = [exchange.stats for exchange in exchanges]
    assert [(each.bytes_sent, each.bytes_received) for each in stats] == [(there, back), (back, there)]
    together([lambda: step(0, ids), lambda: step(1, ids[:0])])
    exchanges[0].steps.begin(2)
    exchanges[0].steps.finish(2, lambda: True)
    assert stats[0].bytes_sent == there, "the counts must not be read again so soon"
    exchanges[0]._window.reset()
    exchanges[0].steps.counts.look(wait=True)
    assert (stats[0].bytes_sent, stats[0].bytes_received) == (2 * there, 2 * back)


def test_each_recorded_time_is_reported_once() -> None:
    live, stats = torch.zeros(NUM_COUNTS, dtype=torch.int64), ExchangeStats()
    counts = PeerCounts(live, stats)
    live[SENT], live[RECEIVED] = 7, 9

    def take(phase: int, *nanoseconds: int) -> None:
        """Record times like `peer_words.note_time`."""
        for each in nanoseconds:
            number = int(live[NUM_TIMES + phase])
            live[TIMES + phase * KEPT_TIMES + number % KEPT_TIMES] = each
            live[NUM_TIMES + phase] += 1

    take(0, 1000, 2000)
    take(1, 3000)
    counts.look(wait=True)
    assert (stats.bytes_sent, stats.bytes_received) == (7, 9)
    assert stats.seconds == {"dispatch": pytest.approx([1e-6, 2e-6]), "combine": pytest.approx([3e-6])}
    for values in stats.seconds.values():
        values.clear()
    take(0, *range(1, KEPT_TIMES + 51))
    counts.look(wait=True)
    assert stats.seconds["combine"] == []
    assert stats.seconds["dispatch"] == pytest.approx([each * 1e-9 for each in range(51, KEPT_TIMES + 51)])


def write_fault(exchange: NvlinkExchange, *record: int) -> None:
    """Record a fault like the device does (`peer_window`)."""
    exchange._window.fault[: 1 + len(record)] = torch.tensor([1, *record])


@pytest.mark.parametrize(("phase", "word"), [(DISPATCH, "dispatch"), (FETCH, "fetch"), (COMBINE, "combine")])
def test_all_ranks_name_the_devices_finding(
    pair: tuple[list[NvlinkExchange], list[Mesh]], phase: int, word: str
) -> None:
    """The finding names its own step: with two in flight the earlier one is complete."""
    exchanges, meshes = pair
    for exchange, mesh in zip(exchanges, meshes, strict=True):
        for step in (812, 813):
            exchange.steps.begin(step)
        mesh.step = 813
    write_fault(exchanges[0], phase, 2, 0b10, 4 + 3, SILENT)
    exchanges[0].steps.finish(812, lambda: True)
    named = f"rank 1 silent \\({DEADLINE:.1f} s\\) at step 813, layer 2, {word}"
    # The other rank waits for its own device and learns of it.

    def fails(rank: int, has_run: Callable[[], bool]) -> None:
        with pytest.raises(ExchangeError, match=named):
            exchanges[rank].steps.finish(813, has_run)

    together([lambda: fails(0, lambda: True), lambda: fails(1, lambda: bool(exchanges[1]._window.fault[ABORT]))])
    assert [mesh.finding.ranks for mesh in meshes if mesh.finding] == [(1,), (1,)]


def test_with_drafts_a_failure_names_this_step_at_the_latest(pair: tuple[list[NvlinkExchange], list[Mesh]]) -> None:
    """The exchange's number does not determine the step, and a later step must not be named."""
    exchanges, _ = pair
    exchanges[0].steps._drafts = True
    for step in range(1, 101):
        exchanges[0].steps.begin(step)
    write_fault(exchanges[0], DISPATCH, 2, 0b10, 598, SILENT)
    with pytest.raises(ExchangeError, match=r"rank 1 silent .* at step 100, layer 2, dispatch"):
        exchanges[0].steps.finish(100, lambda: True)


def test_partial_record_is_read_a_step_later(pair: tuple[list[NvlinkExchange], list[Mesh]]) -> None:
    exchanges, _ = pair
    exchanges[0].steps.begin(812)
    write_fault(exchanges[0])
    exchanges[0].steps.finish(812, lambda: True)
    exchanges[0].steps.begin(813)
    write_fault(exchanges[0], DISPATCH, 2, 0b10, 5, SILENT)
    with pytest.raises(ExchangeError, match=r"rank 1 silent .* at step 813, layer 2, dispatch"):
        exchanges[0].steps.finish(813, lambda: True)


class WaitingDevice:
    """A device that waits for rank 1 in the third exchange until the host ends it, or for `most` seconds."""

    def __init__(self, exchange: NvlinkExchange, most: float = DEADLINE) -> None:
        self._fault, self._begun, self._most = exchange._window.fault, time.monotonic(), most

    def has_run(self) -> bool:
        waited, ended = time.monotonic() - self._begun, bool(self._fault[ABORT])
        time.sleep(0.001)
        if ended:
            record = torch.tensor([1, DISPATCH, 2, 0b10, 3, SILENT])
            self._fault[: len(record)] = record
        self._fault[SPENT] = 0 if waited > self._most else int(waited * 1e9)
        return ended or waited > self._most


def test_wait_ends_at_the_deadline(
    pair: tuple[list[NvlinkExchange], list[Mesh]],
) -> None:
    """The device's own limit is longer, because a peer may have to compile the launch."""
    exchanges, meshes = pair
    meshes[0].deadline = 0.4
    exchanges[0].steps.begin(7)
    device = WaitingDevice(exchanges[0])
    with pytest.raises(ExchangeError, match=r"rank 1 silent \(0\.4 s\) at step 7, layer 2, dispatch"):
        exchanges[0].steps.finish(7, device.has_run)
    assert time.monotonic() - device._begun > 0.4


def test_compiling_rank_is_awaited(pair: tuple[list[NvlinkExchange], list[Mesh]]) -> None:
    exchanges, meshes = pair
    meshes[0].deadline = 1.0
    exchanges[0].steps.begin(7)
    meshes[1].send_sign(Phase.BUSY)
    exchanges[0].steps.finish(7, WaitingDevice(exchanges[0], most=1.8).has_run)
    assert exchanges[0]._window.fault[ABORT] == 0


def test_rank_that_has_just_compiled_is_awaited(pair: tuple[list[NvlinkExchange], list[Mesh]]) -> None:
    """Its next plan ends its sign, and its device may still be late."""
    exchanges, meshes = pair
    meshes[0].deadline = 1.0
    exchanges[0].steps.begin(7)
    meshes[1].send_sign(Phase.BUSY)
    device, spent = WaitingDevice(exchanges[0], most=1.8), exchanges[0]._window.fault[SPENT]
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(exchanges[0].steps.finish, 7, device.has_run)
        while spent < 1.2e9 and not waits.done():
            time.sleep(0.001)
        # Any other frame ends the sign.
        meshes[1].send(0, b"a plan")
        waits.result(timeout=HANG_SECONDS)
    assert exchanges[0]._window.fault[ABORT] == 0


def test_next_wait_has_its_full_deadline(
    pair: tuple[list[NvlinkExchange], list[Mesh]],
) -> None:
    exchanges, meshes = pair
    fault, exchanges[0].steps._ended = exchanges[0]._window.fault, True
    exchanges[0]._window.abort()
    exchanges[0].steps.begin(7)
    exchanges[0].steps.finish(7, lambda: fault[ABORT] == 0)
    meshes[0].deadline = 0.4
    exchanges[0].steps.begin(8)
    with pytest.raises(ExchangeError, match=r"rank 1 silent \(0\.4 s\) at step 7"):
        exchanges[0].steps.finish(8, WaitingDevice(exchanges[0]).has_run)


def test_signs_of_all_ranks_are_read_while_one_plan_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1's plan is awaited first while rank 2 compiles; this rank was busy elsewhere for long."""
    placement, deadline = Placement.of_shards(range(4), partition(6, 3)), 0.4
    monkeypatch.setattr(nvlink, "ops", Turns(3))
    exchanges, meshes = open_exchanges(3, SMALL, placement), open_meshes(3, SMALL, deadline=2.0)
    attach(exchanges, meshes, placement)
    meshes[0].deadline, exchanges[0].steps._looking = deadline, 0.001
    exchanges[0].steps._looked = time.monotonic()
    exchanges[0]._window.fault[SPENT] = int(2e9)
    meshes[2].send_sign(Phase.BUSY)
    # The sign has arrived and is not read yet.
    assert meshes[0]._open_wires()._sockets[2].poll(1000 * HANG_SECONDS)

    def agree_late(mesh: Mesh) -> None:
        """By then rank 0 has read the sign."""
        while not (exchanges[0].steps._slow or exchanges[0]._window.fault[ABORT]):
            time.sleep(0.001)
        Lockstep(mesh).agree(1, 0)

    agreed = together([lambda: Lockstep(meshes[0]).agree(1, 1), *(lambda m=m: agree_late(m) for m in meshes[1:])])
    assert agreed[0].num_tokens == (1, 0, 0)
    assert exchanges[0]._window.fault[ABORT] == 0
    for mesh in meshes:
        mesh.close()


def test_devices_finding_is_read_while_a_plan_is_awaited(
    pair: tuple[list[NvlinkExchange], list[Mesh]],
) -> None:
    """The finding is about a host that hangs, for which the others would wait longer."""
    exchanges, meshes = pair
    meshes[0]._stall = meshes[0]._patience = 10 * DEADLINE
    exchanges[0].steps.begin(7)
    write_fault(exchanges[0], DISPATCH, 2, 0b10, 3, SILENT)
    with pytest.raises(ExchangeError, match=rf"rank 1 silent \({DEADLINE:.1f} s\) at step 7, layer 2, dispatch"):
        Lockstep(meshes[0]).agree(8, 1)


def test_devices_wait_ends_while_a_plan_is_awaited(pair: tuple[list[NvlinkExchange], list[Mesh]]) -> None:
    exchanges, meshes = pair
    meshes[0]._stall = meshes[0]._patience = 10 * DEADLINE
    meshes[0].deadline = 0.4
    exchanges[0].steps.begin(7)
    device = WaitingDevice(exchanges[0])
    with ThreadPoolExecutor(1) as pool:
        runs = pool.submit(lambda: [None for _ in iter(device.has_run, True)])
        with pytest.raises(ExchangeError, match=r"rank 1 silent \(0\.4 s\) at step 7, layer 2, dispatch"):
            Lockstep(meshes[0]).agree(8, 1)
        runs.result(timeout=HANG_SECONDS)
    assert time.monotonic() - device._begun > 0.4


def test_devices_wait_ends_while_the_host_drains(
    pair: tuple[list[NvlinkExchange], list[Mesh]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that has run does not wait: a later one's failure is not its own."""
    exchanges, meshes = pair
    meshes[0].deadline = 0.4
    exchanges[0].steps.begin(7)
    device = WaitingDevice(exchanges[0])
    monkeypatch.setattr(exchanges[0]._memory, "mark", lambda: device.has_run)
    with pytest.raises(ExchangeError, match=r"rank 1 silent \(0\.4 s\) at step 7, layer 2, dispatch"):
        exchanges[0].steps.drain()
    assert time.monotonic() - device._begun > 0.4
    exchanges[0].steps.drain(lambda: True)


def test_wait_ends_when_the_mesh_loses_a_peer(pair: tuple[list[NvlinkExchange], list[Mesh]]) -> None:
    exchanges, meshes = pair
    exchanges[0].steps.begin(7)
    meshes[1].close()
    fault = exchanges[0]._window.fault
    with pytest.raises(ExchangeError, match=r"rank 1 .* after step 7"):
        exchanges[0].steps.finish(7, lambda: bool(fault[ABORT]))
    assert fault[ABORT] == 1


def test_end_of_the_epoch_ends_the_wait(pair: tuple[list[NvlinkExchange], list[Mesh]]) -> None:
    exchanges, _ = pair
    assert exchanges[0]._window.fault.tolist() == [0] * NUM_FAULT
    exchanges[0].steps.abort()
    assert exchanges[0]._window.fault[ABORT] == 1


def test_torch_rendezvous_uses_the_mesh() -> None:
    meshes = open_meshes(3, SMALL, deadline=2.0)

    def meet(rank: int) -> list[bytes]:
        # Called through C++ like torch's rendezvous, which numbers rounds by its process' history.
        own = MeshStore(meshes[rank])
        store, found = dist.PrefixStore("", own), []
        for turn in range(2):
            prefix = f"CUDASymmetricMemory/{rank * 10 + turn}"
            store.set(f"{prefix}/{rank}", f"{turn} of {rank}")
            for peer in range(3):
                if peer != rank:
                    store.wait([f"{prefix}/{peer}"])
                    found.append(store.get(f"{prefix}/{peer}"))
        return found

    assert together([lambda rank=rank: meet(rank) for rank in range(3)]) == [
        [f"{turn} of {peer}".encode() for turn in range(2) for peer in range(3) if peer != rank] for rank in range(3)
    ]
    # A peer that leaves is named through all these layers.
    meshes[2].close()
    own = MeshStore(meshes[0])
    store = dist.PrefixStore("", own)
    with pytest.raises(ExchangeError, match="rank 2 "):
        store.set("CUDASymmetricMemory/2/0", "unanswered")
    for mesh in meshes[:2]:
        mesh.close()


def test_ranks_whose_experts_have_other_bytes_share_no_fetch() -> None:
    """A rank that begins after files have changed may keep other scales than its peers."""
    meshes = open_meshes(2, SMALL)
    memory = LentMemory(pid=1, fd=2, inode=3, num_bytes=4)
    peer = SimpleNamespace(state=torch.empty(0))

    def meet(rank: int) -> None:
        shape = FetchShape(world_size=2, up_bytes=512 + 256 * rank, down_bytes=256)
        offer = FetchOffer(shape=shape, memory=memory, misses=True, required=True)
        with pytest.raises(ExchangeError, match="shared cannot be: rank 1: experts take other bytes there"):
            PeerFetch(None, offer, peer).meet(meshes[rank])  # type: ignore[arg-type]

    together([lambda rank=rank: meet(rank) for rank in range(2)])
    for mesh in meshes:
        mesh.close()


def test_meeting_ends_when_its_rank_stops() -> None:
    """It ends long before the peers' limit, and they learn the reason."""
    meshes = open_meshes(2, SMALL, deadline=2.0)
    meshes[0]._stall = 10 * DEADLINE
    named = "^rank 0 was stopped at step 0, meeting$"

    def waits(rank: int) -> None:
        with pytest.raises(ExchangeError, match=named):
            meshes[rank].gather(b"here")

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(waits, 0)
        assert meshes[1]._open_wires()._sockets[0].poll(1000 * HANG_SECONDS), "rank 0 has not sent its message"
        assert not waiting.done()
        meshes[0].leaving = True
        # It notifies its peer, which does not listen yet, and does not wait for it for long.
        waiting.result(timeout=HANG_SECONDS)
    assert meshes[1].gather(b"there") == [b"here", b"there"]
    waits(1)
    assert [mesh.finding.ranks for mesh in meshes if mesh.finding] == [(0,), (0,)]
    for mesh in meshes:
        mesh.close()


def test_ids_of_another_layer_map_to_no_expert() -> None:
    """After a failed exchange, ids of another layer with more experts may be looked up in this layer's table."""
    slots = backend().expert_slots(num_slots=5, form=plain_expert(hidden=16, intermediate=16, dtype="bfloat16"))
    table = slots.slot_table([3, 1])
    assert table.tolist() == [3, 1]
    behind = torch.empty(0, dtype=torch.int32).set_(table.untyped_storage())
    assert behind.tolist() == [3, 1, -1, -1, -1]
    # A layer without experts on this rank.
    assert slots.slot_table([]).tolist() == [-1]
