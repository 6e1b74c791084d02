"""The whole matrix of one answer on a GPU: one command that prints a table and fails on any difference.

    python -m tests.e2e.gpu_matrix [--processes 8] [--models demo qwen3_moe ...] [--speculation no] [--kept no]
    python -m tests.e2e.gpu_matrix --ranks 1 2 4 [--exchange nvlink nccl zmq] [--placement shards shuffled copied]

Models are a small random checkpoint of each family and the demo model. The product is
`{alone, mixed} x {prefix miss, hit} x {graphs, eager} x {one, two steps in flight} x {chunks of 16, 64, 2048} x
{preempted, not} x {experts in one slot, a quarter, all} x {slru, lru}`. Requests are greedy, seeded and penalised.
Token ids, log-probability bits and ends equal those of each request alone, eager, one step in flight, with all experts
in slots.
The demo model and Qwen3-Next repeat this over {1 draft, 2, adaptive} on a rank that loads the MTP layer. Every model
repeats the first product with prompts compressed to 40 tokens (`--kept`), which has its own answers. The two models
with drafts repeat that with drafts.

A worker is loaded once for its slots and policy. A scheduler of each other kind then steps it by hand. Assertions check
that it ran as the axis says (replays, preemptions, prefix hits). Run this on each kind of GPU, because bytes differ
between kinds. On a CPU it compares the same without graphs. `--ranks` compares fleets of several GPUs with one rank
(gpu_matrix_ranks.py).
"""

import argparse
import gc
import itertools
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from tests.checkpoints import DEMO, MLA, V4_HEADS, WIDE, add_drafts, make_checkpoint
from tests.e2e import gpu_matrix_ranks
from tests.e2e.test_one_answer import KEPT as KEPT_IN_PART
from tests.e2e.test_one_answer import MORE_PAGES, SNAPSHOTS, requests
from tests.rank import Rank, Reply, Requests

from moeyard_worker.experts.policies import POLICIES
from moeyard_worker.models.families import load_model_config
from moeyard_worker.protocol import SamplingParams
from moeyard_worker.scheduling.request import SchedulerStats
from moeyard_worker.scheduling.scheduler import Scheduler

# Family, dtype and overrides of `make_checkpoint`. The demo model is unchanged.
MODELS: dict[str, tuple[str, torch.dtype, dict[str, Any]]] = {
    "deepseek_v3": ("deepseek_v3", torch.bfloat16, MLA),
    "deepseek_v3-fp32": ("deepseek_v3", torch.float32, MLA),
    "kimi_k2": ("kimi_k2", torch.bfloat16, {**MLA, "n_group": 1, "topk_group": 1}),
    "deepseek_v2": ("deepseek_v2", torch.bfloat16, {**MLA, "q_lora_rank": None}),
    "qwen3_moe": ("qwen3_moe", torch.bfloat16, {}),
    "qwen3_moe-fp32": ("qwen3_moe", torch.float32, {}),
    "qwen3_moe-wide": ("qwen3_moe", torch.bfloat16, WIDE),
    "mixtral": ("mixtral", torch.bfloat16, {"sliding_window": 40}),
    "olmoe": ("olmoe", torch.bfloat16, {}),
    "qwen3_next": ("qwen3_next", torch.bfloat16, {"head_dim": 32}),
    "qwen3_5_moe": ("qwen3_5_moe", torch.bfloat16, {"head_dim": 256}),
    "kimi_linear": ("kimi_linear", torch.bfloat16, MLA),
    "kimi_linear-fp32": ("kimi_linear", torch.float32, MLA),
    "deepseek_v4": ("deepseek_v4", torch.bfloat16, {}),
    "deepseek_v4-wide": ("deepseek_v4", torch.bfloat16, V4_HEADS),
}
NAMES = ("demo", *MODELS)
PAGE = 16
PAGES = {"ample": 64, "scarce": 10}
CHUNKS = (16, 64, 2048)
SLOTS = ("all", "quarter", "one")
KEPT = tuple(POLICIES)
# Models that draft.
DRAFTING = ("demo", "qwen3_next")
# Drafts per token. auto: adaptive, at most the model's limit.
DRAFTS = ("1", "2", "auto")
Answers = dict[str, Reply]


