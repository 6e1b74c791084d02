"""The decoder that all families share: embedding, layers of norm, attention, norm, MLP or MoE, final norm, head."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

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
    """One layer: `attention` of normalised rows, then `transform`, which ends in the norm of the layer behind."""

    def __init__(
        self, spec: ModelSpec, layer: LayerSpec, *, index: int, backend: Backend, load: Load, exchange: Exchange,
        experts: Experts, state: Mapping[str, torch.Tensor], rope: torch.Tensor | None,
    ) -> None:  # fmt: skip
        self._backend, self._eps = backend, spec.config.rms_eps
        self.input_norm, self._post_norm = load(layer.input_norm), load(layer.post_norm)
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
            self.moe = Moe(
                backend, rule, layer=index, norm=self._post_norm, eps=self._eps, exchange=exchange, experts=experts,
                **weights,
            )  # fmt: skip

    def transform(
        self, x: torch.Tensor, residual: torch.Tensor, following: torch.Tensor, plan: StepPlan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Norm, then MLP or MoE, then the norm with the weight `following`: (rows, residual), [num_rows, H] each."""
        if self.moe is not None:
            return self.moe.forward(x, residual, following, plan)
        assert self._mlp is not None
        x, residual = self._backend.add_rms_norm(x, residual, self._post_norm, self._eps)
        return self._backend.add_rms_norm(self._mlp.forward(x), residual, following, self._eps)


class Decoder:
    """A model of one of the supported families, holding its dense weights and its state."""

    def __init__(
        self, spec: ModelSpec, *, backend: Backend, load: Load, exchange: Exchange, experts: Experts, allocate: Allocate
    ) -> None:
        config = spec.config
        self._backend, self.eps = backend, config.rms_eps
        self._embed = load(spec.embed)
        kinds = {attention.rope for attention in config.attention if attention.rope is not None}
        ropes = {k: rope_table(k, max_position=config.max_position, device=backend.device) for k in kinds}
        layers = [
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
        # Behind the model's own there may be one that `drafter` is given.
        self._layers, self.more_layers = layers[: config.num_layers], layers[config.num_layers :]
        # With the norm behind each layer: of the next, or the last of all.
        following = [*(layer.input_norm for layer in self._layers[1:]), load(spec.norm)]
        self._walk = [*zip(self._layers, following, strict=True)]
        kind = [(config.attention[i], layer.moe is None) for i, layer in enumerate(self._layers)]
        self._one_of_each = [walked for i, walked in enumerate(self._walk) if kind[i] not in kind[:i]]
        self._lm_head = self._embed if spec.lm_head is None else load(spec.lm_head)

    def forward(self, plan: StepPlan, out: torch.Tensor | None = None) -> torch.Tensor:
        """fp32 logits [num_sampled or more, V] of the plan's sample rows; what lies behind num_sampled is garbage.

        Into `out` [num_sampled, V] if given, where a backend has no more rows than that.
        """
        return self.sampled(self.hidden(plan), plan, out)

    def hidden(self, plan: StepPlan) -> torch.Tensor:
        """[num_rows, H]: what the head reads, of every row of the step."""
        if not plan.num_tokens:
            return self._idle(plan)
        residual = self.embed(plan.token_ids)
        x = self._backend.rms_norm(residual, self._layers[0].input_norm, self.eps)
        for layer, following in self._walk:
            x = layer.attention.forward(x, plan)
            x, residual = layer.transform(x, residual, following, plan)
        return x

    @contextmanager
    def one_layer_of_each_kind(self) -> Iterator[None]:
        """Meanwhile steps run through no more than these: they launch whatever kernels all launch."""
        whole, self._walk = self._walk, self._one_of_each
        try:
            yield
        finally:
            self._walk = whole

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[M, H] of M tokens."""
        return self._embed.index_select(0, token_ids)

    def head(self, x: torch.Tensor) -> torch.Tensor:
        """Logits [M, V] of rows x [M, H] of `hidden`, in their dtype; a row's bits do not depend on the others."""
        return self._backend.linear(x, self._lm_head)

    def sampled(self, x: torch.Tensor, plan: StepPlan, out: torch.Tensor | None = None) -> torch.Tensor:
        """The logits of `forward`, of its `hidden` rows x."""
        if not plan.num_sampled:
            return x.new_empty(0, self._lm_head.shape[0], dtype=torch.float32)
        if plan.sample_rows is not None:
            x = x.index_select(0, plan.sample_rows)
        logits = self.head(x)
        return logits.float() if out is None else out.copy_(logits)

    def _idle(self, plan: StepPlan) -> torch.Tensor:
        """A step without rows: only the exchanges, which every rank takes part in."""
        x = self._embed.new_empty(0, self._embed.shape[1])
        for layer, following in self._walk:
            if layer.moe is not None:
                layer.moe.forward(x, x, following, plan)
        return x
