"""Greedy tokens over HTTP equal those of transformers' `generate`, for every family, on 1, 2 and 3 ranks.

A family's less common options and file layouts are in tests/models/test_families.py.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.e2e.http_fleet import engine_config, serve_http
from tests.fleet import ProcessPool
from tests.models.test_families import YARN

from moeyard_worker.engine.assembly.verify import reference_model

NUM_TOKENS = 64
PROMPT_LENGTHS = (1, 2, 15, 16, 33, 64, 97, 150)
# Five families have 16 experts, so 3 ranks have 6, 5 and 5. The others have 8: 3, 3 and 2. Mixtral's window is shorter
# than all prompts but three, and than every final context.
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"n_routed_experts": 16},
    "kimi_k2": {"n_group": 1, "topk_group": 1, "rope_parameters": {**YARN, "mscale_all_dim": 1.0}},
    "deepseek_v2": {},
    "deepseek_v4": {"n_routed_experts": 16},
    "qwen3_moe": {"num_experts": 16, "num_experts_per_tok": 3, "mlp_only_layers": [1]},
    "qwen3_next": {"num_experts": 16, "num_experts_per_tok": 3},
    "qwen3_5_moe": {"fused_experts": True},
    "kimi_linear": {"num_local_experts": 16, "num_experts_per_tok": 3},
    "mixtral": {"sliding_window": 24},
    "olmoe": {},
}
# The largest logit must exceed the second by far more than fp32 sums in another order can change it (about 1e-5 here).
# With seed 0 some families, such as deepseek_v3 and qwen3_moe, come closer than that. These seeds do not. If a seed
# fails this, choose another seed, never a tolerance.
SEEDS = {
    "deepseek_v3": 1,
    "kimi_k2": 1,
    "deepseek_v2": 1,
    "deepseek_v4": 0,
    "qwen3_moe": 3,
    "qwen3_next": 3,
    "qwen3_5_moe": 0,
    "kimi_linear": 1,
    "mixtral": 3,
    "olmoe": 0,
}
MIN_LEAD = 1e-3
# Distinct tokens per answer on average. Almost anything matches a model that repeats the end of its prompt.
MIN_DISTINCT = 12


def prompts() -> list[list[int]]:
    """Return seeded random ids, one prompt per length."""
    rng = random.Random(64)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in PROMPT_LENGTHS]


def generate(directory: Path, family: str) -> list[list[int]]:
    """Return transformers' greedy tokens for every prompt, computed as one batch padded on the left.

    transformers compresses the padding of DeepSeek-V4 too, so its prompts run one by one.
    """
    torch.set_num_threads(1)
    model = reference_model(directory, family, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    answers: list[list[int]] = []
    for batch in [[ids] for ids in prompts()] if family == "deepseek_v4" else [prompts()]:
        longest = max(map(len, batch))
        rows = [([0] * (longest - len(ids)) + ids, [0] * (longest - len(ids)) + [1] * len(ids)) for ids in batch]
        ids, mask = (torch.tensor(part) for part in zip(*rows, strict=True))
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=NUM_TOKENS,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_logits=True,
            )
        best = torch.stack(out.logits).topk(2).values  # [tokens, prompts, 2]
        lead = float((best[..., 0] - best[..., 1]).min())
        assert lead > MIN_LEAD, f"{family}: two logits are {lead:.1e} apart; choose another seed for its checkpoint"
        answers += [[int(token) for token in row] for row in out.sequences[:, longest:]]
    assert {len(answer) for answer in answers} == {NUM_TOKENS}
    distinct = sum(len(set(answer)) for answer in answers) / len(answers)
    assert distinct >= MIN_DISTINCT, f"{family}: {distinct} different tokens per answer; choose another seed"
    return answers


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A checkpoint and transformers' answers to the prompts."""
    family = str(request.param)
    directory = tmp_path_factory.mktemp(family)
    make_checkpoint(directory, family, seed=SEEDS[family], tokenizer=True, **FAMILIES[family])
    return directory, generate(directory, family)


@pytest.mark.sampled(0)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("case", FAMILIES, indirect=True)
def test_greedy_tokens(ranks: int, case: tuple[Path, list[list[int]]], processes: ProcessPool) -> None:
    """All prompts run at once through the router. Every token equals transformers'."""
    directory, expected = case
    bodies = [{"prompt": ids, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True} for ids in prompts()]
    with serve_http(processes, engine_config(directory, num_workers=ranks)) as service:
        choices = service.choices_at_once(bodies)
    for ids, choice, tokens in zip(prompts(), choices, expected, strict=True):
        assert choice["prompt_token_ids"] == ids
        assert choice["finish_reason"] == "length"
        assert choice["token_ids"] == tokens, f"prompt of {len(ids)} tokens"
