"""The time between two replays of a decode step: `python bench/step_gaps.py --model Qwen3.5-35B-A3B:8`, on a GPU.

A worker copies a step's inputs to the device, replays its graph and copies tokens and their logits back, in one stream
and without waiting. Each line adds or changes one of these. The difference to the graph alone is its cost per step.
Rows and layers are those of `stored_configs.py`, and every step repeats the last one's contents.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence

import stored_configs
import torch
import triton
import triton.language as tl

from moeyard_worker.engine.sampling.sampling import chosen_logits
from moeyard_worker.engine.sampling.step_sampler import StepSampler
from moeyard_worker.engine.steps.gpu_runner import _to_host as to_host

STEPS, TURNS = 100, 7


@triton.jit
def _copy_kernel(p_from, p_to, N, BLOCK: tl.constexpr):
    """Copy N words of 4 bytes. Either side may be pinned memory of the host. Grid: (1,)."""
    for i in range(0, N, BLOCK):
        o = i + tl.arange(0, BLOCK)
        tl.store(p_to + o, tl.load(p_from + o, mask=o < N), mask=o < N)


@torch.inference_mode()
def measure(model: str, rows: Sequence[int]) -> None:
    """Print the milliseconds of a step for each number of rows with each addition."""
    shape, layers = model.split(":")
    worker, runner = stored_configs.load(shape, int(layers), max(rows), 4, "cuda")
    sampler = stored_configs.sampler_of(runner, max(rows))
    pool = torch.cuda.graph_pool_handle()
    with runner.backend.without_collection():
        for count in rows:
            variant = stored_configs.Variant(runner, sampler, {}, pool, rows=count, context=128, pages=4)
            variant.chain(20)
            time_step(f"{model} {count} rows", variant, sampler)
    worker.stop()


@torch.inference_mode()
def time_step(name: str, variant: stored_configs.Variant, sampler: StepSampler) -> None:
    """Print the lines of one captured step."""
    rows = variant._rows
    staging, side, ids = variant._inputs._staging, torch.cuda.Stream(), sampler.last_ids[:rows]
    words = staging._block.view(torch.int32)
    copied = torch.zeros(2 * rows, dtype=torch.int32, pin_memory=True)
    stage = staging._stages[0].view(torch.int32)

    def event() -> torch.cuda.Event:
        found = torch.cuda.Event(enable_timing=True)
        found.record()
        return found

    def send() -> None:
        staging.begin()
        staging.send()

    def send_aside() -> None:
        with torch.cuda.stream(side):
            send()
            ready = torch.cuda.Event()
            ready.record()
        torch.cuda.current_stream().wait_event(ready)

    def tell_aside() -> None:
        done = event()
        with torch.cuda.stream(side):
            side.wait_event(done)
            to_host(ids)

    def chosen() -> torch.Tensor:
        return chosen_logits(sampler.logits, ids)

    def by_kernel(source: torch.Tensor, target: torch.Tensor) -> Callable[[], object]:
        return lambda: _copy_kernel[(1,)](source, target, source.numel(), BLOCK=1024, num_warps=4)

    torch.cuda.synchronize()
    for each in staging._stages:
        each.copy_(staging._block)
    tell, replay = by_kernel(ids.view(torch.int32), copied), variant.replay
    cases: dict[str, list[Callable[[], object]]] = {
        "graph": [replay],
        "events before and after": [event, replay, event],
        "inputs": [send, replay],
        "inputs by a kernel that reads the host": [by_kernel(stage, words), replay],
        # As with two blocks on the device: the previous replay still reads this one.
        "inputs in a second stream": [send_aside, replay],
        "chosen logits": [replay, chosen],
        "tokens to the host": [replay, lambda: to_host(ids)],
        "tokens to the host by a kernel": [replay, tell],
        "tokens to the host in a second stream": [replay, tell_aside],
        "tokens and chosen logits to the host": [replay, lambda: (to_host(chosen()), to_host(ids))],
        "all, as a worker does": [event, send, replay, lambda: (to_host(chosen()), to_host(ids)), event],
        "inputs and tokens by kernels, events": [event, by_kernel(stage, words), replay, tell, event],
    }
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(TURNS):
        for case, parts in cases.items():
            torch.cuda.synchronize()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(STEPS):
                for part in parts:
                    part()
            end.record()
            end.synchronize()
            times[case].append(begin.elapsed_time(end) / STEPS)
    alone = statistics.median(times["graph"])
    for case, found in times.items():
        step = statistics.median(found)
        print(f"{name} {step:.4f} ms, {1e3 * (step - alone):+6.1f} us: {case}", flush=True)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", maxsplit=1)[0])
    parser.add_argument("--model", default="Qwen3.5-35B-A3B:8", help="shape:layers")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64])
    args = parser.parse_args()
    measure(args.model, args.rows)


if __name__ == "__main__":
    main()
