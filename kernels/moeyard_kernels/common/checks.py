"""Argument checks of `ops`. Each function raises ValueError naming the argument and both values."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

FLOATS = (torch.float32, torch.bfloat16)

_CHECKED: ContextVar[bool] = ContextVar("moeyard_kernels_checked", default=False)


def show(x: torch.Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


@contextmanager
def checked() -> Iterator[None]:
    """Check index tensors on a GPU too, at the cost of a host sync each. On a CPU they are always checked."""
    token = _CHECKED.set(True)
    try:
        yield
    finally:
        _CHECKED.reset(token)


def check_indices(op: str, *, low: int, high: int, **indices: torch.Tensor) -> None:
    """Raise ValueError unless every value of each index tensor is in [low, high). On a GPU it needs `checked()`."""
    for name, index in indices.items():
        if index.numel() == 0 or (index.is_cuda and not _CHECKED.get()):
            continue
        least, most = (int(x) for x in torch.aminmax(index))
        if least < low or most >= high:
            raise ValueError(f"{op}: {name} {show(index)} holds {least} to {most}, outside {low} to {high - 1}")


def check_layout(op: str, **tensors: torch.Tensor | None) -> None:
    """Raise ValueError unless all tensors are contiguous and on one device. None is skipped."""
    for name, x in tensors.items():
        if x is not None and not x.is_contiguous():
            raise ValueError(f"{op}: {name} {show(x)} with strides {x.stride()} is not contiguous")
    check_devices(op, **tensors)


def check_devices(op: str, **tensors: torch.Tensor | None) -> None:
    """Raise ValueError unless all tensors are on the first one's device. None is skipped."""
    given = [(name, x) for name, x in tensors.items() if x is not None]
    for name, x in given[1:]:
        if x.device != given[0][1].device:
            raise ValueError(f"{op}: {name} is on {x.device}, {given[0][0]} on {given[0][1].device}")


def check_norm(op: str, x: torch.Tensor, weight: torch.Tensor) -> None:
    if x.dim() == 0 or weight.dim() != 1 or weight.shape[0] != x.shape[-1]:
        raise ValueError(f"{op}: weight {show(weight)} does not fit x {show(x)}")
    if x.dtype not in FLOATS or weight.dtype not in (x.dtype, torch.float32):
        raise ValueError(
            f"{op}: x {x.dtype} and weight {weight.dtype} must share a dtype, fp32 or bf16, or weight fp32"
        )


def check_groups(num_experts: int, top_k: int, num_groups: int, topk_groups: int, group_score: str) -> None:
    if num_groups < 1 or num_experts % num_groups:
        raise ValueError(f"topk_gate: {num_experts} experts in {num_groups} groups")
    if not 1 <= topk_groups <= num_groups:
        raise ValueError(f"topk_gate: topk_groups {topk_groups} of {num_groups} groups")
    if top_k > num_experts // num_groups * topk_groups:
        raise ValueError(f"topk_gate: top_k {top_k} exceeds {topk_groups} groups of {num_experts // num_groups}")
    if group_score not in ("max", "top2sum"):
        raise ValueError(f"topk_gate: group_score {group_score!r} is neither 'max' nor 'top2sum'")
    if group_score == "top2sum" and num_experts // num_groups < 2:
        raise ValueError(f"topk_gate: group_score 'top2sum' of groups of {num_experts // num_groups}")
