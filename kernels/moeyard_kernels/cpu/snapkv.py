"""Which positions of a prompt are kept where its cache is compacted: SnapKV (arXiv 2404.14469).

The queries of the prompt's last positions, the window, say how much each earlier key matters: the softmax of their
scores over all keys that they see, summed over the window and over the query heads that share the key. A key counts for
the largest sum among its neighbours, so that what is kept stays in pieces that can be read. Everything is fp32 and of
one sequence: products have a multiple of 16 rows and sums a fixed order, so neither the batch nor the chunks before
show in what is chosen.
"""

import torch

from moeyard_kernels.common.kept import best, sum_rows
from moeyard_kernels.cpu.attn_prefill import ROW_TILE, key_blocks
from moeyard_kernels.types.decode_tables import BLOCK


def snapkv(
    q: torch.Tensor, k: torch.Tensor, *, length: int, scale: float, budget: int, shared: bool = False
) -> torch.Tensor:
    """Positions to keep of a prompt of `length`, ascending: int64 [Hkv, budget], or [1, budget] for a `shared` choice.

    q [W, Hq, D] are the queries of the last W positions, W <= budget < length; k [Hkv, L, D] the keys of positions 0 to
    at least length - 1 (what lies behind is finite and unseen). The window stays, and of the positions before it those
    that count most; of equal ones the lower. `shared`: scores are summed over all heads, for keys that are one latent.
    """
    scores = key_scores(q, k, length=length, scale=scale)
    if shared:
        scores = sum_rows(scores).unsqueeze(0)
    return best(scores, length=length, budget=budget)


def key_scores(q: torch.Tensor, k: torch.Tensor, *, length: int, scale: float) -> torch.Tensor:
    """fp32 [Hkv, length - W]: of every key before the window what the window's queries give it; q, k as in `snapkv`."""
    window, num_q_heads, dim = q.shape
    num_kv_heads, before = k.shape[0], length - window
    group = num_q_heads // num_kv_heads
    keys = key_blocks(k, 0, length)
    q32 = q.new_zeros(num_kv_heads, group, window + -window % ROW_TILE, dim, dtype=torch.float32)
    torch.mul(q.float().view(window, num_kv_heads, group, dim).permute(1, 2, 0, 3), scale, out=q32[:, :, :window])
    found = q32.new_zeros(num_kv_heads, before)
    for first in range(0, window, ROW_TILE):
        position = torch.arange(before + first, before + first + ROW_TILE).unsqueeze(1)
        hidden = torch.arange(before, keys.shape[1]) > position
        count = min(ROW_TILE, window - first)
        # Head by head: scores take no more memory than those of a tile of the attention before.
        for head in range(num_kv_heads):
            rows = q32[head, :, first : first + ROW_TILE].reshape(group * ROW_TILE, dim)
            scores = (rows @ keys[head].T).view(group, ROW_TILE, -1)
            scores[..., before:].masked_fill_(hidden, float("-inf"))
            p = scores.sub_(scores.amax(-1, keepdim=True)).exp_()
            total = p.view(group, ROW_TILE, -1, BLOCK).sum(-1).cumsum(-1)[..., -1:]
            part = p.div_(total)[:, :count, :before]
            found[head] += sum_rows(sum_rows(part.transpose(0, 1)))
    return found
