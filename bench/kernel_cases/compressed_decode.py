"""Bench of compressed attention at output positions, at the sizes of DeepSeek-V4-Flash."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from kernel_cases.case import Case
from kernel_cases.compressed_prompts import (
    DIM,
    HEADS,
    INDEX_DIM,
    INDEX_HEADS,
    PAGE,
    ROPE,
    SPARE,
    TOP_K,
    WINDOW,
    make_pooling,
    random,
)
from moeyard_kernels import ops
from moeyard_kernels.attention.compressed_decode import CONFIGS, compressed_decode
from moeyard_kernels.types.compressed_rows import CompressedRows
from moeyard_kernels.types.layers import Pooling

OPS: tuple[str, ...] = (
    *("compressed_rotate", "rotate_back", "compressed_pool"),
    *("output_scores", "output_choice", "compressed_decode"),
)

RING, EPS = WINDOW + SPARE, 1e-6
# Rows of a block of DSpark.
BLOCK = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Inputs of one layer's launches."""

    rows: CompressedRows
    ratio: int
    q: torch.Tensor
    kv: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    table: torch.Tensor
    recent: torch.Tensor
    sink: torch.Tensor
    compressed: torch.Tensor | None
    pending: torch.Tensor | None
    poolings: tuple[Pooling, ...]
    window: int = WINDOW

    @property
    def granule(self) -> int:
        return min(self.ratio, 16)

    @property
    def chooses(self) -> bool:
        return self.ratio == 4 and self.rows.num_entries(4) > TOP_K

    def rotate(self, run: Callable[..., Any] = ops.compressed_rotate) -> Any:
        return run(
            self.q,
            self.kv,
            self.cos,
            self.sin,
            self.recent,
            heads=min(HEADS, self.q.shape[1] // DIM),
            index_heads=INDEX_HEADS if self.ratio == 4 else 0,
            eps=EPS,
            compressed=self.compressed,
            pending=self.pending,
            rows=self.rows,
        )

    def pool(self, run: Callable[..., Any] = ops.compressed_pool) -> None:
        if self.pending is not None:
            run(self.pending, self.table, poolings=self.poolings, rows=self.rows, eps=EPS)

    def scores(self, wanted: torch.Tensor, run: Callable[..., Any] = ops.output_scores) -> torch.Tensor:
        assert self.compressed is not None
        found: torch.Tensor = run(
            wanted,
            self.compressed[:, -INDEX_HEADS:],
            self.poolings[1].entries,
            rows=self.rows,
            ratio=4,
            granule=4,
            top_k=TOP_K,
        )
        return found

    def decode(
        self, queries: torch.Tensor, chosen: torch.Tensor | None, run: Callable[..., Any] = ops.compressed_decode
    ) -> torch.Tensor:
        found: torch.Tensor = run(
            queries,
            self.recent,
            self.poolings[0].entries if self.poolings else None,
            chosen,
            self.sink,
            self.cos,
            self.sin,
            rows=self.rows,
            window=self.window,
            ratio=self.ratio,
            granule=self.granule,
            top_k=TOP_K if self.ratio == 4 else 0,
        )
        return found

    def row(self, row: int) -> "Layer":
        """Return one row as a step of its own."""
        rows, at = self.rows, slice(row, row + 1)
        alone = replace(
            rows,
            positions=rows.positions[at].clone(),
            places=rows.places[at].clone(),
            slots=rows.slots[at].clone(),
            page_table=rows.page_table[at].clone(),
        )
        compressed = None if self.compressed is None else self.compressed[at]
        q, kv, cos, sin = (x[at] for x in (self.q, self.kv, self.cos, self.sin))
        return replace(self, rows=alone, q=q, kv=kv, cos=cos, sin=sin, compressed=compressed)


def make(ratio: int, positions: list[int]) -> Layer:
    """Return random inputs of rows at these positions, each of a sequence of its own."""
    count, pages = len(positions), -(-(max(positions) + 1) // PAGE)
    table = torch.randperm(count * pages, device="cuda").view(count, pages).int()
    at = torch.tensor(positions, device="cuda")
    places = table.gather(1, (at // PAGE)[:, None]).long()[:, 0] * PAGE + at % PAGE
    rows = CompressedRows(
        positions=at, places=places, slots=torch.randperm(count, device="cuda"), page_table=table, page_size=PAGE
    )

    index = INDEX_HEADS if ratio == 4 else 0
    dims = {4: (DIM, INDEX_DIM), 128: (DIM,), 0: ()}[ratio]
    columns = {4: 4 * (DIM + INDEX_DIM), 128: 2 * DIM, 0: 0}[ratio]
    reach = 8 if ratio == 4 else ratio
    angle = torch.rand(max(positions) + 1, ROPE // 2, device="cuda") * 6
    angles = torch.cat((angle.cos(), angle.sin()), 1)
    cos, sin = angles[at].chunk(2, 1)
    return Layer(
        rows=rows,
        ratio=ratio,
        q=random(count, HEADS * DIM + index * INDEX_DIM),
        kv=random(count, DIM),
        cos=cos,
        sin=sin,
        table=angles,
        recent=random(count, RING, DIM),
        sink=random(HEADS, dtype=torch.float32),
        compressed=random(count, columns + index, dtype=torch.float32) if ratio else None,
        pending=random(count, reach + SPARE, columns, dtype=torch.float32) if ratio else None,
        poolings=tuple(make_pooling(ratio, dim, count * pages * PAGE) for dim in dims),
    )


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def check(ratio: int) -> Iterator[tuple[str, bool, str]]:
    """Yield (what, whether it holds, numbers) for rows around every border."""
    layer = make(ratio, [0, 3, 127, 300, 2047, 2048, 2051, 9983, 30000, *range(4000, 4012)])
    other = replace(
        layer,
        recent=layer.recent.clone(),
        pending=None if layer.pending is None else layer.pending.clone(),
        poolings=tuple(replace(each, entries=each.entries.clone()) for each in layer.poolings),
    )
    queries, keys, wanted = layer.rotate()
    pairs = zip((queries, keys, wanted), other.rotate(ops.compressed_rotate.reference), strict=True)
    worst = max(error(a, b) for a, b in pairs if a is not None)
    yield "rotation", worst < 4e-3, f"error {worst:.1e}"
    yield "window in the slots", torch.equal(layer.recent[layer.rows.slots, layer.rows.positions % RING], keys), ""
    if layer.pending is not None:
        assert other.pending is not None
        yield "pooled values in the slots", torch.equal(layer.pending, other.pending), ""
        layer.pool()
        other.pool(ops.compressed_pool.reference)
        ended = (layer.rows.positions + 1) % ratio == 0
        places = layer.rows.places[ended] // layer.granule
        for a, b in zip(layer.poolings, other.poolings, strict=True):
            same = a.entries.clone().index_copy_(0, places, b.entries[places])
            yield "other entries", torch.equal(same, b.entries), ""
            found = error(a.entries[places], b.entries[places])
            yield f"entries of {a.norm.shape[0]}", found < 4e-3, f"error {found:.1e}"
    chosen = None
    if ratio == 4:
        scores = layer.scores(wanted)
        expected = layer.scores(wanted, ops.output_scores.reference)
        chosen = ops.output_choice(scores, layer.rows.positions, ratio=4, top_k=TOP_K)
        exact = ops.output_choice.reference(scores, layer.rows.positions, ratio=4, top_k=TOP_K)
        counts = ((layer.rows.positions + 1) // 4).tolist()
        seen = [(row, count) for row, count in enumerate(counts) if count > TOP_K]
        worst = max(error(scores[row, :count], expected[row, :count]) for row, count in seen)
        yield "scores", worst < 1e-5, f"error {worst:.1e}"
        yield "choice", all(torch.equal(chosen[row], exact[row]) for row, _ in seen), ""
        ties = (scores * 2).round() * 0.5 + 0.0
        found = ops.output_choice(ties, layer.rows.positions, ratio=4, top_k=TOP_K)
        exact = ops.output_choice.reference(ties, layer.rows.positions, ratio=4, top_k=TOP_K)
        yield "choice among ties", all(torch.equal(found[row], exact[row]) for row, _ in seen), ""
    out = layer.decode(queries, chosen)
    reference = layer.decode(queries, chosen, ops.compressed_decode.reference)
    worst = max(error(a, b) for a, b in zip(out, reference, strict=True))
    yield "attention", worst < 1e-2, f"error {worst:.1e}"
    # Each config is another build.
    for config in CONFIGS if ratio == 4 else ():
        found = layer.decode(queries, chosen, partial(compressed_decode, config=config))
        yield f"tile of {config.BM}, keys as {'rows' if config.SWAP else 'columns'}", torch.equal(found, out), ""
    alike = True
    for row in (1, 6, 8, 12):
        one = layer.row(row)
        q, _, w = one.rotate()
        its = None
        if ratio == 4 and one.chooses:
            its = ops.output_choice(one.scores(w), one.rows.positions, ratio=4, top_k=TOP_K)
        alike &= torch.equal(one.decode(q, its)[0], out[row])
    yield "rows alone", alike, ""
    back = ops.rotate_back(queries, layer.cos, layer.sin)
    yield "rotation back", torch.equal(back, ops.rotate_back.reference(queries, layer.cos, layer.sin)), ""


def moved(layer: Layer, context: int) -> int:
    """Return the fewest bytes of attention: keys, entries, queries and results."""
    seen = context // layer.ratio if layer.ratio else 0
    some = min(seen, TOP_K) if layer.ratio == 4 else seen
    return layer.rows.num_rows * 2 * DIM * (WINDOW + some + 2 * HEADS)


def prove(ratio: int) -> None:
    """Raise AssertionError with all that `check` finds wrong."""
    wrong = [f"{what} {numbers}" for what, holds, numbers in check(ratio) if not holds]
    assert not wrong, f"ratio {ratio}: {'; '.join(wrong)}"


def cases() -> Iterator[Case]:
    """Yield each op behind short and long contexts. Rows to pool are at the end of a block."""
    for ratio, context, count in (
        (4, 4000, 1),
        (4, 30000, 64),
        (4, 1900, 64),
        (128, 30000, 1),
        (128, 4000, 64),
        (0, 300, 8),
    ):
        yield from _of_layer(ratio, context, count)
    for count in (1, 64):
        yield from _of_blocks(count)


def _of_blocks(count: int) -> Iterator[Case]:
    """Yield the launches of DSpark for `count` sequences: keys that are stored alone, and blocks behind them."""
    layer = make(0, [300] * (BLOCK * count))
    rows = replace(layer.rows, slots=layer.rows.slots[:count], page_table=layer.rows.page_table[:count])
    layer = replace(layer, rows=rows, window=WINDOW + BLOCK)
    keys, queries = replace(layer, q=layer.q[:, :0]), layer.rotate()[0]
    case, shape = partial(Case, prove=partial(prove, 0)), f"T{BLOCK * count} blocks of {BLOCK}"
    yield case(
        op="compressed_rotate", shape=f"{shape}, keys", run=partial(Layer.rotate, keys), num_bytes=3 * layer.kv.nbytes
    )
    moved = 2 * queries.nbytes + 2 * DIM * count * layer.window
    yield case(op="compressed_decode", shape=shape, run=partial(Layer.decode, layer, queries, None), num_bytes=moved)


def _of_layer(ratio: int, context: int, count: int) -> Iterator[Case]:
    layer = make(ratio, [context] * count)
    queries, _, wanted = layer.rotate()
    shape = f"T{count} L{context} ratio {ratio}"
    case = partial(Case, shape=shape, prove=partial(prove, ratio))
    passed = layer.q.nbytes + queries.nbytes + 2 * layer.kv.nbytes
    passed += 0 if wanted is None else wanted.nbytes
    passed += 0 if layer.compressed is None else 2 * layer.compressed.nbytes
    yield case(op="compressed_rotate", run=partial(Layer.rotate, layer), num_bytes=passed)
    back = partial(ops.rotate_back, queries, layer.cos, layer.sin)
    yield case(op="rotate_back", run=back, num_bytes=2 * queries.nbytes)
    if layer.pending is not None:
        ended = make(ratio, [context // 128 * 128 - 1] * count)
        reach = 8 if ratio == 4 else 128
        read = count * reach * layer.pending.shape[2] * (2 if ratio == 4 else 4)
        yield case(op="compressed_pool", run=partial(Layer.pool, ended), num_bytes=read)
    chosen = None
    if layer.chooses:
        scores = layer.scores(wanted)
        seen = count * (context // 4)
        yield case(
            op="output_scores",
            run=partial(Layer.scores, layer, wanted),
            num_bytes=seen * (2 * INDEX_DIM + 4) + wanted.nbytes,
            num_flops=2 * seen * INDEX_HEADS * INDEX_DIM,
        )
        chosen = ops.output_choice(scores, layer.rows.positions, ratio=4, top_k=TOP_K)
        choose = partial(ops.output_choice, scores, layer.rows.positions, ratio=4, top_k=TOP_K)
        yield case(op="output_choice", run=choose, num_bytes=4 * seen + chosen.nbytes)
    yield case(
        op="compressed_decode",
        run=partial(Layer.decode, layer, queries, chosen),
        num_bytes=moved(layer, context),
        variants=[
            (c, partial(Layer.decode, layer, queries, chosen, partial(compressed_decode, config=c))) for c in CONFIGS
        ],
    )
