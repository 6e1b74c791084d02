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
    OPS,
    PAGE,
    RATIOS,
    Rows,
    attention_flops,
    cases,
    chunk,
    layer_cases,
    make_layer,
    make_rows,
    poolings,
    prove_attention,
    prove_choice,
    prove_pool,
    prove_state,
    state_of,
    tables_of,
)
from kernel_cases.timing import capture, replay_seconds

from moeyard_kernels.cuda.compressed_prompts import CompressedPrompts
from moeyard_kernels.types.layers import CompressedLayer
from moeyard_worker.scheduling.step import Chunk


def some(rows: Rows, begin: int, end: int) -> Rows:
    return tuple(None if x is None else x[begin:end] for x in rows)  # type: ignore[return-value]


def run(layer: CompressedLayer, rows: Rows, chunks: Sequence[Chunk]) -> torch.Tensor:
    plan: Any = SimpleNamespace(compressed_prompts=tables_of(chunks))
    return CompressedPrompts(layer).attend(*rows, plan)


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


def prove_chunks(ratio: int) -> None:
    """Compare bits of a prompt in one chunk, in several, and behind a snapshot, with and without a neighbour."""
    layer, length = make_layer(ratio), 2600
    rows, other = make_rows(layer, length), make_rows(layer, 77)
    # Pages in no order.
    pages = torch.randperm(64)[:41].tolist()
    near_by = chunk(0, 77, pages=range(100, 102), slot=8)
    expected = run(layer, rows, [chunk(0, length, pages=pages, slot=0)])
    state = [x.clone() for x in state_of(layer)]
    entries = [pages_of(layer, n, pages) for n in range(len(poolings(layer)))]
    kept = [x[0] if x.dim() == 3 else None for x in state]
    for ends in ((128, length), (1024, 2176, length), (2048, 2304, 2560, length)):
        for x in state_of(layer):
            x.normal_()
        start, found = 0, []
        for end in ends:
            part_of = chunk(start, end - start, pages=pages, slot=0)
            both = tuple(
                None if a is None or b is None else torch.cat((a, b))
                for a, b in zip(other, some(rows, start, end), strict=True)
            )
            found.append(run(layer, both, [near_by, part_of])[77:])  # type: ignore[arg-type]
            start = end
        assert_bits(f"rows of chunks that end at {ends}", torch.cat(found), expected)
        for got, wanted in zip(state_of(layer), kept, strict=True):
            if wanted is not None:
                assert_bits(f"slots of chunks that end at {ends}", got[0], wanted)
        for n, wanted in enumerate(entries):
            assert_bits(f"entries of chunks that end at {ends}", pages_of(layer, n, pages), wanted)
    first = chunk(0, length, pages=pages, slot=0, snapshots=((2432, 5),))
    run(layer, rows, [first])
    layer.recent[0].fill_(float("nan"))
    again = chunk(2432, length - 2432, pages=pages, slot=0, restored=5)
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
    times = [replay_seconds(graph) for _ in range(replays + 2)]
    return statistics.median(times[2:]) * 1e6 / repeats


def times_of(ratio: int, lengths: Sequence[int], table: list[str]) -> None:
    """Add a line of times of a layer's launches for whole prompts."""
    took = dict.fromkeys(OPS, 0.0)
    for case in layer_cases(ratio, lengths):
        took[case.op] += median_us(case.run)
    rate = attention_flops(ratio, lengths) / took["attend_entries"] / 1e6
    shape = f"{len(lengths)}x{lengths[0]}"
    cells = " | ".join(f"{us:9.1f}" for us in took.values())
    table.append(f"| {ratio:5} | {shape:7} | {cells} | {sum(took.values()):9.1f} | {rate:7.0f} |")


def times_of_configs() -> None:
    """Time all configs for one prompt of 8192 rows."""
    for case in cases():
        for config, run_with in case.variants:
            with part(f"{case.op} {case.shape} {config}"):
                us = median_us(run_with)
                rate = f", {case.num_flops / us / 1e6:.0f} TFLOP/s" if case.num_flops else ""
                print(f"      {us:.1f} us{rate}")


def main() -> None:
    torch.manual_seed(0)
    begin = time.monotonic()
    for ratio in RATIOS:
        with part(f"entries against the reference, ratio {ratio}"):
            prove_pool(ratio)
        with part(f"attention against the reference, ratio {ratio}"):
            prove_attention(ratio)
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
