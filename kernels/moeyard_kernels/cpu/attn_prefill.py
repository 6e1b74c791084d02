"""Causal attention over consecutive prompt positions of one sequence, and the choice of positions for a compacted
cache.

SnapKV (arXiv 2404.14469) chooses positions by the queries of the prompt's last positions, the window. Each query has
softmax weights over all keys that it sees. Their sum over the window, and over the query heads that share the key, is
the weight of an earlier key. A key takes the largest sum among its neighbours, so that readable pieces stay. All values
are fp32 and of one sequence. Products have a multiple of 16 rows and sums a fixed order, so neither the batch nor
earlier chunks affect the choice.
"""

import torch
import torch.nn.functional as F

from moeyard_kernels.common.snapkv import best, sum_rows
from moeyard_kernels.types.decode_tables import BLOCK

# Query rows are computed in multiples of this number.
ROW_TILE = 16
# A tile's scores take at most this many fp32 values (32 MiB), or those of one row tile.
_MAX_SCORES = 8 << 20


def attn_prefill(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, start: int, scale: float, window: int | None = None
) -> torch.Tensor:
    """Causal attention of q [T, Hq, Dk] at positions start..start+T-1 of one sequence -> [T, Hq, Dv] in q's dtype.

    k [Hkv, L, Dk] and v [Hkv, L, Dv] hold positions 0..L-1, L >= start + T; later values are finite and unseen. Query
    head h uses key head h // (Hq // Hkv). With `window` a query at p sees p - window + 1..p. A query's bits depend on
    its own row and the keys it sees, not on the chunk, L or the tile.
    """
    return attn_prefill_lse(q, k, v, start=start, scale=scale, window=window)[0]


def attn_prefill_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, start: int, scale: float, window: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (attention [T, Hq, Dv], log of the sum of exp(scores) [T, Hq] fp32). Scores and sums are fp32, also for
    bf16.

    A query's sum over values runs in ascending blocks of 64 keys from position 0, one addition per block; unseen blocks
    add exact zeros. Query rows come in tiles of a multiple of 16, so neither the tile nor the chunk changes the bits.
    """
    num_rows, num_q_heads, dim = q.shape
    num_kv_heads, dim_v = k.shape[0], v.shape[2]
    if dim_v % ROW_TILE:
        # In a product with few columns the sum of a row may depend on its place (see linear.py), so pad the values with
        # zeros.
        v = F.pad(v, (0, -dim_v % ROW_TILE))
    out = q.new_empty(num_rows, num_q_heads, dim_v)
    lse = q.new_empty(num_rows, num_q_heads, dtype=torch.float32)
    if num_rows == 0:
        return out, lse
    end = start + num_rows
    low = 0 if window is None else max(0, start - window + 1) // BLOCK * BLOCK
    k32, v32 = key_blocks(k, low, end), key_blocks(v, low, end)
    q32 = q.new_zeros(
        num_kv_heads, num_q_heads // num_kv_heads, num_rows + -num_rows % ROW_TILE, dim, dtype=torch.float32
    )
    torch.mul(q.view(num_rows, num_kv_heads, -1, dim).permute(1, 2, 0, 3), scale, out=q32[:, :, :num_rows])
    tile = max(ROW_TILE, min(64, _MAX_SCORES // (num_q_heads * k32.shape[1]) // ROW_TILE * ROW_TILE))
    for t in range(0, num_rows, tile):
        count = min(tile, num_rows - t)
        done, log_sum = _tile(q32[:, :, t : t + tile], k32, v32, low, start + t, window)
        out[t : t + count] = done[:, :, :count, :dim_v].permute(2, 0, 1, 3).reshape(count, num_q_heads, dim_v)
        lse[t : t + count] = log_sum[:, :, :count].permute(2, 0, 1).reshape(count, num_q_heads)
    return out, lse


def key_blocks(x: torch.Tensor, low: int, end: int) -> torch.Tensor:
    """Return x [heads, L, D] from `low` to the end of the block that holds end - 1, as fp32, zeros past `end`."""
    stop = end + -end % BLOCK
    if x.shape[1] >= stop:
        return x[:, low:stop].float()
    padded = x.new_zeros(x.shape[0], stop - low, x.shape[2], dtype=torch.float32)
    padded[:, : end - low] = x[:, low:end]
    return padded


def _tile(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, low: int, start: int, window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [Hkv, G, M, D] at positions start.. against keys from `low` on -> [Hkv, G, M, Dv], [Hkv, G, M] (lse), fp32."""
    num_kv_heads, group, m, dim = q.shape
    first = 0 if window is None else max(0, start - window + 1 - low) // BLOCK * BLOCK
    last = min(k.shape[1], start + m - low + -(start + m - low) % BLOCK)
    scores = torch.bmm(q.reshape(num_kv_heads, group * m, dim), k[:, first:last].transpose(1, 2))
    grid = scores.view(num_kv_heads, group, m, last - first)
    # Only mask columns that some row of the tile must not see: those after the first query, and those before the last
    # query's window.
    position = torch.arange(start, start + m).unsqueeze(1)
    after = start + 1 - low - first
    grid[..., after:].masked_fill_(torch.arange(start + 1, low + last) > position, float("-inf"))
    if window is not None:
        before = min(max(0, start + m - window - low - first), last - first)
        hidden = torch.arange(low + first, low + first + before) <= position - window
        grid[..., :before].masked_fill_(hidden, float("-inf"))
    top = scores.amax(-1, keepdim=True)
    scores -= top
    p = scores.exp_()
    acc = p.new_zeros(num_kv_heads, group * m, v.shape[2])
    for b in range(0, last - first, BLOCK):
        acc.baddbmm_(p[:, :, b : b + BLOCK], v[:, first + b : first + b + BLOCK])
    total = p.view(num_kv_heads, group * m, -1, BLOCK).sum(-1).cumsum(-1)[..., -1:]
    lse = total.log().add_(top)
    return acc.div_(total).view(num_kv_heads, group, m, -1), lse.view(num_kv_heads, group, m)


