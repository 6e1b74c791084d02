"""The cost of a step that verifies k drafts of each sequence, relative to a plain step on a GPU, and of drafting.

    python bench/verify_steps.py [--model Qwen3-30B-A3B:48 DeepSeek-V3:6 Kimi-K2:4] [--streams 1 8 64] [--device cuda]
    python bench/verify_steps.py --model DeepSeek-V4-Flash-0731:6 --quantization fp4

It replays graphs like a `GpuRunner`: k + 1 rows per sequence of random tokens behind 128 others, greedy. With
--no-prompts they are behind 128 positions of zeros, which saves the compilation of the prompts' kernels. If the
architecture has an MTP layer or DSpark, its passes are timed too. DSpark makes five drafts, however many are verified.
The break-even acceptance of k drafts is the q with 1 + q + .. + q^k = the ratio. If q is above 1, drafts never pay.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import stored_configs
import torch
from stored_configs import PAGE

from moeyard_kernels.cuda.backend import CudaBackend
from moeyard_kernels.cuda.step_inputs import StepInputs
from moeyard_kernels.types.step_size import StepSize
from moeyard_worker.engine.assembly.worker import Worker
from moeyard_worker.engine.sampling.step_sampler import StepSampler
from moeyard_worker.engine.steps.graphs import StepGraphs
from moeyard_worker.engine.steps.programs import MODEL, StepProgram, StepPrograms, StepState, draft_part
from moeyard_worker.engine.steps.runner import Runner
from moeyard_worker.models.shapes import QUANTIZATIONS, shape_model
from moeyard_worker.scheduling.step import Chunk, Step

CONTEXT, DRAFTS = 128, 3
FILLS, REPLAYS = 4, 6


def load(args: argparse.Namespace, shape: str, layers: int) -> tuple[Worker, Runner, int, bool]:
    """Return a worker that captures nothing by itself, its model, the most drafts, and whether the model makes them."""
    model = shape_model(shape)
    makes = model.num_mtp_layers > 0
    assert makes or not model.has_slots, "state slots for drafts need a drafter"
    kind, drafts = ("mtp", DRAFTS) if model.block_drafts is None else ("dspark", model.block_drafts.size)
    fields: dict[str, Any] = {"speculate": kind, "draft_tokens": drafts} if makes else {}
    if args.quantization is not None:
        fields["quantization"] = args.quantization
    return *stored_configs.load(shape, layers, max(args.streams), 4, args.device, **fields), drafts, makes


def chunk(runner: Runner, stream: int, **fields: Any) -> Chunk:
    """Return rows of a stream, which has its own slots if the model keeps state per sequence."""
    ring = runner.config.state_spec(1).slots_per_sequence(DRAFTS)
    slot = stream * ring if runner.config.has_slots else -1
    return Chunk(key=(b"", str(stream)), state_slot=slot, state_ring=ring, **fields)


def prompts(runner: Runner, streams: int, chance: random.Random, *, computed: bool) -> list[tuple[int, ...]]:
    """Return the pages of `streams` prompts, computed or not."""
    pages = [tuple(range(4 * i, 4 * i + 4)) for i in range(streams)]
    if not computed:
        return pages
    each = 2048 // CONTEXT
    for begin in range(0, streams, each):
        some = [
            chunk(
                runner,
                i,
                start=0,
                pages=pages[i],
                prompt=True,
                num_sampled=1,
                token_ids=tuple(chance.randrange(runner.config.vocab_size) for _ in range(CONTEXT)),
            )
            for i in range(begin, min(begin + each, streams))
        ]
        runner.forward(Step(prefill=tuple(some)))
    return pages


def fill(inputs: StepInputs, pages: list[tuple[int, ...]], runner: Runner, chance: random.Random) -> None:
    """Fill the inputs with other tokens."""
    queries = inputs.size.queries
    chunks = [
        chunk(
            runner,
            i,
            start=CONTEXT,
            pages=pages[i],
            prompt=False,
            num_sampled=queries,
            token_ids=tuple(chance.randrange(runner.config.vocab_size) for _ in range(queries)),
        )
        for i in range(inputs.size.sequences)
    ]
    inputs.fill(Step(decode=tuple(chunks)))


def milliseconds(run: Callable[[], Any], refill: Callable[[], None]) -> float:
    """Return the milliseconds of one run: the median over fills of the mean over replays."""
    found = []
    for _ in range(FILLS):
        refill()
        run()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(REPLAYS):
            run()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / REPLAYS)
    return statistics.median(found)


def breaks_even(ratio: float, drafts: int) -> float:
    """Return the acceptance at which `drafts` drafts pay for `ratio` plain steps, infinite if they never do."""
    if ratio > 1 + drafts:
        return float("inf")
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**j for j in range(drafts + 1)) < ratio else (low, middle)
    return high


@torch.inference_mode()
def measure(args: argparse.Namespace, shape: str, layers: int) -> None:
    """Print a line for each number of streams and drafts."""
    chance, streams = random.Random(5), args.streams
    worker, runner, most, makes = load(args, shape, layers)
    backend = runner.backend
    assert isinstance(backend, CudaBackend)
    pages = prompts(runner, max(streams), chance, computed=not args.no_prompts)
    sampler = StepSampler(
        backend,
        max_rows=max(streams) * (1 + most),
        max_requests=0,
        vocab=runner.config.vocab_size,
        eos_token_ids=(),
        verifies=True,
    )
    programs = StepPrograms(
        runner, backend, sampler, max_sequences=max(streams), num_drafts=most if makes else 0, max_prompt=0
    )
    tails = backend.tails(max_sequences=max(streams), num_drafts=most, limit=4 * PAGE)

    def program(size: StepSize) -> StepProgram:
        if makes:
            return programs(size)
        step = StepState(backend.step_inputs(size, sampler.last_ids, tails))
        return StepProgram(step, {MODEL: partial(programs.run_model, step)})

    graphs = StepGraphs(program, runner.exchange, backend)
    graphs.prepare(StepSize(sequences=count, queries=1 + k, width=4) for count in streams for k in range(most + 1))

    for count in streams:
        plain = 0.0
        for k in range(most + 1):
            step = graphs.step(StepSize(sequences=count, queries=1 + k, width=4))
            inputs, replay = step.inputs, step.graphs[MODEL].replay
            refill = partial(fill, inputs, pages, runner, chance)
            alone = milliseconds(replay, refill)
            plain = plain or alone
            line = f"{shape:22} {layers:3} layers {count:3} streams {k} drafts: verify {alone:7.3f} ms"
            if k:
                line += f", {alone / plain:.3f} of plain, breaks even at {breaks_even(alone / plain, k):.0%}"
            if k and makes:
                passes = range(1, 1 + min(k, programs.num_passes))
                parts = [MODEL, *(draft_part(False, number) for number in passes)]
                both = milliseconds(partial(_all, [step.graphs[part].replay for part in parts]), refill)
                even = breaks_even(both / plain, k)
                line += f"; with drafting {both:7.3f} ms, {both / plain:.3f}, breaks even at {even:.0%}"
            print(line, flush=True)
    worker.stop()


def _all(runs: list[Callable[[], None]]) -> None:
    for run in runs:
        run()


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", maxsplit=1)[0])
    parser.add_argument("--model", nargs="+", default=["Qwen3-30B-A3B:48", "DeepSeek-V3:6", "Kimi-K2:4"])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--quantization", choices=QUANTIZATIONS)
    parser.add_argument("--no-prompts", action="store_true")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name(args.device)}, torch {torch.__version__}", flush=True)
    for model in args.model:
        shape, layers = model.split(":")
        begun = time.perf_counter()
        measure(args, shape, int(layers))
        print(f"in {time.perf_counter() - begun:.0f} s", flush=True)
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
