"""Whole ranks in lockstep with graphs, over the nvlink exchange without a GPU, and over the nccl exchange with gloo.

Ranks are threads of this process, and their backend runs over the references. A "captured" step runs again with the
host's values at the capture. Launches meet at a barrier (`test_nvlink_exchange.Turns`).
"""

import re
import secrets
import threading
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tests.checkpoints import make_checkpoint
from tests.e2e.test_one_answer import SNAPSHOTS, bits, dealt, dealt_evenly, requests
from tests.engine.captured_on_cpu import rehearsed
from tests.exchange.test_nvlink_exchange import DEADLINE, Memory, Turns, together
from tests.fleet import Client
from tests.limits import HANG_SECONDS

from moeyard_kernels import ops as kernel_ops
from moeyard_kernels.cuda.backend import CudaBackend
from moeyard_worker.config.engine_config import DTYPE_BYTES, EngineConfig
from moeyard_worker.config.placement import Placement
from moeyard_worker.config.worker_spec import WorkerSpec
from moeyard_worker.engine.assembly import topology
from moeyard_worker.engine.assembly import worker as worker_module
from moeyard_worker.engine.assembly.device import CudaDevice
from moeyard_worker.engine.assembly.worker import Worker
from moeyard_worker.engine.steps import gpu_runner
from moeyard_worker.engine.steps.gpu_runner import GpuRunner
from moeyard_worker.exchange import factory
from moeyard_worker.exchange.transports.nccl.group import TorchGroup
from moeyard_worker.exchange.transports.nvlink import exchange as nvlink
from moeyard_worker.exchange.transports.nvlink import steps as nvlink_steps
from moeyard_worker.experts import cache
from moeyard_worker.models.families import load_model_config

NUM_PAGES, PAGE_SIZE = 64, 64


class Event:
    """An event of a device where all work is done when a call returns."""

    def __init__(self, enable_timing: bool = False) -> None:
        pass

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: "Event") -> float:
        return 0.0


class _InGraph(threading.local):
    """Whether this rank's thread is replaying a graph."""

    replays = False


in_graph = _InGraph()


class Recorded:
    """A stand-in for a graph: it runs the captured function again with the host's values at the capture."""

    def __init__(self, run: "partial[Any]", *, runs: bool = True) -> None:
        self._run, self._exchange = run, getattr(run.func.__self__, "_exchange", None)  # type: ignore[attr-defined]
        # A capture between steps does not run and must leave no trace.
        self.result = run() if runs else None
        self._values = self._now()

    def _now(self) -> tuple[Any, ...]:
        exchange = self._exchange
        return () if not hasattr(exchange, "_max_rows") else (exchange.steps.rows, exchange._max_rows, exchange._prompt)

    def replay(self) -> None:
        if self._values:
            exchange = self._exchange
            assert exchange is not None
            exchange.steps.rows, exchange._max_rows, exchange._prompt = self._values
        in_graph.replays = True
        again = self._run()
        in_graph.replays = False
        if isinstance(again, torch.Tensor):
            self.result.copy_(again)
            return
        for name in () if again is None else [field.name for field in fields(again)]:
            if (kept := getattr(self.result, name)) is not None:
                kept.copy_(getattr(again, name))

    def reset(self) -> None:
        self._run = partial(pytest.fail, "replayed when it was let go")


class RecordedGroup(TorchGroup):
    """A gloo group that claims to support graphs."""

    def __init__(self, device: torch.device, *, captures: bool) -> None:
        super().__init__(device, captures=True)

    def in_graph(self) -> bool:
        return in_graph.replays


def captured(run: "partial[Any]", pool: Any, *, ahead: bool = True) -> tuple[Recorded, Any]:
    """See `CudaBackend.capture`."""
    found = Recorded(run)
    return found, found.result


class Gpu(CudaDevice):
    """A GPU that is the CPU."""

    def __init__(self, config: EngineConfig, gpu: int) -> None:
        self.backend = CudaBackend(page_size=config.page_size, device=torch.device("cpu"))

    @property
    def name(self) -> str:
        return "no GPU"

    def available(self) -> int:
        return 4 << 30

    def unreachable(self, gpus: Sequence[int]) -> str | None:
        return None

    def activate(self) -> None:
        pass

    def staging(self) -> Any:
        return None

    def finish(self) -> None:
        pass


