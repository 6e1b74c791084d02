"""Prompt compression on a GPU: one answer for a budget, with drafts and without.

Without a GPU the same steps run over the kernels' references in fp32 (captured_on_cpu.py), and tokens and ends equal
those of the CPU backend. On a GPU all bits equal those of each request alone, eager.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.checkpoints import DEMO, MLA, make_checkpoint
from tests.engine.captured_on_cpu import GPU, PLACE, gpu_steps
from tests.engine.test_compaction import requests
from tests.engine.test_speculation_cuda import same
from tests.rank import Rank, Reply, Requests


def load(model: Any, **options: Any) -> Rank:
    return Rank(model, **PLACE, **{"max_num_seqs": 8, "max_batch_tokens": 128, "max_model_len": 160, **options})


def alone(rank: Rank, asked: Requests) -> dict[str, Reply]:
    return {name: rank.run({name: request}, num_drafts=0)[0][name] for name, request in asked.items()}


@pytest.fixture(scope="module")
def on_a_cpu() -> dict[str, Reply]:
    """Answer each request alone with the CPU backend."""
    with Rank(DEMO, dtype="float32") as rank:
        return alone(rank, requests())


@pytest.fixture(scope="module", autouse=True)
def _device(on_a_cpu: dict[str, Reply]) -> Iterator[None]:
    with gpu_steps():
        yield


@pytest.fixture(scope="module")
def drafting() -> Iterator[Rank]:
    with load(DEMO, speculate="mtp", draft_tokens=3) as rank:
        yield rank


@pytest.fixture(scope="module")
def expected() -> dict[str, Reply]:
    """Answer each request alone, without drafts, eager."""
    with load(DEMO, enforce_eager=True, speculate="mtp", draft_tokens=1) as rank:
        return alone(rank, requests())


@pytest.mark.slow
@pytest.mark.skipif(GPU, reason="a GPU's bits differ from a CPU's")
def test_answers_equal_those_of_a_cpu(expected: dict[str, Reply], on_a_cpu: dict[str, Reply]) -> None:
    same(expected, on_a_cpu)


@pytest.mark.sampled(0)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_drafts": 1, "prefill_chunk": 16},
        {"num_drafts": 2, "max_in_flight": 2},
        {"max_in_flight": 2, "prefill_chunk": 23},
        {"num_drafts": 0, "num_pages": 17, "max_in_flight": 2},
    ],
    ids=str,
)
def test_drafts_are_verified_on_compressed_prompts(
    drafting: Rank, expected: dict[str, Reply], changes: dict[str, Any]
) -> None:
    before = drafting.worker.runner.num_replayed  # type: ignore[attr-defined]
    answers, stats = drafting.run(requests(), **changes)
    same(answers, expected)
    assert drafting.worker.runner.num_replayed > before  # type: ignore[attr-defined]
    if changes.get("num_drafts") != 0:
        assert stats.accepted[0] > 0.4 * stats.drafts[0], "the MTP layer is compressed too, and drafts well"
    if "num_pages" in changes:
        assert stats.num_preemptions > 0


@pytest.fixture(scope="module", params=["mla", "gqa", "window"])
def plain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Rank, Rank]]:
    """Ranks without drafts: an eager one and one that replays graphs."""
    family, overrides = {
        "mla": ("deepseek_v3", MLA),
        "gqa": ("qwen3_moe", {}),
        "window": ("mixtral", {"sliding_window": 24}),
    }[request.param]
    model = make_checkpoint(tmp_path_factory.mktemp(request.param), family, dtype=torch.float32, **overrides)
    options = {"kv_memory": 64 * 16 * 4096}
    with load(model, enforce_eager=True, **options) as first, load(model, enforce_eager=False, **options) as second:
        yield first, second


@pytest.mark.sampled(0)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"prefill_chunk": 23, "max_in_flight": 2},
        {"num_pages": 16},
        {"num_pages": 17, "max_in_flight": 2},
    ],
    ids=str,
)
def test_one_answer_for_a_budget(plain: tuple[Rank, Rank], changes: dict[str, Any]) -> None:
    eager, replaying = plain
    asked = {name: ([token % 200 for token in prompt], params) for name, (prompt, params) in requests().items()}
    answers, stats = replaying.run(asked, **changes)
    same(answers, alone(eager, asked))
    assert (stats.num_preemptions > 0) == ("num_pages" in changes)
    assert replaying.worker.runner.num_replayed > 0  # type: ignore[attr-defined]
