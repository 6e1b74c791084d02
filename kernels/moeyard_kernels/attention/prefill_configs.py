"""Configs of `attn_prefill_varlen`: candidates, shape classes and defaults."""

from dataclasses import dataclass
from typing import Literal

import torch

from moeyard_kernels.common.launch import on_hopper
from moeyard_kernels.common.tuning import MULTIPROCESSORS, Config
from moeyard_kernels.types.decode_tables import BLOCK
from moeyard_kernels.types.prefill_plan import PrefillPlan

OP = "attn_prefill_varlen"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig(Config):
    """BM: rows per program. Two programs of 64 share a multiprocessor; programs of 128 read keys half as often.

    kernel: `_attn_prefill_kernel` with loads by pointers, or by tensor descriptors of full blocks of keys where layout
    and pages allow it. Or `attn_prefill_hopper_kernel` where it can run (else descriptors); num_warps are then those of
    each of its two groups.
    """

    kernel: Literal["pointers", "descriptors", "hopper"]
    BM: int


CONFIGS: tuple[PrefillConfig, ...] = (
    PrefillConfig(kernel="hopper", BM=128, num_warps=4, num_stages=3),
    PrefillConfig(kernel="hopper", BM=128, num_warps=4, num_stages=4),
    PrefillConfig(kernel="descriptors", BM=64, num_warps=4, num_stages=3),
    PrefillConfig(kernel="descriptors", BM=128, num_warps=4, num_stages=2),
    PrefillConfig(kernel="pointers", BM=64, num_warps=4, num_stages=3),
    PrefillConfig(kernel="descriptors", BM=128, num_warps=8, num_stages=3),
    PrefillConfig(kernel="pointers", BM=128, num_warps=8, num_stages=3),
)

# The most (full tile, head) pairs of a shape class called "few": each tile of 64 rows has a multiprocessor. When two
# share one, the Hopper kernel is faster after a prefix, by a tenth with grouped heads and by half without. Without a
# prefix it takes 2 to 4 us longer for few grouped rows (docs/journal.md, "Attention").
_FEW = MULTIPROCESSORS // 2
# The least such pairs for which programs of 128 rows are faster in the Triton kernel too.
_WIDE = 256
# Bytes of shared memory that a program may use.
_SHARED = 224 << 10


def split_dim(dim: int) -> tuple[int, int]:
    """Return dim as a sum of two powers of two, the larger first; the second may be 0. Raises ValueError otherwise."""
    first = 1 << (dim.bit_length() - 1)
    rest = dim - first
    if first < 16 or rest & (rest - 1) or 0 < rest < 16:
        raise ValueError(f"{OP}: head dimension {dim} is no sum of one or two powers of two from 16 on")
    return first, rest


def shape_class(q: torch.Tensor, v: torch.Tensor, plan: PrefillPlan) -> str:
    """Return the shape class."""
    kind = ("" if q.dtype == torch.bfloat16 else " fp32") + ("" if plan.window is None else " window")
    layout = "rows" if plan.page_size == 0 else "pages" if plan.page_size % BLOCK == 0 else "small pages"
    return f"D{q.shape[2]} V{v.shape[-1]} {layout} {'many' if _programs(q, plan) > _FEW else 'few'}{kind}"


def default_config(q: torch.Tensor, v: torch.Tensor, plan: PrefillPlan) -> PrefillConfig:
    """Return the config of untuned shapes. fp32 runs without tensor cores, in small tiles."""
    if q.dtype == torch.float32:
        return PrefillConfig(kernel="pointers", BM=32, num_warps=4, num_stages=1)
    width = q.shape[2] + v.shape[-1]
    if width >= 256 and _programs(q, plan) > _FEW and suits_hopper(q, v, plan):
        return CONFIGS[0]
    wide = width > 256 and _programs(q, plan) >= _WIDE
    rows = 128 if wide else 64
    fits = (_SHARED - rows * q.shape[2] * 2) // (BLOCK * width * 2)
    num_stages = max(1, min(3, fits))
    return PrefillConfig(kernel="descriptors", BM=rows, num_warps=8 if wide else 4, num_stages=num_stages)


def _programs(q: torch.Tensor, plan: PrefillPlan) -> int:
    """Return the number of (full tile, head) pairs."""
    return plan.num_full_tiles * q.shape[1]


def suits_hopper(q: torch.Tensor, v: torch.Tensor, plan: PrefillPlan) -> bool:
    """Whether `attn_prefill_hopper_kernel` can run: Hopper, bf16, keys that TMA copies by blocks, no window."""
    if not on_hopper(q):
        return False
    dims = (*split_dim(q.shape[2]), v.shape[-1])
    fits = dims in ((64, 0, 64), (128, 0, 64), (64, 0, 128), (128, 0, 128), (128, 64, 128))
    return fits and plan.window is None and plan.page_size % BLOCK == 0
