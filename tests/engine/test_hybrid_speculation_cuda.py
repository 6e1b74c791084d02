"""Speculation in models with state on a GPU changes no answer: graphs, one and two steps in flight.

These are the checks of `test_speculation_cuda.py`, with and without a GPU.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engine.captured_on_cpu import PLACE, gpu_steps
from tests.engine.test_hybrid_speculation import FAMILIES, drafts_of, requests, write
from tests.engine.test_speculation_cuda import runner, same
from tests.rank import Rank, Reply


def load(model: Path, **options: Any) -> Rank:
    return Rank(model, **PLACE, max_num_seqs=6, max_batch_tokens=160, max_model_len=256, **options)


@pytest.fixture(scope="module", autouse=True)
def _device() -> Iterator[None]:
    with gpu_steps():
        yield


@pytest.fixture(scope="module", params=(*FAMILIES, "deepseek_v4", "dspark"))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("hybrid"), request.param)


@pytest.fixture(scope="module")
def drafting(model: Path) -> Iterator[Rank]:
    with load(model, **drafts_of(model)) as rank:
        yield rank


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, Reply]:
    """Answer each request alone, on a rank that does not speculate, eager."""
    with load(model, enforce_eager=True) as rank:
        return {name: rank.run({name: request})[0][name] for name, request in requests().items()}


@pytest.mark.sampled(0)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_in_flight": 2},
        {"num_pages": 11, "max_in_flight": 2},
        {"prefill_chunk": 64, "max_in_flight": 2},
    ],
    ids=str,
)
def test_answers_equal_plain_decoding(drafting: Rank, expected: dict[str, Reply], changes: dict[str, Any]) -> None:
    if "prefill_chunk" in changes:
        # DeepSeek-V4 computes 128 positions of a prompt together.
        least = drafting.worker.scheduler.config.chunk_alignment
        changes = {**changes, "prefill_chunk": max(least, changes["prefill_chunk"])}
    launches = runner(drafting)
    before = launches.num_replayed, launches.num_eager
    answers, stats = drafting.run(requests(), **changes)
    same(answers, expected)
    assert launches.num_replayed - before[0] > launches.num_eager - before[1] > 0
    assert (stats.num_preemptions > 0) == ("num_pages" in changes)
    assert 0.2 < stats.accepted[0] / stats.drafts[0] < 1
    # The fourth and fifth draft of DSpark are rarely right here.
    assert all(count > 0 for count in stats.accepted[:3])


@pytest.mark.sampled(0)
@pytest.mark.parametrize("deep", [1, 2])
def test_answers_stay_the_same_while_the_depth_changes(drafting: Rank, expected: dict[str, Reply], deep: int) -> None:
    chance, launches = random.Random(3), runner(drafting)
    replayed = launches.num_replayed

    def depth(_number: int, wanted: int) -> int:
        return min(wanted, chance.choice((0, 3)))

    answers, stats = drafting.run(requests(), depth, max_in_flight=deep)
    same(answers, expected)
    assert stats.accepted[0] > 0
    assert launches.num_replayed > replayed


def test_eager_answers_are_the_same(drafting: Rank, expected: dict[str, Reply]) -> None:
    launches, replayed = runner(drafting), runner(drafting).num_replayed
    launches.eager = True
    answers, stats = drafting.run(requests(), max_in_flight=2)
    launches.eager = False
    same(answers, expected)
    assert launches.num_replayed == replayed
    assert stats.accepted[0] > 0


@pytest.mark.slow
@pytest.mark.parametrize("model", ["dspark"], indirect=True)
def test_drafts_follow_from_the_tokens_alone(drafting: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs and launches, neighbours, prefix hits and preemption make the same drafts behind the same tokens."""
    launches, made, compared = runner(drafting), dict[tuple[float, ...], tuple[int, ...]](), 0
    launch = launches.launch

    def recorded(step: Any, asking: Any, **options: Any) -> Any:
        nonlocal compared
        launched = launch(step, asking, **options)
        for request, result in zip(asking, launched.results, strict=True):
            known = (
                request.sampling.temperature,
                request.sampling.top_p,
                *request.prompt,
                *request.output,
                *result.token_ids,
            )
            # A launched step makes no drafts beyond the last token.
            longest = made.get(known, ())
            count = min(len(longest), len(result.drafts))
            assert longest[:count] == result.drafts[:count], (len(known), launches.eager)
            made[known] = max(longest, result.drafts, key=len)
            compared += count
        return launched

    monkeypatch.setattr(launches, "launch", recorded)
    # Drafts of graphs do not follow penalties and minimum lengths.
    asked = {name: request for name, request in requests().items() if name not in ("penalised", "stopped")}
    for launches.eager in (True, False):
        for name, request in asked.items():
            drafting.run({name: request}, max_in_flight=1)
        before, first = compared, launches.eager
        _, stats = drafting.run(asked, max_in_flight=1)
        assert stats.prefix_hit_tokens > 0
        _, stats = drafting.run(asked, max_in_flight=1, num_pages=16)
        assert stats.num_preemptions > 0
        assert compared - before > (100 if first else 200)
    assert len(made) > 50
