"""The launches of a model's step: the sizes of the bench's rows of models.

All sizes come from the published architectures of `moeyard_worker.models.shapes`, and from the weights that the worker
would load for them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from moeyard_kernels.types.gate import GateRule
from moeyard_worker.layers.attention import Attention
from moeyard_worker.layers.gdn import Gdn
from moeyard_worker.layers.gqa import Gqa
from moeyard_worker.layers.kda import Kda
from moeyard_worker.layers.mla import Mla
from moeyard_worker.models.families import FAMILIES
from moeyard_worker.models.model_config import ModelConfig
from moeyard_worker.models.shapes import shape_model
from moeyard_worker.models.spec import model_spec

# Rows of a step of output tokens, and of a prompt.
DECODE_ROWS, PROMPT_ROWS = (1, 8, 64), (256, 512, 1024, 8192)
ROWS = (*DECODE_ROWS, *PROMPT_ROWS)
# Sizes of every latent attention here: the latent, a head's key without and with rotation, its value.
RANK, NOPE, ROPE, DIM_V = 512, 128, 64, 128
# Size of a head of linear attention.
DELTA_DIM = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """x [M, dim] @ [num_out, dim].T. `of` names the steps; `fp32`: sums stay unrounded (a gate's logits)."""

    dim: int
    num_out: int
    of: Literal["all", "decode", "prompts"] = "all"
    fp32: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouped:
    """Grouped-query attention that rotates `rotated` values of a head. `gated`: a gate multiplies its output."""

    heads: int
    kv_heads: int
    dim: int
    rotated: int
    normed: bool
    gated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Latent attention. Without a query rank (0) the latent's norm is part of the cache write."""

    heads: int
    query_rank: int
    interleaved: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """Linear attention by the delta rule. The bench's own table has its prompts (`linear_attention`)."""

    op: Literal["gdn_step", "kda_step"]
    key_heads: int
    heads: int

    @property
    def channels(self) -> int:
        """Return the number of convolved channels: queries, keys and values."""
        return (2 * self.key_heads + self.heads) * DELTA_DIM


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStep:
    """The sizes of a model that its launches depend on.

    `inner`, `shared`, `dense`: widths of a routed expert, of all shared experts and of layers without experts (0:
    none). `bias`: a gate's correction. `shared_gate`: the gate has a row for the shared expert. `fp32_norms`: norms are
    stored less one. `products`: the calls of `linear`, each once. `ranks`: the number of GPUs that share the experts of
    a layer here, because two copies of all experts would not fit a GPU of 80 GB.
    """

    name: str
    hidden: int
    vocabulary: int
    attention: tuple[Grouped | Latent | Delta, ...]
    rule: GateRule
    num_experts: int
    inner: int
    shared: int
    dense: int
    bias: bool
    fp32_logits: bool
    shared_gate: bool
    fp32_norms: bool
    products: tuple[Product, ...]
    ranks: int

    @property
    def num_logits(self) -> int:
        """Return the columns of the gate's product: with a shared expert's row behind the experts, padded to 16."""
        return -(-(self.num_experts + 1) // 16) * 16 if self.shared_gate else self.num_experts

    @property
    def widths(self) -> tuple[int, ...]:
        """Return the widths of the MLPs that every row goes through."""
        return tuple(width for width in (self.shared, self.dense) if width)


def _attention(layer: Attention) -> Grouped | Latent | Delta:
    """Describe a kind of attention. Raises AssertionError for a kind that the bench has no rows for."""
    if isinstance(layer, Gqa):
        assert layer.rope is not None, layer
        assert (layer.sliding_window, layer.bias) == (None, False), layer
        assert layer.qk_norm in ("head", None), layer
        return Grouped(
            heads=layer.num_heads,
            kv_heads=layer.num_kv_heads,
            dim=layer.head_dim,
            rotated=layer.rope.dim,
            normed=layer.qk_norm is not None,
            gated=layer.output_gate,
        )
    if isinstance(layer, Mla):
        assert (layer.kv_lora_rank, layer.nope_dim, layer.rope_dim, layer.v_dim) == (RANK, NOPE, ROPE, DIM_V), layer
        interleaved = layer.rope is not None and layer.rope.interleaved
        return Latent(heads=layer.num_heads, query_rank=layer.q_lora_rank or 0, interleaved=interleaved)
    if isinstance(layer, Gdn):
        assert (layer.k_dim, layer.v_dim) == (DELTA_DIM, DELTA_DIM), layer
        return Delta(op="gdn_step", key_heads=layer.num_k_heads, heads=layer.num_v_heads)
    assert isinstance(layer, Kda), layer
    assert layer.head_dim == DELTA_DIM, layer
    return Delta(op="kda_step", key_heads=layer.num_heads, heads=layer.num_heads)


def _products(model: ModelConfig) -> Iterator[Product]:
    """Yield the products of a model's weights, with those that the backend joins as it joins them."""
    spec = model_spec(model, ())
    for layer in spec.layers:
        weights = {**layer.attention, **layer.mlp}
        shared_gate = weights.pop("shared_gate", None)
        for part, weight in weights.items():
            if weight.matrix:
                num_out, dim = weight.shape
                if shared_gate is not None and part == "gate":
                    # The backend adds the shared expert's row and pads to 16.
                    num_out = -(-(num_out + shared_gate.shape[0]) // 16) * 16
                yield Product(dim=dim, num_out=num_out, fp32=weight.fp32)
            elif part == "kv_b":
                yield Product(dim=weight.shape[2], num_out=weight.shape[0] * weight.shape[1], of="prompts")
    if spec.draft is not None:
        for join in spec.draft.joins.values():
            yield Product(dim=join.shape[1], num_out=join.shape[0])
    head = spec.lm_head or spec.embed
    yield Product(dim=head.shape[1], num_out=head.shape[0], of="decode")


def _model_step(name: str, ranks: int) -> ModelStep:
    model = shape_model(name)
    if model.num_mtp_layers:
        model = model.with_drafts()
    return ModelStep(
        name=name,
        hidden=model.hidden_size,
        vocabulary=model.vocab_size,
        attention=tuple(map(_attention, model.attention_kinds())),
        rule=model.gate.rule,
        num_experts=model.num_experts,
        inner=model.moe_intermediate_size,
        shared=model.shared_intermediate_size,
        dense=model.intermediate_size if len(model.moe_layers) < len(model.attention) else 0,
        bias=model.gate.bias,
        fp32_logits=model.gate.fp32_logits,
        shared_gate=model.shared_gate,
        fp32_norms=FAMILIES[model.family].names.norms_less_one,
        products=tuple(dict.fromkeys(_products(model))),
        ranks=ranks,
    )


_RANKS = MappingProxyType(
    {
        "Qwen3-30B-A3B": 1,
        "Qwen3-235B-A22B": 1,
        "Mixtral-8x7B": 1,
        "DeepSeek-V2-Lite": 1,
        "DeepSeek-V3": 8,
        "Kimi-K2": 8,
        "Kimi-Linear-48B-A3B": 1,
        "Qwen3.5-35B-A3B": 1,
    }
)
MODELS: Mapping[str, ModelStep] = MappingProxyType({name: _model_step(name, ranks) for name, ranks in _RANKS.items()})
