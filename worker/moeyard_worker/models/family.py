"""The description of a model family: how to parse its config.json, and how its checkpoints name their parts. Pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from moeyard_worker.config.fields import MAX_LAYERS, MAX_POSITIONS, Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Checkpoint names of a decoder of norm, attention, norm, MLP or MoE; relative to `layer`, which holds {i}.

    linear: the prefix of attention with state per sequence.
    moe: the possible prefixes of the MoE block, the published one first. A fused file stores all experts of a layer in
        `experts.gate_up_proj` [E, 2I, H] and `experts.down_proj` [E, H, I].
    expert, shared_expert: the names of a routed or shared expert's gate, up and down projection, without ".weight".
    gate_table: the experts of each token id, in a layer that chooses by it.
    hyper_attention, hyper_mlp, hyper_head: the prefixes of the hyper-connections in front of a block or the head.
    renamed: other names of an attention's tensors than its description has.
    draft_layer: the prefix of a layer of multi-token prediction. Its number {i} continues those of the model's layers,
        or starts at 0 if `drafts_apart`.
    token_norm to draft_norm: the parts that only such a layer has, under `draft_parts`.
    read_join, read_norm, markov: the parts of `BlockDrafts`, under its first and last layer. Its norm is `draft_norm`.
    copies: tensors of such a layer that repeat the model's embedding and head.
    norms_less_one: norms are stored less one.
    skipped: (prefix, reason) of tensors that are not loaded.
    """

    embed: str = "model.embed_tokens.weight"
    norm: str = "model.norm.weight"
    lm_head: str = "lm_head.weight"
    layer: str = "model.layers.{i}."
    input_norm: str = "input_layernorm.weight"
    post_norm: str = "post_attention_layernorm.weight"
    attention: str = "self_attn."
    linear: str = "linear_attn."
    mlp: str = "mlp."
    moe: tuple[str, ...] = ("mlp.",)
    gate: str = "gate.weight"
    gate_bias: str = "gate.e_score_correction_bias"
    shared: str = "shared_experts."
    shared_gate: str = "shared_expert_gate.weight"
    expert: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared_expert: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    gate_table: str = "gate.tid2eid"
    hyper_attention: str = "hc_attn_"
    hyper_mlp: str = "hc_ffn_"
    hyper_head: str = "hc_head_"
    renamed: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    draft_layer: str = "model.layers.{i}."
    draft_parts: str = "model.layers.{i}."
    drafts_apart: bool = False
    token_norm: str = "enorm.weight"
    hidden_norm: str = "hnorm.weight"
    join: str = "eh_proj.weight"
    token_join: str = "e_proj.weight"
    hidden_join: str = "h_proj.weight"
    draft_hyper: str = "hc_head_"
    draft_norm: str = "shared_head.norm.weight"
    read_join: str = "main_proj.weight"
    read_norm: str = "main_norm.weight"
    markov: tuple[str, str] = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")
    copies: tuple[str, str] = ("embed_tokens.weight", "shared_head.head.weight")
    norms_less_one: bool = False
    skipped: tuple[tuple[str, str], ...] = ()

    def first_draft(self, num_layers: int) -> int:
        """Return the number of the first layer of multi-token prediction in a model of `num_layers`."""
        return 0 if self.drafts_apart else num_layers

    def of_layer(self, index: int, num_layers: int) -> str:
        """Return the prefix of a layer. Those of multi-token prediction follow the model's `num_layers`."""
        if index < num_layers:
            return self.layer.format(i=index)
        return self.draft_layer.format(i=self.first_draft(num_layers) + index - num_layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture.

    parse: returns the keyword arguments of `ModelConfig` that depend on the family: attention, sizes of MLPs and
        experts, the gate. It raises CheckpointError for an option that would change the results and is not implemented.
    reference: the transformers class that computes the same. `defaults.json` has its values for absent keys.
    other_names: alternatives to `names`. The checkpoint's name of the embedding decides.
    text_config: config.json may hold the settings under the key `text_config`.
    spellings: for a key that is read, another that some files have instead.
    prepare: brings other forms of config.json into the one that is read.
    """

    parse: Callable[[Fields], Mapping[str, Any]]
    reference: str
    names: Names = Names()
    other_names: tuple[Names, ...] = ()
    text_config: bool = False
    spellings: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    prepare: Callable[[Fields], Fields] | None = None


def max_position(config: Fields) -> int:
    """Return `max_position_embeddings`."""
    return config.integer("max_position_embeddings", maximum=MAX_POSITIONS)


def count_layers(config: Fields) -> int:
    """Return the number of decoder layers, without those of multi-token prediction."""
    return config.integer("num_hidden_layers", maximum=MAX_LAYERS)
