"""The cost of counting each expert's rows in a decode step: the same graphs with and without it, in one process.

    python bench/choices.py [--model Qwen3-30B-A3B:48 DeepSeek-V3:6] [--streams 1 8 64] [--device cuda]

Rows and layers are those of `stored_configs.py`. First a check that both give the same logits, and that the counting
graph has counted every row in every layer. Then replays are timed in turns. At the end the script measures the host
time of one read of the counts.
"""

import argparse
import statistics
import sys
import time
from typing import Any

import stored_configs
import torch

from moeyard_kernels.cuda.backend import CudaBackend
from moeyard_worker.engine.sampling.step_sampler import StepSampler
from moeyard_worker.engine.steps.runner import Runner

STEPS, TURNS, LOOKS = 20, 15, 50


def capture(runner: Runner, sampler: StepSampler, rows: int, pool: Any, *, counts: bool) -> stored_configs.Variant:
    """Capture a decode step whose gates count, or do not."""
    backend = runner.backend
    assert isinstance(backend, CudaBackend)
    backend.choices.on = counts
    try:
        return stored_configs.Variant(runner, sampler, {}, pool, rows=rows, context=128, pages=4)
    finally:
        backend.choices.on = True


def read_counts(runner: Runner) -> list[list[int]]:
    """Wait for the counts of the gates and return them."""
    assert runner.backend.choices is not None
    while (found := runner.backend.choices.read()) is None:
        torch.cuda.synchronize()
    return [list(layer) for layer in found]


def look_seconds(runner: Runner) -> float:
    """Return the host's median seconds from a request for the counts to their arrival, while the device is idle."""
    taken = []
    for _ in range(LOOKS):
        begun = time.perf_counter()
        read_counts(runner)
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


@torch.inference_mode()
def measure(model: str, streams: list[int], device: str) -> bool:
    """Print a line for each number of streams. Return False if logits differ or a row was not counted."""
    shape, layers = model.split(":")
    worker, runner = stored_configs.load(shape, int(layers), max(streams), 4, device)
    sampler = stored_configs.sampler_of(runner, max(streams))
    pool, sound = torch.cuda.graph_pool_handle(), True
    with runner.backend.without_collection():
        for rows in streams:
            kinds = {counts: capture(runner, sampler, rows, pool, counts=counts) for counts in (False, True)}
            before = read_counts(runner)
            logits = {counts: variant.chain(STEPS) for counts, variant in kinds.items()}
            grown = {sum(now) - sum(then) for now, then in zip(read_counts(runner), before, strict=True)}
            sound &= torch.equal(logits[False], logits[True])
            # The launches before a chain of a model with state slots count too, and both variants have them.
            sound &= min(grown) >= STEPS * rows * runner.config.gate.rule.top_k and len(grown) == 1
            times: dict[bool, list[float]] = {False: [], True: []}
            for _ in range(TURNS):
                for counts, variant in kinds.items():
                    times[counts].append(variant.milliseconds())
            without, found = (statistics.median(times[counts]) for counts in (False, True))
            apart = statistics.median(a - b for a, b in zip(times[True], times[False], strict=True))
            spread = "; ".join(f"{min(each):.4f} to {max(each):.4f}" for each in times.values())
            line = f"{model} {rows:3} rows: {without:.4f} ms without counts, {found:.4f} with, {1e3 * apart:+.2f} us"
            line += f" ({spread})"
            print(line if sound else f"{line}; WRONG: logits differ, or a row was not counted", flush=True)
    print(f"{model}: a read takes {1e6 * look_seconds(runner):.0f} us", flush=True)
    worker.stop()
    return sound


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", maxsplit=1)[0])
    parser.add_argument("--model", nargs="+", default=["Qwen3-30B-A3B:48", "DeepSeek-V3:6"], help="shape:layers")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name(args.device)}, torch {torch.__version__}", flush=True)
    sound = [measure(model, args.streams, args.device) for model in args.model]
    return 0 if all(sound) else 1


if __name__ == "__main__":
    sys.exit(main())
