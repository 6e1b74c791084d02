"""Layout of (token, k) pairs by expert: blocks of rows that hold one expert each."""

from dataclasses import dataclass

import torch

from moeyard_kernels.types.gate import TokenChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayout:
    """A step's pairs t * K + k grouped by expert: the result of `ops.expert_layout`, an input of `ops.grouped_gemm`.

    counts: [E] int32, the unmasked pairs of each expert; 0 for an expert that is not resident.
    pairs: [rows] int32. The rows of expert e begin at a multiple of block_rows. Experts ascend, and so do the pairs of
    each. The rest of an expert's last block is -1. Rows from num_blocks * block_rows on are not written.
    slot_of_block: [rows / block_rows] int32, the slot of each block's expert. The first num_blocks are written.
    num_blocks: [1] int32 on the device, so that the host does not wait for it.
    one_in: a hint that about 1 / one_in of the pairs have a local expert.
    """

    block_rows: int
    num_pairs: int
    num_slots: int
    one_in: int = 1
    counts: torch.Tensor
    pairs: torch.Tensor
    slot_of_block: torch.Tensor
    num_blocks: torch.Tensor

    @property
    def rows_per_expert(self) -> int:
        """Rows of each expert under uniform routing. The tiles of the products depend on it."""
        return self.num_pairs // (self.one_in * max(1, self.counts.shape[0]))


# Up to this many pairs, the products of a step find their blocks themselves (`ExpertPairs`).
FEW_PAIRS = 64


def can_share(inner: int) -> bool:
    """Return whether a shared expert of `inner` values can run in the launch of one row's routed experts (`SharedRow`).

    A program keeps 64 outputs of both in a multiprocessor's shared memory (`experts.grouped_slice`).
    """
    return inner % 64 == 0 and 0 < inner <= 1600


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPairs:
    """Replacement of `ExpertLayout` for at most FEW_PAIRS pairs: each program finds its rows, without a layout.

    topk_ids [T, K] int64 or int32 and slot_of_expert [E] int32 are contiguous, as in `ops.expert_layout`. Among the
    pairs of a resident expert, the first and every 16th after it begin a block, which has that pair's number. Each pair
    of a single token has its own block. Products over codes have other blocks (`experts.grouped_packed.block_rows`).

    choice: set if one token's topk_ids are still to be chosen. Then the products' launches choose them, and write ids
    and weights.
    """

    num_slots: int
    topk_ids: torch.Tensor
    slot_of_expert: torch.Tensor
    choice: TokenChoice | None = None

    @property
    def num_pairs(self) -> int:
        return self.topk_ids.numel()

    @property
    def one_token(self) -> bool:
        return self.topk_ids.shape[0] == 1

    @property
    def block_rows(self) -> int:
        return 16


def max_blocks(num_pairs: int, num_experts: int, block_rows: int) -> int:
    """Return the most blocks that `num_pairs` pairs can need. Each expert in use wastes at most block_rows - 1 rows.

    The same bound holds for prompt rows and chunks, as no two chunks share a tile.
    """
    return (num_pairs + min(num_experts, num_pairs) * (block_rows - 1)) // block_rows


def expert_block_rows(num_pairs: int, num_experts: int) -> int:
    """Return the fastest rows per block for `num_pairs` pairs over `num_experts` resident experts.

    Small blocks waste less tensor core work; large ones read the weights less often. Measured with 128 experts of
    Qwen3-30B-A3B and block sizes of 16 to 128: on an H200 at 1 to 32 tokens per expert, on an H100 at 8 to 32. The
    choice is the fastest or within 2 % of it.
    """
    if num_pairs <= 10 * num_experts:
        return 16
    if num_pairs <= 20 * num_experts:
        return 32
    return 64 if num_pairs <= 48 * num_experts else 128
