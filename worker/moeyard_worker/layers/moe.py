"""The Mixture-of-Experts layer: gate, dispatch, experts, combine, weighted sum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from moeyard_kernels.backend import Backend, StepPlan
from moeyard_kernels.types.gate import ExpertParts, GateRule
from moeyard_kernels.types.layers import GateLayer
from moeyard_worker.exchange.base import Dispatched, Exchange

if TYPE_CHECKING:
    import torch

    from moeyard_kernels.types.matrix import Matrix
    from moeyard_worker.layers.routing import StepRouting


class Mlp:
    """down(silu(gate(x)) * up(x)); gate_up [2 I, H] holds gate, then up; down [H, I]. limit: as in `ops.silu_mul`."""

    def __init__(self, backend: Backend, *, gate_up: Matrix, down: Matrix, limit: float | None = None) -> None:
        self._backend, self._gate_up, self._down, self._limit = backend, gate_up, down, limit

    def forward(self, x: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        """x [num_rows, H] -> [num_rows, H]."""
        backend = self._backend
        return backend.linear(backend.silu_mul(backend.linear(x, self._gate_up), self._limit), self._down)


class Experts(Protocol):
    """The expert cache, which computes the rows that reach a rank."""

    @property
    def defers_choices(self) -> bool:
        """Whether the expert kernel may choose the experts of a single row, so that no one knows them before."""

    @property
    def joins_shared(self) -> bool:
        """Whether a kernel that chooses may also compute a shared expert."""

    @property
    def all_resident(self) -> bool:
        """Whether every expert has a slot. Otherwise the host may wait for prompt rows to learn which experts they
        need."""

    def run(self, layer: int, dispatched: Dispatched) -> torch.Tensor | None:
        """Return the experts' outputs [R, K, H], one row per (row, k) of a local expert, other rows undefined. None if
        the kernel has already written them to the ranks of their rows."""


class Moe:
    """The gate [E, H] is fp32 if the family computes its logits in fp32; gate_bias [E] is fp32; `dtype` is that of the
    rows.

    All shared experts are one MLP with `limit`. shared_gate [1, H] gives the logit that scales its output. A layer with
    gate_table [vocabulary, K] chooses by token ids. `routing` receives the chosen experts, if requests may want them.
    """

    def __init__(
        self,
        backend: Backend,
        rule: GateRule,
        *,
        layer: int,
        dtype: torch.dtype,
        exchange: Exchange,
        experts: Experts,
        routing: StepRouting | None = None,
        limit: float | None = None,
        gate: Matrix,
        gate_bias: torch.Tensor | None = None,
        gate_table: torch.Tensor | None = None,
        shared_gate_up: Matrix | None = None,
        shared_down: Matrix | None = None,
        shared_gate: Matrix | None = None,
    ) -> None:
        self._backend, self._layer = backend, layer
        self._exchange, self._experts, self._routing = exchange, experts, routing
        self._shared: Mlp | None = None
        weights = None
        if shared_gate_up is not None and shared_down is not None:
            weights = (shared_gate_up, shared_down)
            self._shared = Mlp(backend, gate_up=shared_gate_up, down=shared_down, limit=limit)
        self._gate = backend.gate(
            GateLayer(
                rule=rule,
                weight=gate,
                bias=gate_bias,
                dtype=dtype,
                table=gate_table,
                shared_gate=shared_gate,
                shared=weights if experts.joins_shared else None,
                limit=limit,
            )
        )

    def forward(self, x: torch.Tensor, plan: StepPlan) -> ExpertParts:
        """Return the unreduced results of normalised rows x [num_rows, H]. Every rank calls this in every step, even
        without rows."""
        alone = plan.num_rows == 1
        defer = alone and self._exchange.traits.local and self._experts.defers_choices
        # An expert kernel that chooses leaves no room on the multiprocessors for shared experts in parallel.
        defer = defer and (self._shared is None or self._gate.computes_shared)
        # Shared experts run in parallel with the routed ones. A single row's gate is latency-bound, so they start with
        # it. More rows occupy the memory for longer, and the gate would wait.
        shared = self._share(x, plan) if alone and not defer else None
        chosen = self._gate.choose(x, plan, defer=defer)
        if self._routing is not None:
            self._routing.write(self._layer, chosen.ids)
        if not alone:
            shared = self._share(x, plan)
        dispatched = self._exchange.dispatch(x, chosen.ids, layer=self._layer, num_prompt=plan.num_prompt)
        if dispatched.prompt is not None and not self._experts.all_resident:
            self._exchange.steps.drain()
        if chosen.deferred is not None:
            dispatched = replace(dispatched, deferred_choice=chosen.deferred)
        routed = self._exchange.combine(self._experts.run(self._layer, dispatched), dispatched.handle)
        beside = chosen.shared if shared is None else shared()
        return ExpertParts(routed=routed, weights=chosen.weights, shared=beside, shared_gate=chosen.shared_gate)

    def _share(self, x: torch.Tensor, plan: StepPlan) -> Callable[[], torch.Tensor] | None:
        """Return a function that gives the shared experts' output of normalised rows x [num_rows, H]."""
        if self._shared is None or not plan.num_tokens:
            return None
        return self._backend.beside(partial(self._shared.forward, x, plan), plan)
