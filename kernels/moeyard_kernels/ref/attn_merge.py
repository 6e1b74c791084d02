"""What the decode attentions share: one query row against its blocks of keys, merged in ascending block order."""

import torch

from moeyard_kernels.decode_plan import BLOCK, DecodePlan


def attend_blocks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: DecodePlan) -> torch.Tensor:
    """q [X, n, M, Dk] (scaled), k [X, n, 64, Dk], v [X, n, 64, Dv], all fp32 -> [X, num_rows, M, Dv] fp32.

    X counts independent key heads, n the plan's (row, block) pairs and M the query heads of one key head. Per row:
    out = sum_b exp(s_b - m) v_b / sum_b sum(exp(s_b - m)), m being the row's maximum over all blocks (exact, so it
    knows no order) and both sums running over ascending blocks. Every product has the shape M x 64 whatever the batch.
    """
    num_heads, num_blocks, m, dim = q.shape
    scores = torch.bmm(q.view(-1, m, dim), k.view(-1, BLOCK, dim).transpose(1, 2)).view(num_heads, num_blocks, m, BLOCK)
    scores += plan.mask
    top = scores.amax(-1)
    top = top.index_select(1, plan.blocks_of_row).view(num_heads, plan.num_rows, -1, m).amax(2)
    scores -= top.index_select(1, plan.row_of_block).unsqueeze(-1)
    p = scores.exp_()
    o = torch.bmm(p.view(-1, m, BLOCK), v.reshape(-1, BLOCK, v.shape[-1]))
    out = o.new_zeros(num_heads, plan.num_rows, m, v.shape[-1])
    out.index_add_(1, plan.row_of_block, o.view(num_heads, num_blocks, m, -1))
    total = o.new_zeros(num_heads, plan.num_rows, m)
    total.index_add_(1, plan.row_of_block, p.sum(-1))
    return out.div_(total.unsqueeze(-1))
