"""The door to what every layer does: norms, rotary embedding, activations, sums. See `ops` for the rules."""

import torch

from moeyard_kernels.checks import FLOATS, check_norm, missing, show
from moeyard_kernels.ref import rms_norm as _rms_norm
from moeyard_kernels.ref import rope as _rope
from moeyard_kernels.ref import scale_rows as _scale_rows
from moeyard_kernels.ref import silu_mul as _silu_mul


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """weight [D] * cast(x32 / sqrt(mean(x32^2) + eps)) for x [..., D]; the cast is to x's dtype, x32 is x in fp32."""
    check_norm("rms_norm", x, weight)
    if x.is_cuda:
        raise missing("rms_norm")
    return _rms_norm.rms_norm(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(r, weight, eps), r) with r = x + residual rounded to the dtype; x, residual [..., D], weight [D]."""
    check_norm("add_rms_norm", x, weight)
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(f"add_rms_norm: residual {show(residual)} is not like x {show(x)}")
    if x.is_cuda:
        raise missing("add_rms_norm")
    return _rms_norm.add_rms_norm(x, residual, weight, eps)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """Rotate x [T, heads, D] by the angles of cos, sin [T, D/2] (or [T, D]: the first half counts) -> [T, heads, D].

    A pair (a, b) becomes (a cos - b sin, b cos + a sin); pairs are (i, i + D/2), or (2i, 2i + 1) if `interleaved`. The
    result is in the first form either way, as deepseek_v3 leaves it in transformers 5.17; deepseek_v2 leaves the pairs
    in place, which permutes queries and keys alike. Rounding points are those of the wider dtype of x and cos: pass cos
    and sin in x's dtype for mixtral, qwen3_moe and deepseek_v3, in fp32 for deepseek_v2 (complex fp32, one rounding).
    """
    if x.dim() != 3 or x.shape[2] % 2:
        raise ValueError(f"rope: x must be [T, heads, even D], got {show(x)}")
    if cos.shape != sin.shape or cos.dtype != sin.dtype:
        raise ValueError(f"rope: cos {show(cos)} and sin {show(sin)} differ")
    if cos.dim() != 2 or cos.shape[0] != x.shape[0] or cos.shape[1] not in (x.shape[2], x.shape[2] // 2):
        raise ValueError(f"rope: cos {show(cos)} does not fit x {show(x)}")
    if x.is_cuda:
        raise missing("rope")
    return _rope.rope(x, cos, sin, interleaved=interleaved)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate_up[:, :I]) * gate_up[:, I:] -> [M, I] for gate_up [M, 2 I]; each factor is rounded to the dtype."""
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"silu_mul: gate_up must be [M, 2 I], got {show(gate_up)}")
    if gate_up.is_cuda:
        raise missing("silu_mul")
    return _silu_mul.silu_mul(gate_up)


def scale_rows_(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x [T, H] becomes round(float(x) * float(scale[t])) in place, its own rounded pass; scale [T]. Returns x."""
    if x.dim() != 2 or x.dtype not in FLOATS:
        raise ValueError(f"scale_rows_: x must be fp32 or bf16 [T, H], got {show(x)}")
    if scale.shape != x.shape[:1] or scale.dtype not in FLOATS:
        raise ValueError(f"scale_rows_: scale {show(scale)} does not fit x {show(x)}")
    if x.is_cuda:
        # Triton is loaded only where there is a GPU to run it.
        from moeyard_kernels import scale_rows as triton_kernel

        return triton_kernel.scale_rows_(x, scale)
    return _scale_rows.scale_rows_(x, scale)
