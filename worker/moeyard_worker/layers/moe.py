"""The Mixture-of-Experts layer: gate, token exchange, experts, weighted sum at home."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol

from moeyard_kernels.backend import Backend, StepPlan
from moeyard_kernels.types.gate import GateRule
from moeyard_worker.exchange.base import Dispatched, Exchange
from moeyard_worker.layers.mlp import Mlp

if TYPE_CHECKING:
    import torch


class Joined(Protocol):
    """Room for shared experts among the routed ones."""

    def join(self, layer: int, gate_up: torch.Tensor, down: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Take in a layer's, gate_up [2I, H] and down [H, I]; what lies there now, None where there is no room."""
        ...

    def joins(self, num_pairs: int) -> bool:
        """Whether a step of so many (row, k) is to have it for the last of its rows' K."""
        ...


class Experts(Protocol):
    """What computes the rows that reach a rank (the expert cache)."""

    def run(self, layer: int, dispatched: Dispatched) -> torch.Tensor:
        """The experts' outputs [R, K, H], one row per (row, k) whose expert is here, holes elsewhere."""
        ...

    @property
    def joined(self) -> Joined | None:
        """Where shared experts may be among them, if anywhere."""
        ...


class Moe:
    """norm [H] before the experts; gate [E, H], in fp32 where the family computes its logits so; gate_bias [E] fp32;
    shared experts are one MLP, of which shared_gate [1, H] lets through a part."""

    def __init__(
        self,
        backend: Backend,
        rule: GateRule,
        *,
        layer: int,
        norm: torch.Tensor,
        eps: float,
        exchange: Exchange,
        experts: Experts,
        gate: torch.Tensor,
        gate_bias: torch.Tensor | None = None,
        shared_gate_up: torch.Tensor | None = None,
        shared_down: torch.Tensor | None = None,
        shared_gate: torch.Tensor | None = None,
    ) -> None:
        self._backend, self._layer, self._eps = backend, layer, eps
        self._exchange, self._experts = exchange, experts
        self._gate = backend.gate(gate, gate_bias, rule, norm=norm, eps=eps, shared_gate=shared_gate)
        self._shared, self._shared_gate = None, shared_gate
        # The experts of a row where the shared one is one of them; 0 if it never is.
        self._num_joined = 0
        if shared_gate_up is not None and shared_down is not None:
            among = experts.joined if self._gate.joins else None
            joined = None if among is None else among.join(layer, shared_gate_up, shared_down)
            if joined is not None:
                self._num_joined = rule.top_k + 1
                shared_gate_up, shared_down = joined
            self._shared = Mlp(backend, gate_up=shared_gate_up, down=shared_down)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor, following: torch.Tensor, plan: StepPlan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What attention gave and the residual, [num_rows, H], -> rows normalised by `following` and their residual.

        Every rank calls this in every step, also without a row.
        """
        x, residual = self._gate.norm(x, residual, plan)
        shared: Callable[[], torch.Tensor] | None = None
        joined = self._joins(plan)
        if self._shared is not None and plan.num_tokens and not joined:
            # Beside the choice, which is latencies, and the routed experts.
            shared = self._backend.beside(partial(self._share, self._shared, x), plan)
        weights, ids = self._gate.choose(x, plan, joined=joined)
        dispatched = self._exchange.dispatch(x, ids, layer=self._layer, num_prompt=plan.num_prompt)
        routed = self._exchange.combine(self._experts.run(self._layer, dispatched), dispatched.handle)
        beside = None if shared is None else shared()
        return self._backend.reduce_add_norm(
            routed, weights, beside, residual, following, self._eps, plan, joined=joined
        )

    def _joins(self, plan: StepPlan) -> bool:
        """Whether the shared expert is one of each row's in this step, which changes no bit; never beside peers."""
        num_pairs, among = plan.num_rows * self._num_joined, self._experts.joined
        return num_pairs > 0 and self._exchange.world_size == 1 and among is not None and among.joins(num_pairs)

    def _share(self, mlp: Mlp, x: torch.Tensor) -> torch.Tensor:
        """What the shared experts give for normalised rows x [num_rows, H]."""
        y = mlp.forward(x)
        return (
            y if self._shared_gate is None else self._backend.sigmoid_mul(y, self._backend.linear(x, self._shared_gate))
        )
