"""Prompt compression in models with state on a GPU: graphs of both, with drafts and without.

These are the checks of `test_compaction_cuda.py`, with and without a GPU.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engine.captured_on_cpu import GPU, PLACE, gpu_steps
from tests.engine.test_hybrid_compaction import FAMILIES, LIMITS, requests
from tests.engine.test_hybrid_speculation import write
from tests.engine.test_speculation_cuda import same
from tests.rank import Rank, Reply


def load(model: Path, **options: Any) -> Rank:
    return Rank(model, **PLACE, **LIMITS, max_model_len=256, **options)


def alone(rank: Rank) -> dict[str, Reply]:
    return {name: rank.run({name: request}, num_drafts=0)[0][name] for name, request in requests().items()}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def on_a_cpu(model: Path) -> dict[str, Reply]:
    """Answer each request alone with the CPU backend."""
    with Rank(model, **LIMITS, dtype="float32") as rank:
        return alone(rank)


@pytest.fixture(scope="module")
def expected(model: Path, on_a_cpu: dict[str, Reply]) -> dict[str, Reply]:
    """Answer each request alone, without drafts, eager."""
    with gpu_steps(), load(model, enforce_eager=True) as rank:
        return alone(rank)


@pytest.fixture(scope="module")
def captured(model: Path, expected: dict[str, Reply]) -> Iterator[Rank]:
    drafts: dict[str, Any] = {"speculate": "mtp", "draft_tokens": 3} if "qwen3_next" in model.name else {}
    with gpu_steps(), load(model, **drafts) as rank:
        yield rank


@pytest.mark.sampled(0)
@pytest.mark.skipif(GPU, reason="a GPU's bits differ from a CPU's")
def test_answers_equal_those_of_a_cpu(expected: dict[str, Reply], on_a_cpu: dict[str, Reply]) -> None:
    same(expected, on_a_cpu)


@pytest.mark.sampled(0)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_in_flight": 2, "prefill_chunk": 100},
        {"num_pages": 13, "max_in_flight": 2},
        {"num_drafts": 0},
    ],
    ids=str,
)
def test_one_answer_for_a_budget(captured: Rank, expected: dict[str, Reply], changes: dict[str, Any]) -> None:
    launches: Any = captured.worker.runner
    before = launches.num_replayed, launches.num_eager
    answers, stats = captured.run(requests(), **changes)
    same(answers, expected)
    assert stats.dropped_tokens > 0
    # Chunks that end a compressed prompt have no graph.
    assert launches.num_replayed - before[0] > launches.num_eager - before[1] > 0
    if captured.worker.scheduler.config.num_drafts and "num_drafts" not in changes:
        assert stats.accepted[0] > 0
