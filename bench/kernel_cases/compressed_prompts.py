"""Bench of prompt rows of compressed attention at the sizes of DeepSeek-V4-Flash.

`bench/compressed_prompts.py` also compares cuts of a prompt, and times the stages of a layer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from kernel_cases.case import Case, assert_bits
from moeyard_kernels import ops
from moeyard_kernels.attention import attend_entries, choose_entries, index_scores, keep_last, pool_blocks
from moeyard_kernels.cuda.compressed_prompts import plan_prompts
from moeyard_kernels.types.layers import CompressedLayer, Indexer, Pooling
from moeyard_kernels.types.prompt_tables import PromptTables
from moeyard_worker.scheduling.step import Chunk

OPS = ("pool_blocks", "index_scores", "choose_entries", "attend_entries", "keep_last")

HEADS, DIM, ROPE, WINDOW, SPARE = 64, 512, 64, 128, 16
INDEX_HEADS, INDEX_DIM, TOP_K = 64, 128, 512
PAGE, NUM_SLOTS, POSITIONS = 64, 16, 32768
SCALE = DIM**-0.5
BF16, FP32 = torch.bfloat16, torch.float32
RATIOS = (0, 4, 128)


def random(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=FP32).to(dtype)


def make_pooling(ratio: int, width: int, positions: int = POSITIONS) -> Pooling:
    """Return a pooling with random entries of as many positions."""
    columns = 2 * width if ratio == 4 else width
    return Pooling(
        ratio=ratio,
        overlaps=ratio == 4,
        bias=random(ratio, columns, dtype=FP32),
        norm=random(width),
        entries=random(positions // min(ratio, 16), width),
    )


def make_layer(ratio: int) -> CompressedLayer:
    angles = torch.rand(POSITIONS, ROPE // 2, device="cuda") * 6
    layer = CompressedLayer(
        num_heads=HEADS,
        head_dim=DIM,
        rope_dim=ROPE,
        window=WINDOW,
        eps=1e-6,
        rope=torch.cat((angles.cos(), angles.sin()), 1),
        sink=random(HEADS, dtype=FP32),
        o_a=random(1),
        recent=random(NUM_SLOTS, WINDOW + SPARE, DIM),
    )
    if not ratio:
        return layer
    main, indexer = make_pooling(ratio, DIM), None
    columns, reach = 2 * main.bias.shape[1], ratio
    if ratio == 4:
        indexer = Indexer(num_heads=INDEX_HEADS, top_k=TOP_K, pooling=make_pooling(4, INDEX_DIM))
        columns, reach = columns + 2 * indexer.pooling.bias.shape[1], 2 * ratio
    pending = random(NUM_SLOTS, reach + SPARE, columns, dtype=FP32)
    return replace(layer, pooling=main, indexer=indexer, pending=pending)


Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]


def make_rows(layer: CompressedLayer, count: int) -> Rows:
    """Return queries, keys, the product with `compress`, and queries of the indexer."""
    compressed = wanted = None
    if layer.pending is not None:
        compressed = random(count, layer.pending.shape[2] + (INDEX_HEADS if layer.indexer else 0), dtype=FP32)
    if layer.indexer is not None:
        wanted = random(count, INDEX_HEADS, INDEX_DIM)
    return random(count, HEADS, DIM), random(count, DIM), compressed, wanted


def tables_of(chunks: Sequence[Chunk]) -> PromptTables:
    return plan_prompts(chunks, PAGE, "cuda")


def chunk(start: int, count: int, *, pages: Sequence[int], slot: int, **options: Any) -> Chunk:
    """Return prompt rows of a sequence."""
    given = {"state_slot": slot, "prompt": True, "num_sampled": 0, **options}
    return Chunk(key=(b"", ""), start=start, token_ids=(0,) * count, pages=tuple(pages), **given)


def whole(lengths: Sequence[int]) -> list[Chunk]:
    """Return whole prompts, one after the other in the pages."""
    found, page = [], 0
    for slot, length in enumerate(lengths):
        pages = range(page, page + -(-length // PAGE))
        found.append(chunk(0, length, pages=pages, slot=slot))
        page += len(pages)
    return found


def poolings(layer: CompressedLayer) -> list[tuple[Pooling, int]]:
    """Return each pooling with its first column."""
    found = [] if layer.pooling is None else [(layer.pooling, 0)]
    if layer.pooling is not None and layer.indexer is not None:
        found.append((layer.indexer.pooling, 2 * layer.pooling.bias.shape[1]))
    return found


def state_of(layer: CompressedLayer) -> list[torch.Tensor]:
    """Return slots and pages: recent, pending, entries, entries of the indexer."""
    slots = [layer.recent] if layer.pending is None else [layer.recent, layer.pending]
    return slots + [each.entries for each, _ in poolings(layer)]


# A prompt, a chunk behind a slot, and one behind a restored snapshot.
CHUNKS = [
    chunk(0, 333, pages=range(6), slot=0, snapshots=((128, 5),)),
    chunk(2048, 150, pages=range(10, 45), slot=1),
    chunk(4096, 7, pages=range(50, 115), slot=2, restored=3, snapshots=((4100, 3),)),
]


def near(name: str, got: torch.Tensor, wanted: torch.Tensor, bound: float) -> None:
    error = float((got.double() - wanted.double()).norm() / wanted.double().norm())
    print(f"      {name}: relative error {error:.1e}", flush=True)
    assert error < bound, f"{name}: {error:.1e}, allowed {bound:.1e}"


def new_found(layer: CompressedLayer, tables: PromptTables) -> torch.Tensor | None:
    """Return room for the choices of rows, None if no row chooses."""
    if layer.indexer is None or not tables.chosen(4, TOP_K):
        return None
    return torch.zeros(tables.num_rows, TOP_K, dtype=torch.int32, device="cuda")


def prove_pool(ratio: int) -> None:
    """Compare entries with the reference."""
    layer, tables = make_layer(ratio), tables_of(CHUNKS)
    _, _, compressed, _ = make_rows(layer, tables.num_rows)
    for pooling, column in poolings(layer):
        options = {"rope": layer.rope, "eps": layer.eps, "column": column, "tables": tables}
        got, expected = (replace(pooling, entries=pooling.entries.clone()) for _ in range(2))
        ops.pool_blocks(compressed, layer.pending, pooling=got, **options)
        ops.pool_blocks.reference(compressed, layer.pending, pooling=expected, **options)
        new = (expected.entries != pooling.entries).any(1)
        assert_bits("other entries", got.entries[~new], pooling.entries[~new])
        name = f"{int(new.sum())} entries of ratio {ratio}, width {pooling.norm.shape[0]}"
        near(name, got.entries[new], expected.entries[new], 2e-3)


def prove_choice() -> None:
    """Compare scores with the reference within rounding, and choices exactly."""
    layer, tables = make_layer(4), tables_of(CHUNKS)
    _, _, compressed, wanted = make_rows(layer, tables.num_rows)
    assert layer.indexer is not None and wanted is not None and compressed is not None  # noqa: PT018
    for chosen in tables.chosen(4, TOP_K):
        options = {"pooling": layer.indexer.pooling, "chosen": chosen, "tables": tables}
        got, expected = (
            score(wanted, compressed[:, -INDEX_HEADS:], **options)
            for score in (ops.index_scores, ops.index_scores.reference)
        )
        for i, row in enumerate(chosen.rows.tolist()):
            seen = (int(tables.rows[row, 1]) + 1) // 4
            error = (got[i, :seen] - expected[i, :seen]).abs().max() / expected[i, :seen].abs().max()
            assert float(error) < 1e-4, f"scores of row {row}: {float(error):.1e}"
        # With few values, ties decide.
        for name, scores in (("choice", got), ("choice among ties", got.mul(0.1).round())):
            found, other = (torch.full((tables.num_rows, TOP_K), -77, device="cuda").int() for _ in range(2))
            ops.choose_entries(scores, found, top_k=TOP_K, **options)
            ops.choose_entries.reference(scores, other, top_k=TOP_K, **options)
            assert_bits(name, found, other)


def random_choice(layer: CompressedLayer, tables: PromptTables) -> torch.Tensor | None:
    """Return the choices of rows by random scores, None if no row chooses."""
    found = new_found(layer, tables)
    if found is not None and layer.indexer is not None:
        for chosen in tables.chosen(4, TOP_K):
            scores = random(len(chosen.rows), chosen.width, dtype=FP32)
            ops.choose_entries(scores, found, pooling=layer.indexer.pooling, top_k=TOP_K, chosen=chosen, tables=tables)
    return found


def prove_attention(ratio: int) -> None:
    """Compare attention with its reference, and the bits of all configs."""
    layer, tables = make_layer(ratio), tables_of(CHUNKS)
    rows, found = make_rows(layer, tables.num_rows), random_choice(layer, tables)
    inputs = rows[0], rows[1], layer.recent, layer.sink
    options = {"window": WINDOW, "scale": SCALE, "tables": tables, "pooling": layer.pooling, "found": found}
    expected = ops.attend_entries.reference(*inputs, **options)
    first = attend_entries.attend_entries(*inputs, **options, config=attend_entries.CONFIGS[0])
    for config in attend_entries.CONFIGS:
        got = attend_entries.attend_entries(*inputs, **options, config=config)
        near(f"attention, {config}", got, expected, 1e-2)
        worst = (got.double() - expected.double()).norm(dim=(1, 2)) / expected.double().norm(dim=(1, 2))
        assert float(worst.max()) < 2e-2, f"row {int(worst.argmax())}: {float(worst.max()):.1e}"
        assert_bits(f"{config}", got, first)


def prove_state(ratio: int) -> None:
    """Compare the slots that chunks leave with those of the reference."""
    layer, tables = make_layer(ratio), tables_of(CHUNKS)
    _, keys, compressed, _ = make_rows(layer, tables.num_rows)
    kept = []
    for keep in (ops.keep_last, ops.keep_last.reference):
        slots = [None if x is None else x.clone() for x in (layer.recent, layer.pending)]
        keep(keys, slots[0], compressed, slots[1], tables=tables)
        kept.append(slots)
    assert_bits("state", *kept)


def attention_flops(ratio: int, lengths: Sequence[int]) -> int:
    """Return the operations on keys that the rows see."""
    keys = 0
    for length in lengths:
        at = torch.arange(1, length + 1)
        seen = at.clamp(max=WINDOW)
        if ratio:
            seen = seen + (at // ratio).clamp(max=TOP_K if ratio == 4 else length)
        keys += int(seen.sum())
    return keys * HEADS * DIM * 4


def cases() -> Iterator[Case]:
    """Yield the launches of layers of each kind for a prompt of 8192 rows."""
    for ratio in RATIOS:
        yield from layer_cases(ratio, [8192])


def layer_cases(ratio: int, lengths: Sequence[int]) -> Iterator[Case]:
    """Yield the launches of a layer for whole prompts."""
    layer, tables = make_layer(ratio), tables_of(whole(lengths))
    queries, keys, compressed, wanted = make_rows(layer, sum(lengths))
    name = f"R{ratio} P{'+'.join(map(str, lengths))}"
    for pooling, column in poolings(layer):
        options = {"pooling": pooling, "rope": layer.rope, "eps": layer.eps, "column": column, "tables": tables}
        yield Case(
            op="pool_blocks",
            shape=f"{name} D{pooling.norm.shape[0]}",
            run=partial(pool_blocks.pool_blocks, compressed, layer.pending, **options),
            prove=partial(prove_pool, ratio),
            num_bytes=sum(lengths) * 8 * pooling.bias.shape[1],
        )
    room = new_found(layer, tables)
    if room is not None:
        assert layer.indexer is not None and wanted is not None and compressed is not None  # noqa: PT018
        [chosen] = tables.chosen(ratio, TOP_K)
        options = {"pooling": layer.indexer.pooling, "chosen": chosen, "tables": tables}
        first = ratio * (TOP_K + 1) - 1
        count = sum((position + 1) // ratio for length in lengths for position in range(first, length))
        score = partial(index_scores.index_scores, wanted, compressed[:, -INDEX_HEADS:], **options)
        yield Case(
            op="index_scores",
            shape=name,
            run=score,
            prove=prove_choice,
            num_bytes=4 * count + 2 * wanted.numel(),
            num_flops=2 * count * INDEX_HEADS * INDEX_DIM,
            variants=tuple((config, partial(score, config=config)) for config in index_scores.CONFIGS),
            early=False,
        )
        scores = random(len(chosen.rows), chosen.width, dtype=FP32)
        choose = partial(choose_entries.choose_entries, scores, room, top_k=TOP_K, **options)
        yield Case(
            op="choose_entries",
            shape=name,
            run=choose,
            prove=prove_choice,
            num_bytes=4 * (count + len(chosen.rows) * TOP_K),
            variants=tuple((config, partial(choose, config=config)) for config in choose_entries.CONFIGS),
        )
    options = {"window": WINDOW, "scale": SCALE, "tables": tables, "pooling": layer.pooling}
    options["found"] = random_choice(layer, tables)
    attend = partial(attend_entries.attend_entries, queries, keys, layer.recent, layer.sink, **options)
    yield Case(
        op="attend_entries",
        shape=name,
        run=attend,
        prove=partial(prove_attention, ratio),
        num_bytes=4 * queries.numel(),
        num_flops=attention_flops(ratio, lengths),
        variants=tuple((each, partial(attend, config=each)) for each in attend_entries.CONFIGS),
        early=False,
    )
    states = [(keys, layer.recent), (compressed, layer.pending)]
    yield Case(
        op="keep_last",
        shape=name,
        run=partial(keep_last.keep_last, keys, layer.recent, compressed, layer.pending, tables=tables),
        prove=partial(prove_state, ratio),
        num_bytes=sum(2 * slots[0].numel() * slots.itemsize for _, slots in states if slots is not None),
    )
