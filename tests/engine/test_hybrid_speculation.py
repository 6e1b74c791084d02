"""Speculation in models with state changes no answer: an MTP layer in three families, and DSpark.

These are the checks of `test_speculation.py`: tokens, log-probability bits, ends.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoints import MLA, VOCAB_SIZE, add_drafts, add_v4_drafts, edit_config, make_checkpoint, publish_v4
from tests.rank import Rank, Reply

from moeyard_worker.checkpoint.check import check_weights
from moeyard_worker.config.checkpoint_error import CheckpointError
from moeyard_worker.config.engine_config import EngineConfig
from moeyard_worker.engine.assembly.verify import reference_model
from moeyard_worker.engine.steps.runner import Runner
from moeyard_worker.models.shapes import served_model
from moeyard_worker.protocol import SamplingParams
from moeyard_worker.scheduling.step import Chunk, Step

FAMILIES = ("qwen3_next", "qwen3_5_moe_text")


def requests() -> dict[str, tuple[list[int], SamplingParams]]:
    """Prompts end before, at and after a multiple of 64. Two of them extend earlier prompts."""
    chance = random.Random(5)
    ids = [chance.randrange(250) for _ in range(150)]
    common: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True}
    seeded = {"temperature": 0.7, "seed": 3}
    return {
        "first": (ids[:140], SamplingParams(max_tokens=2, temperature=0.0)),
        "greedy": (ids[3:8], SamplingParams(**common, temperature=0.0, logprobs=3)),
        "seeded": (ids[20:84], SamplingParams(**common, **seeded, top_p=0.95, logprobs=0, prompt_logprobs=1)),
        "penalised": (ids[9:74], SamplingParams(**common, temperature=0.0, repetition_penalty=1.4, logprobs=1)),
        "stopped": (
            ids[7:40],
            SamplingParams(max_tokens=60, temperature=0.0, min_tokens=5, stop_token_ids=tuple(range(0, VOCAB_SIZE, 7))),
        ),
        "behind": ([*ids[:140], 9, 9], SamplingParams(**common, temperature=0.0, logprobs=0)),
        "again": (ids[:140], SamplingParams(**common, **seeded)),
    }


def write(directory: Path, family: str) -> Path:
    """Write a checkpoint with an MTP layer, which Kimi-Linear lacks, and head sizes that GPU kernels need."""
    if family in ("deepseek_v4", "dspark"):
        publish_v4(make_checkpoint(directory, "deepseek_v4", seed=2))
        add_v4_drafts(directory, dspark=family == "dspark")
        return directory
    make_checkpoint(directory, family, seed=2, **(MLA if family == "kimi_linear" else {"head_dim": 32}))
    if family != "kimi_linear":
        add_drafts(directory)
    return directory


@pytest.fixture(scope="module", params=(*FAMILIES, "deepseek_v4", "dspark"))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("hybrid"), request.param)


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, Reply]:
    """Answer each request alone, on a rank that does not speculate."""
    with Rank(model, **LIMITS) as rank:
        return {name: rank.run({name: request})[0][name] for name, request in requests().items()}


def drafts_of(model: Path) -> dict[str, Any]:
    """Return the options that make as many drafts per token as the checkpoint's drafter can."""
    dspark = "dspark_block_size" in json.loads((model / "config.json").read_text())
    return {"speculate": "dspark", "draft_tokens": 5} if dspark else {"speculate": "mtp", "draft_tokens": 3}


LIMITS: dict[str, Any] = {"max_num_seqs": 5, "prefill_chunk": 128, "max_batch_tokens": 160}


@pytest.fixture(scope="module")
def drafting(model: Path) -> Iterator[Rank]:
    with Rank(model, **drafts_of(model), **LIMITS) as rank:
        yield rank


@pytest.mark.sampled(0)
@pytest.mark.parametrize(
    "changes",
    [
        {"num_drafts": 1},
        {"num_drafts": 2},
        {},
        {"prefill_chunk": 64, "max_in_flight": 2},
        {"adaptive_drafts": True},
        {"num_pages": 11},
        {"num_pages": 11, "num_drafts": 2, "max_in_flight": 2},
        {"prefix_caching": False},
    ],
    ids=str,
)
def test_answers_equal_plain_decoding(drafting: Rank, expected: dict[str, Reply], changes: dict[str, Any]) -> None:
    if "prefill_chunk" in changes:
        # DeepSeek-V4 computes 128 positions of a prompt together.
        least = drafting.worker.scheduler.config.chunk_alignment
        changes = {**changes, "prefill_chunk": max(least, changes["prefill_chunk"])}
    answers, stats = drafting.run(requests(), **changes)
    assert answers == expected
    assert (stats.prefix_hit_tokens > 0) == changes.get("prefix_caching", True)
    assert (stats.num_preemptions > 0) == ("num_pages" in changes)
    assert stats.accepted[0] > 0
    if "adaptive_drafts" not in changes:
        assert 0.2 < stats.accepted[0] / stats.drafts[0] < 1
        assert all(count > 0 for count in stats.accepted)


def test_answers_stay_the_same_while_the_depth_changes(drafting: Rank, expected: dict[str, Reply]) -> None:
    chance, depths = random.Random(3), set[int]()

    def depth(_number: int, wanted: int) -> int:
        found = min(wanted, chance.randrange(4))
        depths.add(found)
        return found

    answers, stats = drafting.run(requests(), depth)
    assert answers == expected
    assert depths == {0, 1, 2, 3}
    assert stats.accepted[0] > 0
    assert drafting.run(requests(), num_drafts=0)[0] == expected


