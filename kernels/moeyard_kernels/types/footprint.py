"""What a backend's attention takes beside its weights and state, and the sums that decode attention leaves. Pure."""

from dataclasses import dataclass
from math import gcd
from typing import Protocol

# Over DecodeTables the keys are cut into splits at multiples of so many positions by grouped attention; by latent
# attention see `mla_split`.
GQA_SPLIT = 512
# Bytes that the sums of one launch take at most, if those of one sequence do not take more: of steps with room for the
# longest sequence in all rows, as graphs have, and of others, whose rows may be thousands (output computed anew).
CAPTURED, LAUNCHED = 1 << 30, 1 << 28
_FP32 = 4


def mla_split(heads: int) -> int:
    """At multiples of how many positions latent attention of a model with so many heads cuts the keys.

    Few sequences want short splits, but each leaves a sum per head: of 16 heads in fp32, written and read, 64 KiB
    beside 576 of 512 keys (measured: docs/kernels.md), and a step has room for those of its tables' whole width.
    """
    return 512 if heads <= 16 else 1024


def num_splits(positions: int, split: int) -> int:
    """How many splits of `split` positions so many have, at least 1."""
    return max(1, -(-positions // split))


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitSums:
    """In fp32, of every split, query row and of `heads` heads: a sum of values, `dim` wide, and its log-sum-exp."""

    heads: int
    dim: int
    split: int

    def shape(self, sequences: int, queries: int, positions: int) -> tuple[int, int, int, int]:
        """[B, S, Q heads, dim] of a launch over tables of so many positions, [B, S, Q heads] of the log-sum-exps."""
        return sequences, num_splits(positions, self.split), queries * self.heads, self.dim

    def together(self, sequences: int, queries: int, positions: int, most: int) -> int:
        """Of how many sequences at once the sums take at most `most` bytes, of one at least; beside the log-sum-exps.

        All where there is one split: its sums are the result. Otherwise about as many each time, whose lengths are a
        multiple of 16 bytes if that can be: kernels are compiled anew for pointers that are not.
        """
        _, splits, rows, dim = self.shape(1, queries, positions)
        fit = max(1, most // (splits * rows * dim * _FP32))
        if splits == 1 or fit >= sequences:
            return sequences
        unit = 4 // gcd(4, queries)
        unit = unit if fit >= unit else 1
        fit -= fit % unit
        each = -(-sequences // -(-sequences // fit))
        return each + -each % unit

    def num_bytes(self, sequences: int, queries: int, positions: int, most: int) -> int:
        """What launches of up to so many sequences, queries and positions take at once, with their log-sum-exps."""
        count, splits, rows, dim = self.shape(sequences, queries, positions)
        one = splits * rows * (dim + 1) * _FP32
        return 0 if splits == 1 else min(count * one, max(one, most // dim * (dim + 1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Of one layer, in values.

    `extra`: kept beside the weights, in the served dtype; `fp32_extra`: in fp32. `per_row`: taken in fp32 for each row
    of a step, while the layer computes. `per_position`, in the served dtype, `copied_per_position`, in fp32 unless that
    is served, and `fp32_per_position`: for each position of the longest prefix that a prompt chunk attends to.
    `sums`: what decode rows leave of each split of the keys, where a backend splits them.
    """

    extra: int
    per_row: int
    per_position: int
    copied_per_position: int = 0
    fp32_per_position: int = 0
    fp32_extra: int = 0
    sums: SplitSums | None = None


class Footprints(Protocol):
    """What a backend says of the objects that it would make (`Backend.gqa`, ...), before it makes any.

    FIXED: bytes that the largest step takes whatever its shape. ALLOCATED: bytes that the allocator takes for each byte
    of a step's tensors. STREAM_SLOTS: slots that misses of prompts pass through, beside the cache's. HOST_EXPERTS:
    whether all experts are kept in memory of the host when not all have slots.
    """

    @property
    def FIXED(self) -> int: ...
    @property
    def ALLOCATED(self) -> float: ...
    @property
    def STREAM_SLOTS(self) -> int: ...
    @property
    def HOST_EXPERTS(self) -> bool: ...

    def gqa(self, *, num_heads: int, num_kv_heads: int, head_dim: int, head_norm: bool, fp32_norm: bool) -> Footprint:
        """`head_norm`: queries and keys are normalised head by head, with weights in fp32 if `fp32_norm`."""
        ...

    def gdn(self, *, num_k_heads: int, num_v_heads: int, k_dim: int, v_dim: int, conv_size: int) -> Footprint:
        """Gated DeltaNet with a convolution over `conv_size` positions. Raises ValueError where there is none."""
        ...

    def kda(self, *, num_heads: int, head_dim: int) -> Footprint:
        """Kimi Delta Attention. Raises ValueError where there is none."""
        ...

    def mla(self, *, num_heads: int, nope_dim: int, rope_dim: int, v_dim: int, rank: int) -> Footprint:
        """Latent attention of rank R."""
        ...
