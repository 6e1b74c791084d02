"""Missed experts that all ranks of a host read together: kernel and reference, rank by rank, against plain copies.

Without a GPU the ranks of one process tell, read and move in turn. Real GPUs have one process each and run whole ranks
(`tests/gpu/test_one_answer_ranks.py`).
"""

from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_cases.case import assert_bits

from moeyard_kernels import ops
from moeyard_kernels.experts import fetch_experts as triton_kernel
from moeyard_kernels.ops.expert_cache import plan_reads
from moeyard_kernels.types.expert_residency import BY_PEERS, FOR_PEERS, GATHER_NANOSECONDS, NUM_COUNTS
from moeyard_kernels.types.fetch_window import MISSED, STAMP, FetchWindow, open_fetch
from moeyard_kernels.types.peer_shape import FetchShape, PeerShape
from moeyard_kernels.types.peer_window import (
    DISPATCHED,
    EPOCH,
    FAILED,
    FETCH,
    LAYER,
    PHASE,
    POISONED,
    RANKS,
    REASON,
    SILENT,
    open_window,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
REFERENCE = SimpleNamespace(fetch_experts=ops.fetch_experts.reference)
KERNELS = pytest.mark.parametrize("kernels", [triton_kernel, REFERENCE], ids=("kernel", "reference"))
LAYERS, EXPERTS, SLOTS = 2, 6, 5
SMALL = triton_kernel.FetchConfig(READERS=2, MOVERS=2, BYTES=64)


class Rank:
    """One rank of a host: its store, its slots and its window for fetching."""

    def __init__(self, window: FetchWindow, dtype: torch.dtype, hidden: int, inner: int) -> None:
        self.window = window
        self.store = torch.randn(LAYERS * EXPERTS, 3 * inner * hidden).to(dtype)
        if DEVICE.type == "cuda":
            self.store = self.store.pin_memory()
        self.gate_up = torch.full((SLOTS, 2 * inner, hidden), torch.nan, dtype=dtype, device=DEVICE)
        self.down = torch.full((SLOTS, hidden, inner), torch.nan, dtype=dtype, device=DEVICE)
        self.counts = torch.zeros(NUM_COUNTS, dtype=torch.int64, device=DEVICE)

    def fetch(self, kernels: ModuleType, table: torch.Tensor, layer: int, **parts: Any) -> None:
        config = {"config": SMALL} if kernels is triton_kernel else {}
        kernels.fetch_experts(
            self.store,
            table.to(DEVICE),
            self.gate_up,
            self.down,
            self.window,
            layer=layer,
            counts=self.counts,
            **{"tell": False, "read": False, "move": False, **parts},
            **config,
        )


def open_ranks(
    world: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    hidden: int = 24,
    inner: int = 8,
    staged: int = 2,
    unit_bytes: int = 128,
) -> list[Rank]:
    """Return ranks that share reads. Each has dispatched its first exchange."""
    rows = PeerShape(world_size=world, top_k=1, row_bytes=16, max_tokens=1)
    up = 2 * inner * hidden * dtype.itemsize
    shape = FetchShape(world_size=world, up_bytes=up, down_bytes=up // 2, staged=staged, unit_bytes=unit_bytes)
    of_rows, memory = (
        [torch.zeros(size.num_bytes, dtype=torch.uint8, device=DEVICE) for _ in range(world)] for size in (rows, shape)
    )
    ranks = []
    for rank in range(world):
        peer = open_window(rows, of_rows, rank=rank, dtype=dtype, owner=[0], local=[0], seconds=2.0)
        peer.state[DISPATCHED] = 1
        ranks.append(Rank(open_fetch(shape, memory, peer), dtype, hidden, inner))
    for each in ranks:
        each.window.stores.copy_(torch.tensor([rank.store.data_ptr() for rank in ranks]))
        each.window.share(True)
    return ranks


def table_of(count: int) -> torch.Tensor:
    """Return a table of `count` experts with a slot each."""
    table = torch.full((EXPERTS,), -1, dtype=torch.int32)
    table[torch.randperm(EXPERTS)[:count]] = torch.randperm(SLOTS)[:count].int()
    return table


def fetch_together(kernels: ModuleType, ranks: Sequence[Rank], tables: Sequence[torch.Tensor], layer: int) -> None:
    for part in ("tell", "read", "move"):
        for rank, table in zip(ranks, tables, strict=True):
            rank.fetch(kernels, table, layer, **{part: True})


def check_slots(ranks: Sequence[Rank], tables: Sequence[torch.Tensor], layer: int) -> None:
    """Check that each slot holds the expert that its table names, and that nothing else was written."""
    for number, (rank, table) in enumerate(zip(ranks, tables, strict=True)):
        wanted = [torch.full_like(x, torch.nan, device="cpu") for x in (rank.gate_up, rank.down)]
        ops.gather_experts(rank.store, table, *wanted, layer=layer)
        assert_bits(f"slots of rank {number}", (rank.gate_up.cpu(), rank.down.cpu()), tuple(wanted))


def fault_of(rank: Rank) -> list[int]:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return rank.window.peer.fault[[FAILED, PHASE, LAYER, RANKS, EPOCH, REASON]].tolist()


# Numbers of misses: equal, one rank alone, more than the peers' buffers hold, all different, none.
MISSED_BY = [(2, 2), (3, 0), (0, 5), (1, 4), (0, 0), (5, 0, 1), (0, 1, 0), (2, 5, 1, 4)]


@pytest.mark.sampled(0)
@pytest.mark.parametrize("missed", MISSED_BY, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_kernel_and_reference_leave_the_same_memory(missed: tuple[int, ...], dtype: torch.dtype) -> None:
    """Compare slots, buffers and counters. The second exchange reuses the memory of the first."""
    ours, theirs = open_ranks(len(missed), dtype=dtype), open_ranks(len(missed), dtype=dtype)
    for a, b in zip(ours, theirs, strict=True):
        b.store.copy_(a.store)
    for layer in range(LAYERS):
        tables = [table_of(count) for count in (missed if layer == 0 else missed[::-1])]
        for kernels, ranks in ((triton_kernel, ours), (REFERENCE, theirs)):
            for rank in ranks:
                rank.gate_up.fill_(torch.nan)
                rank.down.fill_(torch.nan)
                rank.window.peer.state[DISPATCHED] = 1 + 3 * layer
            fetch_together(kernels, ranks, tables, layer)
            check_slots(ranks, tables, layer)
        for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            memory = (each.window.memory[number] for each in (a, b))
            assert_bits(f"memory of rank {number}", *memory)
            # Only a GPU kernel measures time.
            a.counts[GATHER_NANOSECONDS] = 0
            assert_bits(f"counts of rank {number}", a.counts, b.counts)
            assert fault_of(a)[0] == fault_of(b)[0] == 0


@pytest.mark.parametrize("sizes", [(40, 4, 64), (8, 8, 1024), (104, 3, 256)], ids=str)
@KERNELS
def test_units_end_where_the_parts_of_an_expert_end(kernels: ModuleType, sizes: tuple[int, int, int]) -> None:
    hidden, inner, unit_bytes = sizes
    ranks = open_ranks(2, hidden=hidden, inner=inner, unit_bytes=unit_bytes)
    tables = [table_of(1), table_of(4)]
    fetch_together(kernels, ranks, tables, 1)
    check_slots(ranks, tables, 1)


@KERNELS
def test_each_rank_reads_the_mean_that_fits(kernels: ModuleType) -> None:
    """The mean of 5, 0 and 1 experts of 9 units is 18. The first rank would offer 27, but buffers hold two experts."""
    ranks = open_ranks(3)
    [units] = {rank.window.shape.units for rank in ranks}
    assert units == 9
    fetch_together(kernels, ranks, [table_of(5), table_of(0), table_of(1)], 0)
    unit = ranks[0].window.shape.unit_bytes
    assert [int(rank.counts[BY_PEERS]) for rank in ranks] == [18 * unit, 0, 0]
    assert [int(rank.counts[FOR_PEERS]) for rank in ranks] == [0, 18 * unit, 0]
    for rank in ranks:
        assert rank.window.views(0).heads[0, :2].tolist() == [1, 5]


@KERNELS
@pytest.mark.parametrize("how", ["apart", "poisoned"])
def test_rank_that_does_not_share_reads_alone(kernels: ModuleType, how: str) -> None:
    ranks = open_ranks(2)
    for rank in ranks:
        if how == "apart":
            rank.window.share(False)
        else:
            rank.window.peer.poison()
    tables = [table_of(5), table_of(0)]
    ranks[0].fetch(kernels, tables[0], 1, tell=True, read=True, move=True)
    check_slots(ranks, tables, 1)
    assert all(not memory.any() for memory in ranks[0].window.memory)
    assert fault_of(ranks[0])[0] == 0


@KERNELS
def test_missing_list_is_named_and_all_is_read_alone(kernels: ModuleType) -> None:
    ranks, tables = open_ranks(3), [table_of(4), table_of(1), table_of(0)]
    for rank in (0, 1):
        ranks[rank].fetch(kernels, tables[rank], 0, tell=True)
    ranks[0].fetch(kernels, tables[0], 0, read=True, move=True)
    check_slots(ranks[:1], tables[:1], 0)
    assert fault_of(ranks[0]) == [1, FETCH, 0, 0b100, 1, SILENT]
    assert int(ranks[0].window.peer.state[POISONED]) == 1
    assert not ranks[1].window.views(1).flags.any()


@KERNELS
def test_missing_unit_is_named_and_read_alone(kernels: ModuleType) -> None:
    """One of the two ranks that read for the first does not."""
    ranks, tables = open_ranks(3, staged=3), [table_of(4), table_of(0), table_of(0)]
    for rank, table in zip(ranks, tables, strict=True):
        rank.fetch(kernels, table, 1, tell=True)
    for number in (0, 1):
        ranks[number].fetch(kernels, tables[number], 1, read=True)
    ranks[0].fetch(kernels, tables[0], 1, move=True)
    check_slots(ranks[:1], tables[:1], 1)
    assert fault_of(ranks[0]) == [1, FETCH, 0, 0b100, 1, SILENT]
    stamps = ranks[0].window.views(0).flags
    assert int((stamps == 1).sum()) == 12
    assert ranks[0].window.views(0).heads[:, STAMP].tolist() == [1, 1, 1]
    # Another epoch starts with reset memory.
    ranks[0].window.reset()
    assert not stamps.any()
    assert not ranks[0].window.views(0).heads[:, MISSED].any()


def test_shares_are_the_mean_without_mutual_reads() -> None:
    for _ in range(200):
        units = torch.randint(0, 40, (int(torch.randint(1, 9, ())),)).tolist()
        most = int(torch.randint(1, 60, ()))
        found = plan_reads(units, most)
        share = -(-sum(units) // len(units))
        for mine, lent, (begin, end) in zip(found.units, found.by_peers, found.ranges, strict=True):
            assert not (lent and end > begin)
            assert mine - lent + end - begin <= max(share, mine - most)
        assert found.ranges[0][0] == 0
        assert max(end for _, end in found.ranges) == sum(found.by_peers)
        for at in range(sum(found.by_peers)):
            rank, number = found.owner(at)
            assert found.by_peers[rank] > number
            begin, end = found.ranges[found.reader(rank, number)]
            assert begin <= at < end


def test_bad_arguments_are_named() -> None:
    [rank, _] = open_ranks(2)
    table = table_of(2).to(DEVICE)
    store, *slots = (torch.zeros(shape, device=DEVICE) for shape in ((12, 144), (5, 8, 12), (5, 12, 4)))
    with pytest.raises(ValueError, match=r"gate_up\[0\]\.nbytes 384, window\.shape\.up_bytes 768"):
        ops.fetch_experts(store, table, *slots, rank.window, layer=0)
    with pytest.raises(
        ValueError, match=r"fetch_experts: layer 2, E 6 of table int32 \[6\], rows 12 of store bfloat16 \[12, 576\]"
    ):
        ops.fetch_experts(rank.store, table, rank.gate_up, rank.down, rank.window, layer=2)
    shape = rank.window.shape
    with pytest.raises(ValueError, match=r"rank 1: memory torch.uint8 \[3\], expected"):
        open_fetch(shape, [rank.window.memory[0], torch.zeros(3, dtype=torch.uint8)], rank.window.peer)
    with pytest.raises(ValueError, match="memory of 1 ranks of 2, rows of 2"):
        open_fetch(shape, rank.window.memory[:1], rank.window.peer)
    for change, word in (
        ({"staged": 15}, "1 to 14 experts are named to peers, got 15"),
        ({"down_bytes": 24}, "experts are multiples of 16 bytes, got 768 and 24"),
        ({"unit_bytes": 96}, "a unit is a power of 2 of 16 bytes or more, got 96"),
        ({"world_size": 33}, "1 to 32 ranks share memory, got 33"),
    ):
        with pytest.raises(ValueError, match=word):
            FetchShape(**{"world_size": 2, "up_bytes": 768, "down_bytes": 384, **change})
