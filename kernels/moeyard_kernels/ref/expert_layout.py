"""Pairs grouped by expert, padded to blocks of rows."""

import torch

from moeyard_kernels.common.checks import check_indices
from moeyard_kernels.types.expert_layout import ExpertLayout, max_blocks


def expert_layout(
    topk_ids: torch.Tensor, slot_of_expert: torch.Tensor, *, num_slots: int, block_rows: int, one_in: int = 1
) -> ExpertLayout:
    """See `moeyard_kernels.ops.expert_layout`. What the kernel leaves unwritten is -1 here."""
    num_pairs, num_experts = topk_ids.numel(), len(slot_of_expert)
    check_indices("expert_layout", low=-1, high=num_experts, topk_ids=topk_ids)
    check_indices("expert_layout", low=-1, high=num_slots, slot_of_expert=slot_of_expert)
    experts = topk_ids.flatten().long()
    here = ((experts >= 0) & (slot_of_expert[experts.clamp(min=0)] >= 0)).nonzero().flatten()
    order = here[torch.sort(experts[here], stable=True).indices]
    counts = torch.bincount(experts[here], minlength=num_experts)
    blocks = (counts + (block_rows - 1)) // block_rows
    capacity = max_blocks(num_pairs, num_experts, block_rows)
    # Rows that padding puts before each expert, on top of the pairs before it.
    shift = (blocks.cumsum(0) - blocks) * block_rows - (counts.cumsum(0) - counts)
    pairs = torch.full((capacity * block_rows,), -1, dtype=torch.int32)
    pairs[torch.arange(len(order)) + shift[experts[order]]] = order.int()
    slot_of_block = torch.full((capacity,), -1, dtype=torch.int32)
    slot_of_block[: int(blocks.sum())] = slot_of_expert[torch.repeat_interleave(blocks)]
    return ExpertLayout(
        block_rows=block_rows,
        num_pairs=num_pairs,
        num_slots=num_slots,
        one_in=one_in,
        counts=counts.int(),
        pairs=pairs,
        slot_of_block=slot_of_block,
        num_blocks=blocks.sum(dtype=torch.int32).reshape(1),
    )
