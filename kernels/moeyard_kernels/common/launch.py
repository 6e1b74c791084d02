"""What the Triton wrappers share: the checks of `checks` and stores that the interpreter gets right.

Under TRITON_INTERPRET=1 a store of fp32 into a bf16 tensor truncates, and arithmetic on bf16 is wrong: kernels load
with `.to(tl.float32)`, and their outputs are made by `new_output` (fp32 when interpreted) and returned through
`finish`, where torch rounds. Kernel parameters carry no annotations but tl.constexpr: a GPU build would compile them.
"""

import functools
import math

import torch
import triton
from triton.experimental.gluon import language as gl

from moeyard_kernels.common.checks import check_indices as check_indices
from moeyard_kernels.common.checks import check_layout as check_layout
from moeyard_kernels.common.checks import checked as checked

# The largest extent of a CUDA grid in y and z, and in x.
MAX_GRID_Y = 65535
MAX_GRID_X = 2**31 - 1


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def capability(x: torch.Tensor) -> tuple[int, int]:
    """Compute capability of the GPU that holds x, (9, 0) for Hopper; (0, 0) of a CPU."""
    return _capability(x.device) if x.is_cuda else (0, 0)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    found: int = torch.cuda.get_device_properties(device).multi_processor_count
    return found


def num_multiprocessors(x: torch.Tensor) -> int:
    """Of the GPU that holds x."""
    return _multiprocessors(x.device)


@functools.cache
def shared_layout(*block: int) -> gl.NVMMASharedLayout:
    """Of blocks of bf16 that a tensor descriptor copies for Gluon: to make one takes a host as long as to launch."""
    return gl.NVMMASharedLayout.get_default_for([*block], gl.bfloat16)


def on_hopper(x: torch.Tensor) -> bool:
    """Whether x is what the kernels in Gluon are written for: bf16, on a Hopper GPU."""
    return x.dtype == torch.bfloat16 and capability(x) == (9, 0)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter (on CPU tensors)."""
    flag: bool = triton.knobs.runtime.interpret
    return flag


def new_output(*shape: int, like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """An empty output for a kernel, on `like`'s device; `like`'s dtype unless given (fp32 for bf16 if interpreted)."""
    dtype = like.dtype if dtype is None else dtype
    stored = torch.float32 if dtype == torch.bfloat16 and not like.is_cuda else dtype
    return torch.empty(shape, device=like.device, dtype=stored)


def packed(x: torch.Tensor) -> torch.Tensor:
    """x, which is contiguous, with the strides of its shape.

    A dimension of one keeps the stride of what it was cut from, and is contiguous all the same: one row of a product's
    result, cut by columns, says that its next row lies a whole result further. Pointers never go there; a tensor
    descriptor takes the stride at its word, and is refused where that is no multiple of 16 bytes.
    """
    strides = tuple(math.prod(max(n, 1) for n in x.shape[i + 1 :]) for i in range(x.dim()))
    return x if x.stride() == strides else x.as_strided(x.shape, strides)


def finish(out: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The output a caller sees: `out` itself on a GPU, rounded to `dtype` by torch if interpreted."""
    return out.to(dtype)
