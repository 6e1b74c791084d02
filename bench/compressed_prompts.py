"""Prompt rows of compressed attention at the sizes of DeepSeek-V4-Flash on one GPU: equality, then times.

`PYTHONPATH=bench:worker:router:kernels:deploy:. python bench/compressed_prompts.py`

1. Each kernel against its reference: choices and state exactly, the rest within rounding.
2. Bits of rows and of the state for several cuts of a prompt, with a neighbour.
3. Median times of each stage in CUDA graphs, and the TFLOP/s of attention.
4. Times of every config.
"""

import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from kernel_cases.case import assert_bits
from kernel_cases.compressed_prompts import (
    HEADS,
    INDEX_DIM,
    INDEX_HEADS,
    PAGE,
    RATIOS,
    SCALE,
    TOP_K,
    WINDOW,
    Chunk,
    Rows,
    attention_flops,
    make_layer,
    make_rows,
    new_found,
    poolings,
    prove_attention,
    prove_choice,
    prove_pool,
    prove_state,
    tables_of,
    whole,
)
from kernel_cases.timing import capture

from moeyard_kernels import ops
from moeyard_kernels.attention import attend_entries, choose_entries, index_scores
from moeyard_kernels.cuda.compressed_prompts import CompressedPrompts
from moeyard_kernels.types.layers import CompressedLayer
from moeyard_kernels.types.prompt_tables import PromptTables


def some(rows: Rows, begin: int, end: int) -> Rows:
    return tuple(None if x is None else x[begin:end] for x in rows)  # type: ignore[return-value]


def run(layer: CompressedLayer, rows: Rows, chunks: Sequence[Chunk]) -> torch.Tensor:
    plan: Any = SimpleNamespace(compressed_prompts=tables_of(chunks))
    return CompressedPrompts(layer).attend(*rows, plan)


def state_of(layer: CompressedLayer) -> list[torch.Tensor]:
    return [layer.recent, *([] if layer.pending is None else [layer.pending]), *(p.entries for p, _ in poolings(layer))]


@contextmanager
def part(name: str) -> Iterator[None]:
    """Print the result of a part. A failure does not hide later parts."""
    begin = time.monotonic()
    try:
        yield
        torch.cuda.synchronize()
        print(f"ok    {name} ({time.monotonic() - begin:.1f} s)", flush=True)
    except Exception:
        print(f"FAIL  {name}\n{traceback.format_exc(limit=-3)}", flush=True)


def stages(layer: CompressedLayer, rows: Rows, tables: PromptTables, found: torch.Tensor | None) -> dict[str, Callable]:
    """Return a call per stage of `CompressedPrompts.attend`, over the same ops."""
    queries, keys, compressed, wanted = rows
    sink = layer.sink
    held: dict[int, torch.Tensor] = {}

    def pool() -> None:
        for pooling, column in poolings(layer):
            options = {"pooling": pooling, "rope": layer.rope, "eps": layer.eps, "column": column, "tables": tables}
            ops.pool_blocks(compressed, layer.pending, **options)

    def each_part() -> Iterator[tuple[int, Any]]:
        if layer.indexer is not None:
            yield from enumerate(tables.chosen(4, TOP_K))

    def score() -> None:
        for n, chosen in each_part():
            assert layer.indexer is not None and wanted is not None and compressed is not None  # noqa: PT018
            weights = compressed[:, -INDEX_HEADS:]
            held[n] = ops.index_scores(wanted, weights, pooling=layer.indexer.pooling, chosen=chosen, tables=tables)

    def choose() -> None:
        for n, chosen in each_part():
            assert layer.indexer is not None and found is not None  # noqa: PT018
            ops.choose_entries(held[n], found, pooling=layer.indexer.pooling, top_k=TOP_K, chosen=chosen, tables=tables)

    def attend() -> torch.Tensor:
        options = {"window": WINDOW, "scale": SCALE, "tables": tables, "pooling": layer.pooling, "found": found}
        return ops.attend_entries(queries, keys, layer.recent, sink, **options)

    def keep() -> None:
        ops.keep_last(keys, layer.recent, compressed, layer.pending, tables=tables)

    return {"pool": pool, "scores": score, "choice": choose, "attention": attend, "state": keep}


def prove_chunks(ratio: int) -> None:
    """Compare bits of a prompt in one chunk, in several, and behind a snapshot, with and without a neighbour."""
    layer, length = make_layer(ratio), 2600
    rows, other = make_rows(layer, length), make_rows(layer, 77)
    # Pages in no order.
    pages = torch.randperm(64)[:41].tolist()
    near_by = Chunk(start=0, token_ids=range(77), pages=range(100, 102), state_slot=8)
    expected = run(layer, rows, [Chunk(start=0, token_ids=range(length), pages=pages, state_slot=0)])
    state = [x.clone() for x in state_of(layer)]
    entries = [pages_of(layer, n, pages) for n in range(len(poolings(layer)))]
    kept = [x[0] if x.dim() == 3 else None for x in state]
    for ends in ((128, length), (1024, 2176, length), (2048, 2304, 2560, length)):
        for x in state_of(layer):
            x.normal_()
        start, found = 0, []
        for end in ends:
            chunk = Chunk(start=start, token_ids=range(end - start), pages=pages, state_slot=0)
            both = tuple(
                None if a is None or b is None else torch.cat((a, b))
                for a, b in zip(other, some(rows, start, end), strict=True)
            )
            found.append(run(layer, both, [near_by, chunk])[77:])  # type: ignore[arg-type]
            start = end
        assert_bits(f"rows of chunks that end at {ends}", torch.cat(found), expected)
        for got, wanted in zip(state_of(layer), kept, strict=True):
            if wanted is not None:
                assert_bits(f"slots of chunks that end at {ends}", got[0], wanted)
        for n, wanted in enumerate(entries):
            assert_bits(f"entries of chunks that end at {ends}", pages_of(layer, n, pages), wanted)
    first = Chunk(start=0, token_ids=range(length), pages=pages, state_slot=0, snapshots=[(2432, 5)])
    run(layer, rows, [first])
    layer.recent[0].fill_(float("nan"))
    again = Chunk(start=2432, token_ids=range(length - 2432), pages=pages, state_slot=0, restored=5)
    assert_bits("rows behind a snapshot", run(layer, some(rows, 2432, length), [again]), expected[2432:])


