"""Helpers of all Triton wrappers: device properties, and outputs that the interpreter stores correctly.

Under TRITON_INTERPRET=1 a store of fp32 into a bf16 tensor truncates, and bf16 arithmetic is wrong. So kernels load
with `.to(tl.float32)`. `new_output` makes outputs (fp32 when interpreted), and `finish` lets torch round them. Kernel
parameters carry no annotations but tl.constexpr, because a GPU build would compile them.
"""

import functools
import math

import torch
import triton
from packaging.version import Version
from triton.experimental.gluon import language as gl

from moeyard_kernels.common.checks import check_indices as check_indices
from moeyard_kernels.common.checks import check_layout as check_layout
from moeyard_kernels.common.checks import checked as checked

# The largest extent of a CUDA grid in y and z, and in x.
MAX_GRID_Y = 65535
MAX_GRID_X = 2**31 - 1
# Whether a view of shared memory may extend past what it views. Triton 3.8 refuses that, so there an operand of a
# product has memory for rows that are never filled. This needs fewer stages in flight.
LARGER_VIEWS = Version(triton.__version__) < Version("3.8")
# Kernels that give the same bits rely on products and sums that round once, and say where these must round twice. This
# also sets the environment variable that Triton 3.9 asks for, because its default will change.
triton.knobs.language.default_fp_fusion = True


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def capability(x: torch.Tensor) -> tuple[int, int]:
    """Return the compute capability of the GPU that holds x, (9, 0) for Hopper; (0, 0) for a CPU."""
    return _capability(x.device) if x.is_cuda else (0, 0)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    found: int = torch.cuda.get_device_properties(device).multi_processor_count
    return found


def num_multiprocessors(x: torch.Tensor) -> int:
    """Return the number of multiprocessors of the GPU that holds x."""
    return _multiprocessors(x.device)


@functools.cache
def shared_layout(*block: int) -> gl.NVMMASharedLayout:
    """Return the layout of bf16 blocks that a tensor descriptor copies for Gluon. Cached: making one costs a launch."""
    return gl.NVMMASharedLayout.get_default_for([*block], gl.bfloat16)


def on_hopper(x: torch.Tensor) -> bool:
    """Return whether Gluon kernels can take x: bf16 on a Hopper GPU."""
    return x.dtype == torch.bfloat16 and capability(x) == (9, 0)


def interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter, on CPU tensors."""
    flag: bool = triton.knobs.runtime.interpret
    return flag


def new_output(*shape: int, like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return an empty kernel output on `like`'s device, by default in its dtype; interpreted bf16 becomes fp32."""
    dtype = like.dtype if dtype is None else dtype
    stored = torch.float32 if dtype == torch.bfloat16 and not like.is_cuda else dtype
    return torch.empty(shape, device=like.device, dtype=stored)


def packed(x: torch.Tensor) -> torch.Tensor:
    """Return contiguous x with the strides of its shape.

    A dimension of size one keeps the stride of the tensor that it was cut from, and x still counts as contiguous. For
    example, one row cut by columns keeps the full row stride. Pointers never use that stride, but a tensor descriptor
    is rejected if it is no multiple of 16 bytes.
    """
    strides = tuple(math.prod(max(n, 1) for n in x.shape[i + 1 :]) for i in range(x.dim()))
    return x if x.stride() == strides else x.as_strided(x.shape, strides)


def finish(out: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the caller's output: `out` itself on a GPU; when interpreted, rounded to `dtype` by torch."""
    return out.to(dtype)
