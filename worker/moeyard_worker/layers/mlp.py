"""The gated MLP of dense layers and shared experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moeyard_kernels.backend import Backend, StepPlan

if TYPE_CHECKING:
    import torch

    from moeyard_kernels.types.matrix import Matrix


class Mlp:
    """down(silu(gate(x)) * up(x)); gate_up [2 I, H] holds gate, then up; down [H, I]."""

    def __init__(self, backend: Backend, *, gate_up: Matrix, down: Matrix) -> None:
        self._backend, self._gate_up, self._down = backend, gate_up, down

    def forward(self, x: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        """x [num_rows, H] -> [num_rows, H]."""
        backend = self._backend
        return backend.linear(backend.silu_mul(backend.linear(x, self._gate_up)), self._down)