class ProcessMemory:
    """The shared memory of ranks in one process."""

    def __init__(self) -> None:
        self.memory: dict[str, dict[int, torch.Tensor]] = {}
        self.next_rank = 0

    def make_memory(self, num_bytes: int, device: torch.device, name: str = "moeyard") -> Memory:
        """Return the memory of the rank that is loading."""
        of_name = self.memory.setdefault(name, {})
        of_name[self.next_rank] = torch.zeros(num_bytes, dtype=torch.uint8)
        return Memory(self.next_rank, cast(Sequence[torch.Tensor], of_name))


@pytest.fixture
def gpu_memory(monkeypatch: pytest.MonkeyPatch) -> ProcessMemory:
    found = ProcessMemory()
    monkeypatch.setattr(factory, "GpuMemory", found.make_memory)
    monkeypatch.setattr(worker_module, "make_device", Gpu)
    monkeypatch.setattr(topology, "missing_nccl", lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(CudaBackend, "capture", staticmethod(captured))
    monkeypatch.setattr(CudaBackend, "capture_while_serving", lambda _, run, pool: Recorded(run, runs=False))
    monkeypatch.setattr(gpu_runner, "_to_host", torch.clone)
    monkeypatch.setattr(nvlink_steps, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(cache, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(CudaBackend, "compile_ahead", rehearsed)
    return found


@pytest.fixture(scope="module", params=["gqa", "mla"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family = {"gqa": "qwen3_moe", "mla": "deepseek_v3"}[request.param]
    return make_checkpoint(tmp_path_factory.mktemp(request.param), family, dtype=torch.bfloat16)


def config(model: Path, *, ranks: int, exchange: str, deep: int = 2, eager: bool = False) -> EngineConfig:
    read = load_model_config(model)
    state = read.state_spec(DTYPE_BYTES[read.dtype])
    snapshots = SNAPSHOTS["ample"] * state.bytes_per_sequence
    return EngineConfig(
        model_path=str(model),
        device="cuda",
        num_workers=ranks,
        exchange=cast(Any, exchange),
        kv_memory=NUM_PAGES * PAGE_SIZE * state.bytes_per_token + snapshots,
        snapshot_memory=snapshots or None,
        page_size=PAGE_SIZE,
        prefill_chunk=max(16, state.chunk_alignment),
        max_batch_tokens=64,
        max_num_seqs=4,
        max_model_len=256,
        enforce_eager=eager,
        async_scheduling=deep == 2,
        step_deadline=DEADLINE / 3,
    )


class Fleet:
    """Ranks and a client of all of them."""

    def __init__(
        self,
        gpu_memory: ProcessMemory,
        config: EngineConfig,
        monkeypatch: pytest.MonkeyPatch,
        placement: Placement | None,
    ) -> None:
        self.gpu_memory, self.config, self.placement = gpu_memory, config, placement
        self.turns = Turns(config.num_workers)
        monkeypatch.setattr(nvlink, "ops", self.turns)
        monkeypatch.setattr(kernel_ops, "fetch_experts", self.turns.fetch_experts)
        epoch = secrets.randbits(31)
        self.workers = [self.make(rank, epoch) for rank in range(config.num_workers)]
        self.meet()
        for rank in range(config.num_workers):
            self.load(rank)
        for worker in self.workers:
            worker.start()
        self.client = Client([worker.endpoints()["frontend"] for worker in self.workers])

    def make(self, rank: int, epoch: int) -> Worker:
        gpus = tuple(range(self.config.num_workers))
        spec = WorkerSpec(
            config=self.config,
            rank=rank,
            epoch=epoch,
            host="127.0.0.1",
            version="",
            peer_gpus=gpus,
            placement=self.placement,
        )
        return Worker(spec)

    def meet(self) -> None:
        mesh = [worker.endpoints()["mesh"] for worker in self.workers]
        together([lambda worker=worker: worker.connect(mesh) for worker in self.workers])

    def load(self, rank: int) -> None:
        self.gpu_memory.next_rank = rank
        self.workers[rank].load(1)

    def replace(self, rank: int) -> list[dict[str, Any]]:
        """Replace a lost rank as the launcher does. Return the losses that the others report."""
        self.workers[rank].stop()
        others = [worker for other, worker in enumerate(self.workers) if other != rank]
        losses = [cast(dict[str, Any], worker.wait()) for worker in others]
        epoch = secrets.randbits(31)
        for worker in others:
            worker.rebind(epoch)
        self.workers[rank] = self.make(rank, epoch)
        self.meet()
        self.load(rank)
        step = max(loss["steps"] for loss in losses)
        self.workers[rank].start(step)
        for worker in others:
            worker.rejoin(step)
        self.client.reconnect(rank, self.workers[rank].endpoints()["frontend"])
        return losses

    def answers(self, label: str, ranks: dict[str, int]) -> dict[str, tuple[Any, ...]]:
        """Run all requests at once, each on its rank."""
        for name, rank in ranks.items():
            prompt, sampling = requests()[name]
            self.client.submit(rank, f"{label}-{name}", prompt[:70], **{**sampling, "max_tokens": 5})
        return {name: bits(self.client.wait(f"{label}-{name}")[0]) for name in ranks}

    def runner(self, rank: int) -> GpuRunner:
        found = self.workers[rank].runner
        assert isinstance(found, GpuRunner)
        return found

    def close(self) -> None:
        self.client.close()
        for worker in self.workers:
            worker.stop()


Starter = Callable[..., Fleet]


@pytest.fixture
def start(gpu_memory: ProcessMemory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Starter]:
    fleets: list[Fleet] = []

    def one(config: EngineConfig, placement: Placement | None = None) -> Fleet:
        fleets.append(Fleet(gpu_memory, config, monkeypatch, placement))
        return fleets[-1]

    yield one
    for fleet in fleets:
        fleet.close()


@pytest.mark.slow
def test_one_answer_for_any_spread_of_requests(model: Path, start: Starter) -> None:
    """Requests run alone beside idle ranks and spread, over several fleet sizes, depths, in graphs and eager."""
    names = list(requests())
    alone = start(config(model, ranks=1, exchange="auto"))
    expected = {name: alone.answers("reference", {name: 0})[name] for name in names}
    alone.close()
    cases = [(8, 2, False), (3, 2, False), (2, 2, False), (1, 2, False), (2, 1, True)]
    for ranks, deep, eager in cases if model.name.startswith("gqa") else cases[2:3]:
        fleet = start(config(model, ranks=ranks, exchange="nvlink", deep=deep, eager=eager))
        last = ranks - 1
        assert fleet.answers("alone", {"c": last})["c"] == expected["c"]
        assert fleet.answers("mixed", {name: i % ranks for i, name in enumerate(names)}) == expected
        assert fleet.answers("again", dict.fromkeys(names, last)) == expected
        if not eager:
            # Steps with scored prompts run eager, on any rank. Their peers replay graphs.
            runners = [fleet.runner(rank) for rank in range(ranks)]
            assert all(runner.num_replayed >= 10 for runner in runners), [r.num_replayed for r in runners]
            if ranks == 3:
                assert runners[0].num_eager == 0
        fleet.close()


@pytest.mark.slow
@pytest.mark.parametrize(("family", "options"), [("qwen3_next", {"head_dim": 32}), ("kimi_linear", {})])
def test_one_answer_of_linear_attention(family: str, options: dict[str, Any], tmp_path: Path, start: Starter) -> None:
    """Each rank keeps the state of its own sequences. Requests are spread evenly, then all but one are on the last
    rank, then all are there with prefix hits. Experts have a random placement."""
    model = make_checkpoint(tmp_path, family, dtype=torch.bfloat16, **options)
    names = list(requests())
    alone = start(config(model, ranks=1, exchange="auto"))
    expected = {name: alone.answers("reference", {name: 0})[name] for name in names}
    alone.close()
    fleet = start(config(model, ranks=2, exchange="nvlink"), dealt(load_model_config(model), 2, family))
    assert fleet.answers("mixed", {name: i % 2 for i, name in enumerate(names)}) == expected
    assert fleet.answers("uneven", {name: int(i > 0) for i, name in enumerate(names)}) == expected
    assert fleet.answers("again", dict.fromkeys(names, 1)) == expected
    assert fleet.workers[1].scheduler.stats.prefix_hit_tokens > 0
    assert all(fleet.runner(rank).num_replayed >= 10 for rank in range(2))


@pytest.mark.sampled(0)
@pytest.mark.parametrize("copied", [False, True], ids=["shuffled", "copied"])
@pytest.mark.parametrize(
    ("how", "ranks"), [("in graphs", 3), ("shared", 2), ("through groups", 2), ("through groups", 3)]
)
def test_one_answer_for_any_placement(
    how: str,
    ranks: int,
    copied: bool,
    model: Path,
    start: Starter,
    alone: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Cases: in graphs, with shared reads of experts in slots, and through process groups, eager and captured.
    Shuffled: one rank has all experts of the first layer."""
    read, names = load_model_config(model), list(requests())
    shared = how == "shared"
    placed = (dealt_evenly if shared else partial(dealt, alone=not copied))(read, ranks, how, copied=copied)
    exchange = "nccl" if how == "through groups" else "nvlink"
    monkeypatch.setattr(factory, "TorchGroup", RecordedGroup if ranks == 3 else TorchGroup)
    assert bool(placed.copies) == copied
    assert len(set(placed.owners)) > 1
    fleet = start(few_slots(model, how, ranks) if shared else config(model, ranks=ranks, exchange=exchange), placed)
    assert fleet.answers("alone", {"c": ranks - 1})["c"] == alone["c"]
    assert fleet.answers("mixed", {name: i % ranks for i, name in enumerate(names)}) == alone
    assert (fleet.turns.num_fetches > 0) == shared


@pytest.mark.sampled(0)
def test_graphs_work_with_a_new_peer(gqa: Path, start: Starter) -> None:
    fleet = start(config(gqa, ranks=2, exchange="nvlink"))
    names = list(requests())
    spread = {name: i % 2 for i, name in enumerate(names)}
    expected = fleet.answers("before", spread)
    graphs = dict(fleet.runner(0)._graphs.captured)
    (loss,) = fleet.replace(1)
    assert loss["ranks"] == (1,)
    assert fleet.answers("behind", spread) == expected
    assert fleet.runner(0)._graphs.captured == graphs != {}


@pytest.mark.sampled(0)
def test_metrics_have_the_bytes_between_ranks(gqa: Path, start: Starter) -> None:
    """The bytes come from the window's counters. A reference has no clock, so there are no times."""
    fleet = start(config(gqa, ranks=2, exchange="nvlink"))
    fleet.answers("first", {name: i % 2 for i, name in enumerate(requests())})
    # A rank reads its counters after a step.
    fleet.answers("then", {"c": 0})
    for worker in fleet.workers:
        with urllib.request.urlopen(worker.endpoints()["metrics_url"], timeout=HANG_SECONDS) as response:
            page = response.read().decode()
        found = dict(re.findall(r'^moeyard_exchange_bytes_total\{direction="(\w+)",.*\} (\S+)$', page, re.M))
        assert sorted(found) == ["received", "sent"]
        assert all(float(count) > 10_000 for count in found.values()), found


@pytest.mark.sampled(0)
def test_worker_stops_while_it_waits_for_peers(gqa: Path, start: Starter) -> None:
    """It has rejoined a fleet whose other rank still loads, and would wait for twelve deadlines."""
    fleet = start(config(gqa, ranks=2, exchange="nvlink"))
    fleet.workers[1].stop()
    loss = cast(dict[str, Any], fleet.workers[0].wait())
    epoch = secrets.randbits(31)
    fleet.workers[0].rebind(epoch)
    fleet.workers[1] = fleet.make(1, epoch)
    fleet.meet()
    fleet.workers[0].rejoin(loss["steps"])
    mesh = fleet.workers[0]._mesh
    assert mesh.failure is None
    # Its message to the other rank has arrived, so it waits.
    assert fleet.workers[1]._mesh._open_wires()._sockets[0].poll(1000 * HANG_SECONDS)
    fleet.workers[0].stop()
    assert mesh.failure == "rank 0 was stopped at step 0, meeting"


def few_slots(model: Path, fetch: str, ranks: int = 2) -> EngineConfig:
    """Return a config with slots for half of a rank's experts, or for 3 experts with three ranks."""
    read = load_model_config(model)
    few = read.num_experts * len(read.moe_layers) // 4 if ranks == 2 else 3
    return replace(config(model, ranks=ranks, exchange="nvlink"), expert_slots=few, expert_fetch=cast(Any, fetch))


@pytest.fixture
def gqa(model: Path) -> Path:
    """The model, for tests that do not depend on its attention."""
    if not model.name.startswith("gqa"):
        pytest.skip("the same for every attention")
    return model


@pytest.fixture
def alone(gqa: Path, start: Starter) -> dict[str, tuple[Any, ...]]:
    """The answers of one rank to each request alone."""
    fleet = start(config(gqa, ranks=1, exchange="auto"))
    expected = {name: fleet.answers("reference", {name: 0})[name] for name in requests()}
    fleet.close()
    return expected


def bytes_of(fleet: Fleet, direction: str) -> list[float]:
    """Return the bytes on each rank's metrics page."""
    fleet.answers(f"counted {direction}", {"c": 0})
    found = []
    for worker in fleet.workers:
        with urllib.request.urlopen(worker.endpoints()["metrics_url"], timeout=HANG_SECONDS) as response:
            page = response.read().decode()
        pattern = rf'^moeyard_expert_cache_bytes_total\{{direction="{direction}",.*\}} (\S+)$'
        found.append(sum(float(count) for count in re.findall(pattern, page, re.M)))
    return found


@pytest.mark.sampled(0)
@pytest.mark.parametrize(("fetch", "ranks"), [("auto", 2), ("alone", 2), ("shared", 3)])
def test_steps_with_prompts_run_eager_under_partial_residency(
    fetch: str, ranks: int, model: Path, alone: dict[str, Any], start: Starter
) -> None:
    """Rows of prompts, also those from a peer, ask the host about experts, so these steps run eager. In all other
    steps, replayed and eager, ranks may read each other's misses."""
    fleet = start(few_slots(model, fetch, ranks))
    assert fleet.answers("mixed", {name: i % ranks for i, name in enumerate(requests())}) == alone
    runners = [fleet.runner(rank) for rank in range(ranks)]
    assert all(runner.num_replayed for runner in runners)
    # A rank has no rows in some of its peer's prompt steps, and those do not count as eager.
    assert sum(runner.num_eager > 0 for runner in runners) >= 2
    for worker in fleet.workers:
        worker.experts.validate()
    together, apart = sum(bytes_of(fleet, "for_peers")), sum(bytes_of(fleet, "alone"))
    assert apart == 0
    assert (fleet.turns.num_fetches > 0) == (together > 0) == (fetch != "alone")


@pytest.mark.sampled(0)
def test_experts_of_a_new_rank_are_read(model: Path, alone: dict[str, Any], start: Starter) -> None:
    fleet = start(few_slots(model, "shared"))
    spread = {name: i % 2 for i, name in enumerate(requests())}
    assert fleet.answers("before", spread) == alone
    exchange = cast(Any, fleet.workers[0]._engine)._exchange
    graphs, borrowed = dict(fleet.runner(0)._graphs.captured), exchange._fetch._borrowed[1]
    begun = fleet.turns.num_fetches
    assert begun > 0
    (loss,) = fleet.replace(1)
    assert loss["ranks"] == (1,)
    assert fleet.answers("behind", spread) == alone
    assert fleet.turns.num_fetches > begun
    assert fleet.runner(0)._graphs.captured == graphs != {}
    # The old memory was released before the new rank kept its own.
    assert not borrowed._give_back.alive
    assert exchange._fetch._borrowed[1].lent == fleet.workers[1].experts.lent != borrowed.lent


def offer_wrong_memory(monkeypatch: pytest.MonkeyPatch, *, lends: bool = True) -> Callable[[], None]:
    """Make rank 1 offer a file that does not exist, or no memory, until the result is called."""
    right = worker_module.fetch_offer

    def wrong(config: EngineConfig, model: Any, experts: Any) -> Any:
        found = right(config, model, experts)
        assert found is not None
        assert found.memory is not None
        wrong_one = replace(found.memory, inode=1) if lends else None
        return found if experts._owned[0][0] == 0 else replace(found, memory=wrong_one)

    monkeypatch.setattr(worker_module, "fetch_offer", wrong)
    return lambda: monkeypatch.setattr(worker_module, "fetch_offer", right)


@pytest.mark.sampled(0)
@pytest.mark.parametrize("lends", [True, False], ids=("another file", "no memory"))
def test_all_ranks_read_alone_if_one_cannot_share(
    lends: bool,
    model: Path,
    alone: dict[str, Any],
    start: Starter,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Every rank reads alone and logs why. Graphs of that time do not stay once all ranks can share."""
    caplog.set_level("INFO")
    found = offer_wrong_memory(monkeypatch, lends=lends)
    fleet = start(few_slots(model, "auto"))
    spread = {name: i % 2 for i, name in enumerate(requests())}
    assert fleet.answers("apart", spread) == alone
    assert fleet.turns.num_fetches == 0
    lines = [record.getMessage() for record in caplog.records if "experts that it misses alone" in record.getMessage()]
    assert len(lines) == 2
    lent = fleet.workers[1].experts.lent
    assert lent is not None
    why = f"rank 0: file {lent.fd} of process " if lends else "rank 1: CUDA cannot pin memory there that others may map"
    assert all(f"alone: {why}" in line for line in lines)
    found()
    fleet.replace(1)
    assert fleet.answers("together", spread) == alone
    assert fleet.turns.num_fetches > 0


@pytest.mark.sampled(0)
def test_required_shared_reads_that_fail_end_the_ranks(
    gqa: Path, start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer_wrong_memory(monkeypatch)
    fleet = start(few_slots(gqa, "shared"))
    losses = [cast(dict[str, Any], worker.wait()) for worker in fleet.workers]
    assert len({loss["reason"] for loss in losses}) == 1
    assert re.fullmatch(
        r"--expert-fetch shared cannot be: rank 0: file \d+ of process \d+ has been replaced by another file; "
        r"use --expert-fetch alone.*",
        losses[0]["reason"],
    )
    assert {loss["ranks"] for loss in losses} == {(0,)}


@pytest.mark.slow
def test_ranks_read_alone_if_one_has_all_experts(
    model: Path, alone: dict[str, Any], start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks agree when they meet, and the one without misses has no memory for others' reads."""
    settings = few_slots(model, "auto")
    make = Fleet.make

    def uneven(self: Fleet, rank: int, epoch: int) -> Worker:
        self.config = replace(settings, expert_slots=None if rank == 1 else settings.expert_slots)
        return make(self, rank, epoch)

    monkeypatch.setattr(Fleet, "make", uneven)
    fleet = start(settings)
    assert [worker.experts.all_resident for worker in fleet.workers] == [False, True]
    assert fleet.answers("mixed", {name: i % 2 for i, name in enumerate(requests())}) == alone
    assert fleet.turns.num_fetches == 0
    assert sorted(fleet.gpu_memory.memory["moeyard-fetch"]) == [0]


@pytest.mark.sampled(0)
@pytest.mark.parametrize("captures", [False, True], ids=["launched", "captured"])
def test_one_answer_through_process_groups(
    captures: bool, model: Path, start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any rank brings rows, and a new rank joins a new group. Steps without prompts are captured on first use, once per
    group."""
    if captures:
        monkeypatch.setattr(factory, "TorchGroup", RecordedGroup)
    names = list(requests())
    one = start(config(model, ranks=1, exchange="auto"))
    expected = {name: one.answers("reference", {name: 0})[name] for name in names}
    one.close()
    for ranks, deep in [(3, 2), (2, 1)] if model.name.startswith("gqa") else [(2, 2)]:
        fleet = start(config(model, ranks=ranks, exchange="nccl", deep=deep))
        spread = {name: i % ranks for i, name in enumerate(names)}
        assert fleet.answers("alone", {"c": ranks - 1})["c"] == expected["c"]
        assert fleet.answers("mixed", spread) == expected
        runners = [fleet.runner(rank) for rank in range(ranks)]
        assert [runner.num_replayed > 3 for runner in runners] == [captures] * ranks
        assert all(runner.num_eager for runner in runners)
        # An eager rank works with peers that replay.
        runners[-1].eager = True
        assert fleet.answers("one launches", spread) == expected
        runners[-1].eager = False
        if ranks == 2:
            before = dict(runners[0]._graphs.captured)
            (loss,) = fleet.replace(1)
            assert loss["ranks"] == (1,)
            assert fleet.answers("behind", spread) == expected
            after = runners[0]._graphs.captured
            assert bool(before) == bool(after) == captures
            assert all(after[size] is not graph for size, graph in before.items() if size in after)
        fleet.close()


@pytest.mark.sampled(0)
@pytest.mark.parametrize("captures", [False, True], ids=["launched", "captured"])
def test_partial_residency_through_process_groups(
    captures: bool, gqa: Path, alone: dict[str, Any], start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host asks about experts within a prompt's step, where it must not wait for peers."""
    if captures:
        monkeypatch.setattr(factory, "TorchGroup", RecordedGroup)
    read = load_model_config(gqa)
    few = read.num_experts * len(read.moe_layers) // 4
    fleet = start(replace(config(gqa, ranks=2, exchange="nccl"), expert_slots=few))
    assert fleet.answers("mixed", {name: i % 2 for i, name in enumerate(requests())}) == alone
