"""Which (token, k) pairs each resident expert computes, as blocks of rows that hold one expert each."""

from dataclasses import dataclass

import torch

from moeyard_kernels.types.gate import TokenChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayout:
    """Rows of a step's pairs t * K + k, grouped by expert; made by `ops.expert_layout`, read by `ops.grouped_gemm`.

    counts: [E] int32, pairs of each expert that are not masked, 0 for one that is not here.
    pairs: [rows] int32. Expert e has counts[e] rows from a multiple of block_rows on; experts ascend, and so do their
    pairs; the rest of the last block is -1. Rows from num_blocks * block_rows on are not written.
    slot_of_block: [rows / block_rows] int32, where the weights of each block's expert are. num_blocks are written.
    num_blocks: [1] int32, on the device: nobody waits for it.
    one_in: of so many pairs at best one has its expert here.
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
        """Rows of each expert, if all have alike: what the products' tiles are chosen by."""
        return self.num_pairs // (self.one_in * max(1, self.counts.shape[0]))


# Pairs up to which the products of a step find their blocks by themselves.
FEW_PAIRS = 64


def can_share(inner: int) -> bool:
    """Whether one row's chosen experts may have a shared one of so many inner values in their launch (`SharedRow`).

    64 of its outputs lie in a multiprocessor's shared memory whole, as theirs do (`experts.grouped_slice`).
    """
    return inner % 64 == 0 and 0 < inner <= 1600


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPairs:
    """In place of an `ExpertLayout` for at most FEW_PAIRS pairs: nothing is laid out, each program finds its rows.

    topk_ids [T, K] int64 or int32 and slot_of_expert [E] int32, contiguous, as `ops.expert_layout` takes them. Of pairs
    of one expert that is here the first, and every 16th after it, begins a block; a block has the pair's number. The
    pairs of one token have a block each.

    choice: where one token's ids, topk_ids, are still to be chosen: the products' launches do it, and write its ids and
    weights.
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
    """The most blocks that so many pairs can need: every expert that has any wastes at most block_rows - 1 rows.

    As much as of pairs and experts it is true of prompt rows and chunks, of which none shares a tile with another.
    """
    return (num_pairs + min(num_experts, num_pairs) * (block_rows - 1)) // block_rows


def expert_block_rows(num_pairs: int, num_experts: int) -> int:
    """The rows per block that run fastest with so many pairs over so many experts (those that are here).

    Small blocks waste little of a tensor core's work, large ones read the weights seldom. Measured on an H200 with 128
    experts of Qwen3-30B-A3B at 1 to 32 tokens per expert and block sizes of 16 to 128, and on an H100 with 8 to 32: the
    fastest or within 2 % of it.
    """
    if num_pairs <= 10 * num_experts:
        return 16
    if num_pairs <= 20 * num_experts:
        return 32
    return 64 if num_pairs <= 48 * num_experts else 128
