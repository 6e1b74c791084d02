"""Partial sums of decode attention per split: bytes of a launch, and sequences that run in turns."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.kernels.decode_cases import DEVICE, assert_same, paged

from moeyard_kernels.attention import gqa_decode, mla_decode
from moeyard_kernels.attention.attn_combine import new_partials
from moeyard_kernels.cuda.plan import CudaPlan
from moeyard_kernels.types.decode_tables import DecodeTables
from moeyard_kernels.types.footprint import CAPTURED, GQA_SPLIT, LAUNCHED, SplitSums, mla_split
from moeyard_worker.scheduling.step import Chunk, Step

GPU = DEVICE == "cuda"
KIMI_LINEAR = SplitSums(heads=32, dim=512, split=mla_split(32))


def tables_of(sequences: int, queries: int, pages: int, *, page: int = 64, most: int = CAPTURED) -> DecodeTables:
    """Return tables without memory."""
    table, lens = ((sequences, n) for n in (pages, queries))
    with torch.device("meta"):
        return DecodeTables(
            page_table=torch.empty(table, dtype=torch.int32),
            kv_lens=torch.empty(lens, dtype=torch.int32),
            page_size=page,
            most=most,
        )


def bytes_of(sums: SplitSums, tables: DecodeTables) -> list[int]:
    """Return the bytes that the launches of each turn allocate."""
    like = torch.empty(1, dtype=torch.bfloat16, device="meta")
    return [
        sum(x.untyped_storage().nbytes() for x in new_partials(like, tables=part, sums=sums))
        for _, part in tables.turns(sums)
    ]


def test_num_bytes_equals_the_allocation() -> None:
    """64 sequences of Kimi-Linear after 163,840 positions: 32 heads x 160 splits x 513 numbers of 4 bytes each."""
    assert bytes_of(KIMI_LINEAR, tables_of(64, 1, 2560)) == [64 * 160 * 32 * 513 * 4]
    assert KIMI_LINEAR.num_bytes(64, 1, 163840, CAPTURED) == 64 * 160 * 32 * 513 * 4
    grouped = SplitSums(heads=32, dim=128, split=GQA_SPLIT)
    assert bytes_of(grouped, tables_of(8, 4, 100)) == [8 * 4 * 13 * 32 * 129 * 4]
    assert grouped.num_bytes(8, 4, 6400, CAPTURED) == 8 * 4 * 13 * 32 * 129 * 4
    # With one split the sums are the result itself, which a step's rows count.
    assert grouped.num_bytes(8, 4, 512, CAPTURED) == 0


def test_too_large_steps_run_in_turns() -> None:
    """The default length on 141 GB took 2.6 GiB. Now there are three turns with about equal numbers of sequences."""
    wide = tables_of(64, 1, 10318)
    sizes = [part.num_sequences for _, part in wide.turns(KIMI_LINEAR)]
    assert sizes == [24, 24, 16]
    assert max(bytes_of(KIMI_LINEAR, wide)) <= KIMI_LINEAR.num_bytes(64, 1, 10318 * 64, CAPTURED) < CAPTURED * 1.002
    # Output of 8192 positions is recomputed, each a row with the whole table: 5.3 GB in one launch.
    again = tables_of(8192, 1, 160, most=LAUNCHED)
    parts = bytes_of(KIMI_LINEAR, again)
    assert max(parts) <= KIMI_LINEAR.num_bytes(8192, 1, 10240, LAUNCHED) < LAUNCHED * 1.002
    # Every turn uses the same block, and the merge covers all.
    assert {size // LAUNCHED for size in parts} == {1}
    assert sum(part.num_sequences for _, part in again.turns(KIMI_LINEAR)) == 8192


@given(
    sequences=st.integers(0, 300),
    queries=st.integers(1, 16),
    pages=st.integers(1, 3000),
    heads=st.integers(1, 128),
    dim=st.sampled_from((64, 96, 128, 512)),
    split=st.sampled_from((512, 1024)),
    most=st.sampled_from((1 << 20, LAUNCHED, CAPTURED)),
)
def test_turns_hold_every_row_once_and_fit(
    sequences: int, queries: int, pages: int, heads: int, dim: int, split: int, most: int
) -> None:
    sums, tables = SplitSums(heads=heads, dim=dim, split=split), tables_of(sequences, queries, pages, most=most)
    turns = tables.turns(sums)
    rows = [row for part, _ in turns for row in range(sequences * queries)[part]]
    assert rows == list(range(sequences * queries))
    for part, some in turns:
        assert len(range(sequences * queries)[part]) == some.num_rows
        assert (some.page_size, some.most, some.num_queries) == (tables.page_size, most, queries)
        assert len(some.turns(sums)) == 1, "a turn is not split again"
    sizes = bytes_of(sums, tables)
    if tables.max_splits(split) == 1:
        assert len(turns) == 1
        return
    assert max(sizes) <= sums.num_bytes(sequences, queries, pages * 64, most)
    # No narrower table, and none with fewer sequences or queries, needs more than the plan for the widest.
    for fewer in (
        tables_of(max(1, sequences // 2), queries, pages, most=most),
        tables_of(max(1, sequences - 1), queries, -(-pages // 3), most=most),
        tables_of(max(1, sequences), -(-queries // 2), pages, most=most),
    ):
        if fewer.max_splits(split) > 1:
            assert max(bytes_of(sums, fewer)) <= sums.num_bytes(max(1, sequences), queries, pages * 64, most)


def test_eager_rows_have_less_memory() -> None:
    """Recomputed output runs like this: an eager step with one row per sequence."""
    chunk = Chunk(key=(b"", "a"), start=600, token_ids=(1,) * 70, pages=tuple(range(11)), prompt=False, num_sampled=1)
    plan = CudaPlan(Step(decode=(chunk,)), page_size=64, windows=(None, 100), flat=False, device=torch.device("cpu"))
    for tables in plan.decode.values():
        assert (tables.num_sequences, tables.num_positions, tables.most) == (70, 704, LAUNCHED)


@pytest.mark.sampled(0)
@pytest.mark.parametrize("queries", [1, 2], ids=lambda q: f"queries-{q}")
@pytest.mark.parametrize("at_once", [1, 4])
def test_turns_change_no_bit(queries: int, at_once: int) -> None:
    """Latent and grouped attention have equal bits, whichever sequences share memory."""
    split = 1024 if GPU else 128
    lens = [1, split + 3, 64, 2 * split + 70, split, 9][: None if GPU or at_once > 1 else 3]
    heads, rank, rope = (32, 512, 64) if GPU else (4, 32, 16)
    held = paged(lens, 64, heads=1, dims=(rank + rope,), dtype=torch.bfloat16)
    tables = held.tables(torch.tensor(lens)[:, None] - torch.arange(queries).flip(0).clamp(max=min(lens) - 1))
    most = at_once * tables.max_splits(split) * queries * heads * rank * 4
    few = replace(tables, most=most)
    assert len(few.turns(SplitSums(heads=heads, dim=rank, split=split))) == -(-len(lens) // at_once)
    q, r = (torch.randn(len(lens) * queries, heads, n).to(DEVICE, torch.bfloat16) for n in (rank, rope))
    whole, parts = (
        mla_decode.mla_decode(q, r, held.caches[0][0], tables=some, scale=0.05, split=split) for some in (tables, few)
    )
    assert_same(parts, whole, "latent")
    dim = 128 if GPU else 32
    both = paged(lens, 64, heads=2, dims=(dim, dim), dtype=torch.bfloat16)
    tables = replace(tables, page_table=both.table)
    few = replace(tables, most=at_once * tables.max_splits(split) * queries * heads * dim * 4)
    q = torch.randn(len(lens) * queries, heads, dim).to(DEVICE, torch.bfloat16)
    whole, parts = (
        gqa_decode.gqa_decode(q, *both.caches, tables=some, scale=0.1, split=split) for some in (tables, few)
    )
    assert_same(parts, whole, "grouped")


@pytest.mark.gpu
def test_peak_memory_of_a_launch_is_as_planned() -> None:
    """64 rows with tables of 2560 equal pages: DeepSeek-V3's heads take three turns, V2-Lite's one."""
    cache = torch.randn(1, 64, 576, device=DEVICE, dtype=torch.bfloat16)
    tables = DecodeTables(
        page_table=torch.zeros(64, 2560, device=DEVICE, dtype=torch.int32),
        kv_lens=torch.full((64,), 1500, device=DEVICE, dtype=torch.int32),
        page_size=64,
    )
    for heads, turns in ((128, 3), (16, 1)):
        sums = SplitSums(heads=heads, dim=512, split=mla_split(heads))
        assert len(tables.turns(sums)) == turns
        q, r = (torch.randn(64, heads, n, device=DEVICE, dtype=torch.bfloat16) for n in (512, 64))
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        mla_decode.mla_decode(q, r, cache, tables=tables, scale=0.05)
        peak = torch.cuda.max_memory_allocated() - before
        planned = sums.num_bytes(64, 1, 2560 * 64, CAPTURED)
        # The peak includes the results of each turn and of all. Lengths fit into the allocator's rounding.
        assert peak <= planned + 2 * q.numel() * 2 + (8 << 20)
        assert peak > planned // 2
