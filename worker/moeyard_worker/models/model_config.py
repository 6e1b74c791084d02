"""A checkpoint's config.json in one normal form, whatever its family and the age of its keys. Pure: loads no torch.

Supported: deepseek_v3 and kimi_k2 (one architecture), deepseek_v2, qwen3_moe, mixtral. An option that would change the
numbers and is not implemented is refused with a CheckpointError, never ignored.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from moeyard_worker.config.engine_config import DTYPE_BYTES
from moeyard_worker.config.fields import Fields, read_json
from moeyard_worker.config.rope_config import RopeConfig
from moeyard_worker.models.attention_config import GqaConfig, MlaConfig, parse_gqa, parse_mla
from moeyard_worker.state.spec import StateSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class GateConfig:
    """How an MoE layer chooses experts; the arguments of `topk_gate` plus where its logits are computed.

    `fp32_logits`: the product itself runs in float32; otherwise in the served dtype, as the family was trained.
    `bias`: a correction per expert is added for the choice, not for the weight.
    """

    top_k: int
    scoring: Literal["softmax", "sigmoid"]
    renormalize: bool
    bias: bool = False
    num_groups: int = 1
    topk_groups: int = 1
    group_score: Literal["max", "top2sum"] = "max"
    scaling: float = 1.0
    fp32_logits: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Everything the model side needs to know of a checkpoint. `moe_layers` are ascending layer indices.

    `shared_intermediate_size` is the width of all shared experts together, 0 without any. `dtype` is the checkpoint's.
    `eos_token_ids` joins generation_config.json and config.json. `num_mtp_layers` are stored after the last layer and
    not served.
    """

    family: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    max_position: int
    rms_eps: float
    tie_word_embeddings: bool
    attention: GqaConfig | MlaConfig
    rope: RopeConfig
    intermediate_size: int
    moe_layers: tuple[int, ...]
    gate: GateConfig
    num_experts: int
    moe_intermediate_size: int
    shared_intermediate_size: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str
    num_mtp_layers: int

    @property
    def top_k(self) -> int:
        """Experts per token."""
        return self.gate.top_k

    def expert_bytes(self, dtype_bytes: int) -> int:
        """One routed expert in one layer: gate, up and down."""
        return 3 * self.hidden_size * self.moe_intermediate_size * dtype_bytes

    def state_spec(self, dtype_bytes: int) -> StateSpec:
        """The cache cost of one token on one rank: keys and values, or the latent row, over all layers."""
        attention = self.attention
        if isinstance(attention, MlaConfig):
            width = attention.latent_dim
        else:
            width = 2 * attention.num_kv_heads * attention.head_dim
        return StateSpec(bytes_per_token=width * self.num_layers * dtype_bytes)


def load_model_config(directory: Path | str) -> ModelConfig:
    """Read config.json and generation_config.json; raises CheckpointError naming file and key."""
    directory = Path(directory)
    path = directory / "config.json"
    config = Fields(str(path), read_json(path))
    family = _family(config)
    config.require("hidden_act", ("silu",), "silu")
    if config.values.get("quantization_config") is not None:
        raise config.error("quantization_config", "is not supported (supported: float32 and bfloat16 weights)")
    max_position = config.integer("max_position_embeddings", 2048)
    common = _PARSERS[family](config, max_position)
    generation = directory / "generation_config.json"
    stop = Fields(str(generation), read_json(generation)) if generation.exists() else Fields(str(generation), {})
    bos = config.integers("bos_token_id") or stop.integers("bos_token_id")
    dtype = config.values.get("dtype") or config.values.get("torch_dtype") or "float32"
    if dtype not in DTYPE_BYTES:
        raise config.error("dtype", f"{dtype!r} is not supported (supported: {', '.join(DTYPE_BYTES)})")
    model = ModelConfig(
        family=family,
        hidden_size=config.integer("hidden_size"),
        num_layers=config.integer("num_hidden_layers"),
        vocab_size=config.integer("vocab_size"),
        max_position=max_position,
        rms_eps=config.number("rms_norm_eps", 1e-5 if family == "mixtral" else 1e-6),
        tie_word_embeddings=config.boolean("tie_word_embeddings", False),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=tuple(dict.fromkeys(stop.integers("eos_token_id") + config.integers("eos_token_id"))),
        dtype=dtype,
        num_mtp_layers=config.integer("num_nextn_predict_layers", 0, minimum=0),
        **common,
    )
    _check(config, model)
    return model


def _family(config: Fields) -> str:
    name = config.values.get("model_type")
    if name in _PARSERS:
        return str(name)
    raise config.error("model_type", f"{name!r} is not supported (supported: {', '.join(_PARSERS)})")


