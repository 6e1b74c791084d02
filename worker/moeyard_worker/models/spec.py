"""Every weight of a model: its block, its shape and the checkpoint tensors that it is made of. Pure.

Only `model_spec` combines shapes and names. The check of a checkpoint compares with it, and the decoder is assembled
from the weights loaded under the same field names.
"""

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from moeyard_kernels.types.footprint import Footprints
from moeyard_kernels.types.weight_form import WeightForm, plain_form
from moeyard_worker.checkpoint.formats.format import Scheme, StoredTensor, stores
from moeyard_worker.layers.weights import Part, Weight, matrix, norm, stacked, table, weight
from moeyard_worker.models.families import FAMILIES
from moeyard_worker.models.family import Names
from moeyard_worker.models.model_config import ModelConfig

_FP32, _BF16 = plain_form("float32"), plain_form("bfloat16")
# Names of a dense MLP's gate, up and down projection.
_DENSE = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """Keys of one layer's experts: three that contain {e}, or if `fused`, two tensors that hold all experts."""

    gate: str
    up: str
    down: str
    fused_gate_up: str
    fused_down: str
    fused: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """The weights of one decoder layer. Those of `attention` and `mlp` have the argument names of the layer classes.

    The sites hold the weights that the residual needs in front of each block (`layers/residual.py`).
    """

    attention_site: Mapping[str, Weight]
    mlp_site: Mapping[str, Weight]
    attention: Mapping[str, Weight]
    mlp: Mapping[str, Weight]
    experts: ExpertNames | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSpec:
    """The weights that only a layer of multi-token prediction has.

    `joins`: "join" [H, 2 H] for the normed embedding and the normed hidden state, or "token" and "hidden" [H, H] for
    the two. Embedding and head are the model's.
    """

    token_norm: Weight
    hidden_norm: Weight
    joins: Mapping[str, Weight]
    head_site: Mapping[str, Weight]

    def weights(self) -> Iterator[Weight]:
        """Yield all of them, in the order of loading."""
        yield from (self.token_norm, self.hidden_norm, *self.joins.values(), *self.head_site.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockDraftSpec:
    """The weights that only `BlockDrafts` has, with R its rank, for n layers that it reads.

    read_join [H, n H] projects the outputs of these layers, and read_norm [H] follows. markov_in [V, R] and markov_out
    [V, R] give the bias of the logits behind a token. Embedding and head are the model's.
    """

    read_join: Weight
    read_norm: Weight
    markov_in: Weight
    markov_out: Weight
    head_site: Mapping[str, Weight]

    def weights(self) -> Iterator[Weight]:
        """Yield all of them, in the order of loading."""
        yield from (self.read_join, self.read_norm, self.markov_in, self.markov_out, *self.head_site.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The weights of a whole model. `lm_head` is None if it is tied to the embedding.

    `keys` are the checkpoint's, empty for random weights. With `config.drafts` the last of `layers` are the drafter's,
    and `draft` has its other weights.
    """

    config: ModelConfig
    names: Names
    keys: Container[str]
    embed: Weight
    head_site: Mapping[str, Weight]
    lm_head: Weight | None
    layers: tuple[LayerSpec, ...]
    draft: DraftSpec | BlockDraftSpec | None = None

    def dense(self) -> Iterator[Weight]:
        """Yield the weights that every rank holds, in the order of loading."""
        yield self.embed
        for layer in self.layers:
            yield from layer.attention_site.values()
            yield from layer.mlp_site.values()
            yield from layer.attention.values()
            yield from layer.mlp.values()
        yield from self.head_site.values()
        if self.lm_head is not None:
            yield self.lm_head
        if self.draft is not None:
            yield from self.draft.weights()

    def form(self, each: Weight, dtype: str) -> WeightForm:
        """Return the form in memory of a parameter, served in `dtype`."""
        return self.config.weights.form(each, dtype, self.keys)

    def num_bytes(self, each: Weight, dtype: str) -> int:
        """Return the bytes in memory of a parameter, served in `dtype`."""
        return self.form(each, dtype).num_bytes(each.rows, each.columns)

    def dense_bytes(self, dtype: str) -> int:
        """Return the bytes in memory of the weights that every rank holds."""
        return sum(self.num_bytes(each, dtype) for each in self.dense())

    def resident_bytes(self, dtype: str, footprints: Footprints) -> int:
        """Return the bytes of the dense weights, of the tables that every rank computes from them, and of the values of
        the largest matrix that is kept in codes."""
        ropes = {attention.rope for attention in self.config.attention}
        tables = sum(_FP32.num_bytes(self.config.max_position, rope.dim) for rope in ropes if rope is not None)
        for attention in self.config.attention:
            found = attention.footprint(footprints)
            tables += plain_form(dtype).num_bytes(1, found.extra) + _FP32.num_bytes(1, found.fp32_extra)
        coded = [each for each in self.dense() if self.form(each, dtype).tiled]
        values = max((_BF16.num_bytes(each.rows, each.columns) for each in coded), default=0)
        return self.dense_bytes(dtype) + tables + values

    def expert_parts(self, names: ExpertNames, expert: int) -> tuple[Part, Part, Part]:
        """Return the stored parts of an expert: gate [I, H], up [I, H] and down [H, I]."""
        hidden, width, count = self.config.hidden_size, self.config.moe_intermediate_size, self.config.num_experts
        if names.fused:
            gate_up, down = (count, 2 * width, hidden), (count, hidden, width)
            return (
                Part(names.fused_gate_up, (width, hidden), whole=gate_up, begin=expert * 2 * width),
                Part(names.fused_gate_up, (width, hidden), whole=gate_up, begin=(expert * 2 + 1) * width),
                Part(names.fused_down, (hidden, width), whole=down, begin=expert * hidden),
            )
        return (
            Part(names.gate.format(e=expert), (width, hidden)),
            Part(names.up.format(e=expert), (width, hidden)),
            Part(names.down.format(e=expert), (hidden, width)),
        )

    def parts(self) -> Iterator[Part]:
        """Yield the stored parts of all weights: the dense ones in the order of loading, then every expert."""
        for each in self.dense():
            yield from each.parts
        for layer in self.layers:
            if layer.experts is not None:
                for expert in range(self.config.num_experts):
                    yield from self.expert_parts(layer.experts, expert)

    def stored(self, parts: Iterable[Part]) -> dict[str, StoredTensor]:
        """Return by key the tensors that the checkpoint must hold for `parts`."""
        found: dict[str, StoredTensor] = {}
        for part in parts:
            found.update(self.scheme(part).stored(part))
        return found

    def scheme(self, part: Part) -> Scheme:
        """Return how the checkpoint stores `part`."""
        return self.config.weights.scheme(part, self.keys)

    def expected(self) -> dict[str, StoredTensor]:
        """Return by key every tensor that the checkpoint must hold, including the experts of all ranks."""
        # Parts of one tensor are stored alike.
        return self.stored({part.key: part for part in self.parts()}.values())


def model_spec(config: ModelConfig, keys: Container[str]) -> ModelSpec:
    """Return the weights of `config`. The checkpoint's `keys` decide between the layouts in use."""
    family = FAMILIES[config.family]
    names = next((each for each in (family.names, *family.other_names) if each.embed in keys), family.names)
    hidden = config.hidden_size
    lm_head = None if config.tie_word_embeddings else matrix(names.lm_head, config.vocab_size, hidden)
    return ModelSpec(
        config=config,
        names=names,
        keys=keys,
        embed=weight(names.embed, config.vocab_size, hidden),
        head_site={
            "norm": norm(names.norm, hidden, less_one=names.norms_less_one),
            **_connections(config, names.hyper_head, before_block=False),
        },
        lm_head=lm_head,
        layers=tuple(_layer(config, names, i, keys) for i in range(len(config.attention))),
        draft=_draft(config, names) if config.drafts else None,
    )


def _draft(config: ModelConfig, names: Names) -> DraftSpec | BlockDraftSpec:
    hidden, less_one = config.hidden_size, names.norms_less_one
    if (block := config.block_drafts) is not None:
        first, last = (names.of_layer(i, config.num_layers) for i in (config.num_layers, len(config.attention) - 1))
        markov_in, markov_out = (last + name for name in names.markov)
        return BlockDraftSpec(
            read_join=matrix(first + names.read_join, hidden, len(block.read_layers) * hidden),
            read_norm=norm(first + names.read_norm, hidden, less_one=less_one),
            markov_in=weight(markov_in, config.vocab_size, block.markov_rank),
            markov_out=matrix(markov_out, config.vocab_size, block.markov_rank),
            head_site=_draft_head(config, names, last),
        )
    at = names.draft_parts.format(i=config.num_layers)
    if config.hyper is None:
        joins = {"join": matrix(at + names.join, hidden, 2 * hidden)}
    else:
        joins = {"token": matrix(at + names.token_join, hidden, hidden)}
        joins["hidden"] = matrix(at + names.hidden_join, hidden, hidden)
    return DraftSpec(
        token_norm=norm(at + names.token_norm, hidden, less_one=less_one),
        hidden_norm=norm(at + names.hidden_norm, hidden, less_one=less_one),
        joins=joins,
        head_site=_draft_head(config, names, at),
    )


def _draft_head(config: ModelConfig, names: Names, at: str) -> dict[str, Weight]:
    """Return the weights at the site between a drafter's last block and the head."""
    return {
        "norm": norm(at + names.draft_norm, config.hidden_size, less_one=names.norms_less_one),
        **_connections(config, at + names.draft_hyper, before_block=False),
    }


def _layer(config: ModelConfig, names: Names, index: int, keys: Container[str]) -> LayerSpec:
    prefix = names.of_layer(index, config.num_layers)
    mlp: dict[str, Weight]
    if index in config.moe_layers:
        at_moe = next((prefix + m for m in names.moe if prefix + m + names.gate in keys), prefix + names.moe[0])
        mlp, experts = _moe(config, names, at_moe, index), _experts(names, at_moe, keys)
    else:
        prefixes = [prefix + block for block in (names.mlp, *names.moe)]
        at_mlp = next((each for each in prefixes if stores(f"{each}gate_proj", keys)), prefixes[0])
        mlp, experts = _mlp(_DENSE, config.hidden_size, config.intermediate_size, at_mlp), None
    attention, less_one = config.attention[index], names.norms_less_one
    at = prefix + (names.linear if attention.state().slots else names.attention)
    return LayerSpec(
        attention_site={
            "norm": norm(prefix + names.input_norm, config.hidden_size, less_one=less_one),
            **_connections(config, prefix + names.hyper_attention),
        },
        mlp_site={
            "norm": norm(prefix + names.post_norm, config.hidden_size, less_one=less_one),
            **_connections(config, prefix + names.hyper_mlp),
        },
        attention=_renamed(attention.weights(config.hidden_size, at), at, names.renamed),
        mlp=mlp,
        experts=experts,
    )


def _connections(config: ModelConfig, at: str, *, before_block: bool = True) -> dict[str, Weight]:
    """Return the weights of the hyper-connections at a site, or nothing for a residual of one stream."""
    if config.hyper is None:
        return {}
    streams = config.hyper.streams
    width, scales = (streams * (2 + streams), 3) if before_block else (streams, 1)
    return {
        "connections": matrix(f"{at}fn", width, streams * config.hidden_size, fp32=True),
        "base": weight(f"{at}base", width, fp32=True),
        "scale": weight(f"{at}scale", scales, fp32=True),
    }


def _renamed(weights: dict[str, Weight], at: str, names: Mapping[str, str]) -> dict[str, Weight]:
    """Return the weights of an attention with other checkpoint names behind the prefix `at`."""
    if not names:
        return weights

    def part(each: Part) -> Part:
        name = each.key.removeprefix(at)
        return replace(each, key=at + names.get(name, name))

    return {name: replace(each, parts=tuple(map(part, each.parts))) for name, each in weights.items()}


def _mlp(names: tuple[str, str, str], hidden: int, width: int, at: str) -> dict[str, Weight]:
    gate, up, down = (f"{at}{name}.weight" for name in names)
    return {"gate_up": stacked((gate, width), (up, width), width=hidden), "down": matrix(down, hidden, width)}


def _moe(config: ModelConfig, names: Names, at: str, layer: int) -> dict[str, Weight]:
    gate, hidden = config.gate, config.hidden_size
    specs = {"gate": matrix(at + names.gate, config.num_experts, hidden, fp32=gate.fp32_logits)}
    if layer in config.hash_layers:
        specs["gate_table"] = table(at + names.gate_table, config.vocab_size, config.top_k)
    elif gate.bias:
        specs["gate_bias"] = weight(at + names.gate_bias, config.num_experts, fp32=True)
    if config.shared_intermediate_size:
        shared = _mlp(names.shared_expert, hidden, config.shared_intermediate_size, at + names.shared)
        specs |= {"shared_" + name: spec for name, spec in shared.items()}
        if config.shared_gate:
            specs["shared_gate"] = matrix(at + names.shared_gate, 1, hidden)
    return specs


def _experts(names: Names, at: str, keys: Container[str]) -> ExpertNames:
    gate, up, down = (f"{at}experts.{{e}}.{name}.weight" for name in names.expert)
    gate_up_all, down_all = f"{at}experts.gate_up_proj", f"{at}experts.down_proj"
    return ExpertNames(
        gate=gate, up=up, down=down, fused_gate_up=gate_up_all, fused_down=down_all, fused=gate_up_all in keys
    )
