"""Recording the engine's needs and replaying them: the simulator counts exactly what the engine counted."""

import itertools
import os
import resource
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import msgpack
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.expert_fill import copy_expert

import moeyard_kernels
import moeyard_worker
from moeyard_kernels.cpu.backend import CpuBackend
from moeyard_kernels.types.matrix import ExpertViews
from moeyard_kernels.types.weight_form import plain_expert
from moeyard_worker.exchange.base import Dispatched
from moeyard_worker.experts.cache import ExpertCache
from moeyard_worker.experts.offline.sim import belady, format_table, simulate
from moeyard_worker.experts.offline.trace import Access, read_trace
from moeyard_worker.experts.policies import POLICIES
from moeyard_worker.experts.recorder import RoutingRecorder, TraceHeader

LAYERS, EXPERTS, SIZE, TOP_K = (0, 2, 3), range(4, 10), 16, 2


class Zeros:
    def expect(self, experts: Iterable[tuple[int, int]]) -> None:
        pass

    def fill(self, layer: int, expert: int, out: ExpertViews) -> None:
        zeros = torch.zeros(SIZE, SIZE)
        copy_expert(out, zeros, zeros, zeros)


def header(*, rank: int = 0, world_size: int = 1, num_slots: int = 4, policy: str = "slru") -> TraceHeader:
    return TraceHeader(
        rank=rank,
        world_size=world_size,
        layers=LAYERS,
        experts_start=EXPERTS.start,
        experts_stop=EXPERTS.stop,
        top_k=TOP_K,
        num_slots=num_slots,
        policy=policy,
    )


def run_engine(path: Path, trace_header: TraceHeader, *, num_steps: int = 60) -> ExpertCache:
    generator = torch.Generator().manual_seed(trace_header.num_slots + trace_header.rank)
    with RoutingRecorder(path, trace_header) as recorder:
        cache = ExpertCache(
            backend=CpuBackend(page_size=16),
            source=Zeros(),
            layers=LAYERS,
            experts=EXPERTS,
            form=plain_expert(hidden=SIZE, intermediate=SIZE, dtype="float32"),
            num_slots=trace_header.num_slots,
            policy=trace_header.policy,
            recorder=recorder,
        )
        cache.preload()
        for step in range(num_steps):
            cache.begin_step(step)
            for layer in LAYERS:
                counts = torch.randint(-3, 4, (len(EXPERTS),), generator=generator).clamp(min=0)
                decodes = counts * torch.randint(0, 2, counts.shape, generator=generator)
                # Each row has one pair and one hole. The first rows of an expert are decode rows.
                local = torch.arange(len(EXPERTS)).repeat_interleave(counts)
                nth = torch.cat([torch.arange(count) for count in counts.tolist()])
                dispatched = Dispatched(
                    rows=torch.zeros(len(local), SIZE),
                    experts=torch.stack((local, torch.full_like(local, -1)), 1),
                    prompt=nth >= decodes[local],
                    handle=None,
                )
                cache.run(layer, dispatched)
        cache.validate()
    return cache


@pytest.mark.sampled(1)
@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("num_slots", [1, 3, 9, 17, 18, 99])
def test_simulated_counters_equal_the_engines(tmp_path: Path, policy: str, num_slots: int) -> None:
    path = tmp_path / "trace"
    caches = [
        run_engine(path, header(rank=rank, world_size=2, num_slots=num_slots, policy=policy)) for rank in range(2)
    ]
    result = simulate(path, policy, num_slots)
    assert [rank.counters for rank in result.ranks] == [cache.stats.counters for cache in caches]
    assert [rank.num_slots for rank in result.ranks] == [cache.num_slots for cache in caches]
    assert result.total.num_hits == sum(cache.stats.counters.num_hits for cache in caches) > 0
    assert result == simulate(path)
    best = belady(path, num_slots)
    assert all(o.num_hits >= r.counters.num_hits for o, r in zip(best, result.ranks, strict=True))
    assert format_table(result, best).count("\n") == 4


