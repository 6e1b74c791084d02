"""Kernels of compressed attention at output positions: the formulas of their references, and one answer per row."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from tests.kernels.decode_cases import DEVICE

from moeyard_kernels import ops
from moeyard_kernels.attention import compressed_decode as decode_kernel
from moeyard_kernels.attention import compressed_pool as pool_kernel
from moeyard_kernels.attention import compressed_rotate as rotate_kernel
from moeyard_kernels.attention import output_choice as choose_kernel
from moeyard_kernels.attention import output_scores as scores_kernel
from moeyard_kernels.cuda import footprint
from moeyard_kernels.types import compressed_rows
from moeyard_kernels.types.compressed_rows import CompressedRows
from moeyard_kernels.types.footprint import CAPTURED, COMPRESSED_SPLIT
from moeyard_kernels.types.layers import Pooling

GPU = DEVICE == "cuda"
EPS = 1e-6
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Heads, their width, rotated values and window; the indexer's heads, their width and choice."""

    heads: int = 5
    dim: int = 24
    rope: int = 8
    window: int = 64
    index_heads: int = 3
    index_dim: int = 16
    top_k: int = 70
    page: int = 16


SIZES = Sizes()
FLASH = Sizes(heads=64, dim=512, rope=64, window=128, index_heads=64, index_dim=128, top_k=512)
PRO = replace(FLASH, heads=128, top_k=1024)
SHAPES = [SIZES, FLASH, PRO] if GPU else [SIZES]
BY_SHAPE = pytest.mark.parametrize("sizes", SHAPES, ids=lambda s: f"{s.heads}x{s.dim}")
SLOTS, SPARE = 7, 16


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-30))


def near(dtype: torch.dtype) -> float:
    return 4e-6 if dtype == torch.float32 else 8e-3


