"""Strides, shape classes and grids of elementwise wrappers, whose rows may be slices of wider tensors."""

import torch
import triton

from moeyard_kernels.common.checks import check_devices, show
from moeyard_kernels.common.launch import MAX_GRID_X, MAX_GRID_Y
from moeyard_kernels.common.tuning import RowConfig, choose


def check_rows(op: str, **tensors: torch.Tensor | None) -> None:
    """Raise ValueError unless all tensors are on one device and contiguous in their last dimension. None is skipped."""
    for name, x in tensors.items():
        if x is not None and x.dim() and x.shape[-1] > 1 and x.stride(-1) != 1:
            raise ValueError(
                f"{op}: {name} {show(x)} with strides {x.stride()} is not contiguous in its last dimension"
            )
    check_devices(op, **tensors)


def row_strides(op: str, name: str, x: torch.Tensor) -> tuple[int, int, int, int]:
    """Return (A, B, stride of A, stride of B) of the rows of x [..., D]: row a * B + b. B is 1 if possible.

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


# Rows at multiples of this many elements are 16-byte aligned if their base is.
_UNIT = 8


def stride_unit(*rows: torch.Tensor) -> int:
    """Return the unit, 8 or 1, by which a launch divides row strides and its kernel multiplies them.

    The compiler knows nothing of a stride that it does not specialise on, and then reads bf16 rows two bytes at a time.
    With a unit of 8 it reads 16 bytes if the base is 16-byte aligned, which it detects itself.
    """
    return _UNIT if all(x.stride(0) % _UNIT == 0 for x in rows) else 1


def row_class(num_rows: int, width: str) -> str:
    """Return the shape class of a row kernel. Decode steps need many small programs, prompts few large ones."""
    return f"{'few' if num_rows <= 64 else 'many'} {width}"


def row_launch(
    op: str, x: torch.Tensor, *, num_rows: int, width: int, name: str, config: RowConfig | None
) -> tuple[RowConfig, tuple[int, int]]:
    """Return config and grid of a kernel whose programs take BLOCK of the `width` columns of one of `num_rows` rows.

    name: the letter of the width in the shape class. Raises ValueError for what a grid cannot hold.
    """

    def default() -> RowConfig:
        block = min(512 if num_rows <= 64 else 2048, max(16, triton.next_power_of_2(width)))
        return RowConfig(BLOCK=block, num_warps=max(1, block // 256))

    config = config or choose(op, row_class(num_rows, f"{name}{width}"), x, (RowConfig,), default)
    num_blocks = triton.cdiv(width, config.BLOCK)
    if num_blocks > MAX_GRID_Y or num_rows > MAX_GRID_X:
        raise ValueError(f"{op}: [{num_rows}, {width}] exceeds the grid of a GPU")
    return config, (num_rows, num_blocks)
