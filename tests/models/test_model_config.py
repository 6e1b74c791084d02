"""config.json becomes one normal form: old and new keys, per-layer kinds, stop ids, and errors that name the key."""

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import DeepseekV3Config, KimiLinearConfig, Qwen3MoeConfig, Qwen3NextConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from moeyard_worker.config.checkpoint_error import CheckpointError
from moeyard_worker.layers.gdn import Gdn
from moeyard_worker.layers.gqa import Gqa
from moeyard_worker.layers.kda import Kda
from moeyard_worker.layers.mla import Mla
from moeyard_worker.layers.rope import inverse_frequencies
from moeyard_worker.models.families import FAMILIES, load_model_config
from moeyard_worker.models.model_config import ModelConfig

DEFAULTS = Path(__file__).parents[2] / "worker/moeyard_worker/models/defaults.json"

BASE: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "q_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "max_position_embeddings": 1024,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "max_position_embeddings": 1024,
        "rope_theta": 1000000.0,
    },
    # The published file (allenai/OLMoE-1B-7B-0924) made small, without num_key_value_heads.
    "olmoe": {
        "model_type": "olmoe",
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": False,
        "attention_bias": False,
        "clip_qkv": None,
        "max_position_embeddings": 1024,
        "rope_scaling": None,
        "rope_theta": 10000.0,
    },
}


# The published file (Qwen/Qwen3-Next-80B-A3B-Instruct) made small.
BASE["qwen3_next"] = {
    **{key: value for key, value in BASE["qwen3_moe"].items() if key != "model_type"},
    "model_type": "qwen3_next",
    "num_hidden_layers": 8,
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.25,
    "rope_scaling": None,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "shared_expert_intermediate_size": 40,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}


# The published file (moonshotai/Kimi-Linear-48B-A3B-Instruct) made small.
BASE["kimi_linear"] = {
    "model_type": "kimi_linear",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 72,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "mla_use_nope": True,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "linear_attn_config": {
        "full_attn_layers": [4],
        "kda_layers": [1, 2, 3, 5],
        "head_dim": 24,
        "num_heads": 3,
        "short_conv_kernel_size": 4,
    },
    "num_experts": 8,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 32,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "moe_layer_freq": 1,
    "first_k_dense_replace": 1,
    "num_expert_group": 1,
    "topk_group": 1,
    "use_grouped_topk": True,
    "routed_scaling_factor": 2.446,
    "model_max_length": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 3,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
}


def write(directory: Path, family: str, remove: tuple[str, ...] = (), **changes: Any) -> Path:
    config = {key: value for key, value in {**BASE[family], **changes}.items() if key not in remove}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_import_loads_no_torch() -> None:
    modules = "moeyard_worker.models.model_config, moeyard_worker.checkpoint.check"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


def test_deepseek_v3(tmp_path: Path) -> None:
    config = load_model_config(write(tmp_path, "deepseek_v3"))
    [attention] = config.attention_kinds()
    assert isinstance(attention, Mla)
    assert attention.scale == 24**-0.5
    assert attention.rope is not None
    assert attention.rope.interleaved
    assert attention.rope.dim == 8
    assert len(config.attention) == 4
    assert config.moe_layers == (1, 2, 3)
    assert config.shared_intermediate_size == 64
    assert config.gate.rule.group_score == "top2sum"
    assert config.gate.fp32_logits
    # 4 layers of 32 + 8 values.
    assert config.state_spec(2).bytes_per_token == 4 * 40 * 2
    assert config.state_spec(2).prefix_reusable


def test_qwen3_moe(tmp_path: Path) -> None:
    config = load_model_config(write(tmp_path, "qwen3_moe", decoder_sparse_step=2, mlp_only_layers=[3]))
    [attention] = config.attention_kinds()
    assert isinstance(attention, Gqa)
    assert config.moe_layers == (1, 5)
    assert attention.rope is not None
    assert attention.rope.theta == 1000000.0
    assert attention.head_dim == 32
    assert attention.sliding_window is None
    assert config.state_spec(4).bytes_per_token == 6 * 2 * 2 * 32 * 4


