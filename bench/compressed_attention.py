"""Compressed attention at output positions on a GPU, at the sizes of DeepSeek-V4-Flash: bits, errors, and times.

`PYTHONPATH=bench:worker:router:kernels:deploy:. python bench/compressed_attention.py` checks every kernel against its
reference, and a row alone against the row in a batch. Then it prints median times of CUDA graphs, in microseconds per
launch with a cold L2, beside the bytes that must move at copy bandwidth. It ends after about a minute.
"""

import sys
import time
import traceback
from functools import partial

import torch
from kernel_cases.compressed_decode import INDEX_DIM, TOP_K, Layer, check, make, moved
from kernel_cases.head_linear import groups_case
from kernel_cases.timing import Timer

from moeyard_kernels import ops
from moeyard_kernels.attention.compressed_decode import CONFIGS, compressed_decode

RATIOS, CONTEXTS, ROWS = (4, 128, 0), (300, 4000, 30000), (1, 8, 64)
SECONDS = 55.0


def timed(timer: Timer, ratio: int, context: int, count: int) -> str:
    """Return one line of times."""
    # Rows of `layer` end no block, and rows of `ended` do.
    layer = make(ratio, [context] * count)
    ended = make(ratio, [context // 128 * 128 - 1] * count)
    queries, _, wanted = layer.rotate()
    small = 1 << 19
    times = {"rotate": timer.seconds(partial(Layer.rotate, layer), small)}
    chosen, index = None, 0
    if ratio:
        times["pool"] = timer.seconds(partial(Layer.pool, layer), small)
    if layer.chooses:
        scores = layer.scores(wanted)
        chosen = ops.output_choice(scores, layer.rows.positions, ratio=4, top_k=TOP_K)
        index = 2 * INDEX_DIM * (context // 4) * count
        times["scores"] = timer.seconds(partial(Layer.scores, layer, wanted), index)
        times["choice"] = timer.seconds(
            partial(ops.output_choice, scores, layer.rows.positions, ratio=4, top_k=TOP_K), scores.nbytes
        )
    bytes_of_keys = moved(layer, context)
    times["attend"] = timer.seconds(partial(Layer.decode, layer, queries, chosen), bytes_of_keys)
    total = sum(times.values())
    if ratio:
        times["pool at an end"] = timer.seconds(partial(Layer.pool, ended), small)
    floor = (bytes_of_keys + index) / timer.copy_bandwidth
    listed = "  ".join(f"{name} {1e6 * each:6.1f}" for name, each in times.items())
    return f"{ratio:5} {context:6} {count:4}  total {1e6 * total:6.1f}  floor {1e6 * floor:6.1f}  {listed}"


def tiles(timer: Timer, context: int, count: int) -> str:
    """Return one line of times of the configs of attention with a choice."""
    layer = make(4, [context] * count)
    queries, _, wanted = layer.rotate()
    chosen = ops.output_choice(layer.scores(wanted), layer.rows.positions, ratio=4, top_k=TOP_K)
    found = []
    for config in CONFIGS:
        run = partial(Layer.decode, layer, queries, chosen, partial(compressed_decode, config=config))
        seconds = timer.seconds(run, moved(layer, context))
        found.append(f"{config.BM} {'rows' if config.SWAP else 'columns'} {1e6 * seconds:6.1f}")
    return f"attend {context:6} {count:4}  {'  '.join(found)}"


def products(timer: Timer, count: int) -> str:
    """Return one line of times of the layer's other products: `compress` of ratio 4, and the output of groups."""
    x, weight = (torch.randn(n, 4096, device="cuda").bfloat16() for n in (count, 2624))
    compress = partial(ops.linear, x, weight, static_weight=True, out_dtype=torch.float32)
    found = [f"compress {1e6 * timer.seconds(compress, weight.nbytes):6.1f}"]
    groups = groups_case(count)
    for config, run in [(None, groups.run), *groups.variants]:
        name = "default" if config is None else f"{config.kernel} {config.BM}x{config.BN}"
        found.append(f"{name} {1e6 * timer.seconds(run, groups.num_bytes):6.1f}")
    floors = [1e6 * each / timer.copy_bandwidth for each in (weight.nbytes, groups.num_bytes)]
    return f"products {count:4}  floors {floors[0]:.1f} and {floors[1]:.1f}  {'  '.join(found)}"


def main() -> int:
    torch.manual_seed(1)
    begun, failed = time.monotonic(), 0
    for ratio in RATIOS:
        try:
            for what, holds, numbers in check(ratio):
                failed += not holds
                print(f"ratio {ratio:3}  {'equal' if holds else 'WRONG':5}  {what}  {numbers}", flush=True)
        except Exception:
            failed += 1
            traceback.print_exc()
    print(f"checked after {time.monotonic() - begun:.1f} s, {failed} failed", flush=True)
    timer = Timer()
    print(f"copy {timer.copy_bandwidth / 1e12:.2f} TB/s\nratio context rows, us per layer", flush=True)
    for ratio in RATIOS:
        for context in CONTEXTS:
            for count in ROWS:
                if time.monotonic() - begun > SECONDS:
                    print("out of time")
                    return failed
                try:
                    print(timed(timer, ratio, context, count), flush=True)
                except Exception:
                    failed += 1
                    traceback.print_exc()
                torch.cuda.empty_cache()
    for count in ROWS:
        for line in (partial(tiles, timer, 4000, count), partial(products, timer, count)):
            if time.monotonic() - begun > SECONDS:
                print("out of time")
                return failed
            try:
                print(line(), flush=True)
            except Exception:
                failed += 1
                traceback.print_exc()
    return failed


if __name__ == "__main__":
    sys.exit(main())
