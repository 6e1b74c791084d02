"""Speculation on a GPU changes no answer: graphs verify and make drafts, one and two steps in flight.

Without a GPU the same steps run over the kernels' references in fp32 (captured_on_cpu.py). Tokens and ends equal plain
decoding. Log-probabilities nearly do, since a reference's sums may depend on the number of rows. On a GPU all bits do.
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.checkpoints import DEMO
from tests.engine.captured_on_cpu import GPU, PLACE, gpu_steps
from tests.engine.test_speculation import requests
from tests.rank import Rank, Reply

from moeyard_worker.engine.sampling.edit_counts import EditCounts
from moeyard_worker.engine.steps.gpu_runner import GpuRunner
from moeyard_worker.protocol import Done, Submit, TokenLogprob


def load(**options: Any) -> Rank:
    return Rank(DEMO, **PLACE, max_num_seqs=8, max_batch_tokens=128, max_model_len=160, **options)


@pytest.fixture(scope="module", autouse=True)
def _device() -> Iterator[None]:
    with gpu_steps():
        yield


@pytest.fixture(scope="module")
def drafting() -> Iterator[Rank]:
    with load(speculate="mtp") as rank:
        yield rank


@pytest.fixture(scope="module")
def expected() -> dict[str, Reply]:
    """Answer each request alone, without drafts, eager."""
    with load(enforce_eager=True, speculate="mtp", draft_tokens=1) as rank:
        return {name: rank.run({name: request}, num_drafts=0)[0][name] for name, request in requests().items()}


def same(answers: dict[str, Reply], expected: dict[str, Reply]) -> None:
    if GPU:
        assert answers == expected
        return
    for name, answer in answers.items():
        wanted = expected[name]
        assert (answer.token_ids, answer.end) == (wanted.token_ids, wanted.end), name
        for ours, theirs in ((answer.logprobs, wanted.logprobs), (answer.prompt_logprobs, wanted.prompt_logprobs)):
            assert [_ranked(entry) for entry in ours] == [_ranked(entry) for entry in theirs], name
            found = torch.tensor([entry.logprob for entry in ours])
            assert torch.allclose(found, torch.tensor([entry.logprob for entry in theirs]), atol=1e-4), name


def _ranked(entry: TokenLogprob) -> tuple[Any, ...]:
    return entry.rank, tuple(token for token, _ in entry.top)


def runner(rank: Rank) -> GpuRunner:
    found = rank.worker.runner
    assert isinstance(found, GpuRunner)
    return found


@pytest.mark.sampled(0)
@pytest.mark.parametrize(
    "changes",
    [
        {"num_drafts": 1},
        {"num_drafts": 2},
        {},
        {"max_in_flight": 2},
        {"num_drafts": 1, "max_in_flight": 2},
        {"prefill_chunk": 16, "max_in_flight": 2},
        {"num_pages": 9, "max_in_flight": 2},
        {"adaptive_drafts": True, "max_in_flight": 2},
        {"num_drafts": 0, "max_in_flight": 2},
    ],
    ids=str,
)
def test_answers_equal_plain_decoding(drafting: Rank, expected: dict[str, Reply], changes: dict[str, Any]) -> None:
    adaptive = {"adaptive_drafts": False, **changes}
    launches = runner(drafting)
    before = launches.num_replayed, launches.num_eager
    answers, stats = drafting.run(requests(), **adaptive)
    same(answers, expected)
    replayed, eager = launches.num_replayed - before[0], launches.num_eager - before[1]
    assert replayed > (0 if "num_pages" in changes else eager), (replayed, eager)
    assert (stats.num_preemptions > 0) == ("num_pages" in changes)
    if changes.get("num_drafts") != 0 and not adaptive["adaptive_drafts"]:
        assert stats.accepted[0] > 0.5 * stats.drafts[0] > 0
        assert all(count > 0 for count in stats.accepted)


@pytest.mark.parametrize("deep", [1, 2])
def test_answers_stay_the_same_while_the_depth_changes_per_step(
    drafting: Rank, expected: dict[str, Reply], deep: int
) -> None:
    chance = random.Random(3)
    depths: list[int] = []

    def depth(_number: int, wanted: int) -> int:
        depths.append(min(wanted, chance.randrange(4)))
        return depths[-1]

    answers, stats = drafting.run(requests(), depth, adaptive_drafts=False, max_in_flight=deep)
    same(answers, expected)
    assert set(depths) == {0, 1, 2, 3}
    assert stats.accepted[0] > 0


@pytest.mark.parametrize("deep", [1, 2])
def test_prompts_alone_are_replayed(drafting: Rank, expected: dict[str, Reply], deep: int) -> None:
    """Chunks of a prompt, the last one with a sampled row, and drafts after it."""
    launches = runner(drafting)
    before = launches.num_eager, launches.num_replayed
    asked, options = {"greedy": requests()["greedy"]}, {"adaptive_drafts": False, "num_drafts": 2}
    answers, stats = drafting.run(asked, prefill_chunk=16, max_in_flight=deep, **options)
    same(answers, {"greedy": expected["greedy"]})
    assert launches.num_eager == before[0]
    assert launches.num_replayed > before[1] + -(-len(asked["greedy"][0]) // 16)
    assert stats.accepted[0] > 0.5 * stats.drafts[0] > 0


def test_eager_answers_are_the_same(drafting: Rank, expected: dict[str, Reply]) -> None:
    launches, replayed = runner(drafting), runner(drafting).num_replayed
    launches.eager = True
    answers, stats = drafting.run(requests(), adaptive_drafts=False, max_in_flight=2)
    launches.eager = False
    same(answers, expected)
    assert launches.num_replayed == replayed
    assert stats.accepted[0] > 0.5 * stats.drafts[0]


def test_graphs_and_host_make_equally_good_drafts(drafting: Rank) -> None:
    """Greedy and seeded requests have as many right drafts from graphs as from the host."""
    asked = {name: request for name, request in requests().items() if name in ("greedy", "seeded", "shared")}
    asked = {name: (prompt, replace(params, prompt_logprobs=None)) for name, (prompt, params) in asked.items()}
    launches, counts = runner(drafting), []
    for eager, deep in ((True, 1), (False, 1), (False, 2)):
        launches.eager = eager
        counts.append(drafting.run(asked, adaptive_drafts=False, max_in_flight=deep)[1])
    launches.eager = False
    assert counts[1].accepted == counts[0].accepted
    assert counts[1].drafts == counts[0].drafts
    assert counts[2].accepted[0] > 0.5 * counts[2].drafts[0]


@pytest.mark.parametrize("store", [pytest.param("auto", marks=pytest.mark.slow), "none"])
def test_few_expert_slots_change_no_answer(expected: dict[str, Reply], store: str) -> None:
    """With experts in host memory, or only in the files."""
    with load(speculate="mtp", draft_tokens=2, expert_slots=9, expert_host_store=store) as rank:
        answers, stats = rank.run(requests(), max_in_flight=2)
    same(answers, expected)
    assert stats.accepted[0] > 0.5 * stats.drafts[0]


def test_graph_reports_non_finite_logits(drafting: Rank) -> None:
    """The head becomes NaN between the prompt's step and the next. Both are graphs."""
    scheduler = drafting.scheduler(adaptive_drafts=False, num_drafts=2)
    prompt, params = requests()["greedy"]
    submit = Submit(request_id="spoilt", prompt_token_ids=tuple(prompt), sampling=replace(params, logprobs=None))
    assert scheduler.add(submit, b"client", 0.0) is None
    launches, head = runner(drafting), runner(drafting)._runner.model._lm_head.data
    with torch.inference_mode():
        for sound in (True, False):
            step, kept = scheduler.schedule(0.0), head[3].clone()
            if not sound:
                head[3] = float("nan")
            replayed = launches.num_replayed
            launched = launches.launch(step, scheduler.requests(step), before=None, num_drafts=step.num_drafts)
            assert launched.unsound == (() if sound else ("spoilt",))
            assert launches.num_replayed > replayed
            head[3] = kept
            scheduler.complete(step, launched.results, 0.0)
    for reply in scheduler.fail(["spoilt"], "it was spoilt"):
        assert isinstance(reply.message, Done)
    # The rank stays usable: no other request reads the NaNs.
    answers, _ = drafting.run({"greedy": requests()["greedy"]}, adaptive_drafts=False)
    assert answers["greedy"].end == ("length", None)


@pytest.mark.parametrize("deep", [1, 2])
def test_penalty_counts_stay_on_the_device(
    drafting: Rank, expected: dict[str, Reply], deep: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host counts a request's tokens once, after its prompt."""
    counted: list[str] = []
    count = EditCounts._count

    def recorded(self: EditCounts, chunk: Any, request: Any, *rest: Any) -> Any:
        counted.append(request.request_id)
        return count(self, chunk, request, *rest)

    monkeypatch.setattr(EditCounts, "_count", recorded)
    for name in ("penalised", "stopped"):
        answers, stats = drafting.run({name: requests()[name]}, adaptive_drafts=False, max_in_flight=deep)
        same(answers, {name: expected[name]})
        assert stats.accepted[0] > 0
    assert counted == ["penalised", "stopped"]
