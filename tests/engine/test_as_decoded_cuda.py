"""Scoring with `as_decoded` on a GPU, beside captured steps, with and without drafts.

Without a GPU the same steps run over the kernels' references in fp32 (captured_on_cpu.py), whose sums may depend on the
number of rows: log-probabilities are close there. On a GPU all bits equal those of sampling.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoints import DEMO
from tests.engine.captured_on_cpu import PLACE, gpu_steps
from tests.engine.test_hybrid_speculation import write
from tests.engine.test_speculation_cuda import same
from tests.rank import Rank

from moeyard_worker.engine.steps.gpu_runner import GpuRunner
from moeyard_worker.protocol import SamplingParams

LIMITS: dict[str, Any] = {"max_num_seqs": 8, "max_batch_tokens": 128, "max_model_len": 256}
OUTPUT = 40


def requests() -> dict[str, tuple[list[int], SamplingParams]]:
    drawn = SamplingParams(max_tokens=OUTPUT, ignore_eos=True, temperature=0.8, seed=3, logprobs=2)
    ids = [(7 * i) % 250 for i in range(1, 91)]
    return {
        "first": (ids[:70], replace(drawn, prompt_logprobs=1)),
        "behind": ([*ids[:70], 9], replace(drawn, routed_experts_start=0)),
        "penalised": (ids[5:40], replace(drawn, repetition_penalty=1.3)),
        "greedy": (ids[8:12], replace(drawn, temperature=0.0, routed_experts_start=0)),
    }


@pytest.fixture(scope="module", autouse=True)
def _device() -> Iterator[None]:
    with gpu_steps():
        yield


@pytest.mark.sampled(0)
@pytest.mark.parametrize("options", [{}, {"speculate": "mtp", "draft_tokens": 2}], ids=["plain", "drafts"])
@pytest.mark.parametrize("family", ["demo", "qwen3_next", "deepseek_v4"])
def test_scores_are_those_of_sampling(tmp_path: Path, family: str, options: dict[str, Any]) -> None:
    model = DEMO if family == "demo" else write(tmp_path, family)
    with Rank(model, **PLACE, **LIMITS, enable_return_routed_experts=True, **options) as rank:
        launches = rank.worker.runner
        assert isinstance(launches, GpuRunner)
        answers, _ = rank.run(requests())
        for count, changes in ((OUTPUT, {}), (15, {"max_in_flight": 2, "num_pages": 24})):
            asked = {
                name: (
                    prompt,
                    replace(params, trace_decode_token_ids=tuple(answers[name].token_ids[:count]), as_decoded=True),
                )
                for name, (prompt, params) in requests().items()
            }
            free = {f"free {name}": request for name, request in requests().items()}
            before = launches.num_replayed
            replies, _ = rank.run({**asked, **free}, **changes)
            assert launches.num_replayed > before
            expected = {**answers, **{f"free {name}": reply for name, reply in answers.items()}}
            same(replies, expected)
            assert all(replies[name].experts == reply.experts for name, reply in expected.items())