@dataclass(frozen=True, slots=True)
class Course:
    """How a worker's steps are planned and launched."""

    eager: bool
    deep: int
    chunk: int
    pages: str
    drafts: str = "off"

    def __str__(self) -> str:
        name = f"{'eager' if self.eager else 'graphs'}-{self.deep}deep-chunk{self.chunk}-{self.pages}"
        return name if self.drafts == "off" else f"{name}-drafts_{self.drafts}"


@dataclass(frozen=True, slots=True)
class Loaded:
    """A worker: model, experts with slots, policy, whether it loads the MTP layer, whether prompts are compressed."""

    model: str
    slots: str = "all"
    policy: str = KEPT[0]
    drafts: bool = False
    compressed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One worker's line of the table. `differing` names courses and requests with other bytes, `failed` the error."""

    worker: Loaded
    courses: int = 0
    answers: int = 0
    replayed: int = 0
    eager: int = 0
    preemptions: int = 0
    hits: int = 0
    accepted: int = 0
    seconds: float = 0.0
    differing: list[str] = field(default_factory=list)
    failed: str = ""

    def __str__(self) -> str:
        ends = gpu_matrix_ranks.verdict(self.differing, self.failed)
        return (
            f"{self.worker.model + ' kept' * self.worker.compressed:21} {self.worker.slots:8} {self.worker.policy:5} "
            f"{'yes' if self.worker.drafts else '-':6} {self.courses:7} {self.answers:8} {self.replayed:8} "
            f"{self.eager:6} {self.preemptions:8} {self.hits:7} {self.accepted:6} {self.seconds:7.1f}  {ends}"
        )


HEADER = (
    f"{'model':21} {'experts':8} {'kept':5} {'drafts':6} {'courses':>7} {'answers':>8} {'replays':>8} {'eager':>6} "
    f"{'preempt.':>8} {'hits':>7} {'right':>6} {'seconds':>7}"
)


def courses(device: str, *, drafts: bool = False, only: str = "") -> list[Course]:
    """Return the product of what one worker can run, filtered by `only` in the name. A CPU has no graphs."""
    eager, depths = (True,) if device == "cpu" else (False, True), DRAFTS if drafts else ("off",)
    found = [Course(*values) for values in itertools.product(eager, (1, 2), CHUNKS, PAGES, depths)]
    return [course for course in found if only in str(course)]


@cache
def checkpoint(name: str) -> Path:
    """Return the model's checkpoint. Each process makes its own with the same bytes."""
    if name == "demo":
        return DEMO
    family, dtype, overrides = MODELS[name]
    directory = make_checkpoint(Path(tempfile.mkdtemp(prefix="gpu-matrix-")), family, dtype=dtype, **overrides)
    if name in DRAFTING:
        add_drafts(directory)
    return directory


def wanted(*, compressed: bool) -> Requests:
    """Return the requests of test_one_answer.py and one that shares a prefix of "c", behind a snapshot of state."""
    asked = requests(compressed=compressed)
    asked["e"] = (asked["c"][0][:70] + asked["d"][0][:60], asked["d"][1])
    return {name: (prompt, SamplingParams(**params)) for name, (prompt, params) in asked.items()}