def test_olmoe(tmp_path: Path) -> None:
    config = load_model_config(write(tmp_path, "olmoe"))
    [attention] = config.attention_kinds()
    assert isinstance(attention, Gqa)
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (4, 4, 16)
    assert attention.qk_norm == "all"
    assert attention.norm_eps == config.rms_eps == 1e-5
    assert not config.gate.rule.renormalize
    assert config.moe_layers == (0, 1, 2, 3)
    assert config.moe_intermediate_size == 32
    assert config.shared_intermediate_size == 0


def test_sliding_window_of_qwen3_moe_needs_its_switch(tmp_path: Path) -> None:
    off = load_model_config(write(tmp_path, "qwen3_moe", sliding_window=64)).attention[0]
    on = load_model_config(write(tmp_path, "qwen3_moe", sliding_window=64, use_sliding_window=True)).attention[0]
    assert isinstance(off, Gqa)
    assert isinstance(on, Gqa)
    assert (off.sliding_window, on.sliding_window) == (None, 64)


def test_moe_layer_freq(tmp_path: Path) -> None:
    directory = write(tmp_path, "deepseek_v3", moe_layer_freq=2, first_k_dense_replace=0)
    assert load_model_config(directory).moe_layers == (0, 2)


def test_stop_ids_join_both_files(tmp_path: Path) -> None:
    write(tmp_path, "qwen3_moe", eos_token_id=7, bos_token_id=1)
    assert load_model_config(tmp_path).eos_token_ids == (7,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 7]}))
    config = load_model_config(tmp_path)
    assert config.eos_token_ids == (9, 7)
    assert config.bos_token_id == 1


def test_stop_ids_of_config_json_are_added(tmp_path: Path) -> None:
    write(tmp_path, "qwen3_moe", eos_token_id=7)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}))
    assert load_model_config(tmp_path).eos_token_ids == (9, 7)


ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 50000.0,
        "factor": 32.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "yarn-plain": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 256,
        "truncate": False,
    },
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.5, 2.0, 2.5],
        "long_factor": [2.0, 3.0, 5.0, 8.0],
        "original_max_position_embeddings": 256,
    },
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0},
}


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("old_keys", [False, True])
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe"])
def test_rope_matches_transformers(tmp_path: Path, family: str, name: str, old_keys: bool) -> None:
    rope = dict(ROPES[name])
    if "short_factor" in rope and family == "qwen3_moe":  # a rotated head has 32 values, not 8
        rope |= {key: rope[key] * 4 for key in ("short_factor", "long_factor")}
    config_class = {"deepseek_v3": DeepseekV3Config, "qwen3_moe": Qwen3MoeConfig}[family]
    reference = config_class(**{**BASE[family], "rope_parameters": dict(rope)})
    expected, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](reference, device=None)
    if old_keys:
        theta, kind = rope.pop("rope_theta"), rope.pop("rope_type")
        write(tmp_path, family, rope_theta=theta, rope_scaling={"type": kind, **rope})
    else:
        write(tmp_path, family, rope_parameters=rope, remove=("rope_theta",))
    config = load_model_config(tmp_path)
    made = config.attention[0].rope
    assert made is not None
    torch.testing.assert_close(inverse_frequencies(made), expected, rtol=1e-6, atol=0)
    assert made.attention_factor == pytest.approx(factor, rel=1e-12)
    if made.longer is None:
        return
    # Sequences longer than the rotation's original context get another rotation.
    assert load_model_config(tmp_path, config.max_position) == config
    longer = load_model_config(tmp_path, config.max_position + 1)
    assert longer.max_position == {"longrope": 1024, "dynamic": 3072}[name]
    made = longer.attention[0].rope
    assert made is not None
    expected, factor = ROPE_INIT_FUNCTIONS[name](reference, device=None, seq_len=longer.max_position)
    torch.testing.assert_close(inverse_frequencies(made), expected, rtol=1e-5, atol=0)
    assert made.attention_factor == pytest.approx(factor, rel=1e-12)


