"""A checkpoint's config.json in one normal form, whatever its family and the age of its keys. Pure: loads no torch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from moeyard_kernels.types.gate import GateRule
from moeyard_kernels.types.weight_form import ExpertForm
from moeyard_worker.checkpoint.formats.format import Format
from moeyard_worker.layers.attention import Attention
from moeyard_worker.layers.gqa import Gqa
from moeyard_worker.layers.mla import Mla
from moeyard_worker.state.layout import state_spec
from moeyard_worker.state.spec import StateSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class GateConfig:
    """How an MoE layer chooses experts, and where its logits are computed.

    `fp32_logits`: the product itself runs in float32; otherwise in the served dtype, as the family was trained.
    `bias`: a correction per expert is added for the choice, not for the weight.
    """

    rule: GateRule
    bias: bool = False
    fp32_logits: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Settings of a checkpoint that the model needs. `moe_layers` are ascending layer indices.

    `max_position` is the longest sequence that can be served. `attention` has one entry per layer.
    `shared_intermediate_size` is the width of all shared experts together, 0 without any. With `shared_gate` a gate
    scales their output. `dtype` is the checkpoint's, `weights` the format that stores its weights. `eos_token_ids`
    joins generation_config.json, config.json and the tokenizer's `eos_token`. `num_mtp_layers` for multi-token
    prediction are stored after the last layer. With `drafts` the first of them is served as layer `num_layers`, which
    `attention` and `moe_layers` then have too.
    """

    family: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    max_position: int
    rms_eps: float
    tie_word_embeddings: bool
    attention: tuple[Attention, ...]
    intermediate_size: int
    moe_layers: tuple[int, ...]
    gate: GateConfig
    num_experts: int
    moe_intermediate_size: int
    shared_intermediate_size: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str
    weights: Format
    num_mtp_layers: int
    drafts: bool = False
    shared_gate: bool = False

    def for_length(self, length: int | None) -> "ModelConfig":
        """Return the same for sequences of up to `length` tokens, which decides between rotations that depend on it.

        None is the longest sequence that the first of them serves.
        """
        ropes = [kind.rope for kind in self.attention_kinds() if kind.rope is not None]
        limits = [rope.max_length for rope in ropes if rope.longer is not None]
        if not limits:
            return self
        if length is None or length <= min(limits):
            return replace(self, max_position=min(limits))
        return replace(self, attention=tuple(_longer(kind) for kind in self.attention))

    def with_drafts(self) -> "ModelConfig":
        """The same with its first layer of multi-token prediction served; raises ValueError if it has none.

        That layer is one as the last is that keeps no state per sequence, with experts (DeepSeek-V3, arXiv 2412.19437,
        section 2.2; Qwen3-Next's as vLLM has it).
        """
        if not self.num_mtp_layers:
            raise ValueError(
                "this model has no layer for multi-token prediction (config.json: num_nextn_predict_layers, for some "
                "families mtp_num_hidden_layers)"
            )
        full = next(kind for kind in reversed(self.attention) if not kind.state().slots)
        return replace(
            self,
            attention=(*self.attention, full),
            moe_layers=(*self.moe_layers, self.num_layers),
            drafts=True,
        )

    @property
    def has_slots(self) -> bool:
        """Whether a layer keeps state per sequence."""
        return any(kind.state().slots for kind in self.attention_kinds())

    @property
    def top_k(self) -> int:
        """Experts per token."""
        return self.gate.rule.top_k

    def served_dtype(self, asked: str) -> str:
        """The dtype to serve in, where "auto" is the checkpoint's."""
        return self.dtype if asked == "auto" else asked

    def attention_kinds(self) -> Iterator[Attention]:
        """The descriptions of attention that differ, each once."""
        yield from dict.fromkeys(self.attention)

    def expert_form(self, dtype: str) -> ExpertForm:
        """Return the form in memory of one routed expert, served in `dtype`."""
        return self.weights.expert_form(hidden=self.hidden_size, intermediate=self.moe_intermediate_size, dtype=dtype)

    def state_spec(self, dtype_bytes: int) -> StateSpec:
        """Return the state of a sequence on one rank, over all layers."""
        return state_spec((attention.state() for attention in self.attention), dtype_bytes)


def _longer(attention: Attention) -> Attention:
    """Return the same layer with the rotation for longer sequences."""
    if isinstance(attention, Gqa | Mla) and attention.rope is not None and attention.rope.longer is not None:
        return replace(attention, rope=attention.rope.longer)
    return attention
