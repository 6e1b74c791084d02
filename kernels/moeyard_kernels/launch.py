"""What the Triton wrappers share: what they demand of tensors, the checked mode, and stores the interpreter gets right.

Under TRITON_INTERPRET=1 a store of fp32 into a bf16 tensor truncates, and arithmetic on bf16 is wrong: kernels load
with `.to(tl.float32)`, and their outputs are made by `new_output` (fp32 when interpreted) and returned through
`finish`, where torch rounds. Kernel parameters carry no annotations but tl.constexpr: a GPU build would compile them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import triton

from moeyard_kernels.checks import show

# The largest extent of a CUDA grid in y and z, and in x.
MAX_GRID_Y = 65535
MAX_GRID_X = 2**31 - 1

_CHECKED: ContextVar[bool] = ContextVar("moeyard_kernels_checked", default=False)


@contextmanager
def checked() -> Iterator[None]:
    """Within it, wrappers on a GPU check index tensors too, which costs a host sync each. On a CPU they always are."""
    token = _CHECKED.set(True)
    try:
        yield
    finally:
        _CHECKED.reset(token)


def check_indices(op: str, *, low: int, high: int, **indices: torch.Tensor) -> None:
    """Raise ValueError unless every value of each named index tensor is in [low, high). Free on a GPU if unchecked."""
    for name, index in indices.items():
        if index.numel() == 0 or (index.is_cuda and not _CHECKED.get()):
            continue
        least, most = (int(x) for x in torch.aminmax(index))
        if least < low or most >= high:
            raise ValueError(f"{op}: {name} {show(index)} holds {least} to {most}, outside {low} to {high - 1}")


def check_layout(op: str, **tensors: torch.Tensor | None) -> None:
    """Raise ValueError unless all tensors are contiguous, on one device. None is passed over."""
    first: tuple[str, torch.Tensor] | None = None
    for name, x in tensors.items():
        if x is None:
            continue
        if not x.is_contiguous():
            raise ValueError(f"{op}: {name} {show(x)} with strides {x.stride()} is not contiguous")
        first = first or (name, x)
        if x.device != first[1].device:
            raise ValueError(f"{op}: {name} is on {x.device}, {first[0]} on {first[1].device}")


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter (on CPU tensors)."""
    flag: bool = triton.knobs.runtime.interpret
    return flag


def new_output(*shape: int, like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """An empty output for a kernel, on `like`'s device; `like`'s dtype unless given (fp32 for bf16 if interpreted)."""
    dtype = like.dtype if dtype is None else dtype
    stored = torch.float32 if dtype == torch.bfloat16 and not like.is_cuda else dtype
    return torch.empty(shape, device=like.device, dtype=stored)


def finish(out: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The output a caller sees: `out` itself on a GPU, rounded to `dtype` by torch if interpreted."""
    return out.to(dtype)