# Changes of a config.json with 1024 positions, the usual longest sequence, which vLLM derives too, and the limit of
# --max-model-len.
YARN, LINEAR = {"rope_type": "yarn", "factor": 4.0}, {"factor": 2.5}
LONG = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
LENGTHS: dict[str, tuple[dict[str, Any], int, int]] = {
    "plain": ({}, 1024, 1024),
    "null": ({"rope_scaling": None}, 1024, 1024),
    "yarn": ({"rope_scaling": {**YARN, "original_max_position_embeddings": 256}}, 1024, 1024),
    "yarn, beyond": ({"rope_scaling": {**YARN, "original_max_position_embeddings": 1024}}, 4096, 4096),
    "yarn, shorter": ({"rope_scaling": {**YARN, "original_max_position_embeddings": 128}}, 512, 512),
    "yarn without original": ({"rope_scaling": YARN}, 4096, 4096),
    "yarn without factor": ({"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 256}}, 1024, 1024),
    "yarn, original beside": ({"rope_scaling": YARN, "original_max_position_embeddings": 300}, 1200, 1200),
    "yarn, new keys": ({"rope_parameters": {**YARN, "rope_theta": 1e6}}, 4096, 4096),
    "yarn, type": ({"rope_parameters": {"type": "yarn", "factor": 2}}, 2048, 2048),
    "deepseek_yarn": ({"rope_scaling": {"type": "deepseek_yarn", "factor": 3}}, 3072, 3072),
    "linear": ({"rope_scaling": {**LINEAR, "type": "linear"}}, 2560, 2560),
    "linear, new keys": ({"rope_parameters": {**LINEAR, "rope_type": "linear"}}, 2560, 2560),
    "dynamic": ({"rope_scaling": {**LINEAR, "type": "dynamic"}}, 1024, 2560),
    "llama3": ({"rope_scaling": ROPES["llama3"]}, 1024, 1024),
    "su": ({"rope_scaling": {**LONG, "type": "su", "original_max_position_embeddings": 200}}, 200, 1024),
    "longrope": ({"rope_parameters": {**LONG, "rope_type": "longrope"}}, 1024, 1024),
    "longrope, original beside": (
        {"rope_scaling": {**LONG, "type": "longrope"}, "original_max_position_embeddings": 128},
        128,
        1024,
    ),
    "mrope": ({"rope_scaling": {"type": "mrope", "mrope_section": [8, 4, 4]}}, 1024, 1024),
    "per layer type": ({"rope_parameters": {"full_attention": YARN}}, 4096, 4096),
    "per layer type, one used": (
        {
            "rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_theta": 1.0}},
            "layer_types": ["full_attention"] * 6,
        },
        4096,
        4096,
    ),
    "per layer type, equal": ({"rope_parameters": {"full_attention": YARN, "sliding_attention": YARN}}, 4096, 4096),
}


@pytest.mark.parametrize("case", LENGTHS)
def test_context_of_a_scaled_rope(tmp_path: Path, case: str) -> None:
    changes, usual, longest = LENGTHS[case]
    write(tmp_path, "qwen3_moe", **changes)
    assert load_model_config(tmp_path).max_position == usual
    assert load_model_config(tmp_path, longest).max_position == longest
    assert load_model_config(tmp_path, longest + 1).max_position == longest


def test_rope_of_one_layer_type(tmp_path: Path) -> None:
    ropes = {"full_attention": {**YARN, "original_max_position_embeddings": 512}, "linear_attention": None}
    write(tmp_path, "qwen3_next", rope_parameters=ropes)
    assert load_model_config(tmp_path).max_position == 2048


# Config classes of transformers by family.
CLASSES = {
    "deepseek_v3": "DeepseekV3Config",
    "deepseek_v2": "DeepseekV2Config",
    "qwen3_moe": "Qwen3MoeConfig",
    "qwen3_next": "Qwen3NextConfig",
    "qwen3_5_moe_text": "Qwen3_5MoeTextConfig",
    "kimi_linear": "KimiLinearConfig",
    "mixtral": "MixtralConfig",
    "olmoe": "OlmoeConfig",
}


def read(directory: Path, values: Mapping[str, Any]) -> ModelConfig | str:
    """Return the model, or the error that refuses it."""
    (directory / "config.json").write_text(json.dumps(values))
    try:
        return load_model_config(directory)
    except CheckpointError as error:
        return str(error)


