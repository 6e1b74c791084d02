"""The door to projections. See `ops` for the rules."""

import torch

from moeyard_kernels.common.checks import FLOATS, check_devices, show
from moeyard_kernels.door.load import kernel


def _check(op: str, x: torch.Tensor, weight: torch.Tensor, name: str) -> None:
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"{op}: x {show(x)} does not fit {name} {show(weight)}")
    if x.dtype != weight.dtype or x.dtype not in FLOATS:
        raise ValueError(f"{op}: x {show(x)} and {name} {show(weight)} must share a dtype, fp32 or bf16")
    check_devices(op, **{"x": x, name: weight})


def _check_out(op: str, x: torch.Tensor, out_dtype: torch.dtype | None) -> None:
    if out_dtype not in (None, x.dtype, torch.float32):
        raise ValueError(f"{op}: out_dtype {out_dtype} for x {show(x)}, expected its own or fp32")


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    static_weight: bool = False,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x [M, K] @ weight [N, K].T + bias [N] -> [M, N]; fp32 or bf16, all alike. M may be 0.

    Sums and the bias are fp32, with one rounding to the dtype at the end, or none if out_dtype is fp32: what a product
    of fp32 copies of the same bf16 values is, up to the order of its sums. static_weight: the caller knows that no
    launch still at work writes `weight`, as with a model's weights while it serves; a GPU may then read it before the
    launches ahead have ended. A weight that one of them writes would be read half old, half new.
    """
    _check("linear", x, weight, "weight")
    if bias is not None:
        if bias.dtype != x.dtype or bias.shape != weight.shape[:1]:
            raise ValueError(f"linear: bias {show(bias)} does not fit weight {show(weight)}")
        check_devices("linear", x=x, bias=bias)
    _check_out("linear", x, out_dtype)
    return kernel("linear.linear", x).linear(x, weight, bias, static_weight=static_weight, out_dtype=out_dtype)


def linear_pair(
    x: torch.Tensor,
    weight_a: torch.Tensor,
    weight_b: torch.Tensor,
    *,
    static_weight: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(linear(x, weight_a), linear(x, weight_b)), bit for bit, in one launch on a GPU (for many rows it may be two).

    For two projections of one input: q_a and kv_a, gate and up. x [M, K], weight_a [Na, K], weight_b [Nb, K].
    static_weight and out_dtype, of both: as in `linear`.
    """
    _check("linear_pair", x, weight_a, "weight_a")
    _check("linear_pair", x, weight_b, "weight_b")
    _check_out("linear_pair", x, out_dtype)
    more = {"static_weight": static_weight, "out_dtype": out_dtype}
    return kernel("linear.linear", x).linear_pair(x, weight_a, weight_b, **more)


def head_linear(x: torch.Tensor, weight: torch.Tensor, *, static_weight: bool = False) -> torch.Tensor:
    """y[t, h] = weight[h] @ x[t, h]: x [T, H, K], weight [H, N, K] -> [T, H, N] contiguous; fp32 or bf16, all alike.

    x has any strides but for its last, which is 1, and so has weight but that one of its last two is 1: of latent
    attention's kv_b [H, nope + Dv, R], `kv_b[:, :nope].transpose(1, 2)` absorbs queries and `kv_b[:, nope:]` expands
    values, both as views. Sums are fp32, with one rounding at the end. static_weight: as in `linear`.
    """
    if x.dim() != 3 or weight.dim() != 3 or x.shape[1] != weight.shape[0] or x.shape[2] != weight.shape[2]:
        raise ValueError(f"head_linear: x {show(x)} does not fit weight {show(weight)}")
    if x.dtype != weight.dtype or x.dtype not in FLOATS:
        raise ValueError(f"head_linear: x {show(x)} and weight {show(weight)} must share a dtype, fp32 or bf16")
    check_devices("head_linear", x=x, weight=weight)
    if x.stride(2) != 1 and x.shape[2] > 1:
        raise ValueError(f"head_linear: x {show(x)} with strides {x.stride()} is not contiguous in its last dimension")
    if 1 not in weight.stride()[1:] and min(weight.shape[1:]) > 1:
        raise ValueError(
            f"head_linear: weight {show(weight)} with strides {weight.stride()} is contiguous in none of the last two"
        )
    return kernel("linear.head_linear", x).head_linear(x, weight, static_weight=static_weight)
