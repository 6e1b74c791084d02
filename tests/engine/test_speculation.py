"""Speculation on one rank changes no answer: tokens, log-probability bits and ends, whatever the drafts.

The bundled model drafts well (about four of five tokens are right). A copy with random weights in its MTP layer drafts
badly. tests/e2e/test_one_answer.py has several ranks in processes.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoints import DEMO, make_checkpoint
from tests.deploy.tiny_demo import make_demo
from tests.rank import Rank, Reply
from tokenizers import Tokenizer

from moeyard_worker.checkpoint.check import check_weights
from moeyard_worker.config.checkpoint_error import CheckpointError
from moeyard_worker.config.engine_config import EngineConfig
from moeyard_worker.models.shapes import served_model
from moeyard_worker.protocol import Grammar, SamplingParams

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yz"]}}, "required": ["a"]}


def prompts() -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    texts = [json.loads(line)["text"] for line in (DEMO / "heldout.jsonl").read_text().splitlines()[:6]]
    return [tokenizer.encode(text).ids[:count] for text, count in zip(texts, (5, 33, 64, 20, 90, 17), strict=True)]


def requests() -> dict[str, tuple[list[int], SamplingParams]]:
    """Requests that together use every option for tokens."""
    a, b, c, d, e, f = prompts()
    common: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True}
    seeded = {"temperature": 0.8, "seed": 11}
    schema = Grammar(kind="json_schema", text=json.dumps(SCHEMA))
    return {
        "silent": (e, SamplingParams(max_tokens=0, temperature=0.0)),
        "greedy": (a, SamplingParams(**common, temperature=0.0, logprobs=3)),
        "seeded": (b, SamplingParams(**common, **seeded, top_p=0.95, top_k=40, logprobs=0, prompt_logprobs=2)),
        "penalised": (
            c,
            SamplingParams(
                **common,
                temperature=0.6,
                seed=5,
                repetition_penalty=1.3,
                presence_penalty=0.4,
                frequency_penalty=0.2,
                logit_bias={7: -3.0, 20: 2.0},
            ),
        ),
        # A stop token after min_tokens. Most tokens are accepted drafts.
        "stopped": (d, SamplingParams(max_tokens=60, temperature=0.0, min_tokens=6, stop_token_ids=tuple(range(200)))),
        "short": (e, SamplingParams(max_tokens=1, temperature=0.0)),
        "shared": (e, SamplingParams(**common, temperature=0.0)),
        "grammar": (f, SamplingParams(max_tokens=24, **seeded, grammar=schema, logprobs=1)),
    }


@pytest.fixture(scope="module")
def expected() -> dict[str, Reply]:
    """Answer each request alone, on a rank without speculation and without the MTP layer."""
    with Rank(DEMO) as rank:
        found = {name: rank.run({name: request})[0][name] for name, request in requests().items()}
    assert found["stopped"].end is not None
    assert found["stopped"].end[0] == "stop"
    assert 6 <= len(found["stopped"].token_ids) < 60
    return found


@pytest.fixture(scope="module")
def drafting() -> Iterator[Rank]:
    with Rank(DEMO, speculate="mtp", draft_tokens=3) as rank:
        yield rank


@pytest.mark.sampled(0)
@pytest.mark.parametrize(
    "changes",
    [
        {"num_drafts": 1},
        {"num_drafts": 2},
        {},
        {"prefill_chunk": 7},
        {"prefill_chunk": 16, "max_in_flight": 2},
        {"num_pages": 8},
        {"adaptive_drafts": True},
        {"num_pages": 9, "num_drafts": 1, "max_in_flight": 2},
    ],
    ids=str,
)
def test_answers_equal_plain_decoding(drafting: Rank, expected: dict[str, Reply], changes: dict[str, Any]) -> None:
    answers, stats = drafting.run(requests(), **changes)
    assert answers == expected
    assert (stats.num_preemptions > 0) == ("num_pages" in changes)
    if "adaptive_drafts" in changes:
        assert stats.accepted[0] > 0, "the depth depends on measured times"
    else:
        assert 0.5 < stats.accepted[0] / stats.drafts[0] < 1
        assert all(count > 0 for count in stats.accepted)
    # Cached prefixes include the MTP layer's keys. The prompt of "shared" equals earlier ones.
    assert stats.prefix_hit_tokens > 0 or "num_pages" in changes


def test_answers_stay_the_same_while_the_depth_changes_per_step(drafting: Rank, expected: dict[str, Reply]) -> None:
    chance = random.Random(3)
    depths: list[int] = []

    def depth(_number: int, wanted: int) -> int:
        depths.append(min(wanted, chance.randrange(4)))
        return depths[-1]

    answers, stats = drafting.run(requests(), depth)
    assert answers == expected
    assert set(depths) == {0, 1, 2, 3}
    assert stats.accepted[0] > 0
    assert drafting.run(requests(), num_drafts=0)[0] == expected


def test_few_expert_slots_change_no_answer(expected: dict[str, Reply]) -> None:
    with Rank(DEMO, speculate="mtp", expert_slots=9) as rank:
        answers, stats = rank.run(requests())
    assert answers == expected
    assert stats.accepted[0] > 0.5 * stats.drafts[0]
    # The cache holds the MTP layer's experts like any others.
    assert 6 in rank.worker.experts.stats.expert_rows
    assert rank.worker.experts.stats.counters.num_misses > 0


def test_random_drafts_change_no_answer(tmp_path: Path, expected: dict[str, Reply]) -> None:
    for path in DEMO.glob("*.json"):
        (tmp_path / path.name).symlink_to(path)
    tensors = load_file(DEMO / "model.safetensors")
    join = tensors["model.layers.6.eh_proj.weight"]
    noise = torch.randn(join.shape, generator=torch.Generator().manual_seed(1))
    tensors["model.layers.6.eh_proj.weight"] = noise.to(join.dtype)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with Rank(tmp_path, speculate="mtp", draft_tokens=3) as rank:
        answers, stats = rank.run(requests())
    assert answers == expected
    assert stats.accepted[0] < 0.1 * stats.drafts[0]


def test_mtp_layer_is_loaded_only_on_request(tmp_path: Path) -> None:
    make_demo(tmp_path)
    plain, config = EngineConfig(model_path=str(tmp_path)), EngineConfig(model_path=str(tmp_path), speculate="mtp")
    without, model = served_model(plain), served_model(config)
    assert model.moe_layers == (*without.moe_layers, 2)
    assert model.state_spec(4).bytes_per_token == without.state_spec(4).bytes_per_token * 3 // 2
    skipped = check_weights(plain, without).skipped
    assert set(skipped.values()) == {"multi-token prediction layer"}
    checked = check_weights(config, model)
    assert checked.skipped == {
        f"model.layers.2.{name}": "a copy of the model's own embedding or head"
        for name in ("embed_tokens.weight", "shared_head.head.weight")
    }
    assert checked.dense_bytes() > check_weights(plain, without).dense_bytes()


def test_mtp_layer_without_eh_proj_is_incomplete(tmp_path: Path) -> None:
    make_demo(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.2.eh_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = EngineConfig(model_path=str(tmp_path), speculate="mtp")
    with pytest.raises(CheckpointError, match=r"no tensor model\.layers\.2\.eh_proj\.weight of shape \[32, 64\]"):
        check_weights(config, served_model(config))


def test_checkpoint_without_an_mtp_layer(tmp_path: Path) -> None:
    config = EngineConfig(model_path=str(make_checkpoint(tmp_path, "deepseek_v3")), speculate="mtp")
    with pytest.raises(
        ValueError, match=r"^--speculate mtp: .*: this model has no layer for multi-token prediction \("
    ):
        served_model(config)