@pytest.mark.parametrize("family", CLASSES)
def test_missing_key_has_the_default_of_its_class(tmp_path: Path, family: str) -> None:
    """Each key of a whole config.json is once removed and once the only key."""
    config_class = getattr(transformers, CLASSES[family])
    common = {"hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 4}
    tiny = {**common, "vocab_size": 200_000, "rms_norm_eps": 0.25, "bos_token_id": 3, "eos_token_id": 4, "n_group": 2}
    tiny |= {"num_experts": 16, "n_routed_experts": 16, "num_experts_per_tok": 3, "topk_group": 2}
    tiny |= {"use_sliding_window": True, "first_k_dense_replace": 1}
    # Keys that a config class lacks stay: they belong to the authors' own code.
    whole = json.loads(config_class(**tiny).to_json_string(use_diff=False)) | {"model_type": family}
    for key in whole:
        for values in ({k: v for k, v in whole.items() if k != key}, {key: whole[key], "model_type": family}):
            if key == "model_type":
                continue
            # Latent attention has one key per query head, whatever the file or class says.
            if family in ("deepseek_v3", "deepseek_v2", "kimi_linear"):
                values["num_key_value_heads"] = None
            try:
                complete = json.loads(config_class.from_dict(values).to_json_string(use_diff=False))
            except StrictDataclassError:  # a list's length differs from the default number of layers
                assert isinstance(read(tmp_path, values), str), f"{'only' if len(values) < 4 else 'without'} {key}"
                continue
            expected = read(tmp_path, {**complete, "model_type": family})
            assert read(tmp_path, values) == expected, f"{'only' if len(values) < 4 else 'without'} {key}"


@pytest.mark.parametrize("family", ["deepseek_v3", "olmoe", "kimi_linear"])
def test_default_token_id_has_the_lowest_priority(tmp_path: Path, family: str) -> None:
    """The class's id counts if no file gives one, null included, and the vocabulary contains it."""
    default = json.loads(DEFAULTS.read_text())[FAMILIES[family].reference]["eos_token_id"]
    write(tmp_path, family, remove=("eos_token_id",), vocab_size=200_000)
    assert load_model_config(tmp_path).eos_token_ids == (default,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9]}))
    assert load_model_config(tmp_path).eos_token_ids == (9,)
    (tmp_path / "generation_config.json").unlink()
    write(tmp_path, family, eos_token_id=None, vocab_size=200_000)
    assert load_model_config(tmp_path).eos_token_ids == ()
    write(tmp_path, family, remove=("eos_token_id",), vocab_size=default)
    assert load_model_config(tmp_path).eos_token_ids == ()


def test_qwen3_5_moe_in_a_vision_model(tmp_path: Path) -> None:
    """The text part works alone and inside the whole file. An outer value counts if the text part has none."""
    plain = {key: value for key, value in BASE["qwen3_next"].items() if key not in ("intermediate_size", "model_type")}
    sections = {"mrope_section": [2, 1, 1], "mrope_interleaved": True, "rope_type": "default", "rope_theta": 1e6}
    text = {**plain, "model_type": "qwen3_5_moe_text", "rope_parameters": sections, "eos_token_id": 9}
    (tmp_path / "config.json").write_text(json.dumps(text))
    alone = load_model_config(tmp_path)
    assert not alone.attention[0].by_key_head  # type: ignore[attr-defined]
    assert alone.moe_layers == tuple(range(8))
    assert alone.gate.rule.renormalize
    whole = {"model_type": "qwen3_5_moe", "text_config": text, "vision_config": {"hidden_size": 5}, "dtype": "bfloat16"}
    for tied in (False, True):
        (tmp_path / "config.json").write_text(json.dumps({**whole, "tie_word_embeddings": tied}))
        config = load_model_config(tmp_path)
        assert config == replace(alone, family="qwen3_5_moe", tie_word_embeddings=tied, dtype="bfloat16")
    (tmp_path / "config.json").write_text(json.dumps({**whole, "text_config": 5}))
    with pytest.raises(CheckpointError, match="text_config is 5, expected an object"):
        load_model_config(tmp_path)


