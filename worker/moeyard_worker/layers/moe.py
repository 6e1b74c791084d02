"""The Mixture-of-Experts layer: gate, token exchange, experts, weighted sum at home."""

from typing import Protocol

import torch
import torch.nn.functional as F

from moeyard_kernels import ops
from moeyard_kernels.cpu.linear import linear
from moeyard_worker.engine.batch import Batch
from moeyard_worker.exchange.base import Dispatched, Exchange
from moeyard_worker.layers.mlp import Mlp
from moeyard_worker.models.model_config import GateConfig


class Experts(Protocol):
    """What computes the rows that reach a rank (the expert cache)."""

    def run(self, layer: int, dispatched: Dispatched) -> torch.Tensor:
        """The experts' outputs [P, H] in the pair order of `dispatched`."""
        ...


class Moe:
    """gate [E, H], in fp32 where the family computes its logits so; gate_bias [E] fp32; shared experts are one MLP."""

    def __init__(
        self,
        config: GateConfig,
        *,
        layer: int,
        exchange: Exchange,
        experts: Experts,
        gate: torch.Tensor,
        gate_bias: torch.Tensor | None = None,
        shared_gate_up: torch.Tensor | None = None,
        shared_down: torch.Tensor | None = None,
    ) -> None:
        self._config, self._layer = config, layer
        self._exchange, self._experts = exchange, experts
        self._gate, self._gate_bias = gate, gate_bias
        self._shared = None
        if shared_gate_up is not None and shared_down is not None:
            self._shared = Mlp(gate_up=shared_gate_up, down=shared_down)

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """x [num_rows, H] -> [num_rows, H]. Every rank calls this in every step, also without a row."""
        count = batch.num_tokens
        weights, ids = self._choose(x)
        dispatched = self._exchange.dispatch(
            x[:count], ids[:count], layer=self._layer, num_prefill_tokens=batch.num_prefill
        )
        partial = self._exchange.combine(self._experts.run(self._layer, dispatched), dispatched.handle)
        if not count:
            return x
        shared = None if self._shared is None else self._shared.forward(x)[:count]
        out = ops.moe_weighted_reduce(partial, weights[:count], shared)
        return out if count == x.shape[0] else F.pad(out, (0, 0, 0, x.shape[0] - count))

    def _choose(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        config = self._config
        if not x.shape[0]:
            return x.new_empty(0, config.top_k, dtype=torch.float32), x.new_empty(0, config.top_k, dtype=torch.int64)
        return ops.topk_gate(
            linear(x.to(self._gate.dtype), self._gate).float(),
            top_k=config.top_k,
            scoring=config.scoring,
            renormalize=config.renormalize,
            bias=self._gate_bias,
            num_groups=config.num_groups,
            topk_groups=config.topk_groups,
            group_score=config.group_score,
            scaling=config.scaling,
        )