def step_rows(positions: list[int], sizes: Sizes, *, queries: int = 1, hidden: tuple[int, ...] = ()) -> CompressedRows:
    """Return rows at these positions, in pages and slots of their own; rows `hidden` store nothing."""
    sequences = len(positions) // queries
    pages = max(positions) // sizes.page + 2
    table = torch.randperm(sequences * pages, generator=torch.Generator().manual_seed(3)).view(sequences, pages)
    at = torch.tensor(positions)
    places = table[torch.arange(len(positions)) // queries, at // sizes.page] * sizes.page + at % sizes.page
    places[list(hidden)] = -1
    return CompressedRows(
        positions=at.to(DEVICE),
        places=places.to(DEVICE),
        slots=torch.randperm(SLOTS, generator=torch.Generator().manual_seed(4))[:sequences].to(DEVICE),
        page_table=table.int().to(DEVICE),
        page_size=sizes.page,
    )


def alone(rows: CompressedRows, row: int) -> CompressedRows:
    """Return one row of a step as a step of its own."""
    b = row // rows.num_queries
    return replace(
        rows,
        positions=rows.positions[row : row + 1].clone(),
        places=rows.places[row : row + 1].clone(),
        slots=rows.slots[b : b + 1].clone(),
        page_table=rows.page_table[b : b + 1].clone(),
    )


def num_places(rows: CompressedRows, granule: int) -> int:
    return rows.page_table.numel() * rows.page_size // granule


def angles(count: int, sizes: Sizes) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin as a plan has them: views of rows of a table."""
    angle = torch.rand(count, sizes.rope // 2) * 6
    cos, sin = torch.cat((angle.cos(), angle.sin()), 1).to(DEVICE).chunk(2, 1)
    return cos, sin


@DTYPES
@BY_SHAPE
@pytest.mark.parametrize("indexed", [False, True], ids=["plain", "indexed"])
def test_rotation_and_stores(sizes: Sizes, dtype: torch.dtype, indexed: bool) -> None:
    positions, hi = [3, 4, 5, 79, 80, 80], sizes.index_heads if indexed else 0
    rows = step_rows(positions, sizes, queries=3, hidden=(5,))
    count, width = len(positions), sizes.heads * sizes.dim + hi * sizes.index_dim
    # Rows of wider products.
    q = torch.randn(count, width + 8).to(DEVICE, dtype)[:, :width]
    kv = torch.randn(count, sizes.dim + 8).to(DEVICE, dtype)[:, 8:]
    cos, sin = angles(count, sizes)
    columns = 4 * sizes.dim + 4 * sizes.index_dim
    compressed = torch.randn(count, columns + hi, device=DEVICE)
    found: dict[bool, list[torch.Tensor | None]] = {}
    for kernel in (True, False):
        recent = torch.zeros(SLOTS, sizes.window + SPARE, sizes.dim, device=DEVICE, dtype=dtype)
        pending = torch.zeros(SLOTS, 24, columns, device=DEVICE)
        run = rotate_kernel.compressed_rotate if kernel else ops.compressed_rotate.reference
        state: dict[str, Any] = {"compressed": compressed, "pending": pending} if indexed else {}
        results = run(q, kv, cos, sin, recent, heads=sizes.heads, index_heads=hi, eps=EPS, rows=rows, **state)
        found[kernel] = [*results, recent, pending]
    for mine, wanted in zip(found[True], found[False], strict=True):
        assert (mine is None) == (wanted is None)
        if mine is not None and wanted is not None:
            assert relative(mine, wanted) < near(dtype)
    recent = found[True][3]
    assert recent is not None
    assert int((recent.abs().sum(2) > 0).sum()) == 5, "a hidden row stores nothing"
    one = rotate_kernel.compressed_rotate(
        q[4:5], kv[4:5], cos[4:5], sin[4:5], recent, heads=sizes.heads, index_heads=hi, eps=EPS
    )
    for mine, whole in zip(one, found[True], strict=False):
        assert (mine is None and whole is None) or torch.equal(mine, whole[4:5])  # type: ignore[index, arg-type]


@DTYPES
@BY_SHAPE
def test_keys_without_queries(sizes: Sizes, dtype: torch.dtype) -> None:
    """Rows that only store keys leave what rows with queries leave."""
    rows = step_rows([3, 4, 5, 79, 80, 80], sizes, queries=3, hidden=(5,))
    kv = torch.randn(6, sizes.dim + 8).to(DEVICE, dtype)[:, 8:]
    q, (cos, sin) = torch.randn(6, sizes.heads * sizes.dim).to(DEVICE, dtype), angles(6, sizes)
    stored = [torch.zeros(SLOTS, sizes.window + SPARE, sizes.dim, device=DEVICE, dtype=dtype) for _ in range(3)]
    run, reference = rotate_kernel.compressed_rotate, ops.compressed_rotate.reference
    for recent, how, heads in zip(stored, (run, run, reference), (sizes.heads, 0, 0), strict=True):
        some = q[:, : heads * sizes.dim]
        queries, keys, _ = how(some, kv, cos, sin, recent, heads=heads, index_heads=0, eps=EPS, rows=rows)
        assert queries.shape == (6, heads, sizes.dim)
        assert torch.equal(recent[rows.slots[0], 4], keys[1])
    assert torch.equal(stored[0], stored[1])
    assert relative(stored[1], stored[2]) < near(dtype)


@DTYPES
@BY_SHAPE
def test_rotation_back(sizes: Sizes, dtype: torch.dtype) -> None:
    x = torch.randn(3, sizes.heads, sizes.dim).to(DEVICE, dtype)
    cos, sin = angles(3, sizes)
    assert torch.equal(rotate_kernel.rotate_back(x, cos, sin), ops.rotate_back.reference(x, cos, sin))
    assert rotate_kernel.rotate_back(x[:0], cos[:0], sin[:0]).shape == (0, sizes.heads, sizes.dim)


def pooling(ratio: int, dim: int, dtype: torch.dtype, rows: CompressedRows, *, overlaps: bool) -> Pooling:
    width = 2 * dim if overlaps else dim
    return Pooling(
        ratio=ratio,
        overlaps=overlaps,
        bias=torch.randn(ratio, width, device=DEVICE),
        norm=torch.randn(dim).to(DEVICE, dtype),
        entries=torch.full((num_places(rows, min(ratio, 16)), dim), 7.0, device=DEVICE, dtype=dtype),
    )


@DTYPES
@BY_SHAPE
@pytest.mark.parametrize("ratio", [4, 128])
def test_pooled_entries(sizes: Sizes, dtype: torch.dtype, ratio: int) -> None:
    # The first block, which has none before it, blocks further on, no end of a block, and a row that stores nothing.
    positions = [3, 4, 7, 11, 127, 255, 255]
    rows, overlaps = step_rows(positions, sizes, hidden=(6,)), ratio == 4
    dims = (sizes.dim, sizes.index_dim) if overlaps else (sizes.dim,)
    poolings = [pooling(ratio, dim, dtype, rows, overlaps=overlaps) for dim in dims]
    columns = sum(2 * each.bias.shape[1] for each in poolings)
    ring = (2 * ratio if overlaps else ratio) + SPARE
    pending = torch.randn(SLOTS, ring, columns, device=DEVICE) * 2
    rope = torch.cat(angles(260, sizes), 1)
    expected = [replace(each, entries=each.entries.clone()) for each in poolings]
    pool_kernel.compressed_pool(pending, rope, poolings=poolings, rows=rows, eps=EPS)
    ops.compressed_pool.reference(pending, rope, poolings=expected, rows=rows, eps=EPS)
    for at, (mine, wanted) in enumerate(zip(poolings, expected, strict=True)):
        assert relative(mine.entries, wanted.entries) < near(dtype)
        changed = (mine.entries != 7).any(1)
        assert torch.equal(changed, (wanted.entries != 7).any(1))
        # A row alone has the same bits.
        again = replace(mine, entries=torch.full_like(mine.entries, 7.0))
        others = [replace(each, entries=torch.zeros_like(each.entries)) for each in poolings]
        pool_kernel.compressed_pool(
            pending, rope, poolings=[*others[:at], again, *others[at + 1 :]], rows=alone(rows, 5), eps=EPS
        )
        entry = int(rows.places[5]) // mine.granule
        assert torch.equal(again.entries[entry], mine.entries[entry])
        assert bool((again.entries[entry] != 7).any())


@DTYPES
@BY_SHAPE
def test_scores_of_entries(sizes: Sizes, dtype: torch.dtype) -> None:
    edge = 4 * sizes.top_k
    positions = [5, edge + 2, edge + 3, edge + 300] if not GPU else [5, edge + 2, edge + 3, 8 * edge + 1]
    rows = step_rows(positions, sizes)
    wanted = torch.randn(4, sizes.index_heads, sizes.index_dim).to(DEVICE, dtype)
    weights = torch.randn(4, 9 + sizes.index_heads, device=DEVICE)[:, 9:]
    entries = torch.randn(num_places(rows, 4), sizes.index_dim).to(DEVICE, dtype)
    named: dict[str, Any] = {"ratio": 4, "granule": 4, "top_k": sizes.top_k}
    found = scores_kernel.output_scores(wanted, weights, entries, rows=rows, **named)
    expected = ops.output_scores.reference(wanted, weights, entries, rows=rows, **named)
    for row, position in enumerate(positions):
        count = (position + 1) // 4
        if count > sizes.top_k:
            assert relative(found[row, :count], expected[row, :count]) < 4e-6
            one = scores_kernel.output_scores(
                wanted[row : row + 1], weights[row : row + 1], entries, rows=alone(rows, row), **named
            )
            assert torch.equal(one[0, :count], found[row, :count])
        assert bool(found[row, count:].isnan().all()) or GPU, "entries that the row does not see stay"


def test_choice_of_entries() -> None:
    """Ties, signs and zeros; rows that see as many entries as they choose are not touched."""
    top_k, counts = 9, [3, 9, 10, 300, 5000, 4097, 9000]
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(len(counts), max(counts), generator=generator)
    scores[3] = scores[3].clamp(min=0)  # relu leaves ties
    scores[4] = (scores[4] * 2).round() + 0.0  # ties among the best, and at the border
    scores[5] = -scores[5].abs()
    scores[6] = 0.0
    scores[6, 250:255] = torch.tensor([1e-30, -1.0, 2.0, 2.0, -0.5])
    scores = scores.to(DEVICE)
    positions = torch.tensor([4 * count + count % 3 for count in counts], device=DEVICE)
    found = choose_kernel.output_choice(scores, positions, ratio=4, top_k=top_k)
    expected = ops.output_choice.reference(scores, positions, ratio=4, top_k=top_k)
    for row, position in enumerate(positions.tolist()):
        if (position + 1) // 4 > top_k:
            assert torch.equal(found[row], expected[row]), row
    one = choose_kernel.output_choice(scores[4:5].contiguous(), positions[4:5], ratio=4, top_k=top_k)
    assert torch.equal(one[0], found[4])


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """The inputs of `compressed_decode`."""

    tensors: list[Any]
    named: dict[str, Any]
    rows: CompressedRows

    def run(self, how: Any, **options: Any) -> torch.Tensor:
        return how(*self.tensors, rows=self.rows, **self.named, **options)

    def row(self, row: int) -> "Attention":
        """Return one row as a step of its own."""
        by_row = {0, 3, 5, 6}
        tensors = [
            x[row : row + 1].contiguous() if n in by_row and x is not None else x for n, x in enumerate(self.tensors)
        ]
        tensors[5:7] = (x[row : row + 1] for x in self.tensors[5:7])
        return replace(self, tensors=tensors, rows=alone(self.rows, row))


def attention(sizes: Sizes, dtype: torch.dtype, ratio: int, positions: list[int], *, queries: int = 1) -> Attention:
    rows = step_rows(positions, sizes, queries=queries)
    count, granule, top_k = len(positions), min(ratio, 16), sizes.top_k if ratio == 4 else 0
    chosen = entries = None
    if ratio:
        entries = torch.randn(num_places(rows, granule), sizes.dim).to(DEVICE, dtype)
    if top_k and rows.num_entries(ratio) > top_k:
        chosen = torch.full((count, top_k), 10**9, dtype=torch.int32)
        for row, position in enumerate(positions):
            seen = (position + 1) // ratio
            if seen > top_k:
                chosen[row] = torch.randperm(seen)[:top_k].sort().values
        chosen = chosen.to(DEVICE)
    tensors = [
        torch.randn(count, sizes.heads, sizes.dim).to(DEVICE, dtype),
        torch.randn(SLOTS, sizes.window + SPARE, sizes.dim).to(DEVICE, dtype),
        entries,
        chosen,
        torch.randn(sizes.heads, device=DEVICE),
        *angles(count, sizes),
    ]
    return Attention(
        tensors=tensors,
        named={"window": sizes.window, "ratio": ratio, "granule": granule, "top_k": top_k},
        rows=rows,
    )


@DTYPES
@BY_SHAPE
@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_attention(sizes: Sizes, dtype: torch.dtype, ratio: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows around the borders of the window, of blocks, of splits and of the choice."""
    edge = (sizes.top_k if ratio == 4 else COMPRESSED_SPLIT) * max(ratio, 1)
    positions = [0, 2, sizes.window - 1, sizes.window + 3, edge - 2, edge + 130]
    if ratio == 128 and not GPU:
        # The last row has longer splits (below).
        positions[4:] = [1300, 5500]
    if not GPU:
        for module in (decode_kernel, compressed_rows):
            monkeypatch.setattr(module, "COMPRESSED_SPLIT", 64 if ratio == 4 else 16)
            monkeypatch.setattr(module, "COMPRESSED_SPLITS", 2)
    case = attention(sizes, dtype, ratio, positions)
    found = case.run(decode_kernel.compressed_decode)
    assert relative(found, case.run(ops.compressed_decode.reference)) < near(dtype)
    for row in (1, 5):
        assert torch.equal(case.row(row).run(decode_kernel.compressed_decode)[0], found[row])
    if dtype == torch.bfloat16:
        for config in decode_kernel.CONFIGS:
            assert torch.equal(case.run(decode_kernel.compressed_decode, config=config), found), config


def test_rows_of_one_sequence() -> None:
    """Rows of verified drafts have the bits of rows alone."""
    case = attention(SIZES, torch.bfloat16, 4, [278, 279, 280, 281, 0, 1, 2, 3], queries=4)
    found = case.run(decode_kernel.compressed_decode)
    assert relative(found, case.run(ops.compressed_decode.reference)) < near(torch.bfloat16)
    for row in (2, 5):
        assert torch.equal(case.row(row).run(decode_kernel.compressed_decode)[0], found[row])


@DTYPES
@BY_SHAPE
def test_rows_of_a_block(sizes: Sizes, dtype: torch.dtype) -> None:
    """All rows of a block see its last position, and a window that is wider than a multiple of 64."""
    sizes = replace(sizes, window=sizes.window + 5)
    case = attention(sizes, dtype, 0, [*[4] * 5, *[90] * 5, *[300] * 5], queries=5)
    found = case.run(decode_kernel.compressed_decode)
    assert relative(found, case.run(ops.compressed_decode.reference)) < near(dtype)
    for row in (3, 12):
        assert torch.equal(case.row(row).run(decode_kernel.compressed_decode)[0], found[row])


@pytest.mark.parametrize(("ratio", "index_heads"), [(0, 0), (4, 64), (128, 0)])
@pytest.mark.parametrize("positions", [64, 4096, 32768, 1 << 20])
def test_reserve_covers_partial_results(ratio: int, index_heads: int, positions: int) -> None:
    """The window's split alone is a result of the step, not reserved apart."""
    top_k = 512 if index_heads else 0
    table = torch.zeros(1, positions // 64, dtype=torch.int32)
    one = torch.zeros(1, dtype=torch.int64)
    rows = CompressedRows(positions=one, places=one, slots=one, page_table=table, page_size=64)
    found = footprint.compressed(
        num_heads=64,
        head_dim=512,
        ratio=ratio,
        index_heads=index_heads,
        index_dim=128 if index_heads else 0,
        top_k=top_k,
        groups_width=8192,
    )
    assert found.sums is not None
    taken = rows.num_splits(ratio, top_k) * 64 * 513
    if index_heads:
        taken += rows.num_entries(ratio)
    assert found.sums.num_bytes(1, 1, positions, CAPTURED) >= 4 * taken or not ratio