@pytest.mark.parametrize("spelling", ["published", "transformers"])
def test_qwen3_next(tmp_path: Path, spelling: str) -> None:
    """Both spellings: the published file and that of transformers 5."""
    write(tmp_path, "qwen3_next")
    if spelling == "transformers":
        Qwen3NextConfig(**BASE["qwen3_next"]).save_pretrained(tmp_path)
        stored = json.loads((tmp_path / "config.json").read_text())
        assert "layer_types" in stored
        assert "full_attention_interval" not in stored
        # transformers 5.17 also writes the key at the top, 5.24 does not.
        stored.pop("partial_rotary_factor", None)
        assert stored["rope_parameters"]["partial_rotary_factor"] == 0.25
        (tmp_path / "config.json").write_text(json.dumps(stored))
    config = load_model_config(tmp_path)
    linear, full = config.attention[0], config.attention[3]
    assert config.attention == (linear, linear, linear, full) * 2
    assert linear == Gdn(num_k_heads=2, num_v_heads=4, k_dim=16, v_dim=24, conv_size=4, norm_eps=1e-6, by_key_head=True)
    assert isinstance(full, Gqa)
    assert full.output_gate
    assert full.norm_less_one
    assert full.rope is not None
    assert (full.rope.dim, full.rope.theta) == (8, 1000000.0)
    assert config.shared_gate
    assert config.shared_intermediate_size == 40
    state = config.state_spec(2)
    assert state.bytes_per_token == 2 * 2 * 2 * 32 * 2
    assert state.bytes_per_sequence == 6 * (4 * 16 * 24 * 4 + 3 * (2 * 32 + 96) * 2)
    assert (state.chunk_alignment, state.prefix_reusable) == (64, False)