@pytest.mark.parametrize("model", FAMILIES, indirect=True)
@pytest.mark.parametrize("ring", [1, 3])
def test_too_short_a_state_ring_changes_answers(
    drafting: Rank, expected: dict[str, Reply], monkeypatch: pytest.MonkeyPatch, ring: int
) -> None:
    """With fewer state slots than the four rows of a sequence in a step, refused drafts stay and change answers."""
    monkeypatch.setattr(type(drafting.scheduler().config), "state_ring", ring)
    assert drafting.run(requests())[0] != expected


@pytest.mark.parametrize("model", FAMILIES, indirect=True)
def test_mtp_layer_matches_its_definition(model: Path, drafting: Rank, tmp_path: Path) -> None:
    """transformers has the layer's parts: a one-layer model gets embedding and hidden state via norms and `fc`.

    As in vLLM's `qwen3_next_mtp.py`, the embedding comes first, then the hidden state after the model's last norm.
    """
    family = json.loads((model / "config.json").read_text())["model_type"]
    runner = drafting.worker.runner
    assert isinstance(runner, Runner)
    assert runner.speculation is not None
    chance = random.Random(8)
    ids = [chance.randrange(250) for _ in range(50)]
    chunk = Chunk(
        key=(b"", ""),
        start=0,
        token_ids=tuple(ids[:-1]),
        pages=(0, 1, 2, 3),
        state_slot=0,
        state_ring=4,
        prompt=True,
        num_sampled=1,
    )
    with torch.inference_mode():
        plan = runner.backend.plan(Step(prefill=(chunk,)))
        shifted = torch.zeros(plan.num_rows, dtype=torch.int64)
        shifted[: len(ids) - 1] = torch.tensor(ids[1:])
        found = runner.speculation.drafter.forward(shifted, runner.model.hidden(plan), plan)[: len(ids) - 1]

        whole, tensors = reference_model(model, family, dtype=torch.float32), load_file(model / "model.safetensors")
        hidden = whole.model(torch.tensor([ids[:-1]])).last_hidden_state
        token = whole.model.embed_tokens(torch.tensor([ids[1:]]))
        norms = {}
        for name, x in (("embedding", token), ("hidden", hidden)):
            size = x.pow(2).mean(-1, keepdim=True).add(whole.config.rms_norm_eps).rsqrt()
            norms[name] = x * size * (1 + tensors[f"mtp.pre_fc_norm_{name}.weight"])
        joined = torch.cat((norms["embedding"], norms["hidden"]), -1) @ tensors["mtp.fc.weight"].T
        expected = alone(model, tmp_path, tensors, family).model(inputs_embeds=joined).last_hidden_state[0]
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-5


def alone(model: Path, directory: Path, tensors: dict[str, torch.Tensor], family: str) -> Any:
    """Return the MTP layer as a model with one layer."""
    config = json.loads((model / "config.json").read_text())
    config |= {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    (directory / "config.json").write_text(json.dumps(config))
    kept = {name: tensors[name] for name in ("model.embed_tokens.weight", "lm_head.weight")}
    kept |= {
        f"model.{name.removeprefix('mtp.')}": tensor
        for name, tensor in tensors.items()
        if name.startswith(("mtp.layers.", "mtp.norm."))
    }
    save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})
    return reference_model(directory, family, dtype=torch.float32)


@pytest.mark.parametrize("model", FAMILIES, indirect=True)
def test_mtp_layer_is_loaded_only_on_request(model: Path, tmp_path: Path) -> None:
    plain, config = EngineConfig(model_path=str(model)), EngineConfig(model_path=str(model), speculate="mtp")
    without, drafts = served_model(plain), served_model(config)
    assert drafts.moe_layers == (*without.moe_layers, 3)
    assert drafts.state_spec(4).bytes_per_token == 2 * without.state_spec(4).bytes_per_token
    assert drafts.state_spec(4).bytes_per_sequence == without.state_spec(4).bytes_per_sequence
    assert set(check_weights(plain, without).skipped.values()) == {"multi-token prediction layer"}
    assert check_weights(config, drafts).skipped == {}
    make_checkpoint(tmp_path, "qwen3_next")
    config = EngineConfig(model_path=str(tmp_path), speculate="mtp")
    with pytest.raises(CheckpointError, match=r"no layer for multi-token prediction .* mtp\.layers\.0"):
        check_weights(config, served_model(config))


@pytest.mark.parametrize("model", FAMILIES, indirect=True)
def test_unexpected_mtp_tensors_are_an_error(model: Path, tmp_path: Path) -> None:
    """A second MTP layer is skipped. An embedding of the layer's own is an error, since it would change drafts."""
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    edit_config(tmp_path, num_nextn_predict_layers=2)
    config, tensors = EngineConfig(model_path=str(tmp_path), speculate="mtp"), load_file(model / "model.safetensors")
    save_file({**tensors, "mtp.layers.1.x": torch.ones(3)}, tmp_path / "model.safetensors")
    assert check_weights(config, served_model(config)).skipped == {"mtp.layers.1.x": "multi-token prediction layer"}
    save_file({**tensors, "mtp.embed_tokens.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"unexpected tensor mtp\.embed_tokens\.weight"):
        check_weights(config, served_model(config))
