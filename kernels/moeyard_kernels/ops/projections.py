"""Projections: products with fp32 sums and one rounding."""

import torch

from moeyard_kernels.common.checks import show
from moeyard_kernels.ops.op import op
from moeyard_kernels.types.matrix import Matrix, dequantize

_OUT_DTYPE = "out_dtype in (None, x.dtype, torch.float32)"


@op("linear.linear", _OUT_DTYPE, x="float [M, K]", weight="x [N, K]", bias="x [N]?")
def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    static_weight: bool = False,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x [M, K] @ weight [N, K].T + bias [N] -> [M, N]; all fp32 or all bf16. M may be 0.

    Sums and the bias are fp32, with one rounding to the dtype at the end, or none if out_dtype is fp32. The fp32 result
    equals a product of fp32 copies of the same bf16 values, up to the order of its sums. static_weight: no launch in
    flight writes `weight`, as for a model's weights while it serves. A GPU may then read it before the previous
    launches have ended.
    """
    y = x.float() @ weight.float().T
    if bias is not None:
        y += bias.float()
    return y.to(out_dtype or x.dtype)


@op("linear.linear", _OUT_DTYPE, x="float [M, K]", weight_a="x [Na, K]", weight_b="x [Nb, K]")
def linear_pair(
    x: torch.Tensor,
    weight_a: torch.Tensor,
    weight_b: torch.Tensor,
    *,
    static_weight: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(linear(x, weight_a), linear(x, weight_b)), bit for bit, in one launch on a GPU (two if there are many rows).

    For two projections of one input: q_a and kv_a, gate and up. x [M, K], weight_a [Na, K], weight_b [Nb, K].
    static_weight and out_dtype apply to both, as in `linear`.
    """
    return linear.reference(x, weight_a, out_dtype=out_dtype), linear.reference(x, weight_b, out_dtype=out_dtype)


def _check_codes(op: str, weight: Matrix) -> None:
    """Raise ValueError for a matrix without fp8 codes in tiles, or with blocks of scales that cut tiles."""
    form = weight.form
    columns = form.parts[1].columns if form.tiled and form.name == "fp8" else 0
    if columns not in (None, weight.shape[1]) and (not columns or columns % form.tile_columns):
        raise ValueError(f"{op}: weight {form.name} {weight.shape}, expected fp8 codes in tiles")


def _check_packed(op: str, x: torch.Tensor, weight: Matrix) -> None:
    if weight.shape[1] != x.shape[1] or weight.data.device != x.device:
        raise ValueError(f"{op}: x {show(x)} on {x.device} for a weight {weight.shape} on {weight.data.device}")


@op("linear.linear_packed", "x.dtype == torch.bfloat16", _check_codes, _check_packed, x="float [M, K]", bias="x [N]?")
def linear_packed(x: torch.Tensor, weight: Matrix, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`linear` over the values of a matrix [N, K] of fp8 codes in tiles, bit for bit, for few rows. x is bf16.

    On a GPU the values are made on the chip, which needs Hopper. No launch in flight may write the codes.
    """
    return linear.reference(x, dequantize(weight), bias)


@op(
    "linear.linear_packed",
    "out.dtype == torch.bfloat16 and weight.shape == (N, K)",
    _check_codes,
    out="float [N, K] contiguous",
)
def write_values(out: torch.Tensor, weight: Matrix) -> torch.Tensor:
    """Write the values of a matrix [N, K] of fp8 codes in tiles to bf16 out [N, K]. Returns out."""
    return out.copy_(dequantize(weight))


def _check_columns(op: str, weight: torch.Tensor) -> None:
    if 1 not in weight.stride()[1:] and min(weight.shape[1:]) > 1:
        raise ValueError(
            f"{op}: weight {show(weight)} with strides {weight.stride()} is contiguous in none of the last two"
        )


@op("linear.head_linear", _check_columns, x="float [T, H, K] rows", weight="x [H, N, K]")
def head_linear(x: torch.Tensor, weight: torch.Tensor, *, static_weight: bool = False) -> torch.Tensor:
    """y[t, h] = weight[h] @ x[t, h]: x [T, H, K], weight [H, N, K] -> [T, H, N] contiguous; all fp32 or all bf16.

    The last stride of x and one of the last two strides of weight are 1. So views of latent attention's kv_b [H, nope +
    Dv, R] fit: `kv_b[:, :nope].transpose(1, 2)` absorbs queries and `kv_b[:, nope:]` expands values. Sums are fp32,
    with one rounding at the end. static_weight: as in `linear`.
    """
    y = x.float().transpose(0, 1) @ weight.float().transpose(1, 2)
    return y.transpose(0, 1).contiguous().to(x.dtype)
