"""What a family's file states: how its config.json is read and how its checkpoints name their parts. Pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moeyard_worker.config.fields import MAX_LAYERS, MAX_POSITIONS, Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Checkpoint names of a decoder of norm, attention, norm, MLP or MoE; all relative to `layer`.

    `layer` holds {i}. `moe` lists where the MoE block may sit, the published place first. `expert` are the names of an
    expert's gate, up and down projection, each followed by ".weight". A fused file stores all experts of a layer in
    `experts.gate_up_proj` [E, 2I, H] and `experts.down_proj` [E, H, I]. `draft_layer` is a layer of multi-token
    prediction, with {i} for a number that goes on behind the model's layers, or where they sit `drafts_apart`, from 0;
    `token_norm` to `draft_norm` are what it has beside other layers, at `draft_parts`, and so are the `copies` of the
    model's own embedding and head. `linear` is where attention with state per sequence sits. `norms_less_one`: norms
    are stored less one. `skipped` maps beginnings of names to why what they name is not loaded.
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
    draft_layer: str = "model.layers.{i}."
    draft_parts: str = "model.layers.{i}."
    drafts_apart: bool = False
    token_norm: str = "enorm.weight"
    hidden_norm: str = "hnorm.weight"
    join: str = "eh_proj.weight"
    draft_norm: str = "shared_head.norm.weight"
    copies: tuple[str, str] = ("embed_tokens.weight", "shared_head.head.weight")
    norms_less_one: bool = False
    skipped: tuple[tuple[str, str], ...] = ()

    def first_draft(self, num_layers: int) -> int:
        """The number of the first layer of multi-token prediction of a model of `num_layers`."""
        return 0 if self.drafts_apart else num_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture.

    `parse` reads what the family decides for itself of a config.json, as keyword arguments of `ModelConfig`: attention,
    the sizes of MLPs and experts, the gate. It raises CheckpointError for an option that would change the numbers and
    is not implemented. `reference` is the class of transformers that computes the same. `defaults` are what its config
    class has for keys that config.json lacks; a key that is null keeps null. `other_names`: what a checkpoint may name
    its parts instead, told by its embedding. `text_config`: config.json may have under that key what is read here.
    `spellings`: keys that are read, each with another that files have for it.
    """

    parse: Callable[[Fields], Mapping[str, Any]]
    reference: str
    defaults: Mapping[str, Any]
    names: Names = Names()
    other_names: tuple[Names, ...] = ()
    text_config: bool = False
    spellings: tuple[tuple[str, str], ...] = ()


def max_position(config: Fields) -> int:
    """The longest sequence that the rotation is made for."""
    return config.integer("max_position_embeddings", maximum=MAX_POSITIONS)


def count_layers(config: Fields) -> int:
    """The layers of the model, whatever is not served of it left out."""
    return config.integer("num_hidden_layers", maximum=MAX_LAYERS)
