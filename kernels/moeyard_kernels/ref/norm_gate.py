"""Residual addition, norm, router product and choice of experts, one after the other."""

from dataclasses import asdict

import torch

from moeyard_kernels.ref.linear import linear
from moeyard_kernels.ref.rms_norm import add_rms_norm
from moeyard_kernels.ref.topk_gate import topk_gate
from moeyard_kernels.types.gate import GateRule


def norm_gate(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rule: GateRule,
    *,
    eps: float,
    arrived: torch.Tensor,
    fp32_logits: bool = False,
    static_weight: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `moeyard_kernels.ops.norm_gate`. A CPU counts no arrivals and launches nothing ahead."""
    normed, total = add_rms_norm(x, residual, norm, eps)
    logits = linear(normed.to(weight.dtype), weight, out_dtype=torch.float32 if fp32_logits else None)
    return normed, total, *topk_gate(logits, bias=bias, **asdict(rule))
