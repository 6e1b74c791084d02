"""What the wrappers of elementwise kernels ask of tensors whose rows may be slices of wider ones."""

import torch

from moeyard_kernels.common.checks import check_devices, show


def check_rows(op: str, **tensors: torch.Tensor | None) -> None:
    """Raise ValueError unless all tensors are on one device and contiguous in their last dimension. None is passed."""
    for name, x in tensors.items():
        if x is not None and x.dim() and x.shape[-1] > 1 and x.stride(-1) != 1:
            raise ValueError(
                f"{op}: {name} {show(x)} with strides {x.stride()} is not contiguous in its last dimension"
            )
    check_devices(op, **tensors)


def row_strides(op: str, name: str, x: torch.Tensor) -> tuple[int, int, int, int]:
    """(A, B, stride of A, stride of B) such that row a * B + b of x [..., D] begins there; B is 1 where it can be.

    Raises ValueError for more than three dimensions that are not contiguous.
    """
    dim = x.shape[-1]
    if x.is_contiguous():
        return (x.numel() // max(1, dim), 1, dim, 0)
    if x.dim() == 1:
        return (1, 1, 0, 0)
    if x.dim() == 2:
        return (x.shape[0], 1, x.stride(0), 0)
    if x.dim() == 3:
        a, b = x.shape[0], x.shape[1]
        if x.stride(0) == b * x.stride(1):
            return (a * b, 1, x.stride(1), 0)
        return (a, b, x.stride(0), x.stride(1))
    raise ValueError(f"{op}: {name} {show(x)} with strides {x.stride()} is not contiguous")


# Elements of rows that are so far apart, or a multiple of it, lie at multiples of 16 bytes wherever their base does.
_UNIT = 8


def stride_unit(*rows: torch.Tensor) -> int:
    """What a launch divides the row strides of matrices by, and its kernel multiplies them with: 8, or 1 for odd ones.

    Without it the compiler knows nothing of a stride that it was told not to specialise on, and reads rows of bf16 two
    bytes at a time; with it it reads 16, where the base is at a multiple of 16 bytes too (that it finds out itself).
    """
    return _UNIT if all(x.stride(0) % _UNIT == 0 for x in rows) else 1
