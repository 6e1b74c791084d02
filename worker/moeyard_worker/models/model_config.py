"""A checkpoint's config.json in one normal form for all families and spellings of keys. Pure: loads no torch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from moeyard_kernels.types.gate import GateRule
from moeyard_kernels.types.weight_form import ExpertForm
from moeyard_worker.checkpoint.formats.format import Format
from moeyard_worker.layers.attention import Attention
from moeyard_worker.layers.gqa import Gqa
from moeyard_worker.layers.mla import Mla
from moeyard_worker.layers.residual import HyperConfig
from moeyard_worker.state.layout import state_spec
from moeyard_worker.state.spec import StateSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class GateConfig:
    """How an MoE layer chooses experts.

    `bias`: a correction per expert is added for the choice but not to the weight. `fp32_logits`: the logits are
    computed in float32; otherwise in the served dtype. Both follow the family's training.
    """

    rule: GateRule
    bias: bool = False
    fp32_logits: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockDrafts:
    """A drafter that makes the drafts of a block in one pass: DSpark (`models/dspark.py`).

    size: drafts of a block, which are also its rows.
    noise_token: the token of all rows but the first.
    read_layers: the model's layers whose output the drafter reads, ascending. It has as many layers of its own.
    markov_rank: width of the embedding that maps a token to a bias of the next one's logits.
    """

    size: int
    noise_token: int
    read_layers: tuple[int, ...]
    markov_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The settings of a checkpoint that the model needs.

    max_position: the longest sequence that can be served.
    attention: one entry per layer.
    moe_layers: ascending layer indices.
    hash_layers: MoE layers whose experts depend on the token alone.
    shared_intermediate_size: the width of all shared experts together, 0 without any. With `shared_gate` a gate scales
        their output.
    eos_token_ids: the union of generation_config.json, config.json and the tokenizer's `eos_token`.
    dtype: the checkpoint's.
    weights: the format of the stored weights.
    swiglu_limit: of the gates and ups of all experts, see `ops.silu_mul`.
    hyper: the connections of several residual streams; None for one stream.
    draft_attention: the attention of a layer of multi-token prediction, if it is not that of the last layer without
        state per sequence.
    block_drafts: the drafter, if it is not a layer of multi-token prediction.
    num_mtp_layers: layers of multi-token prediction, or those of `block_drafts`. With `drafts` the first of them, or
        all of `block_drafts`, are served as layers from `num_layers` on. `attention` and `moe_layers` include them.
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
    hash_layers: tuple[int, ...] = ()
    swiglu_limit: float | None = None
    hyper: HyperConfig | None = None
    draft_attention: Attention | None = None
    block_drafts: BlockDrafts | None = None

    def for_length(self, length: int | None) -> "ModelConfig":
        """Return the config with the rotation for sequences of up to `length` tokens, if the rotation depends on it.

        None keeps the shorter rotation and limits `max_position` to its length.
        """
        ropes = [kind.rope for kind in self.attention_kinds() if kind.rope is not None]
        limits = [rope.max_length for rope in ropes if rope.longer is not None]
        if not limits:
            return self
        if length is None or length <= min(limits):
            return replace(self, max_position=min(limits))
        return replace(self, attention=tuple(_longer(kind) for kind in self.attention))

    def with_drafts(self) -> "ModelConfig":
        """Return the config that also serves the drafter: the first layer of multi-token prediction, or all layers of
        `block_drafts`. Raises ValueError without one.

        Without `draft_attention` it has that of the last layer without state per sequence. It has experts (DeepSeek-V3,
        arXiv 2412.19437, section 2.2; for Qwen3-Next as in vLLM).
        """
        if not self.num_mtp_layers:
            raise ValueError(
                "this model has no layer for multi-token prediction (config.json: num_nextn_predict_layers, for some "
                "families mtp_num_hidden_layers)"
            )
        kind = self.draft_attention
        if kind is None:
            kind = next(kind for kind in reversed(self.attention) if not kind.state().slots)
        count = 1 if self.block_drafts is None else self.num_mtp_layers
        return replace(
            self,
            attention=(*self.attention, *(kind,) * count),
            moe_layers=(*self.moe_layers, *range(self.num_layers, self.num_layers + count)),
            drafts=True,
        )

    @property
    def num_draft_layers(self) -> int:
        """Served layers of the drafter."""
        return len(self.attention) - self.num_layers

    @property
    def read_layers(self) -> tuple[int, ...]:
        """The layers whose output a served drafter reads, beside the hidden states in front of the head."""
        return self.block_drafts.read_layers if self.drafts and self.block_drafts is not None else ()

    @property
    def has_slots(self) -> bool:
        """Whether any layer keeps state per sequence."""
        return any(kind.state().slots for kind in self.attention_kinds())

    @property
    def hidden_width(self) -> int:
        """Values of a row of hidden states: those of all streams in front of the head, and of `read_layers`."""
        return self.hidden_size * ((1 if self.hyper is None else self.hyper.streams) + len(self.read_layers))

    @property
    def top_k(self) -> int:
        """Experts per token."""
        return self.gate.rule.top_k

    @property
    def routed_layers(self) -> tuple[int, ...]:
        """The MoE layers that choose experts for tokens, without those of multi-token prediction."""
        return tuple(layer for layer in self.moe_layers if layer < self.num_layers)

    @property
    def expert_id_bytes(self) -> int:
        """Bytes of an expert's id in a returned routing."""
        return 1 if self.num_experts <= 256 else 2

    def served_dtype(self, asked: str) -> str:
        """Return the dtype to serve in. "auto" is the checkpoint's."""
        return self.dtype if asked == "auto" else asked

    def attention_kinds(self) -> Iterator[Attention]:
        """Yield each distinct kind of attention once."""
        yield from dict.fromkeys(self.attention)

    def expert_form(self, dtype: str) -> ExpertForm:
        """Return the form in memory of one routed expert, served in `dtype`."""
        sizes = {"hidden": self.hidden_size, "intermediate": self.moe_intermediate_size}
        return replace(self.weights.expert_form(**sizes, dtype=dtype), limit=self.swiglu_limit)

    def state_spec(self, dtype_bytes: int) -> StateSpec:
        """Return the memory of a sequence on one rank, over all layers."""
        return state_spec((attention.state() for attention in self.attention), dtype_bytes)


def _longer(attention: Attention) -> Attention:
    """Return `attention` with the rotation for longer sequences, if it has one."""
    if isinstance(attention, Gqa | Mla) and attention.rope is not None and attention.rope.longer is not None:
        return replace(attention, rope=attention.rope.longer)
    return attention
