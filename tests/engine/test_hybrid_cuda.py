"""Families with state in slots as a GPU serves them: graphs, two steps in flight, prompts beside output, preemption.

Without a GPU the same steps run over the kernels' oracles (captured_on_cpu.py), in fp32: tokens are those of a worker
on CPUs, log-probabilities nearly. On a GPU, in bf16, all bits are those of each request alone, launched one by one.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.engine.captured_on_cpu import without_a_gpu
from tests.rank import Rank, Requests, Told

from moeyard_worker.engine.graph_runner import GraphRunner
from moeyard_worker.protocol import SamplingParams

GPU = torch.cuda.is_available()
MLA = {"qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
FAMILIES: dict[str, dict[str, Any]] = {"qwen3_next": {"head_dim": 32}, "kimi_linear": MLA}
# Pages of 16 positions: three of the requests below start together in the fewer, and outgrow them.
AMPLE, SCARCE = 64, 11


def requests() -> Requests:
    """Longer and shorter than a chunk of the formula; greedy, drawn, penalised."""
    chance = torch.Generator().manual_seed(7)
    lengths = {"long": 150, "short": 20, "drawn": 70, "penalised": 33}
    prompts = {name: torch.randint(VOCAB_SIZE, (n,), generator=chance).tolist() for name, n in lengths.items()}
    common: dict[str, Any] = {"max_tokens": 24, "logprobs": 1, "ignore_eos": True}
    options: dict[str, dict[str, Any]] = {
        "drawn": {"temperature": 1.0, "seed": 5}, "penalised": {"frequency_penalty": 0.7},
    }  # fmt: skip
    return {
        name: (prompt, SamplingParams(**{"temperature": 0.0, **common, **options.get(name, {})}))
        for name, prompt in prompts.items()
    }


def load(model: Path, **options: Any) -> Rank:
    return Rank(model, page_size=16, max_num_seqs=4, max_batch_tokens=128, max_model_len=208, **options)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    dtype = torch.bfloat16 if GPU else torch.float32
    return make_checkpoint(
        tmp_path_factory.mktemp(request.param), request.param, dtype=dtype, **FAMILIES[request.param]
    )  # fmt: skip


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, Told]:
    """Each request alone."""
    rank = load(model, **({"device": "cuda", "enforce_eager": True} if GPU else {"device": "cpu"}))
    found = {name: rank.run({name: request})[0][name] for name, request in requests().items()}
    rank.worker.stop()
    return found


@pytest.fixture(scope="module")
def served(model: Path, expected: dict[str, Told]) -> Iterator[Rank]:
    with pytest.MonkeyPatch.context() as patch:
        if not GPU:
            without_a_gpu(patch)
        rank = load(model, **({"device": "cuda"} if GPU else {}))
        yield rank
        rank.worker.stop()


@pytest.mark.parametrize("changes", [
    {}, {"max_in_flight": 1}, {"prefill_chunk": 64}, {"mixed_prefill_tokens": 64}, {"num_pages": SCARCE},
    {"num_pages": SCARCE, "max_in_flight": 1, "prefill_chunk": 64},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "launches"])
def test_answers_are_those_of_each_request_alone(
    served: Rank, expected: dict[str, Told], changes: dict[str, Any], eager: bool
) -> None:
    runner = served.worker.runner
    assert isinstance(runner, GraphRunner)
    before, runner.eager = runner.num_replayed, eager
    told, stats = served.run(requests(), **{"num_pages": AMPLE, "max_in_flight": 2, **changes})
    runner.eager = False
    assert (runner.num_replayed > before) is not eager
    assert (stats.num_preemptions > 0) == (changes.get("num_pages") == SCARCE)
    for name, answer in told.items():
        wanted = expected[name]
        assert (answer.token_ids, answer.end) == (wanted.token_ids, wanted.end), name
        if GPU:
            assert answer == wanted, name
        ours, theirs = (torch.tensor([entry.logprob for entry in each.logprobs]) for each in (answer, wanted))
        assert torch.allclose(ours, theirs, atol=1e-4), name
