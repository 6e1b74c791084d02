"""Models with state on a GPU: graphs, two steps in flight, mixed steps, preemption, and prefix hits on snapshots.

Without a GPU the same steps run over the kernels' references in fp32 (captured_on_cpu.py). Tokens equal those of a CPU
worker, and log-probabilities nearly do. On a GPU in bf16 all bits equal those of each request alone, eager.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoints import MLA, VOCAB_SIZE, make_checkpoint
from tests.engine.captured_on_cpu import GPU, gpu_steps
from tests.rank import Rank, Reply, Requests

from moeyard_worker.engine.steps.gpu_runner import GpuRunner
from moeyard_worker.protocol import SamplingParams

HEADS = {"head_dim": 32}
FAMILIES: dict[str, dict[str, Any]] = {"qwen3_next": HEADS, "qwen3_5_moe": HEADS, "kimi_linear": MLA, "deepseek_v4": {}}
# Pages of 16 positions. With SCARCE, three of the requests start together and outgrow their pages.
AMPLE, SCARCE = 64, 11
# Scarce pages for the turns of a conversation.
TIGHT = 22


def requests() -> Requests:
    """Prompts longer and shorter than a chunk of the formula: greedy, sampled, penalised."""
    chance = torch.Generator().manual_seed(7)
    lengths = {"long": 150, "short": 20, "drawn": 70, "penalised": 33}
    prompts = {name: torch.randint(VOCAB_SIZE, (n,), generator=chance).tolist() for name, n in lengths.items()}
    common: dict[str, Any] = {"max_tokens": 24, "logprobs": 1, "ignore_eos": True}
    options: dict[str, dict[str, Any]] = {
        "drawn": {"temperature": 1.0, "seed": 5},
        "penalised": {"frequency_penalty": 0.7},
    }
    return {
        name: (prompt, SamplingParams(**{"temperature": 0.0, **common, **options.get(name, {})}))
        for name, prompt in prompts.items()
    }


def turns() -> tuple[Requests, ...]:
    """Return three batches. All requests but "stranger" share a beginning: the first turn of a conversation, a branch,
    its next turn, another branch, and the first again."""
    chance = torch.Generator().manual_seed(8)
    shared, *others = (torch.randint(VOCAB_SIZE, (n,), generator=chance).tolist() for n in (130, 45, 60, 50, 50, 70))
    prompts = {"first": shared + others[0], "left": shared + others[1], "third": shared + others[2]}
    prompts |= {"turn": prompts["first"] + others[3], "again": prompts["first"], "stranger": others[4]}
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=1, ignore_eos=True)
    return tuple(
        {name: (prompts[name], params) for name in names}
        for names in (("first",), ("left",), ("turn", "third", "again", "stranger"))
    )


def load(model: Path, **options: Any) -> Rank:
    return Rank(model, page_size=16, max_num_seqs=4, max_batch_tokens=128, max_model_len=256, **options)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    dtype = torch.bfloat16 if GPU else torch.float32
    return make_checkpoint(
        tmp_path_factory.mktemp(request.param), request.param, dtype=dtype, **FAMILIES[request.param]
    )


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, Reply]:
    """Answer each request alone."""
    options = {"device": "cuda", "enforce_eager": True} if GPU else {"device": "cpu"}
    asked = {name: request for some in (requests(), *turns()) for name, request in some.items()}
    with load(model, **options, prefix_caching=False) as rank:
        return {name: rank.run({name: request})[0][name] for name, request in asked.items()}


@pytest.fixture(scope="module")
def served(model: Path, expected: dict[str, Reply]) -> Iterator[Rank]:
    with gpu_steps(), load(model, **({"device": "cuda"} if GPU else {})) as rank:
        yield rank


@pytest.mark.sampled(0)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_in_flight": 1},
        {"prefill_chunk": 64},
        {"mixed_prefill_tokens": 64},
        {"num_pages": SCARCE},
        {"num_pages": SCARCE, "max_in_flight": 1, "prefill_chunk": 64},
    ],
    ids=str,
)
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_answers_equal_each_request_alone(
    served: Rank, expected: dict[str, Reply], changes: dict[str, Any], eager: bool
) -> None:
    runner = served.worker.runner
    assert isinstance(runner, GpuRunner)
    before, runner.eager = runner.num_replayed, eager
    answers, stats = served.run(requests(), **scheduling(served, changes))
    runner.eager = False
    assert (runner.num_replayed > before) is not eager
    assert (stats.num_preemptions > 0) == (changes.get("num_pages") == SCARCE)
    check(answers, expected)


def scheduling(served: Rank, changes: dict[str, Any]) -> dict[str, Any]:
    """Return the scheduler's settings. A chunk has at least the rows that the model computes together."""
    least = served.worker.scheduler.config.chunk_alignment
    rows = {name: max(changes[name], least) for name in ("prefill_chunk", "mixed_prefill_tokens") if name in changes}
    return {"num_pages": AMPLE, "max_in_flight": 2, **changes, **rows}


def check(answers: dict[str, Reply], expected: dict[str, Reply]) -> None:
    for name, answer in answers.items():
        wanted = expected[name]
        assert (answer.token_ids, answer.end) == (wanted.token_ids, wanted.end), name
        if GPU:
            assert answer == wanted, name
        ours, theirs = (torch.tensor([entry.logprob for entry in each.logprobs]) for each in (answer, wanted))
        assert torch.allclose(ours, theirs, atol=1e-4), name


@pytest.mark.sampled(0)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_in_flight": 1},
        {"prefill_chunk": 64},
        {"mixed_prefill_tokens": 64},
        {"num_snapshots": 1},
        {"num_snapshots": 2, "prefill_chunk": 64},
        {"num_snapshots": 0},
        {"num_pages": TIGHT},
        {"num_pages": TIGHT, "max_in_flight": 1, "prefill_chunk": 64},
    ],
    ids=str,
)
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_prefixes_are_reused_from_snapshots(
    served: Rank, expected: dict[str, Reply], changes: dict[str, Any], eager: bool
) -> None:
    """With few snapshots a restored slot is reused, even by the same step."""
    runner = served.worker.runner
    assert isinstance(runner, GpuRunner)
    before, runner.eager = runner.num_replayed, eager
    scheduler = served.scheduler(**scheduling(served, changes))
    for some in turns():
        check(served.serve(scheduler, some), expected)
    runner.eager = False
    assert (runner.num_replayed > before) is not eager
    snapshots, stats = scheduler.snapshots, scheduler.stats
    # Chunks of 128 positions leave one snapshot in these prompts, and all of them share it.
    few = scheduler.config.num_snapshots < 3 and scheduler.config.chunk_alignment < 128
    reuses = scheduler.config.num_snapshots > 0
    assert (snapshots.num_used > 0, stats.prefix_hit_tokens > 0) == (reuses, reuses)
    assert (snapshots.num_evicted > 0) == (few and reuses)
    assert (stats.num_preemptions > 0) == (changes.get("num_pages") == TIGHT)
