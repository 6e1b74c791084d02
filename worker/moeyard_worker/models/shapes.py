"""Published architectures by name, as their config.json has them: what weights of chance can be served under. Pure.

From the configs on the hub (2026-11): what decides sizes and arithmetic, and nothing else. `moeyard-demo` is that of
the bundled model (deploy/demo), small enough for every machine.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from moeyard_worker.config.engine_config import EngineConfig
from moeyard_worker.config.fields import Fields
from moeyard_worker.models.families import load_model_config, parse_model_config
from moeyard_worker.models.model_config import ModelConfig

_DEEPSEEK_V3: Mapping[str, Any] = MappingProxyType({
    "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
    "num_hidden_layers": 61, "num_attention_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256,
    "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 2048, "first_k_dense_replace": 3,
    "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "norm_topk_prob": True, "rope_theta": 10000,
    "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "dtype": "bfloat16",
    "num_nextn_predict_layers": 1,
    "rope_scaling": {
        "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
        "mscale": 1.0, "mscale_all_dim": 1.0,
    },
})  # fmt: skip
_QWEN3: Mapping[str, Any] = MappingProxyType({
    "model_type": "qwen3_moe", "vocab_size": 151936, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
    "num_experts_per_tok": 8, "norm_topk_prob": True, "rope_theta": 1000000.0, "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6, "dtype": "bfloat16",
})  # fmt: skip

SHAPES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "Qwen3-30B-A3B": {
            **_QWEN3, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
            "num_attention_heads": 32, "moe_intermediate_size": 768,
        },
        "Qwen3-235B-A22B": {
            **_QWEN3, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 94,
            "num_attention_heads": 64, "moe_intermediate_size": 1536,
        },
        "Qwen3-Next-80B-A3B": {
            "model_type": "qwen3_next", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5120,
            "num_hidden_layers": 48, "full_attention_interval": 4, "num_attention_heads": 16, "num_key_value_heads": 2,
            "head_dim": 256, "partial_rotary_factor": 0.25, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
            "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 512,
            "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
            "norm_topk_prob": True, "rope_theta": 10000000, "max_position_embeddings": 262144, "rms_norm_eps": 1e-6,
            "dtype": "bfloat16",
        },
        "Qwen3.5-35B-A3B": {
            "model_type": "qwen3_5_moe_text", "vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40,
            "full_attention_interval": 4, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
            "partial_rotary_factor": 0.25, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
            "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 256,
            "num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
            "rope_theta": 10000000, "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "dtype": "bfloat16",
        },
        "Mixtral-8x7B": {
            "model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
            "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8,
            "num_experts_per_tok": 2, "rope_theta": 1000000.0, "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-5, "dtype": "bfloat16",
        },
        "DeepSeek-V2-Lite": {
            "model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 2048, "intermediate_size": 10944,
            "num_hidden_layers": 27, "num_attention_heads": 16, "q_lora_rank": None, "kv_lora_rank": 512,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64,
            "num_experts_per_tok": 6, "n_shared_experts": 2, "moe_intermediate_size": 1408,
            "first_k_dense_replace": 1, "topk_method": "greedy", "scoring_func": "softmax",
            "routed_scaling_factor": 1.0, "norm_topk_prob": False, "rope_theta": 10000,
            "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "dtype": "bfloat16",
            "rope_scaling": {
                "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32,
                "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707,
            },
        },
        "DeepSeek-V3": _DEEPSEEK_V3,
        "Kimi-K2": {
            **_DEEPSEEK_V3, "model_type": "kimi_k2", "vocab_size": 163840, "num_attention_heads": 64,
            "n_routed_experts": 384, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
            "num_nextn_predict_layers": 0, "routed_scaling_factor": 2.827, "rope_theta": 50000.0,
            "max_position_embeddings": 131072,
            "rope_scaling": {
                "type": "yarn", "factor": 32, "original_max_position_embeddings": 4096, "beta_fast": 1,
                "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
            },
        },
        "Kimi-Linear-48B-A3B": {
            "model_type": "kimi_linear", "vocab_size": 163840, "hidden_size": 2304, "intermediate_size": 9216,
            "num_hidden_layers": 27, "num_attention_heads": 32, "q_lora_rank": None, "kv_lora_rank": 512,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_experts": 256,
            "num_experts_per_token": 8, "num_shared_experts": 1, "moe_intermediate_size": 1024,
            "first_k_dense_replace": 1, "moe_renormalize": True, "num_expert_group": 1, "topk_group": 1,
            "routed_scaling_factor": 2.446, "model_max_length": 1048576, "rms_norm_eps": 1e-5, "dtype": "bfloat16",
            "layer_types": [*(["linear_attention"] * 3 + ["full_attention"]) * 6, *["linear_attention"] * 2,
                            "full_attention"],
        },
        "moeyard-demo": {
            "model_type": "deepseek_v3", "vocab_size": 4096, "hidden_size": 192, "intermediate_size": 384,
            "num_hidden_layers": 6, "num_attention_heads": 6, "q_lora_rank": 64, "kv_lora_rank": 64,
            "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "n_routed_experts": 32,
            "num_experts_per_tok": 4, "n_shared_experts": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
            "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": True, "rope_theta": 10000.0,
            "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "dtype": "bfloat16",
        },
    }
)  # fmt: skip


def shape_config(name: str, num_layers: int | None = None) -> dict[str, Any]:
    """The config.json of a named architecture, cut to its first `num_layers`; raises ValueError for another name."""
    if name not in SHAPES:
        raise ValueError(f"shape {name!r} is not one of {', '.join(SHAPES)}")
    config = dict(SHAPES[name])
    if num_layers is not None:
        if not 1 <= num_layers <= config["num_hidden_layers"]:
            raise ValueError(f"num_layers {num_layers}: {name} has {config['num_hidden_layers']}, give 1 to that many")
        config["num_hidden_layers"] = num_layers
        if "layer_types" in config:
            config["layer_types"] = config["layer_types"][:num_layers]
    return config


def shape_model(name: str, num_layers: int | None = None) -> ModelConfig:
    """A named architecture as a model; raises ValueError for another name, or layers that it has not."""
    source = name if num_layers is None else f"{num_layers} layers of {name}"
    return parse_model_config(Fields(source, shape_config(name, num_layers)), Fields(source, {}))


def _check_slots(config: EngineConfig, model: ModelConfig) -> None:
    """Raise ValueError for what does not go with state per sequence."""
    together = model.state_spec(1).chunk_alignment
    for name in ("prefill_chunk", "max_batch_tokens", "mixed_prefill_tokens"):
        if (rows := getattr(config, name)) is not None and rows < together:
            raise ValueError(
                f"--{name.replace('_', '-')} {rows}: {model.family} computes {together} positions of a prompt "
                "together, give at least as many"
            )


def served_model(config: EngineConfig) -> ModelConfig:
    """What `config` serves: a checkpoint's model, or a shape. Raises ValueError saying what is wrong with it."""
    if config.shape is not None:
        model = shape_model(config.shape, config.num_layers)
    else:
        assert config.model_path is not None, "EngineConfig demands one of both"
        model = load_model_config(config.model_path, config.max_model_len)
    if model.has_slots:
        _check_slots(config, model)
    if config.speculate is None:
        return model
    try:
        return model.with_drafts()
    except ValueError as error:
        raise ValueError(f"--speculate {config.speculate}: {config.model_path or config.shape}: {error}") from None