def test_trace_is_a_stream_of_plain_msgpack(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    with RoutingRecorder(path, header()) as recorder:
        recorder.record(step=7, layer=2, decode=[4, 9], prefill=[5])
        recorder.record(step=7, layer=3, decode=[], prefill=[])
        recorder.record(step=8, layer=0, decode=[], prefill=[6])
    with path.open("rb") as file:
        head, *records = msgpack.Unpacker(file)
    assert (head["format"], head["version"], head["layers"], head["policy"]) == (
        "moeyard-routing",
        1,
        [0, 2, 3],
        "slru",
    )
    assert records == [[7, 2, [4, 9], [5]], [8, 0, [], [6]]]
    [trace] = read_trace(path)
    assert trace.header == header()
    assert list(trace) == list(trace) == [Access(7, 2, (4, 9), (5,)), Access(8, 0, (), (6,))]


def test_full_disk_ends_only_the_recording(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file-size limit of the process acts like a full disk."""
    path, step = tmp_path / "trace", 0
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    recorder = RoutingRecorder(path, header())
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 1001, before[1]))
    try:
        while recorder.dropped < 2 * len(LAYERS):
            step += 1
            for layer in LAYERS:
                recorder.record(step=step, layer=layer, decode=[4, 9], prefill=[5])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    recorder.close()
    assert recorder.failed
    assert [record.getMessage() for record in caplog.records] == [
        f"{path}: File too large; recording of routing ends here, serving goes on"
    ]
    # The recorded file ends with a whole step.
    [trace] = read_trace(path)
    accesses = list(trace)
    assert accesses == [Access(i + 1, layer, (4, 9), (5,)) for i in range(step - 2) for layer in LAYERS]
    assert len(accesses) > 50


def test_disk_without_space_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        RoutingRecorder(tmp_path / "full", header())


def test_killed_worker_loses_only_its_last_step(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    recorder = RoutingRecorder(path, header())
    for layer in LAYERS:
        recorder.record(step=1, layer=layer, decode=[4], prefill=[])
    assert len(list(read_trace(path)[0])) == 3
    recorder.record(step=2, layer=0, decode=[4], prefill=[])
    recorder.record(step=3, layer=0, decode=[5], prefill=[])
    assert len(list(read_trace(path)[0])) == 4
    recorder.close()
    recorder.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:-2])
    assert [access.step for access in read_trace(path)[0]] == [1, 1, 1, 2]


def test_invalid_traces(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    with pytest.raises(FileNotFoundError):
        read_trace(path)
    path.write_bytes(b"{}")
    with pytest.raises(ValueError, match="trace is not a routing trace"):
        read_trace(path)
    path.write_bytes(msgpack.packb({"format": "moeyard-routing", "version": 9}))
    with pytest.raises(ValueError, match="version 9, this program reads 1"):
        read_trace(path)
    with RoutingRecorder(path, header()) as recorder:
        recorder.record(step=0, layer=0, decode=[4], prefill=[4])
    with pytest.raises(ValueError, match="is not an access of rank 0"):
        list(read_trace(path)[0])
    path.unlink()
    for rank in (0, 2):
        RoutingRecorder(path, header(rank=rank, world_size=3)).close()
    with pytest.raises(ValueError, match=r"has 3 ranks, but trace.rank1 is missing"):
        read_trace(path)
    RoutingRecorder(path, header(rank=1, world_size=3)).close()
    assert [trace.header.rank for trace in read_trace(path)] == [0, 1, 2]
    [alone] = read_trace(tmp_path / "trace.rank1")
    assert alone.header.rank == 1
    RoutingRecorder(path, header()).close()
    with pytest.raises(ValueError, match=r"both .* exist"):
        read_trace(path)
    path.unlink()
    (tmp_path / "trace.rank1").write_bytes((tmp_path / "trace.rank2").read_bytes())
    with pytest.raises(ValueError, match="written by rank 2 of 3, not by rank 1 of 3"):
        read_trace(path)


def test_simulation_with_too_few_slots_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    RoutingRecorder(path, header()).close()
    with pytest.raises(ValueError, match="at least 1 slot"):
        simulate(path, "slru", 0)
    with pytest.raises(ValueError, match="at least 1 slot"):
        belady(path, 0)
    result = simulate(path, "lru", 2)
    assert result.total.hit_rate is None
    assert format_table(result, belady(path, 2)).splitlines()[-1].endswith("-")


def best_by_search(accesses: list[Access], slots: int) -> int:
    """Return the most hits over all sequences of resident sets, each taken from residents and needs before.

    Like a cache it starts with the first expert of as many layers as there are slots.
    """
    reachable = {frozenset((layer, EXPERTS.start) for layer in LAYERS[:slots]): 0}
    for access in accesses:
        needed = {(access.layer, e) for e in access.decode + access.prefill}
        after: dict[frozenset[tuple[int, int]], int] = {}
        for resident, num_hits in reachable.items():
            pool = sorted(resident | needed)
            for size in range(min(slots, len(pool)) + 1):
                for kept in map(frozenset, itertools.combinations(pool, size)):
                    after[kept] = max(after.get(kept, 0), num_hits + len(needed & resident))
        reachable = after
    return max(reachable.values())


@given(
    st.lists(st.sets(st.integers(4, 8), min_size=1, max_size=3), min_size=1, max_size=9),
    st.integers(1, 3),
)
def test_belady_equals_an_exhaustive_search(
    tmp_path_factory: pytest.TempPathFactory, needed: list[set[int]], slots: int
) -> None:
    path = tmp_path_factory.mktemp("belady") / "trace"
    accesses = [Access(step, 0, tuple(sorted(experts)), ()) for step, experts in enumerate(needed)]
    with RoutingRecorder(path, header()) as recorder:
        for access in accesses:
            recorder.record(step=access.step, layer=0, decode=access.decode, prefill=())
    [best] = belady(path, slots)
    assert best.num_hits == best_by_search(accesses, slots)
    assert best.num_hits + best.num_misses == sum(map(len, needed))


def test_simulation_loads_no_torch() -> None:
    code = "import sys, moeyard_worker.experts.offline.sim; sys.exit('torch' in sys.modules)"
    packages = [str(Path(package.__file__ or "").parents[1]) for package in (moeyard_worker, moeyard_kernels)]
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": os.pathsep.join(packages)})