@pytest.mark.parametrize("spelling", ["published", "transformers"])
def test_kimi_linear(tmp_path: Path, spelling: str) -> None:
    """Both spellings: the published file and that of transformers 5."""
    write(tmp_path, "kimi_linear")
    if spelling == "transformers":
        # transformers 5.24 warns of the old key.
        given = {key: value for key, value in BASE["kimi_linear"].items() if key != "rope_scaling"}
        KimiLinearConfig(**given).save_pretrained(tmp_path)
        stored = json.loads((tmp_path / "config.json").read_text())
        assert stored["layer_types"] == ["linear_attention"] * 3 + ["full_attention", "linear_attention"]
        for key in ("linear_attn_config", "first_k_dense_replace"):
            stored.pop(key, None)
        (tmp_path / "config.json").write_text(json.dumps(stored))
    config = load_model_config(tmp_path)
    kda, mla = config.attention[0], config.attention[3]
    assert config.attention == (kda, kda, kda, mla, kda)
    assert kda == Kda(num_heads=3, head_dim=24, conv_size=4, norm_eps=1e-5)
    assert isinstance(mla, Mla)
    assert (mla.rope, mla.scale, mla.rope_dim) == (None, 24**-0.5, 8)
    assert config.moe_layers == (1, 2, 3, 4)
    assert (config.num_experts, config.top_k, config.shared_intermediate_size) == (8, 2, 32)
    assert config.gate.rule.renormalize
    assert config.gate.rule.scaling == 2.446
    assert (config.max_position, config.rms_eps) == (2048, 1e-5)
    state = config.state_spec(2)
    assert state.bytes_per_token == 40 * 2
    assert state.bytes_per_sequence == 4 * (3 * 24 * 24 * 4 + 3 * 3 * 72 * 2)
    assert (state.chunk_alignment, state.prefix_reusable) == (64, False)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "architecture": (
        "qwen3_moe",
        {"model_type": "llama"},
        "model_type 'llama' is not supported (supported: deepseek_v3",
    ),
    "no architecture": ("qwen3_moe", {"model_type": None}, "model_type null is not supported"),
    "activation": ("qwen3_moe", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    "quantized": (
        "deepseek_v3",
        {"quantization_config": {"quant_method": "quark", "fmt": "e4m3", "weight_block_size": [128, 128]}},
        "quantization_config is not supported: the weights are quantised by quark (e4m3) (supported: float32 and bf",
    ),
    "quip": ("qwen3_moe", {"quantization_config": {"quant_method": "quip", "bits": 4}}, "quantised by quip (4 bits)"),
    "gptq": ("qwen3_moe", {"quantization_config": {"quant_method": "gptq", "bits": 8}}, "bits 8 is not supported"),
    "compressed": (
        "deepseek_v3",
        {"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}},
        "config_groups is null, expected one or more groups",
    ),
    "compressed before": (
        "qwen3_moe",
        {"compression_config": {"format": "int"}},
        "compression_config: config_groups is null, expected one or more groups",
    ),
    "unnamed groups": (
        "qwen3_moe",
        {"quantization_config": {"config_groups": {}}},
        'has no quant_method: its keys are those of compressed-tensors; add "quant_method": "compressed-tensors"',
    ),
    "unnamed gptq": (
        "qwen3_moe",
        {"quantization_config": {"bits": 4, "group_size": 128, "sym": True}},
        'has no quant_method: its keys are those of gptq (4 bits); add "quant_method": "gptq"',
    ),
    "unnamed awq": (
        "qwen3_moe",
        {"quantization_config": {"bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}},
        'has no quant_method: its keys are those of awq (4 bits); add "quant_method": "awq"',
    ),
    "unnamed fp8": (
        "qwen3_moe",
        {"quantization_config": {"fmt": "e4m3", "weight_block_size": [128, 128]}},
        'has no quant_method: its keys are those of fp8 (e4m3); add "quant_method": "fp8"',
    ),
    "mxfp4": ("qwen3_moe", {"quantization_config": {"quant_method": "mxfp4"}}, "quantised by mxfp4"),
    "bitsandbytes": (
        "qwen3_moe",
        {"quantization_config": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}},
        "quantised by bitsandbytes",
    ),
    "modelopt": (
        "qwen3_moe",
        {"quantization_config": {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}},
        "quantised by modelopt (NVFP4)",
    ),
    "modelopt without producer": (
        "qwen3_moe",
        {"quantization_config": {"quantization": {"quant_algo": "NVFP4"}}},
        "quantised by modelopt (NVFP4)",
    ),
    "producer is no string": (
        "qwen3_moe",
        {"quantization_config": {"producer": {"name": ["gptq"]}}},
        "quantised by ['gptq'] (supported",
    ),
    "mlx": ("qwen3_moe", {"quantization": {"group_size": 64, "bits": 4}}, "quantised by MLX (4 bits)"),
    "method is no string": ("qwen3_moe", {"quantization_config": {"quant_method": ["fp8"]}}, "['fp8'] (supported"),
    "quantized, no method": ("qwen3_moe", {"quantization_config": {}}, "has no quant_method (supported: fp8, comp"),
    "quantized text": (
        "qwen3_next",
        {"model_type": "qwen3_5_moe", "text_config": {"quantization_config": {"quant_method": "quip"}}},
        "quantised by quip",
    ),
    "another architecture, quantized": (
        "qwen3_moe",
        {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}},
        "; quantization_config is not supported either: mxfp4",
    ),
    "dtype": ("qwen3_moe", {"torch_dtype": "float16"}, "dtype 'float16' is not supported"),
    "missing": ("deepseek_v3", {"kv_lora_rank": None}, "kv_lora_rank is missing"),
    "not a number": ("qwen3_moe", {"hidden_size": "64"}, "hidden_size is '64', expected an integer"),
    "heads": ("qwen3_moe", {"num_key_value_heads": 3}, "num_key_value_heads is 3, which does not divide 4 heads"),
    "rope kind": ("qwen3_moe", {"rope_scaling": {"type": "ntk"}}, "rope_scaling: rope_type 'ntk'"),
    "rope kind no string": (
        "qwen3_moe",
        {"rope_scaling": {"type": ["yarn"]}},
        "rope_type ['yarn'] is not supported",
    ),
    "longrope": ("qwen3_moe", {"rope_scaling": {"type": "su"}}, "rope_scaling: short_factor is null, expected a list"),
    "too far": (
        "qwen3_moe",
        {"rope_scaling": {"type": "linear", "factor": 1e9}},
        "factor makes a context of 1.024e+12",
    ),
    "rope factor": ("qwen3_moe", {"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing"),
    "partial rotation": ("qwen3_moe", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
    "rope per layer": ("qwen3_moe", {"rope_parameters": {"full": {"rope_theta": 1.0}}}, "differs per layer type"),
    "dynamic, too far": (
        "qwen3_moe",
        {"rope_scaling": {"type": "dynamic", "factor": 1e150}},
        "factor makes a context of 1.024e+153",
    ),
    "ropes of two layer types": (
        "qwen3_moe",
        {"rope_parameters": {"full_attention": {"rope_theta": 1.0}, "sliding_attention": {"rope_theta": 2.0}}},
        "rope_parameters differs per layer type",
    ),
    "gate": ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
    "groups": ("deepseek_v3", {"n_group": 3}, "n_group is 3 of 8 experts"),
    "small groups": ("deepseek_v3", {"n_group": 8, "topk_group": 4}, "a group needs at least 2"),
    "few groups": ("deepseek_v3", {"n_group": 4, "num_experts_per_tok": 3}, "too few experts to choose 3 from"),
    "top_k": ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, more than the 8 experts"),
    "dense": ("deepseek_v3", {"first_k_dense_replace": 4}, "no layer is a Mixture-of-Experts layer"),
    "v2 weights": (
        "deepseek_v3",
        {"model_type": "deepseek_v2", "norm_topk_prob": True},
        "norm_topk_prob true is not supported",
    ),
    "kind of layer": (
        "qwen3_next",
        {"layer_types": ["linear_attention"] * 7 + ["mamba"]},
        "layer_types has 'mamba', which is not supported (supported: linear_attention, full_attention)",
    ),
    "kinds of layers": ("qwen3_next", {"layer_types": ["full_attention"]}, "expected a list of 8 names, one per layer"),
    "no full attention": ("qwen3_next", {"full_attention_interval": 9}, "layer_types names no layer of full attention"),
    "value heads": ("qwen3_next", {"linear_num_key_heads": 3}, "linear_num_value_heads is 4, no multiple of 3 key"),
    "more than a head": (
        "qwen3_next",
        {"partial_rotary_factor": 1.5},
        "partial_rotary_factor is 1.5, a part is at most",
    ),
    "layers named twice": (
        "kimi_linear",
        {"linear_attn_config": {"full_attn_layers": [4, 5], "kda_layers": [1, 2, 3, 5]}},
        "linear_attn_config: kda_layers and full_attn_layers do not name each of 5 layers once, from 1",
    ),
    "no object": ("kimi_linear", {"linear_attn_config": [1]}, "linear_attn_config is [1], expected an object"),
    "rotated": ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope false is not supported (supported: true)"),
    "tied": ("kimi_linear", {"tie_word_embeddings": True}, "tie_word_embeddings true is not supported"),
    "kind of MLP": (
        "kimi_linear",
        {"mlp_layer_types": ["moe"] * 5},
        "mlp_layer_types has 'moe', which is not supported",
    ),
    "softmax": (
        "kimi_linear",
        {"moe_router_activation_func": "softmax"},
        "moe_router_activation_func 'softmax' is not",
    ),
    "clipped queries": ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is not supported (supported: null)"),
    "olmoe with a window": ("olmoe", {"sliding_window": 24}, "sliding_window is not supported (supported: null)"),
    "olmoe's head width": ("olmoe", {"head_dim": 32}, "head_dim is 32: 4 heads are not 64 wide"),
}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "hf_quant_config.json",
            {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}},
            "is not supported: the weights are quantised by modelopt (FP8) (supported",
        ),
        (
            "quantize_config.json",
            {"bits": 4, "group_size": 128, "desc_act": False},
            "config.json has no quantization_config; copy these settings of gptq (4 bits) into it, with "
            '"quant_method": "gptq"',
        ),
        (
            "quantize_config.json",
            {"quant_method": ["gptq"]},
            "is not supported: the weights are quantised by ['gptq'] (",
        ),
        (
            "quant_config.json",
            {"zero_point": True, "q_group_size": 128, "w_bit": 4},
            "config.json has no quantization_config; copy these settings of awq (4 bits) into it, with "
            '"quant_method": "awq" and "bits", "group_size" for "w_bit", "q_group_size"',
        ),
    ],
)
def test_files_of_quantisers_are_refused(tmp_path: Path, name: str, content: dict[str, Any], message: str) -> None:
    write(tmp_path, "qwen3_moe")
    load_model_config(tmp_path)
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=re.escape(f"{name}: {message}")):
        load_model_config(tmp_path)


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path: Path, case: str) -> None:
    family, changes, message = REFUSED[case]
    write(tmp_path, family, **changes)
    with pytest.raises(CheckpointError) as error:
        load_model_config(tmp_path)
    assert str(error.value).startswith(f"{tmp_path}/config.json: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_unreadable(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read as JSON"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"config\.json: expected a JSON object, got \["):
        load_model_config(tmp_path)