def load(worker: Loaded, device: str) -> Rank:
    """Load a worker that can replay graphs and run eager."""
    model = checkpoint(worker.model)
    read = load_model_config(model)
    read = read.with_drafts() if worker.drafts else read
    total = read.num_experts * len(read.moe_layers)
    state = read.state_spec(torch.finfo(getattr(torch, read.dtype)).bits // 8)
    snapshots = SNAPSHOTS["ample"] * state.bytes_per_sequence
    return Rank(
        model,
        device=device,
        page_size=PAGE,
        max_batch_tokens=256,
        max_num_seqs=8,
        kv_memory=PAGES["ample"] * PAGE * state.bytes_per_token + snapshots,
        snapshot_memory=snapshots or None,
        prefill_chunk=2048,
        expert_policy=worker.policy,
        speculate="mtp" if worker.drafts else None,
        expert_slots={"all": None, "quarter": total // 4, "one": 1}[worker.slots],
    )


def scheduler(rank: Rank, course: Course, *, compressed: bool) -> Scheduler:
    """Return an empty scheduler that plans as the course says, and set the rank to launch likewise."""
    if hasattr(rank.worker.runner, "eager"):
        rank.worker.runner.eager = course.eager
    most, together = rank.worker.scheduler.config.num_drafts, rank.worker.scheduler.config.chunk_alignment
    return rank.scheduler(
        num_pages=min(PAGES[course.pages] + MORE_PAGES * compressed, PAGES["ample"]),
        max_in_flight=course.deep,
        # With state, a chunk has at least the positions that the chunk formula takes together. The window follows them.
        prefill_chunk=max(course.chunk, together + KEPT_IN_PART.window * (compressed and together > 1)),
        num_snapshots=min(SNAPSHOTS[course.pages], rank.worker.scheduler.config.num_snapshots),
        adaptive_drafts=course.drafts == "auto",
        num_drafts={"off": 0, "1": 1, "2": 2, "auto": most}[course.drafts],
    )


def references(rank: Rank, *, compressed: bool = False) -> Answers:
    """Answer each request alone, eager, one step in flight, in one chunk."""
    course, asked = Course(True, 1, 2048, "ample"), wanted(compressed=compressed)
    return {
        name: rank.serve(scheduler(rank, course, compressed=compressed), {name: request})[name]
        for name, request in asked.items()
    }


def counts(rank: Rank) -> tuple[int, int]:
    """Return the numbers of replayed and eager steps so far, if the device has graphs."""
    runner = rank.worker.runner
    return getattr(runner, "num_replayed", 0), getattr(runner, "num_eager", 0)


def check(
    rank: Rank, course: Course, expected: Answers, *, compressed: bool = False
) -> tuple[list[str], SchedulerStats]:
    """Run a miss alone, all at once with a hit, and a hit alone. Return the differences and the scheduler's counts."""
    found, asked = scheduler(rank, course, compressed=compressed), wanted(compressed=compressed)
    before = counts(rank)
    told = [rank.serve(found, {name: asked[name] for name in some}) for some in ("c", tuple(asked), "d")]
    differing = [
        f"{course} {name} {how}"
        for how, answers in zip(("alone", "mixed", "again"), told, strict=True)
        for name, answer in answers.items()
        if answer != expected[name]
    ]
    replayed, launched = (after - count for after, count in zip(counts(rank), before, strict=True))
    assert found.pool.num_free == found.config.num_pages, course
    assert found.stats.prefix_hit_tokens > 0, course
    assert (found.stats.dropped_tokens > 0) == compressed, course
    # With drafts or compression a request may end before pages run out.
    unusual = course.drafts != "off" or compressed
    assert (found.stats.num_preemptions > 0) == (course.pages == "scarce") or unusual, course
    assert course.drafts in ("off", "auto") or found.stats.accepted[0] > 0, course
    if course.eager:
        assert replayed == 0, course
    else:
        # Steps that score or recompute run eager, as does the end of a compressed prompt. Prompts run eager if some
        # experts have no slot, or beside drafts.
        usual = rank.worker.experts.all_resident and not (rank.worker.scheduler.config.num_drafts or compressed)
        assert replayed > (launched if usual else 0), (course, replayed, launched)
    return differing, found.stats


def run(worker: Loaded, device: str, only: str, expected: Answers | None) -> tuple[Row, Answers]:
    """Run the courses of one worker. Without `expected` the worker has all experts resident and makes the reference."""
    begun = time.perf_counter()
    rank = load(worker, device)
    try:
        answers = references(rank, compressed=worker.compressed) if expected is None else expected
        before, differing = counts(rank), list[str]()
        preemptions = hits = compared = right = 0
        every = courses(device, drafts=worker.drafts, only=only)
        for course in every:
            different, stats = check(rank, course, answers, compressed=worker.compressed)
            differing += different
            compared += 2 + len(answers)
            preemptions += stats.num_preemptions
            hits += stats.prefix_hit_tokens
            right += sum(stats.accepted)
        rank.worker.experts.validate()
        replayed, launched = (after - count for after, count in zip(counts(rank), before, strict=True))
        row = Row(
            worker=worker,
            courses=len(every),
            answers=compared,
            replayed=replayed,
            eager=launched,
            accepted=right,
            preemptions=preemptions,
            hits=hits,
            seconds=time.perf_counter() - begun,
            differing=differing,
        )
        return row, answers
    finally:
        rank.worker.stop()
        del rank
        gc.collect()
        if device != "cpu":
            torch.cuda.empty_cache()


def others(first: Loaded, slots: Sequence[str], speculation: str) -> list[Loaded]:
    """Return the other workers of a model besides the one that makes its reference. `speculation`: yes, no or only."""
    model = first.model
    if first.compressed:
        return [Loaded(model, "all", KEPT[-1], True, True)] if model in DRAFTING and speculation != "no" else []
    plain = [Loaded(model, kept, policy) for kept in slots for policy in KEPT if (kept, policy) != ("all", KEPT[0])]
    drafting = [Loaded(model, kept, KEPT[-1], drafts=True) for kept in slots] if model in DRAFTING else []
    return {"yes": drafting + plain, "no": plain, "only": drafting}[speculation]


def rows(
    names: Sequence[str], slots: Sequence[str], device: str, processes: int, *, speculation: str, kept: str, only: str
) -> Iterator[Row]:
    """Yield rows as they complete. A model's other workers follow the one that makes its reference. A failed worker
    yields its error, its traceback goes to stderr, and the others still run."""
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        parts = {"yes": (False, True), "no": (False,), "only": (True,)}[kept]
        first = [Loaded(name, compressed=part) for name, part in itertools.product(names, parts)]
        waiting: dict[Future[tuple[Row, Answers]], Loaded]
        waiting = {pool.submit(run, worker, device, only, None): worker for worker in first}
        while waiting:
            done = next(as_completed(waiting))
            worker = waiting.pop(done)
            following = others(worker, slots, speculation) if worker in first else []
            if (error := done.exception()) is not None:
                traceback.print_exception(error)
                yield Row(worker=worker, failed=gpu_matrix_ranks.one_line(error))
                yield from (Row(worker=each, failed="no reference") for each in following)
                continue
            row, answers = done.result()
            waiting |= {pool.submit(run, each, device, only, answers): each for each in following}
            yield row


def where(device: str) -> str:
    """Return what the bytes depend on: revision, devices, torch."""
    asked = ("git", "-C", str(DEMO), "describe", "--always", "--dirty", "--abbrev=12")
    try:
        described = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        described = ""
    names = [torch.cuda.get_device_name(gpu) for gpu in range(torch.cuda.device_count())] if device != "cpu" else []
    each = ", ".join(f"{len([*same])} x {name}" for name, same in itertools.groupby(names))
    return f"revision {described or 'unknown: no git here'}, {each or 'CPU'}, torch {torch.__version__}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Return 1 if an answer differs or a worker fails."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", maxsplit=1)[0])
    parser.add_argument("--models", nargs="+", choices=NAMES, help="all; with --ranks five of them")
    parser.add_argument("--slots", nargs="+", choices=SLOTS, default=list(SLOTS))
    parser.add_argument("--speculation", choices=("yes", "no", "only"), default="yes", help="models with drafts")
    parser.add_argument("--kept", choices=("yes", "no", "only"), default="yes", help="compressed prompts")
    parser.add_argument("--only", default="", help="part of a course's name, for example graphs-2deep")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--processes", type=int, default=8)
    few, exchanges, placements = gpu_matrix_ranks.MODELS, gpu_matrix_ranks.EXCHANGES, tuple(gpu_matrix_ranks.COURSES)
    several = parser.add_argument_group("several GPUs (of the above --models and --device only)")
    several.add_argument("--ranks", nargs="+", type=int, metavar="N", help="fleets of N ranks with each of these:")
    several.add_argument("--exchange", nargs="+", choices=exchanges, default=list(exchanges))
    several.add_argument("--placement", nargs="+", choices=placements, default=list(placements))
    args = parser.parse_args(argv)
    print(where(args.device), flush=True)
    if args.ranks is not None:
        every = gpu_matrix_ranks.cases(args.ranks, args.exchange, args.placement)
        return gpu_matrix_ranks.table(
            args.models or few, every, checkpoint, device=args.device, num_gpus=torch.cuda.device_count()
        )
    print(HEADER, flush=True)
    begun, found = time.perf_counter(), []
    every = rows(
        args.models or NAMES,
        args.slots,
        args.device,
        args.processes,
        speculation=args.speculation,
        kept=args.kept,
        only=args.only,
    )
    for row in every:
        found.append(row)
        print(row, flush=True)
    differing, failed = sum(len(row.differing) for row in found), sum(bool(row.failed) for row in found)
    print(
        f"{sum(row.answers for row in found)} answers of {len(found)} workers in {time.perf_counter() - begun:.0f} s, "
        f"{differing} differ, {failed} workers failed"
    )
    return int(differing > 0 or failed > 0)


if __name__ == "__main__":
    sys.exit(main())
