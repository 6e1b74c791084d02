"""Tokens per second with and without drafts, of one rank in process: the demo model on held-out text.

    python bench/speculation.py [--model DIR] [--streams 1,8] [--drafts 0,1,2,3] [--rounds 5] [--tokens N] [--device D]

Every round runs all depths in turn over its own prompts, so that other load affects all alike. The ratio to the plain
run is that of the same round, and the output has medians. The answers are compared too.
"""

import argparse
import json
import statistics
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from moeyard_worker.config.cpu_config import set_cpu_environment

set_cpu_environment()

from moeyard_worker.config.engine_config import EngineConfig  # noqa: E402 - loads torch, which reads the settings above
from moeyard_worker.config.worker_spec import WorkerSpec  # noqa: E402
from moeyard_worker.engine.assembly.worker import Worker  # noqa: E402
from moeyard_worker.engine.steps.in_flight import LaunchedStep  # noqa: E402
from moeyard_worker.protocol import SamplingParams, Submit, Tokens  # noqa: E402

DEMO = Path(__file__).resolve().parents[1] / "deploy/demo"
PROMPT_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Course:
    """One run: tokens of each stream, seconds after the prompts (also CPU seconds of this process), draft counts."""

    tokens: list[list[int]]
    seconds: float
    cpu_seconds: float
    drafts: list[int]
    kept: list[int]


def load(model: Path, drafts: int | None, device: str) -> Worker:
    """Return a worker that verifies up to `drafts` drafts. 0: none, None: as many as pay."""
    config = EngineConfig(
        model_path=str(model),
        kv_memory=32 << 20,
        device=device,
        async_scheduling=device != "cpu",
        speculate=None if drafts == 0 else "mtp",
        draft_tokens=drafts or None,
    )
    worker = Worker(WorkerSpec(config=config, rank=0, epoch=0, host="127.0.0.1", version="bench"))
    worker.connect([worker.endpoints()["mesh"]])
    worker.load(1)
    return worker


def run(worker: Worker, prompts: list[list[int]], num_tokens: int, temperature: float) -> Course:
    """Run all prompts at once, timed from the step after the last prompt's."""
    # All runs of a worker share it, so that it keeps its measurements of depths.
    scheduler = worker.scheduler
    before = [*scheduler.stats.drafts, *scheduler.stats.accepted]
    for i, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=temperature, seed=i)
        submit = Submit(request_id=str(i), prompt_token_ids=tuple(prompt), sampling=params)
        rejected = scheduler.add(submit, b"", 0.0)
        assert rejected is None, rejected
    tokens: list[list[int]] = [[] for _ in prompts]
    begun = busy = 0.0
    flights: deque[LaunchedStep] = deque()
    while scheduler.has_work() or flights:
        step = scheduler.schedule(time.monotonic())
        if step.chunks:
            last = flights[-1] if flights else None
            requests = scheduler.requests(step)
            flights.append(worker.runner.launch(step, requests, before=last, num_drafts=step.num_drafts))
            if len(flights) < scheduler.config.max_in_flight:
                continue
        launched = flights.popleft()
        for reply in scheduler.complete(launched.step, launched.results, time.monotonic(), launched.scores):
            if isinstance(reply.message, Tokens):
                tokens[int(reply.message.request_id)] += reply.message.token_ids
        if launched.step.prefill:
            begun, busy = time.perf_counter(), time.process_time()
    seconds, cpu_seconds = time.perf_counter() - begun, time.process_time() - busy
    now = [*scheduler.stats.drafts, *scheduler.stats.accepted]
    counts = [after - count for after, count in zip(now, before, strict=True)]
    return Course(tokens, seconds, cpu_seconds, counts[: len(counts) // 2], counts[len(counts) // 2 :])


def main() -> int:
    """Run the command line. Return 1 if an answer differs."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", maxsplit=1)[0])
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--streams", default="1,8")
    parser.add_argument("--drafts", default="0,1,2,3", help="0 first; auto: by measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--device", default="cpu", help="cpu, or cuda: two steps in flight, graphs")
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    texts = [json.loads(line)["text"] for line in (args.model / "heldout.jsonl").read_text().splitlines()]
    prompts = [
        ids[:PROMPT_TOKENS] for ids in (tokenizer.encode(text).ids for text in texts) if len(ids) > PROMPT_TOKENS
    ]
    depths = args.drafts.split(",")
    workers = {depth: load(args.model, None if depth == "auto" else int(depth), args.device) for depth in depths}
    differs = False
    print(
        f"{'streams':>8} {'drafts':>7} {'tokens/s':>9} {'to plain':>9} {'worst':>6} {'by CPU':>7} {'per step':>9}  kept"
    )
    for streams in map(int, args.streams.split(",")):
        courses: dict[str, list[Course]] = {depth: [] for depth in depths}
        for number in range(args.rounds + 1):
            some = [prompts[(number * streams + i) % len(prompts)] for i in range(streams)]
            for depth, worker in workers.items():
                courses[depth].append(run(worker, some, args.tokens, args.temperature))
            differs |= any(courses[depth][-1].tokens != courses[depths[0]][-1].tokens for depth in depths)
        for depth in depths:
            show(streams, depth, courses[depth][1:], courses[depths[0]][1:], args.tokens)
    for worker in workers.values():
        worker.stop()
    return int(differs)


def show(streams: int, depth: str, courses: list[Course], plain: list[Course], num_tokens: int) -> None:
    """Print one line of the table."""
    rates = [streams * num_tokens / course.seconds for course in courses]
    ratios = [before.seconds / course.seconds for course, before in zip(courses, plain, strict=True)]
    by_cpu = [before.cpu_seconds / course.cpu_seconds for course, before in zip(courses, plain, strict=True)]
    drafts = [sum(column) for column in zip(*(course.drafts for course in courses), strict=True)]
    kept = [sum(column) for column in zip(*(course.kept for course in courses), strict=True)]
    length = f"{1 + sum(kept) / drafts[0]:.2f}" if drafts and drafts[0] else "-"
    shares = " ".join(f"{100 * a / d:.0f}%" for a, d in zip(kept, drafts, strict=True) if d)
    print(
        f"{streams:>8} {depth:>7} {statistics.median(rates):>9.1f} {statistics.median(ratios):>9.2f} "
        f"{min(ratios):>6.2f} {statistics.median(by_cpu):>7.2f} {length:>9}  {shares}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
