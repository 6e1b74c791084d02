"""Memory that a backend's attention needs beside weights and state, and the partial sums of decode attention. Pure."""

from dataclasses import dataclass
from math import gcd
from typing import Protocol

# Grouped attention over DecodeTables splits keys at multiples of this many positions; for latent attention see
# `mla_split`.
GQA_SPLIT = 512
# Compressed attention splits the entries that a row sees at multiples of this many, or of a multiple of it if these
# were too many splits. The window is one split more.
COMPRESSED_SPLIT, COMPRESSED_SPLITS = 128, 16
# Largest bytes of one launch's sums, unless one sequence needs more. Captured steps have room for the longest sequence
# in all rows; other steps may recompute thousands of rows.
CAPTURED, LAUNCHED = 1 << 30, 1 << 28
_FP32 = 4


def mla_split(heads: int) -> int:
    """Return the positions per split of latent attention with `heads` heads.

    Few sequences run faster with short splits. But each split writes and reads an fp32 sum per head: 64 KiB for 16
    heads, beside 576 KiB for 512 keys (docs/journal.md). A step reserves the sums of its tables' whole width.
    """
    return 512 if heads <= 16 else 1024


def num_splits(positions: int, split: int) -> int:
    """Return the number of splits of `positions` positions, at least 1."""
    return max(1, -(-positions // split))


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitSums:
    """fp32 partial results per split, query row and head: a sum of `dim` values and its log-sum-exp.

    more: splits of every row besides those of its positions.
    """

    heads: int
    dim: int
    split: int
    more: int = 0

    def shape(self, sequences: int, queries: int, positions: int) -> tuple[int, int, int, int]:
        """Return the shape of the sums, [B, S, Q heads, dim]. The log-sum-exps are [B, S, Q heads]."""
        return sequences, num_splits(positions, self.split) + self.more, queries * self.heads, self.dim

    def together(self, sequences: int, queries: int, positions: int, most: int) -> int:
        """Return how many sequences, at least 1, have sums of at most `most` bytes, log-sum-exps not counted.

        With one split the sums are the result, so all sequences run at once. Otherwise turns are of about equal size.
        If possible their lengths fill multiples of 16 bytes: Triton compiles another kernel for unaligned pointers.
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
        """Return the most bytes of sums and log-sum-exps that one launch allocates."""
        count, splits, rows, dim = self.shape(sequences, queries, positions)
        one = splits * rows * (dim + 1) * _FP32
        return 0 if splits == 1 else min(count * one, max(one, most // dim * (dim + 1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Memory of one layer, counted in values.

    `extra`: beside the weights, in the served dtype; `fp32_extra`: in fp32. `per_row`: fp32 values per row of a step
    while the layer computes. The other counts are per position of the longest prefix
    that a prompt chunk attends to. `per_position` is in the served dtype, `fp32_per_position` in fp32, and
    `copied_per_position` in fp32 unless fp32 is served. `sums`: partial results of decode rows, if the backend splits
    keys.
    """

    extra: int
    per_row: int
    per_position: int
    copied_per_position: int = 0
    fp32_per_position: int = 0
    fp32_extra: int = 0
    sums: SplitSums | None = None


class Footprints(Protocol):
    """Memory that a backend needs for each kind of layer (`Backend.gqa`, ...), before any layer is built.

    FIXED: bytes that the largest step takes whatever its shape. ALLOCATED: allocator bytes per byte of a step's
    tensors. STREAM_SLOTS: slots for missed experts of prompts, beside the cache's slots. HOST_EXPERTS: whether the host
    keeps all experts if some have no slot.
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
        """Grouped-query attention. `head_norm`: q and k are normalised per head, with fp32 weights if `fp32_norm`."""
        ...

    def gdn(self, *, num_k_heads: int, num_v_heads: int, k_dim: int, v_dim: int, conv_size: int) -> Footprint:
        """Gated DeltaNet with a convolution over `conv_size` positions. Raises ValueError if the backend has none."""
        ...

    def kda(self, *, num_heads: int, head_dim: int) -> Footprint:
        """Kimi Delta Attention. Raises ValueError if the backend has none."""
        ...

    def mla(self, *, num_heads: int, nope_dim: int, rope_dim: int, v_dim: int, rank: int) -> Footprint:
        """Latent attention of rank R."""
        ...

    def compressed(
        self,
        *,
        num_heads: int,
        head_dim: int,
        ratio: int,
        index_heads: int,
        index_dim: int,
        top_k: int,
        groups_width: int,
    ) -> Footprint:
        """DeepSeek-V4's attention with an entry per `ratio` positions (0: none), of which an indexer with heads chooses
        `top_k`, and the width of its groups' outputs."""
        ...
