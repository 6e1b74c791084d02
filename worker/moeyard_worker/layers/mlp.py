"""The gated MLP of dense layers and shared experts."""

import torch

from moeyard_kernels import ops
from moeyard_kernels.cpu.linear import linear


class Mlp:
    """down(silu(gate(x)) * up(x)); gate_up [2 I, H] holds gate, then up; down [H, I]."""

    def __init__(self, *, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        self._gate_up, self._down = gate_up, down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [M, H] -> [M, H]."""
        return linear(ops.silu_mul(linear(x, self._gate_up)), self._down)
