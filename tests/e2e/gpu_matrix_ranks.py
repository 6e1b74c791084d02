"""The matrix of one answer over several GPUs (`gpu_matrix --ranks`): one fleet per line of the table.

    python -m tests.e2e.gpu_matrix --ranks 1 2 4 --exchange nvlink nccl zmq --placement shards shuffled copied

The reference is each request of a model alone on one eager rank. Each fleet answers one request alone beside idle
ranks, all requests spread over the ranks, and one whose prefix is a cache hit. The placement of a line also sets how
steps run: "shards" and "copied" have two steps in flight and all experts in slots, "shuffled" one and half of them.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from tests.e2e.test_one_answer import check_rows, requests, run_alone, run_mixed
from tests.fleet import ProcessPool, start_fleet
from tests.gpu.test_one_answer_ranks import Case, Placed, config, placement

from moeyard_worker.config.engine_config import ExchangeKind

MODELS = ("demo", "qwen3_moe", "deepseek_v3", "qwen3_next", "kimi_linear")
EXCHANGES: tuple[ExchangeKind, ...] = ("nvlink", "nccl", "zmq")
# placement: steps in flight, experts in slots
COURSES: dict[Placed, tuple[int, str]] = {"shards": (2, "all"), "shuffled": (1, "half"), "copied": (2, "all")}
Expected = dict[str, tuple[Any, ...]]


def one_line(error: BaseException) -> str:
    """Return an error in one line."""
    return f"{type(error).__name__}: {str(error).strip().split(chr(10), 1)[0][:200]}"


def verdict(differing: Sequence[str], failed: str) -> str:
    """Return the end of a table line."""
    if failed:
        return f"FAILED: {failed}"
    return f"DIFFERS: {', '.join(differing[:6])}" if differing else "equal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One fleet's line. `differing`: requests with other bits, `failed`: the error, `left_out`: why it did not run."""

    model: str
    case: Case
    answers: int = 0
    replayed: int = 0
    eager: int = 0
    seconds: float = 0.0
    differing: list[str] = field(default_factory=list)
    failed: str = ""
    left_out: str = ""

    def __str__(self) -> str:
        case = self.case
        ends = f"NOT RUN: {self.left_out}" if self.left_out else verdict(self.differing, self.failed)
        return (
            f"{self.model:16} {case.ranks:5} {case.exchange:8} {case.placed:9} {case.deep:4} {case.slots:7} "
            f"{self.answers:7} {self.replayed:7} {self.eager:6} {self.seconds:7.1f}  {ends}"
        )


HEADER = (
    f"{'model':16} {'ranks':>5} {'exchange':8} {'placement':9} {'deep':>4} {'experts':7} {'answers':>7} {'replays':>7} "
    f"{'eager':>6} {'seconds':>7}"
)


def cases(ranks: Sequence[int], exchanges: Sequence[ExchangeKind], placements: Sequence[Placed]) -> list[Case]:
    """Return the product. One rank has one placement."""
    found = [
        Case(count, exchange, COURSES[placed][0], COURSES[placed][1], placed=placed)
        for count, exchange, placed in itertools.product(ranks, exchanges, placements)
    ]
    return [case for case in found if case.ranks > 1 or case.placed == placements[0]]


def missing(case: Case, device: str, num_gpus: int) -> str:
    """Return why a case cannot run here, or an empty string."""
    if device == "cpu":
        return "" if case.exchange == "zmq" else f"{case.exchange} needs GPUs"
    if case.ranks > num_gpus:
        return f"there are {num_gpus} GPUs"
    if case.exchange == "nvlink":
        for pair in itertools.permutations(range(case.ranks), 2):
            if not torch.cuda.can_device_access_peer(*pair):
                return "GPU {} has no peer access to GPU {}".format(*pair)
    return ""


def references(model: Path, pool: ProcessPool, device: str) -> Expected:
    """Answer each request alone on one rank."""
    with start_fleet(pool, replace(config(Case(1, "auto", eager=True), model), device=device)) as fleet:
        return {name: run_alone(fleet, "reference", name, 0) for name in requests()}


def run(name: str, model: Path, case: Case, expected: Expected, pool: ProcessPool, device: str) -> Row:
    """Run one line. Raises AssertionError if the fleet did not run as its line says."""
    begun, last = time.perf_counter(), case.ranks - 1
    # One rank has no other placement.
    placed = placement(case, model) if case.ranks > 1 else None
    with start_fleet(pool, replace(config(case, model), device=device), placed) as fleet:
        answered = {"alone": {"c": run_alone(fleet, "alone", "c", last)}}
        answered["mixed"] = run_mixed(fleet, "mixed", {each: i % case.ranks for i, each in enumerate(requests())})
        answered["again"] = {"c": run_alone(fleet, "again", "c", last)}
        differing = [
            f"{each} {how}" for how, answers in answered.items() for each in answers if answers[each] != expected[each]
        ]
        graphs, answers = fleet.call("graphs"), sum(map(len, answered.values()))
        assert {report["exchange"] for report in fleet.reports} == {case.exchange}, fleet.reports
        assert fleet.call("stats")[last]["prefix_hit_tokens"] > 0, "no prefix hit"
        # A request with different bits may have chosen other experts, but each row has the same number of them.
        check_rows(fleet, answers)
        if case.exchange == "nvlink":
            assert all(each["num_replayed"] > each["num_eager"] for each in graphs), graphs
        else:
            # Over nccl prefill steps (half of these) run eager. Over zmq every step does.
            assert all((each["num_replayed"] > 0) == (case.exchange == "nccl") for each in graphs), graphs
    return Row(
        model=name,
        case=case,
        answers=answers,
        replayed=sum(each["num_replayed"] for each in graphs),
        eager=sum(each["num_eager"] for each in graphs),
        seconds=time.perf_counter() - begun,
        differing=differing,
    )


def rows(
    names: Sequence[str], every: Sequence[Case], checkpoint: Callable[[str], Path], *, device: str, num_gpus: int
) -> Iterator[Row]:
    """Yield rows as they complete. After a failed fleet the next one gets new processes."""
    pool = ProcessPool()
    try:
        for name in names:
            expected: Expected | None = None
            for case in every:
                if why := missing(case, device, num_gpus):
                    yield Row(model=name, case=case, left_out=why)
                    continue
                try:
                    expected = references(checkpoint(name), pool, device) if expected is None else expected
                    row = run(name, checkpoint(name), case, expected, pool, device)
                except Exception as error:  # boundary: the error belongs to this line, and the others still run
                    row = Row(model=name, case=case, failed=one_line(error))
                    pool.close()
                    pool = ProcessPool()
                yield row
    finally:
        pool.close()


def table(
    names: Sequence[str], every: Sequence[Case], checkpoint: Callable[[str], Path], *, device: str, num_gpus: int
) -> int:
    """Print rows as they complete. Return 1 if an answer differs, a fleet fails, or nothing was compared."""
    print(HEADER, flush=True)
    begun, found = time.perf_counter(), list[Row]()
    for row in rows(names, every, checkpoint, device=device, num_gpus=num_gpus):
        found.append(row)
        print(row, flush=True)
    ran = [row for row in found if not row.left_out]
    answers, differing = sum(row.answers for row in ran), sum(len(row.differing) for row in ran)
    failed = sum(bool(row.failed) for row in ran)
    print(
        f"{answers} answers of {len(ran)} fleets in {time.perf_counter() - begun:.0f} s, {differing} differ, "
        f"{failed} fleets failed, {len(found) - len(ran)} were not run"
    )
    return int(differing > 0 or failed > 0 or not answers)
