"""A decode step of linear attention between its projections: one oracle after the other."""

import torch

from moeyard_kernels.ref.causal_conv1d import causal_conv1d_update
from moeyard_kernels.ref.delta_recurrent import gdn_recurrent, kda_recurrent
from moeyard_kernels.ref.gated_rms_norm import gated_rms_norm
from moeyard_kernels.types.state_slots import StateSlots


def gdn_step(
    qkv: torch.Tensor, conv: torch.Tensor, window: torch.Tensor, b: torch.Tensor, a: torch.Tensor,
    a_log: torch.Tensor, dt_bias: torch.Tensor, state: torch.Tensor, gate: torch.Tensor, norm: torch.Tensor,
    eps: float, *, slots: StateSlots, sigmoid: bool, rows: torch.Tensor | None, static_state: bool,
) -> torch.Tensor:  # fmt: skip
    """See `moeyard_kernels.ops.gdn_step`: on a CPU nothing is launched ahead, so static_state says nothing."""
    mixed = causal_conv1d_update(qkv, conv, window, slots=slots)
    mixed = gdn_recurrent(mixed, b, a, a_log, dt_bias, state, slots=slots)
    return gated_rms_norm(mixed, gate, norm, eps, sigmoid=sigmoid, rows=rows)


def kda_step(
    qkv: torch.Tensor, conv: torch.Tensor, window: torch.Tensor, b: torch.Tensor, a: torch.Tensor,
    a_log: torch.Tensor, dt_bias: torch.Tensor, state: torch.Tensor, gate: torch.Tensor, norm: torch.Tensor,
    eps: float, *, slots: StateSlots, sigmoid: bool, rows: torch.Tensor | None, static_state: bool,
) -> torch.Tensor:  # fmt: skip
    """See `moeyard_kernels.ops.kda_step`: on a CPU nothing is launched ahead, so static_state says nothing."""
    mixed = causal_conv1d_update(qkv, conv, window, slots=slots)
    mixed = kda_recurrent(mixed, b, a, a_log, dt_bias, state, slots=slots)
    return gated_rms_norm(mixed, gate, norm, eps, sigmoid=sigmoid, rows=rows)
