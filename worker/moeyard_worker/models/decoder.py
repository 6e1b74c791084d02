"""The decoder of all families: embedding, layers of attention and MLP or experts on a residual stream, and head."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from moeyard_kernels.backend import Backend, StepPlan
from moeyard_kernels.types.matrix import Matrix
from moeyard_worker.exchange.base import Exchange
from moeyard_worker.layers.moe import Experts, Mlp, Moe
from moeyard_worker.layers.overwriting import tensors
from moeyard_worker.layers.residual import AddNormStreams, HyperStreams, Residual, Streams
from moeyard_worker.layers.rope import rope_table
from moeyard_worker.layers.routing import StepRouting
from moeyard_worker.layers.weights import Weight
from moeyard_worker.models.spec import LayerSpec, ModelSpec

# Returns a `Matrix` if `Weight.matrix`, else a tensor.
Load = Callable[[Weight], Any]
# Takes present weights and new ones of the same structure: `overwrite` or `compare`.
Use = Callable[[Any, Any], object]
# Returns the state arrays of a layer by name. Called once per layer.
Allocate = Callable[[int], Mapping[str, torch.Tensor]]


def load_all(load: Load, weights: Mapping[str, Weight]) -> dict[str, Any]:
    """Return the loaded weights under the same names."""
    return {name: load(weight) for name, weight in weights.items()}


class DecoderLayer:
    """Attention, then `block`: an MLP or experts. `site` is the residual's site in front of the attention."""

    def __init__(
        self,
        spec: ModelSpec,
        layer: LayerSpec,
        *,
        index: int,
        backend: Backend,
        load: Load,
        streams: Streams,
        exchange: Exchange,
        experts: Experts,
        routing: StepRouting | None,
        state: Mapping[str, torch.Tensor],
        rope: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        config = spec.config
        self.site = streams.site(load_all(load, layer.attention_site))
        self._mlp_site = streams.site(load_all(load, layer.mlp_site))
        weights = load_all(load, layer.attention)
        self.attention = config.attention[index].build(backend, weights=weights, state=state, rope=rope)
        weights = load_all(load, layer.mlp)
        self.block: Mlp | Moe
        if layer.experts is None:
            self.block = Mlp(backend, **weights)
        else:
            self.block = Moe(
                backend,
                config.gate.rule,
                layer=index,
                dtype=dtype,
                exchange=exchange,
                experts=experts,
                routing=routing,
                limit=config.swiglu_limit,
                **weights,
            )

    def forward(self, x: torch.Tensor, residual: Residual, following: object, plan: StepPlan) -> torch.Tensor:
        """Map rows x [num_rows, H] at `site` to the rows at the site `following`."""
        x = residual.leave(self.attention.forward(x, plan), self._mlp_site)
        return residual.leave(self.block.forward(x, plan), following)

    def idle(self, empty: torch.Tensor, plan: StepPlan) -> None:
        """Take part in the exchange of a step without rows on this rank; `empty` is [0, H]."""
        if isinstance(self.block, Moe):
            self.block.forward(empty, plan)


class Decoder:
    """A model of any supported family, with its dense weights and its state."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        backend: Backend,
        load: Load,
        exchange: Exchange,
        experts: Experts,
        allocate: Allocate,
        routing: StepRouting | None = None,
    ) -> None:
        config = spec.config
        self._backend, self._routing, self.eps = backend, routing, config.rms_eps
        self.streams: Streams
        if config.hyper is None:
            self.streams = AddNormStreams(backend, config.rms_eps)
        else:
            self.streams = HyperStreams(backend, config.hyper, config.rms_eps)
        self._embed: torch.Tensor = load(spec.embed)
        kinds = {attention.rope for attention in config.attention if attention.rope is not None}
        ropes = {k: rope_table(k, max_position=config.max_position, device=backend.device) for k in kinds}

        self._ropes = ropes
        streams, dtype = self.streams, self._embed.dtype

        # Without `self`, so that a model is freed as soon as another takes its place.
        def make(spec: ModelSpec, i: int, load: Load) -> DecoderLayer:
            rope = config.attention[i].rope
            return DecoderLayer(
                spec,
                spec.layers[i],
                index=i,
                backend=backend,
                load=load,
                streams=streams,
                exchange=exchange,
                experts=experts,
                # Drafts choose experts too, which belong to no token.
                routing=routing if i < config.num_layers else None,
                state=allocate(i),
                rope=None if rope is None else ropes[rope],
                dtype=dtype,
            )

        self._make = make
        layers = [make(spec, i, load) for i in range(len(spec.layers))]
        # A drafter's layers may follow the model's. It runs them.
        self._layers, self.more_layers = layers[: config.num_layers], layers[config.num_layers :]
        # Each layer with the site behind it: that of the next layer, or of the head.
        self._ending = self.streams.last(load_all(load, spec.head_site))
        last, self._to_head = self._ending
        # The drafter reads the output of some layers. It follows the rows that the head reads.
        num_read = len(config.read_layers)
        self._head_width = config.hidden_width - num_read * config.hidden_size
        # How often the output of each layer is read.
        reads = [int(i in config.read_layers) for i in range(config.num_layers)]
        self._walk = [*zip(self._layers, [*(layer.site for layer in self._layers[1:]), last], reads, strict=True)]
        kind = [(config.attention[i], type(layer.block)) for i, layer in enumerate(self._layers)]
        of_each = [layer for i, layer in enumerate(self._layers) if kind[i] not in kind[:i]]
        # The last of them leads to the head, whose rows may be wider (`HyperStreams.last`), and is read for all.
        reads = [0] * (len(of_each) - 1) + [num_read]
        self._one_of_each = [*zip(of_each, [*(layer.site for layer in of_each[1:]), last], reads, strict=True)]
        self._lm_head: Matrix = Matrix.plain(self._embed) if spec.lm_head is None else load(spec.lm_head)

    def shared(self) -> list[torch.Tensor]:
        """Return the tensors that layers share, which `renew` leaves alone."""
        return [tensor for _, tensor in tensors((self._ropes, self.streams), "shared", {id(self._backend)})]

    def renew(self, spec: ModelSpec, load: Load, use: Use) -> None:
        """Call `use` with the present weights and those that `load` gives, one layer at a time."""
        use(self._embed, load(spec.embed))
        for i, layer in enumerate((*self._layers, *self.more_layers)):
            use(layer, self._make(spec, i, load))
        use(self._ending, self.streams.last(load_all(load, spec.head_site)))
        if spec.lm_head is not None:
            use(self._lm_head, load(spec.lm_head))

    def forward(self, plan: StepPlan, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return fp32 logits [num_sampled or more, V] of the plan's sample rows. Rows from num_sampled on are garbage.

        They are written to `out` [num_sampled, V] if given, which needs a backend without such further rows.
        """
        return self.sampled(self.hidden(plan), plan, out)

    def hidden(self, plan: StepPlan) -> torch.Tensor:
        """Return the hidden states of the step's rows, [num_rows, H] or with S streams [num_rows, S H].

        If a drafter reads layers (`ModelConfig.read_layers`), their output follows, [num_rows, H] of each.
        """
        if not plan.num_tokens:
            empty = self._embed.new_empty(0, self._embed.shape[1])
            for layer, *_ in self._walk:
                layer.idle(empty, plan)
            return empty
        residual = self.streams.begin(self.embed(plan.token_ids), plan)
        x, read = residual.enter(self._layers[0].site), list[torch.Tensor]()
        for layer, following, reads in self._walk:
            x = layer.forward(x, residual, following, plan)
            if reads:
                read += [residual.mean()] * reads
        if self._routing is not None:
            self._routing.settle()
        return torch.cat((x, *read), 1) if read else x

    @contextmanager
    def one_layer_of_each_kind(self) -> Iterator[None]:
        """In this context, steps run one layer of each kind. They launch every kernel that all layers launch."""
        whole, self._walk = self._walk, self._one_of_each
        try:
            yield
        finally:
            self._walk = whole

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the embedding [M, H] of M tokens."""
        return self._embed.index_select(0, token_ids)

    def head(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits [M, V] of the `hidden` rows x, in their dtype. A row's bits do not depend on the others."""
        return self.logits(self._to_head(x[:, : self._head_width].contiguous()))

    def read(self, x: torch.Tensor) -> torch.Tensor:
        """Return the part [M, n H] of the `hidden` rows x that a drafter reads from n layers."""
        return x[:, self._head_width :]

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits [M, V] of rows x [M, H] in front of the head."""
        return self._backend.linear(x, self._lm_head)

    def sampled(self, x: torch.Tensor, plan: StepPlan, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits of `forward` for the rows x of `hidden`."""
        if not plan.num_sampled:
            return x.new_empty(0, self._lm_head.shape[0], dtype=torch.float32)
        if plan.sample_rows is not None:
            x = x.index_select(0, plan.sample_rows)
        logits = self.head(x)
        return logits.float() if out is None else out.copy_(logits)