def _check(config: Fields, model: ModelConfig) -> None:
    if not model.moe_layers:
        raise config.error("num_hidden_layers", f"is {model.num_layers} and no layer is a Mixture-of-Experts layer")
    if model.top_k > model.num_experts:
        raise config.error("num_experts_per_tok", f"is {model.top_k}, more than the {model.num_experts} experts")
    gate = model.gate
    if model.num_experts % gate.num_groups or gate.topk_groups > gate.num_groups:
        raise config.error("n_group", f"is {gate.num_groups} of {model.num_experts} experts, top {gate.topk_groups}")
    if gate.topk_groups * (model.num_experts // gate.num_groups) < gate.top_k:
        raise config.error("topk_group", f"is {gate.topk_groups}: too few experts to choose {gate.top_k} from")
    if gate.group_score == "top2sum" and model.num_experts // gate.num_groups < 2:
        raise config.error(
            "n_group", f"is {gate.num_groups}: a group needs at least 2 of the {model.num_experts} experts"
        )


def _deepseek_mlp(config: Fields) -> dict[str, Any]:
    if config.values.get("mlp_bias"):
        raise config.error("mlp_bias", "is not supported")
    first = config.integer("first_k_dense_replace", 0, minimum=0)
    frequency = config.integer("moe_layer_freq", 1)
    layers = range(config.integer("num_hidden_layers"))
    width = config.integer("moe_intermediate_size")
    return {
        "intermediate_size": config.integer("intermediate_size"),
        "moe_layers": tuple(i for i in layers if i >= first and i % frequency == 0),
        "num_experts": config.integer("n_routed_experts"),
        "moe_intermediate_size": width,
        "shared_intermediate_size": width * config.integer("n_shared_experts", 0, minimum=0),
    }


def _deepseek_v3(config: Fields, max_position: int) -> dict[str, Any]:
    config.require("topk_method", ("noaux_tc",), "noaux_tc")
    config.require("scoring_func", ("sigmoid",), "sigmoid")
    gate = GateConfig(
        top_k=config.integer("num_experts_per_tok"),
        scoring="sigmoid",
        renormalize=config.boolean("norm_topk_prob", True),
        bias=True,
        num_groups=config.integer("n_group", 1),
        topk_groups=config.integer("topk_group", 1),
        group_score="top2sum",
        scaling=config.number("routed_scaling_factor", 1.0),
        fp32_logits=True,
    )
    interleaved = config.boolean("rope_interleave", True)
    return {**parse_mla(config, max_position, interleaved=interleaved), **_deepseek_mlp(config), "gate": gate}


def _deepseek_v2(config: Fields, max_position: int) -> dict[str, Any]:
    config.require("scoring_func", ("softmax",), "softmax")
    method = config.require("topk_method", ("greedy", "group_limited_greedy"), "greedy")
    # Its authors' code normalises the weights then, transformers does not; no published checkpoint sets it.
    config.require("norm_topk_prob", (False,), False)
    grouped = method == "group_limited_greedy"
    gate = GateConfig(
        top_k=config.integer("num_experts_per_tok"),
        scoring="softmax",
        renormalize=False,
        num_groups=config.integer("n_group") if grouped else 1,
        topk_groups=config.integer("topk_group") if grouped else 1,
        scaling=config.number("routed_scaling_factor", 1.0),
        fp32_logits=True,
    )
    return {**parse_mla(config, max_position, interleaved=True), **_deepseek_mlp(config), "gate": gate}


def _qwen3_moe(config: Fields, max_position: int) -> dict[str, Any]:
    num_layers, step = config.integer("num_hidden_layers"), config.integer("decoder_sparse_step", 1)
    dense = config.integers("mlp_only_layers")
    window = config.optional_integer("sliding_window") if config.boolean("use_sliding_window", False) else None
    attention = parse_gqa(
        config,
        max_position,
        default_theta=10_000.0,
        sliding_window=window,
        bias=config.boolean("attention_bias", False),
        qk_norm=True,
    )
    gate = GateConfig(
        top_k=config.integer("num_experts_per_tok"),
        scoring="softmax",
        renormalize=config.boolean("norm_topk_prob", False),
    )
    # transformers 5 writes num_local_experts where the hub's files say num_experts.
    num_experts = config.optional_integer("num_experts") or config.integer("num_local_experts")
    return {
        **attention,
        "intermediate_size": config.integer("intermediate_size"),
        "moe_layers": tuple(i for i in range(num_layers) if i not in dense and (i + 1) % step == 0),
        "num_experts": num_experts,
        "moe_intermediate_size": config.integer("moe_intermediate_size"),
        "shared_intermediate_size": 0,
        "gate": gate,
    }


def _mixtral(config: Fields, max_position: int) -> dict[str, Any]:
    window = config.optional_integer("sliding_window")
    width = config.integer("intermediate_size")
    return {
        **parse_gqa(config, max_position, default_theta=1_000_000.0, sliding_window=window, bias=False, qk_norm=False),
        "intermediate_size": width,
        "moe_layers": tuple(range(config.integer("num_hidden_layers"))),
        "num_experts": config.integer("num_local_experts"),
        "moe_intermediate_size": width,
        "shared_intermediate_size": 0,
        "gate": GateConfig(top_k=config.integer("num_experts_per_tok"), scoring="softmax", renormalize=True),
    }


_PARSERS: MappingProxyType[str, Callable[[Fields, int], dict[str, Any]]] = MappingProxyType(
    {
        "deepseek_v3": _deepseek_v3,
        "kimi_k2": _deepseek_v3,
        "deepseek_v2": _deepseek_v2,
        "qwen3_moe": _qwen3_moe,
        "mixtral": _mixtral,
    }
)