def pages_of(layer: CompressedLayer, n: int, pages: Sequence[int]) -> torch.Tensor:
    """Return the entries of a prompt of 2600 rows."""
    pooling = poolings(layer)[n][0]
    ends = torch.arange(pooling.ratio - 1, 2600, pooling.ratio)
    places = (torch.tensor(pages)[ends // PAGE] * PAGE + ends % PAGE) // pooling.granule
    return pooling.entries[places.cuda()].clone()


def _repeat(body: Callable[[], object], count: int) -> None:
    for _ in range(count):
        body()


def median_us(body: Callable[[], object], *, repeats: int = 3, replays: int = 9) -> float:
    """Return the median time of `body` in a graph of `repeats` calls."""
    graph = capture(partial(_repeat, body, repeats))
    times = []
    for _ in range(replays + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / repeats)
    return statistics.median(times[2:])


def times_of(ratio: int, lengths: Sequence[int], table: list[str]) -> None:
    layer, tables = make_layer(ratio), tables_of(whole(lengths))
    rows = make_rows(layer, sum(lengths))
    found = new_found(layer, tables)
    calls = stages(layer, rows, tables, found)
    for call in calls.values():
        call()
    took = {}
    for name, call in calls.items():
        idle = (name == "pool" and not ratio) or (name in ("scores", "choice") and found is None)
        took[name] = 0.0 if idle else median_us(call)
        # The next stage reads what this one left, not the memory of a graph that is gone.
        call()
    rate = attention_flops(ratio, lengths) / took["attention"] / 1e6
    shape = f"{len(lengths)}x{lengths[0]}"
    cells = " | ".join(f"{us:9.1f}" for us in took.values())
    table.append(f"| {ratio:5} | {shape:7} | {cells} | {sum(took.values()):9.1f} | {rate:7.0f} |")


def times_of_configs() -> None:
    """Time all configs for one prompt of 8192 rows."""
    for ratio in (0, 4, 128):
        layer, tables = make_layer(ratio), tables_of(whole([8192]))
        rows = make_rows(layer, 8192)
        queries, keys, compressed, wanted = rows
        found = new_found(layer, tables)
        if found is not None:
            assert layer.indexer is not None and wanted is not None and compressed is not None  # noqa: PT018
            [chosen] = tables.chosen(4, TOP_K)
            options = {"pooling": layer.indexer.pooling, "chosen": chosen, "tables": tables}
            weights = compressed[:, -INDEX_HEADS:]
            seen = sum((p + 1) // 4 for p in range(2051, 8192))
            score = partial(index_scores.index_scores, wanted, weights, **options)
            for config in index_scores.CONFIGS:
                with part(f"index_scores {config}"):
                    us = median_us(partial(score, config=config))
                    print(f"      {us:.1f} us, {2 * seen * INDEX_HEADS * INDEX_DIM / us / 1e6:.0f} TFLOP/s")
            choose = partial(choose_entries.choose_entries, score(), found, top_k=TOP_K, **options)
            for each in choose_entries.CONFIGS:
                with part(f"choose_entries {each}"):
                    print(f"      {median_us(partial(choose, config=each)):.1f} us")
        options = {"window": WINDOW, "scale": SCALE, "tables": tables, "pooling": layer.pooling, "found": found}
        attend = partial(attend_entries.attend_entries, queries, keys, layer.recent, layer.sink, **options)
        for shape in attend_entries.CONFIGS:
            if shape.BM < HEADS:
                continue
            with part(f"attend_entries ratio {ratio} {shape}"):
                us = median_us(partial(attend, config=shape))
                print(f"      {us:.1f} us, {attention_flops(ratio, [8192]) / us / 1e6:.0f} TFLOP/s")


def main() -> None:
    torch.manual_seed(0)
    begin = time.monotonic()
    for ratio in RATIOS:
        with part(f"entries against the reference, ratio {ratio}"):
            prove_pool(ratio)
        with part(f"attention against the reference, ratio {ratio}"):
            prove_attention(ratio, attend_entries.CONFIGS)
        with part(f"state against the reference, ratio {ratio}"):
            prove_state(ratio)
    with part("scores and choices against the references"):
        prove_choice()
    for ratio in RATIOS:
        with part(f"bits of chunks, ratio {ratio}"):
            prove_chunks(ratio)
    heads = ("ratio", "prompts", "pool us", "scores us", "choice us", "attention", "state us", "sum us", "TFLOP/s")
    widths = (5, 7, 9, 9, 9, 9, 9, 9, 7)
    table = ["| " + " | ".join(f"{name:>{width}}" for name, width in zip(heads, widths, strict=True)) + " |"]
    for lengths in ([1024], [8192], [4096] * 4):
        for ratio in RATIOS:
            with part(f"times, ratio {ratio}, {len(lengths)}x{lengths[0]}"):
                times_of(ratio, lengths, table)
    with part("times of configs"):
        times_of_configs()
    print("\n".join(table))
    print(f"{time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
