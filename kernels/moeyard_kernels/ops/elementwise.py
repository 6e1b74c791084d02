"""Ops of every layer: norms, activations, gates."""

import torch
import torch.nn.functional as F

from moeyard_kernels.common.checks import check_indices
from moeyard_kernels.ops.op import op


def rows_apart(x: torch.Tensor) -> torch.Tensor:
    """Return x [M, N] in fp32 (or fp64) with gaps between rows, so that torch runs one vector loop per row.

    Its sigmoid, silu and softplus differ in the last bit between vectors and the scalar tail of a loop (torch 2.13,
    AVX2). With the gaps, the path of a value depends only on its column.
    """
    out = torch.empty(x.shape[0], x.shape[1] + 1, dtype=torch.promote_types(x.dtype, torch.float32))[:, :-1]
    return out.copy_(x)


def sum_in_order(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Sum x over `dim` by one addition after the other, in the order of the index."""
    first, *others = x.unbind(dim)
    total = first.clone()
    for each in others:
        total += each
    return total


@op("elementwise.rms_norm", x="float [..., D]", weight="x|fp32 [D]")
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """weight [D] * cast(x32 / sqrt(mean(x32^2) + eps)) for x [..., D]; x32 is x in fp32, the cast is to x's dtype.

    The cast precedes the weight, as in the Hugging Face models. An fp32 weight of bf16 rows is applied before the cast,
    because Qwen3-Next stores such weights minus one.
    """
    x32 = x.float()
    scale = x32.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    if weight.dtype != x.dtype:
        return (x32 * scale).mul_(weight).to(x.dtype)
    return (x32 * scale).to(x.dtype).mul_(weight)


@op("elementwise.rms_norm", x="float [..., D]", residual="like x", weight="x|fp32 [D]")
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (rms_norm(r, weight, eps), r) with r = x + residual, rounded to the dtype; x, residual [..., D]."""
    total = x + residual
    return rms_norm.reference(total, weight, eps), total


@op(
    "elementwise.mla_split_qkv_a_norm",
    "0 < Rq and 0 < R and Rq + R < W",
    qkv_a="float [T, W]",
    q_weight="qkv_a [Rq]",
    kv_weight="qkv_a [R]",
)
def mla_split_qkv_a_norm(
    qkv_a: torch.Tensor, q_weight: torch.Tensor, kv_weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split qkv_a [T, Rq + R + Dr] into (q_a [T, Rq], kv_a [T, R], k_rope [T, Dr]).

    q_a and kv_a are `rms_norm` of their columns with q_weight [Rq] and kv_weight [R], bit for bit. k_rope is a copy.
    """
    num_q, num_kv = q_weight.shape[0], kv_weight.shape[0]
    q, kv, rope = qkv_a.split((num_q, num_kv, qkv_a.shape[1] - num_q - num_kv), 1)
    return rms_norm.reference(q, q_weight, eps), rms_norm.reference(kv, kv_weight, eps), rope.clone()


@op("elementwise.silu_mul", "limit is None or limit > 0", gate_up="float [M, 2*I]")
def silu_mul(gate_up: torch.Tensor, limit: float | None = None) -> torch.Tensor:
    """silu(gate_up[:, :I]) * gate_up[:, I:] -> [M, I] for gate_up [M, 2 I]; each factor is rounded to the dtype.

    limit: gates are at most `limit`, and ups are between -limit and limit (DeepSeek-V4).
    """
    if limit is not None:
        gate, up = gate_up.chunk(2, 1)
        gate_up = torch.cat((gate.clamp(max=limit), up.clamp(-limit, limit)), 1)
    # The gate half is a view with strided rows, so each row is one vector loop of I elements. Whether a value takes the
    # vector path or the scalar tail depends only on its column.
    half = gate_up.shape[1] // 2
    return F.silu(gate_up[:, :half]).mul_(gate_up[:, half:])


@op("elementwise.scale_rows", x="float [T, H]", scale="float [T]")
def scale_rows_(x: torch.Tensor, scale: torch.Tensor, *, sigmoid: bool = False) -> torch.Tensor:
    """Replace x [T, H] by round(float(x) * float(scale[t])), with scale [T]. Return x.

    sigmoid: the factor is sigmoid(scale[t]) in fp32, the gate of a shared expert. `moe_reduce_add_norm` fuses that,
    except for rows that do not begin at multiples of 16 bytes.
    """
    factor = rows_apart(scale.unsqueeze(1))
    if sigmoid:
        factor = factor.sigmoid()
    if x.dtype == torch.float32:
        return x.mul_(factor)
    return x.copy_(x.float() * factor)


@op("elementwise.sigmoid_mul", x="float [M, N]", gate="float [M, N]")
def sigmoid_mul(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x [M, N] * sigmoid(gate [M, N]) in fp32, rounded once to x's dtype. Rows may be slices of wider rows."""
    return (x.float() * gate.float().sigmoid()).to(x.dtype)


@op(
    "elementwise.gated_rms_norm",
    x="float [T, H, D]",
    gate="float [T, H*D]",
    weight="x|fp32 [D]",
    rows="int64 [T]?",
)
def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    sigmoid: bool = False,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """rms_norm(x) * silu(gate), or sigmoid(gate), for x [T, H, D], gate [T, H D], weight [D] -> [T, H D] in x's dtype.

    The gate is activated and multiplied in fp32, and the product is rounded once. With an fp32 weight nothing is
    rounded before that (Kimi-Linear). A weight of x's dtype rounds as in `rms_norm`. Rows of the gate may be slices of
    wider rows. With `rows` [T] int64, row t is x[rows[t]] with the gate of row t. Indices are checked on a CPU, and on
    a GPU within `launch.checked()`.
    """
    dtype = x.dtype
    if rows is not None:
        check_indices("gated_rms_norm", low=0, high=x.shape[0], rows=rows)
        x = x.index_select(0, rows)
    if weight.dtype == torch.float32:
        x = x.float()
    gate = rows_apart(gate)
    factor = gate.sigmoid() if sigmoid else F.silu(gate)
    return (rms_norm.reference(x, weight, eps).flatten(1) * factor).to(dtype)
