"""The door to what every layer does: norms, activations, sums. See `ops` for the rules."""

import torch

from moeyard_kernels.common.checks import FLOATS, check_devices, check_norm, show
from moeyard_kernels.door.load import kernel


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """weight [D] * cast(x32 / sqrt(mean(x32^2) + eps)) for x [..., D]; the cast is to x's dtype, x32 is x in fp32.

    A weight in fp32 beside x in bf16 comes before the cast: cast(weight * x32 / sqrt(...)).
    """
    check_norm("rms_norm", x, weight)
    check_devices("rms_norm", x=x, weight=weight)
    return kernel("elementwise.rms_norm", x).rms_norm(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(r, weight, eps), r) with r = x + residual rounded to the dtype; x, residual [..., D], weight [D]."""
    check_norm("add_rms_norm", x, weight)
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(f"add_rms_norm: residual {show(residual)} is not like x {show(x)}")
    check_devices("add_rms_norm", x=x, residual=residual, weight=weight)
    return kernel("elementwise.rms_norm", x).add_rms_norm(x, residual, weight, eps)


def mla_split_qkv_a_norm(
    qkv_a: torch.Tensor, q_weight: torch.Tensor, kv_weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split qkv_a [T, Rq + R + Dr] by q_weight [Rq] and kv_weight [R]: (q_a [T, Rq], kv_a [T, R], k_rope [T, Dr]).

    q_a and kv_a are `rms_norm` of their columns, bit for bit, k_rope is a copy.
    """
    if qkv_a.dim() != 2 or qkv_a.dtype not in FLOATS:
        raise ValueError(f"mla_split_qkv_a_norm: qkv_a must be fp32 or bf16 [T, Rq + R + Dr], got {show(qkv_a)}")
    for name, weight in (("q_weight", q_weight), ("kv_weight", kv_weight)):
        if weight.dim() != 1 or weight.dtype != qkv_a.dtype or not weight.shape[0]:
            raise ValueError(f"mla_split_qkv_a_norm: {name} {show(weight)} must be {qkv_a.dtype} of one dimension")
    if q_weight.shape[0] + kv_weight.shape[0] >= qkv_a.shape[1]:
        raise ValueError(
            f"mla_split_qkv_a_norm: q_weight {show(q_weight)} and kv_weight {show(kv_weight)} leave nothing of qkv_a "
            f"{show(qkv_a)}"
        )
    check_devices("mla_split_qkv_a_norm", qkv_a=qkv_a, q_weight=q_weight, kv_weight=kv_weight)
    return kernel("elementwise.mla_split_qkv_a_norm", qkv_a).mla_split_qkv_a_norm(qkv_a, q_weight, kv_weight, eps)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate_up[:, :I]) * gate_up[:, I:] -> [M, I] for gate_up [M, 2 I]; each factor is rounded to the dtype."""
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 or gate_up.dtype not in FLOATS:
        raise ValueError(f"silu_mul: gate_up must be fp32 or bf16 [M, 2 I], got {show(gate_up)}")
    return kernel("elementwise.silu_mul", gate_up).silu_mul(gate_up)


def scale_rows_(x: torch.Tensor, scale: torch.Tensor, *, sigmoid: bool = False) -> torch.Tensor:
    """x [T, H] becomes round(float(x) * float(scale[t])) in place, its own rounded pass; scale [T]. Returns x.

    sigmoid: the factor is sigmoid(scale[t]), in fp32; so a shared expert's gate is applied, fused in
    `moe_reduce_add_norm` but for rows that do not begin at multiples of 16 bytes.
    """
    if x.dim() != 2 or x.dtype not in FLOATS:
        raise ValueError(f"scale_rows_: x must be fp32 or bf16 [T, H], got {show(x)}")
    if scale.shape != x.shape[:1] or scale.dtype not in FLOATS:
        raise ValueError(f"scale_rows_: scale {show(scale)} does not fit x {show(x)}")
    check_devices("scale_rows_", x=x, scale=scale)
    return kernel("elementwise.scale_rows", x).scale_rows_(x, scale, sigmoid=sigmoid)


def sigmoid_mul(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x [M, N] * sigmoid(gate [M, N]) in fp32, rounded once to x's dtype. Rows may be slices of wider ones."""
    if x.dim() != 2 or x.dtype not in FLOATS:
        raise ValueError(f"sigmoid_mul: x must be fp32 or bf16 [M, N], got {show(x)}")
    if gate.shape != x.shape or gate.dtype not in FLOATS:
        raise ValueError(f"sigmoid_mul: gate {show(gate)} is not like x {show(x)}")
    check_devices("sigmoid_mul", x=x, gate=gate)
    return kernel("elementwise.sigmoid_mul", x).sigmoid_mul(x, gate)
