"""What decode attention leaves of each split of the keys for its merge, and of how many sequences at once. Pure."""

from dataclasses import dataclass
from math import gcd

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