def snapkv(
    q: torch.Tensor, k: torch.Tensor, *, length: int, scale: float, budget: int, shared: bool = False
) -> torch.Tensor:
    """Return the positions to keep of a prompt of `length`, ascending: int64 [Hkv, budget], or [1, budget] if `shared`.

    q [W, Hq, D] are the queries of the last W positions, W <= budget < length. The keys k [Hkv, L, D] cover at least
    positions 0 to length - 1; later values are finite and unseen. The window stays, and the earlier positions with the
    largest weights; the lower position wins a tie. `shared`: sum the scores over all heads, for keys that are one
    latent.
    """
    scores = key_scores(q, k, length=length, scale=scale)
    if shared:
        scores = sum_rows(scores).unsqueeze(0)
    return best(scores, length=length, budget=budget)


def key_scores(q: torch.Tensor, k: torch.Tensor, *, length: int, scale: float) -> torch.Tensor:
    """Return fp32 [Hkv, length - W]: the weight of every key before the window under the window's queries, as in
    `snapkv`."""
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
        # Head by head, so that scores take no more memory than those of a tile of the attention.
        for head in range(num_kv_heads):
            rows = q32[head, :, first : first + ROW_TILE].reshape(group * ROW_TILE, dim)
            scores = (rows @ keys[head].T).view(group, ROW_TILE, -1)
            scores[..., before:].masked_fill_(hidden, float("-inf"))
            p = scores.sub_(scores.amax(-1, keepdim=True)).exp_()
            total = p.view(group, ROW_TILE, -1, BLOCK).sum(-1).cumsum(-1)[..., -1:]
            part = p.div_(total)[:, :count, :before]
            found[head] += sum_rows(sum_rows(part.transpose(0, 1)))
    return found
