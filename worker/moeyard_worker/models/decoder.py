"""The decoder that all families share: embedding, layers of norm, attention, norm, MLP or MoE, final norm, head."""

from collections.abc import Callable, Mapping

import torch

from moeyard_kernels.backend import Backend, StepPlan
from moeyard_worker.exchange.base import Exchange
from moeyard_worker.layers.mlp import Mlp
from moeyard_worker.layers.moe import Experts, Moe
from moeyard_worker.layers.rope import rope_table
from moeyard_worker.layers.weights import Weight
from moeyard_worker.models.spec import LayerSpec, ModelSpec

Load = Callable[[Weight], torch.Tensor]
# The state arrays of a layer by name, asked for once per layer.
Allocate = Callable[[int], Mapping[str, torch.Tensor]]


class DecoderLayer:
    """One layer; `attention` and `transform` are its two blocks, both [num_rows, H] to the same."""

    def __init__(
        self, spec: ModelSpec, layer: LayerSpec, *, index: int, backend: Backend, load: Load, exchange: Exchange,
        experts: Experts, state: Mapping[str, torch.Tensor], rope: torch.Tensor | None,
    ) -> None:  # fmt: skip
        self.input_norm, self.post_norm = load(layer.input_norm), load(layer.post_norm)
        weights = {name: load(weight) for name, weight in layer.attention.items()}
        attention = spec.config.attention[index]
        self.attention = attention.build(backend, weights=weights, state=state, rope=rope)
        self.moe: Moe | None = None
        self._mlp: Mlp | None = None
        weights = {name: load(weight) for name, weight in layer.mlp.items()}
        if layer.experts is None:
            self._mlp = Mlp(backend, **weights)
        else:
            rule = spec.config.gate.rule
            dtype = self.input_norm.dtype
            self.moe = Moe(backend, rule, layer=index, dtype=dtype, exchange=exchange, experts=experts, **weights)

    def transform(self, x: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        """The MLP or MoE block of normalised rows."""
        if self.moe is not None:
            return self.moe.forward(x, plan)
        assert self._mlp is not None
        return self._mlp.forward(x)


class Decoder:
    """A model of one of the supported families, holding its dense weights and its state."""

    def __init__(
        self, spec: ModelSpec, *, backend: Backend, load: Load, exchange: Exchange, experts: Experts, allocate: Allocate
    ) -> None:
        config = spec.config
        self._backend, self._eps = backend, config.rms_eps
        self._embed = load(spec.embed)
        kinds = {attention.rope for attention in config.attention if attention.rope is not None}
        ropes = {k: rope_table(k, max_position=config.max_position, device=backend.device) for k in kinds}
        self._layers = [
            DecoderLayer(
                spec,
                layer,
                index=i,
                backend=backend,
                load=load,
                exchange=exchange,
                experts=experts,
                state=allocate(i),
                rope=None if attention.rope is None else ropes[attention.rope],
            )
            for i, (layer, attention) in enumerate(zip(spec.layers, config.attention, strict=True))
        ]
        self._norm = load(spec.norm)
        self._lm_head = self._embed if spec.lm_head is None else load(spec.lm_head)

    def forward(self, plan: StepPlan) -> torch.Tensor:
        """fp32 logits [num_sampled or more, V] of the plan's sample rows; what lies behind num_sampled is garbage."""
        if not plan.num_tokens:
            return self._idle(plan)
        backend, eps = self._backend, self._eps
        x = residual = self._embed.index_select(0, plan.token_ids)
        first = self._layers[0]
        x = backend.rms_norm(x, first.input_norm, eps)
        for layer in self._layers:
            if layer is not first:
                x, residual = backend.add_rms_norm(x, residual, layer.input_norm, eps)
            x = layer.attention.forward(x, plan)
            x, residual = backend.add_rms_norm(x, residual, layer.post_norm, eps)
            x = layer.transform(x, plan)
        if not plan.num_sampled:
            return x.new_empty(0, self._lm_head.shape[0], dtype=torch.float32)
        if plan.sample_rows is not None:
            x, residual = x.index_select(0, plan.sample_rows), residual.index_select(0, plan.sample_rows)
        x, _ = backend.add_rms_norm(x, residual, self._norm, eps)
        return backend.linear(x, self._lm_head).float()

    def _idle(self, plan: StepPlan) -> torch.Tensor:
        """A step without rows: only the exchanges, which every rank takes part in."""
        x = self._embed.new_empty(0, self._embed.shape[1])
        for layer in self._layers:
            if layer.moe is not None:
                layer.moe.forward(x, plan)
        return x.new_empty(0, self._lm_head.shape[0], dtype=torch.float32)
