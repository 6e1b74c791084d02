"""The exchange over memory that all ranks map: ranks in threads of this process, on CPU tensors over the oracles.

`tests/gpu/test_one_answer_ranks.py` tests the GPU's part: launches that wait, graphs, torch's mapping.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
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
from moeyard_kernels.types.peer_shape import KEPT_TIMES, NUM_COUNTS, NUM_TIMES, RECEIVED, SENT, TIMES
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
from moeyard_worker.exchange.transports.nvlink.memory import MeshStore
from moeyard_worker.exchange.transports.nvlink.steps import PeerCounts

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="ranks of one process share memory of the host; tests/e2e has GPUs that do"
)
DEADLINE = 30.0
# As it is, whatever a test puts in its place.
FETCH_EXPERTS = ops.fetch_experts.reference
SMALL = ExchangeShape(num_experts=6, top_k=2, hidden=8, dtype="bfloat16", max_tokens=8)


class Turns:
    """`ops` of ranks in threads: all send, then all wait, as on a CPU nothing arrives while one does."""

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
        """Ranks that share tell, read and move in turn, and count how often."""
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
    """The ranks' memory, which all of this process reach."""

    def __init__(self, rank: int, of_all: Sequence[torch.Tensor]) -> None:
        self.own, self._of_all = of_all[rank], of_all

    def drain(self) -> None:
        """Nothing runs behind a call's back."""

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
    """Two ranks of four layers that have met."""
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
def test_ranks_give_what_one_gives(checkpoint: Path, world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what runs before the ranks have met: it takes no part, and leaves nothing behind."""
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
            # Room for more rows than anybody has changes nothing, and ranks need not have as much.
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


def test_every_layer_has_owners_of_its_own_and_a_new_epoch_others(
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
    # What was captured keeps its tensors. Rank 1 has expert 1 as its first, and 5 as its second.
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


def test_prompt_rows_are_marked_by_what_was_agreed_on(pair: tuple[list[NvlinkExchange], list[Mesh]]) -> None:
    exchanges, _ = pair
    exchanges[0].steps.set_rows(PeerRows(3, (0, 2)))
    marked = exchanges[0]._prompt
    assert marked is not None
    assert marked.view(3, 2).tolist() == [[False, True], [False, True], [False, False]]
    exchanges[0].steps.set_rows(PeerRows(3, (0, 0)))
    assert exchanges[0]._prompt is None
    with pytest.raises(AssertionError, match="most=9"):
        exchanges[0].steps.set_rows(PeerRows(9))


def test_bytes_and_times_are_told_as_they_were_counted(pair: tuple[list[NvlinkExchange], list[Mesh]]) -> None:
    """Of the device's counts, those of an epoch before among them; not of more often than a few times a second."""
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
    assert stats[0].bytes_sent == there, "so soon it is not looked at again"
    exchanges[0]._window.reset()
    exchanges[0].steps.counts.look(wait=True)
    assert (stats[0].bytes_sent, stats[0].bytes_received) == (2 * there, 2 * back)


def test_of_the_times_that_a_device_keeps_each_is_told_once() -> None:
    live, stats = torch.zeros(NUM_COUNTS, dtype=torch.int64), ExchangeStats()
    counts = PeerCounts(live, stats)
    live[SENT], live[RECEIVED] = 7, 9

    def take(phase: int, *nanoseconds: int) -> None:
        """As `peer_words.note_time` does."""
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
    """As the device does (`peer_window`)."""
    exchange._window.fault[: 1 + len(record)] = torch.tensor([1, *record])


@pytest.mark.parametrize(("phase", "word"), [(DISPATCH, "dispatch"), (FETCH, "fetch"), (COMBINE, "combine")])
def test_what_the_device_wrote_down_is_what_all_ranks_name(
    pair: tuple[list[NvlinkExchange], list[Mesh]], phase: int, word: str
) -> None:
    """In the step that it belongs to: with two in flight the one before is whole."""
    exchanges, meshes = pair
    for exchange, mesh in zip(exchanges, meshes, strict=True):
        for step in (812, 813):
            exchange.steps.begin(step)
        mesh.step = 813
    write_fault(exchanges[0], phase, 2, 0b10, 4 + 3, SILENT)
    exchanges[0].steps.finish(812, lambda: True)
    named = f"rank 1 silent \\({DEADLINE:.1f} s\\) at step 813, layer 2, {word}"
    # The other waits for its own device and hears of it.

    def fails(rank: int, has_run: Callable[[], bool]) -> None:
        with pytest.raises(ExchangeError, match=named):
            exchanges[rank].steps.finish(813, has_run)

    together([lambda: fails(0, lambda: True), lambda: fails(1, lambda: bool(exchanges[1]._window.fault[ABORT]))])
    assert [mesh.finding.ranks for mesh in meshes if mesh.finding] == [(1,), (1,)]


def test_with_drafts_a_failure_is_this_steps_at_the_latest(pair: tuple[list[NvlinkExchange], list[Mesh]]) -> None:
    """Its number does not tell the step, and what is computed behind it must not be told."""
    exchanges, _ = pair
    exchanges[0].steps._drafts = True
    for step in range(1, 101):
        exchanges[0].steps.begin(step)
    write_fault(exchanges[0], DISPATCH, 2, 0b10, 598, SILENT)
    with pytest.raises(ExchangeError, match=r"rank 1 silent .* at step 100, layer 2, dispatch"):
        exchanges[0].steps.finish(100, lambda: True)


def test_a_record_half_written_is_read_a_step_later(pair: tuple[list[NvlinkExchange], list[Mesh]]) -> None:
    exchanges, _ = pair
    exchanges[0].steps.begin(812)
    write_fault(exchanges[0])
    exchanges[0].steps.finish(812, lambda: True)
    exchanges[0].steps.begin(813)
    write_fault(exchanges[0], DISPATCH, 2, 0b10, 5, SILENT)
    with pytest.raises(ExchangeError, match=r"rank 1 silent .* at step 813, layer 2, dispatch"):
        exchanges[0].steps.finish(813, lambda: True)


class Waiting:
    """A device that waits for rank 1 in the third exchange, until the host ends that, for `most` seconds at most."""

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


def test_a_wait_ends_after_a_deadline_where_the_device_would_go_on(
    pair: tuple[list[NvlinkExchange], list[Mesh]],
) -> None:
    """As what is launched may have to be compiled on a peer, its own limit is longer."""
    exchanges, meshes = pair
    meshes[0].deadline = 0.4
    exchanges[0].steps.begin(7)
    device = Waiting(exchanges[0])
    with pytest.raises(ExchangeError, match=r"rank 1 silent \(0\.4 s\) at step 7, layer 2, dispatch"):
        exchanges[0].steps.finish(7, device.has_run)
    assert time.monotonic() - device._begun > 0.4


def test_whoever_compiles_is_waited_for(pair: tuple[list[NvlinkExchange], list[Mesh]]) -> None:
    exchanges, meshes = pair
    meshes[0].deadline = 1.0
    exchanges[0].steps.begin(7)
    meshes[1].send_sign(Phase.BUSY)
    exchanges[0].steps.finish(7, Waiting(exchanges[0], most=1.8).has_run)
    assert exchanges[0]._window.fault[ABORT] == 0


def test_whoever_compiled_a_moment_ago_is_too(pair: tuple[list[NvlinkExchange], list[Mesh]]) -> None:
    """Its next plan ends what it said, and its device may not be where others wait for it."""
    exchanges, meshes = pair
    meshes[0].deadline = 1.0
    exchanges[0].steps.begin(7)
    meshes[1].send_sign(Phase.BUSY)
    device, spent = Waiting(exchanges[0], most=1.8), exchanges[0]._window.fault[SPENT]
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(exchanges[0].steps.finish, 7, device.has_run)
        while spent < 1.2e9 and not waits.done():
            time.sleep(0.001)
        # Any other frame ends it.
        meshes[1].send(0, b"a plan")
        waits.result(timeout=HANG_SECONDS)
    assert exchanges[0]._window.fault[ABORT] == 0


def test_a_wait_that_ends_as_the_host_would_end_it_leaves_the_next_one_its_time(
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
        exchanges[0].steps.finish(8, Waiting(exchanges[0]).has_run)


def test_while_one_plan_is_waited_for_all_are_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1's is waited for first, and rank 2 compiles; this rank was elsewhere for long."""
    placement, deadline = Placement.of_shards(range(4), partition(6, 3)), 0.4
    monkeypatch.setattr(nvlink, "ops", Turns(3))
    exchanges, meshes = open_exchanges(3, SMALL, placement), open_meshes(3, SMALL, deadline=2.0)
    attach(exchanges, meshes, placement)
    meshes[0].deadline, exchanges[0].steps._looking = deadline, 0.001
    exchanges[0].steps._looked = time.monotonic()
    exchanges[0]._window.fault[SPENT] = int(2e9)
    meshes[2].send_sign(Phase.BUSY)
    # It has come, and is not read yet.
    assert meshes[0]._open_wires()._sockets[2].poll(1000 * HANG_SECONDS)

    def agree_late(mesh: Mesh) -> None:
        """Rank 0 has looked at what was said by then."""
        while not (exchanges[0].steps._slow or exchanges[0]._window.fault[ABORT]):
            time.sleep(0.001)
        Lockstep(mesh).agree(1, 0)

    agreed = together([lambda: Lockstep(meshes[0]).agree(1, 1), *(lambda m=m: agree_late(m) for m in meshes[1:])])
    assert agreed[0].num_tokens == (1, 0, 0)
    assert exchanges[0]._window.fault[ABORT] == 0
    for mesh in meshes:
        mesh.close()


def test_what_the_device_has_found_is_heard_while_a_plan_is_waited_for(
    pair: tuple[list[NvlinkExchange], list[Mesh]],
) -> None:
    """That of a host that hangs, for which others would wait for longer."""
    exchanges, meshes = pair
    meshes[0]._stall = meshes[0]._patience = 10 * DEADLINE
    exchanges[0].steps.begin(7)
    write_fault(exchanges[0], DISPATCH, 2, 0b10, 3, SILENT)
    with pytest.raises(ExchangeError, match=rf"rank 1 silent \({DEADLINE:.1f} s\) at step 7, layer 2, dispatch"):
        Lockstep(meshes[0]).agree(8, 1)


def test_and_its_wait_ends_after_a_deadline(pair: tuple[list[NvlinkExchange], list[Mesh]]) -> None:
    exchanges, meshes = pair
    meshes[0]._stall = meshes[0]._patience = 10 * DEADLINE
    meshes[0].deadline = 0.4
    exchanges[0].steps.begin(7)
    device = Waiting(exchanges[0])
    with ThreadPoolExecutor(1) as pool:
        runs = pool.submit(lambda: [None for _ in iter(device.has_run, True)])
        with pytest.raises(ExchangeError, match=r"rank 1 silent \(0\.4 s\) at step 7, layer 2, dispatch"):
            Lockstep(meshes[0]).agree(8, 1)
        runs.result(timeout=HANG_SECONDS)
    assert time.monotonic() - device._begun > 0.4


def test_so_it_does_where_the_host_waits_in_the_midst_of_a_step(
    pair: tuple[list[NvlinkExchange], list[Mesh]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for what has run, as results of a step that is completed: a later one's failure is not theirs."""
    exchanges, meshes = pair
    meshes[0].deadline = 0.4
    exchanges[0].steps.begin(7)
    device = Waiting(exchanges[0])
    monkeypatch.setattr(exchanges[0]._memory, "mark", lambda: device.has_run)
    with pytest.raises(ExchangeError, match=r"rank 1 silent \(0\.4 s\) at step 7, layer 2, dispatch"):
        exchanges[0].steps.drain()
    assert time.monotonic() - device._begun > 0.4
    exchanges[0].steps.drain(lambda: True)


def test_a_wait_ends_when_the_mesh_loses_a_peer(pair: tuple[list[NvlinkExchange], list[Mesh]]) -> None:
    exchanges, meshes = pair
    exchanges[0].steps.begin(7)
    meshes[1].close()
    fault = exchanges[0]._window.fault
    with pytest.raises(ExchangeError, match=r"rank 1 .* after step 7"):
        exchanges[0].steps.finish(7, lambda: bool(fault[ABORT]))
    assert fault[ABORT] == 1


def test_an_epoch_that_ends_ends_the_wait_too(pair: tuple[list[NvlinkExchange], list[Mesh]]) -> None:
    exchanges, _ = pair
    assert exchanges[0]._window.fault.tolist() == [0] * NUM_FAULT
    exchanges[0].steps.abort()
    assert exchanges[0]._window.fault[ABORT] == 1


def test_torch_finds_ranks_by_the_mesh_whatever_a_process_has_met_before() -> None:
    meshes = open_meshes(3, SMALL, deadline=2.0)

    def meet(rank: int) -> list[bytes]:
        # Through C++, as torch's rendezvous does: it numbers rounds by what its process has seen.
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
    # A peer that leaves meanwhile is named through it all.
    meshes[2].close()
    own = MeshStore(meshes[0])
    store = dist.PrefixStore("", own)
    with pytest.raises(ExchangeError, match="rank 2 "):
        store.set("CUDASymmetricMemory/2/0", "nobody answers")
    for mesh in meshes[:2]:
        mesh.close()


def test_a_meeting_ends_when_its_rank_is_stopped() -> None:
    """Long before its peers would be given up, and they hear why."""
    meshes = open_meshes(2, SMALL, deadline=2.0)
    meshes[0]._stall = 10 * DEADLINE
    named = "^rank 0 was stopped at step 0, meeting$"

    def waits(rank: int) -> None:
        with pytest.raises(ExchangeError, match=named):
            meshes[rank].gather(b"here")

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(waits, 0)
        assert meshes[1]._open_wires()._sockets[0].poll(1000 * HANG_SECONDS), "its word has not come"
        assert not waiting.done()
        meshes[0].leaving = True
        # It tells its peer, which does not listen yet, and does not wait for it for long.
        waiting.result(timeout=HANG_SECONDS)
    assert meshes[1].gather(b"there") == [b"here", b"there"]
    waits(1)
    assert [mesh.finding.ranks for mesh in meshes if mesh.finding] == [(0,), (0,)]
    for mesh in meshes:
        mesh.close()


def test_ids_of_another_layer_lead_to_no_expert() -> None:
    """Behind an exchange that failed they may lie where this layer's are looked up, and it may have fewer experts."""
    slots = backend().expert_slots(num_slots=5, form=plain_expert(hidden=16, intermediate=16, dtype="bfloat16"))
    table = slots.slot_table([3, 1])
    assert table.tolist() == [3, 1]
    behind = torch.empty(0, dtype=torch.int32).set_(table.untyped_storage())
    assert behind.tolist() == [3, 1, -1, -1, -1]
    # Of a layer of which a rank has none.
    assert slots.slot_table([]).tolist() == [-1]
