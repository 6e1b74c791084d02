"""Every weight of a model: which block goes where, its shape, and the checkpoint tensors it is made of. Pure.

`model_spec` is the only place that knows shapes and names together; the loader proves the checkpoint against it and the
decoder is assembled from what was loaded under the same field names.
"""

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from moeyard_worker.layers.weights import Weight, matrix, stacked, weight
from moeyard_worker.models import deepseek, mixtral, qwen3_moe
from moeyard_worker.models.attention_config import GqaConfig, MlaConfig
from moeyard_worker.models.model_config import ModelConfig
from moeyard_worker.models.names import Names

NAMES = MappingProxyType(
    {
        "deepseek_v3": deepseek.NAMES,
        "kimi_k2": deepseek.NAMES,
        "deepseek_v2": deepseek.NAMES,
        "qwen3_moe": qwen3_moe.NAMES,
        "mixtral": mixtral.NAMES,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """Where one layer's experts are stored: three keys with {e} in them, or two tensors that hold all experts."""

    gate: str
    up: str
    down: str
    fused_gate_up: str
    fused_down: str
    fused: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One decoder layer. `attention` and `mlp` are keyed by the argument names of their layer classes."""

    input_norm: Weight
    post_norm: Weight
    attention: Mapping[str, Weight]
    mlp: Mapping[str, Weight]
    experts: ExpertNames | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The whole model; `lm_head` is None when the embedding is used for it."""

    config: ModelConfig
    names: Names
    embed: Weight
    norm: Weight
    lm_head: Weight | None
    layers: tuple[LayerSpec, ...]

    def dense(self) -> Iterator[Weight]:
        """All weights that every rank holds, in the order they are loaded."""
        yield self.embed
        for layer in self.layers:
            yield layer.input_norm
            yield layer.post_norm
            yield from layer.attention.values()
            yield from layer.mlp.values()
        yield self.norm
        if self.lm_head is not None:
            yield self.lm_head

    def expert_tensors(self, names: ExpertNames, expert: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """(key, stored shape) of the tensors that hold an expert."""
        hidden, width, count = self.config.hidden_size, self.config.moe_intermediate_size, self.config.num_experts
        if names.fused:
            return ((names.fused_gate_up, (count, 2 * width, hidden)), (names.fused_down, (count, hidden, width)))
        return (
            (names.gate.format(e=expert), (width, hidden)),
            (names.up.format(e=expert), (width, hidden)),
            (names.down.format(e=expert), (hidden, width)),
        )

    def expected(self) -> dict[str, tuple[int, ...]]:
        """Key and shape of every tensor that the checkpoint must hold, experts of all ranks included."""
        shapes = {part.key: part.shape for each in self.dense() for part in each.parts}
        for layer in self.layers:
            if layer.experts is not None:
                for expert in range(self.config.num_experts):
                    shapes.update(self.expert_tensors(layer.experts, expert))
        return shapes


def model_spec(config: ModelConfig, keys: Container[str]) -> ModelSpec:
    """The weights of `config`; `keys` of the checkpoint decide between layouts that are both in use."""
    names = NAMES[config.family]
    hidden = config.hidden_size
    lm_head = None if config.tie_word_embeddings else matrix(names.lm_head, config.vocab_size, hidden)
    return ModelSpec(
        config=config,
        names=names,
        embed=weight(names.embed, config.vocab_size, hidden),
        norm=weight(names.norm, hidden),
        lm_head=lm_head,
        layers=tuple(_layer(config, names, i, keys) for i in range(config.num_layers)),
    )


def _layer(config: ModelConfig, names: Names, index: int, keys: Container[str]) -> LayerSpec:
    prefix = names.layer.format(i=index)
    attention = config.attention
    at = prefix + names.attention
    mlp: dict[str, Weight]
    if index in config.moe_layers:
        at_moe = next((prefix + m for m in names.moe if prefix + m + names.gate in keys), prefix + names.moe[0])
        mlp, experts = _moe(config, names, at_moe), _experts(names, at_moe, keys)
    else:
        mlp, experts = _mlp(config.hidden_size, config.intermediate_size, prefix + names.mlp), None
    return LayerSpec(
        input_norm=weight(prefix + names.input_norm, config.hidden_size),
        post_norm=weight(prefix + names.post_norm, config.hidden_size),
        attention=_mla(attention, config.hidden_size, at)
        if isinstance(attention, MlaConfig)
        else _gqa(attention, config.hidden_size, at),
        mlp=mlp,
        experts=experts,
    )


def _gqa(attention: GqaConfig, hidden: int, at: str) -> dict[str, Weight]:
    width = attention.head_dim
    rows = [(name, heads * width) for name, heads in _gqa_heads(attention)]
    specs = {
        "qkv": stacked(*((f"{at}{name}.weight", count) for name, count in rows), width=hidden),
        "o": matrix(f"{at}o_proj.weight", hidden, attention.num_heads * width),
    }
    if attention.bias:
        specs["qkv_bias"] = stacked(*((f"{at}{name}.bias", count) for name, count in rows))
        specs["o_bias"] = weight(f"{at}o_proj.bias", hidden)
    if attention.qk_norm:
        specs["q_norm"] = weight(f"{at}q_norm.weight", width)
        specs["k_norm"] = weight(f"{at}k_norm.weight", width)
    return specs


def _gqa_heads(attention: GqaConfig) -> tuple[tuple[str, int], ...]:
    return (("q_proj", attention.num_heads), ("k_proj", attention.num_kv_heads), ("v_proj", attention.num_kv_heads))


def _mla(attention: MlaConfig, hidden: int, at: str) -> dict[str, Weight]:
    heads, rank, query_rank = attention.num_heads, attention.kv_lora_rank, attention.q_lora_rank
    first = ("q_proj", heads * attention.qk_dim) if query_rank is None else ("q_a_proj", query_rank)
    down = ("kv_a_proj_with_mqa", attention.latent_dim)
    specs = {
        "q_kv_a": stacked(*((f"{at}{name}.weight", count) for name, count in (first, down)), width=hidden),
        "kv_norm": weight(f"{at}kv_a_layernorm.weight", rank),
        "kv_b": Weight(
            (heads, attention.nope_dim + attention.v_dim, rank),
            weight(f"{at}kv_b_proj.weight", heads * (attention.nope_dim + attention.v_dim), rank).parts,
        ),
        "o": matrix(f"{at}o_proj.weight", hidden, heads * attention.v_dim),
    }
    if query_rank is not None:
        specs["q_norm"] = weight(f"{at}q_a_layernorm.weight", query_rank)
        specs["q_b"] = matrix(f"{at}q_b_proj.weight", heads * attention.qk_dim, query_rank)
    if attention.bias:
        # The undivided query projection never has a bias.
        query_bias = (None if query_rank is None else f"{at}q_a_proj.bias", first[1])
        specs["q_kv_a_bias"] = stacked(query_bias, (f"{at}{down[0]}.bias", down[1]))
        specs["o_bias"] = weight(f"{at}o_proj.bias", hidden)
    return specs


def _mlp(hidden: int, width: int, at: str) -> dict[str, Weight]:
    return {
        "gate_up": stacked((f"{at}gate_proj.weight", width), (f"{at}up_proj.weight", width), width=hidden),
        "down": matrix(f"{at}down_proj.weight", hidden, width),
    }


def _moe(config: ModelConfig, names: Names, at: str) -> dict[str, Weight]:
    gate, hidden = config.gate, config.hidden_size
    specs = {"gate": matrix(at + names.gate, config.num_experts, hidden, fp32=gate.fp32_logits)}
    if gate.bias:
        specs["gate_bias"] = weight(at + names.gate_bias, config.num_experts, fp32=True)
    if config.shared_intermediate_size:
        shared = _mlp(hidden, config.shared_intermediate_size, at + names.shared)
        specs |= {"shared_" + name: spec for name, spec in shared.items()}
    return specs


def _experts(names: Names, at: str, keys: Container[str]) -> ExpertNames:
    gate, up, down = (f"{at}experts.{{e}}.{name}.weight" for name in names.expert)
    fused = f"{at}experts.gate_up_proj"
    return ExpertNames(
        gate=gate,
        up=up,
        down=down,
        fused_gate_up=fused,
        fused_down=f"{at}experts.down_proj",
        fused=fused in keys,
    )
