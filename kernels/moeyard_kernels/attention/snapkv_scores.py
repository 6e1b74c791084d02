"""Triton: score each key of a prompt by the attention of its last queries, to choose the keys to keep (SnapKV).

The weight of key j < L - W of key head h sums over rows (q, i): the query heads q of h, and the last W positions i.
With c = scale log2(e):

    weight(j) = sum_(q, i) e(q, i, j) / sum_(j' <= i) e(q, i, j')
    e(q, i, j) = exp2(fma(s(q, i, j), c, -(top(q, i) c)))

The first launch computes maximum and sum of each row over each split of SPLIT keys, in ascending blocks of BN. The
second merges the splits in ascending order. The third sums the weights over ascending tiles of BM rows. Scores are
computed twice and never stored: a window of 32 rows of 128 heads over 32k keys has 0.5 GB of them.

The order of a sum over the rows of a tile depends on the tile. So there is one tile size and nothing to tune, and the
bits depend on q and the keys alone. The op runs once per layer and prompt, whose own attention takes about a hundred
times as long.
"""

import math

import torch
import triton
import triton.language as tl

from moeyard_kernels.attention.decode_splits import UNFUSED
from moeyard_kernels.attention.prefill_configs import split_dim
from moeyard_kernels.common import launch

# Rows and keys of a tile, keys of a split.
BM, BN, SPLIT = 64, 128, 1024
# The most bytes of row maxima and sums over all splits at a time. Above that, heads run in turns.
_MAX_PARTIAL = 64 << 20
# As in `attn_prefill_varlen`: below any real score, and so far below that score that exp2 is 0.
_NO_SCORE = tl.constexpr(-1e30)
_UNSEEN = tl.constexpr(-2e38)


@triton.jit
def _queries(p_q, o_r, m_r, i_h, W, s_q, s_q_head, GROUP: tl.constexpr, FIRST, D: tl.constexpr, WIDE: tl.constexpr):
    """Load columns [FIRST, FIRST + D) of rows o_r of key head i_h. Row g W + i is query i of head g of the group."""
    o_row = (o_r % W).to(tl.int64) * s_q + (i_h * GROUP + o_r // W) * s_q_head
    b_q = tl.load(p_q + o_row[:, None] + (FIRST + tl.arange(0, D))[None, :], mask=m_r[:, None], other=0.0)
    return b_q.to(tl.float32) if WIDE else b_q


@triton.jit
def _keys(p_k, p_rows, o_n, m_n, s_k, D: tl.constexpr, PLACED: tl.constexpr, WIDE: tl.constexpr):
    """Load the keys of positions o_n, [BN, D], with zeros outside m_n."""
    o_row = o_n.to(tl.int64)
    if PLACED:
        o_row = tl.load(p_rows + o_n, mask=m_n, other=0)
    b_k = tl.load(p_k + o_row[:, None] * s_k + tl.arange(0, D)[None, :], mask=m_n[:, None], other=0.0)
    return b_k.to(tl.float32) if WIDE else b_k


# Sizes that change from prompt to prompt must not recompile the kernels or change the order of sums.
@triton.jit(do_not_specialize=["W", "length", "num_splits", "num_tiles"])
def _snapkv_softmax_kernel(
    p_q, p_k, p_k2, p_rows, p_top, p_sum, c, W, length, num_splits, num_tiles, s_q, s_q_head, s_k, s_k_head, s_k2,
    s_k2_head, GROUP: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    SPLIT: tl.constexpr, PLACED: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the maximum of q . k and the sum of exp2 of BM rows of a key head over one split. Grid: H splits tiles.

    p_top, p_sum: [H, num_splits, GROUP W] fp32.
    """
    i_split = tl.program_id(0) // num_tiles % num_splits
    i_h = (tl.program_id(0) // num_tiles // num_splits).to(tl.int64)
    o_r = tl.program_id(0) % num_tiles * BM + tl.arange(0, BM)
    m_r = o_r < GROUP * W
    b_q = _queries(p_q, o_r, m_r, i_h, W, s_q, s_q_head, GROUP, 0, D1, WIDE)
    b_q2 = b_q
    if D2 > 0:
        b_q2 = _queries(p_q, o_r, m_r, i_h, W, s_q, s_q_head, GROUP, D1, D2, WIDE)
    o_p = length - W + o_r % W
    b_top = tl.full([BM], _NO_SCORE, tl.float32)
    b_sum = tl.zeros([BM], dtype=tl.float32)
    i_end = tl.minimum((i_split + 1) * SPLIT, length)
    for i_n in tl.range(i_split * SPLIT, i_end, BN, num_stages=STAGES):
        o_n = i_n + tl.arange(0, BN)
        m_n = o_n < length
        b_k = _keys(p_k + i_h * s_k_head, p_rows, o_n, m_n, s_k, D1, PLACED, WIDE)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
        if D2 > 0:
            b_k2 = _keys(p_k2 + i_h * s_k2_head, p_rows, o_n, m_n, s_k2, D2, PLACED, WIDE)
            b_s = tl.dot(b_q2, tl.trans(b_k2), b_s, input_precision="ieee")
        b_s = tl.where(o_n[None, :] <= o_p[:, None], b_s, _UNSEEN)
        b_new = tl.maximum(b_top, tl.max(b_s, 1))
        b_shift = tl.broadcast_to(-(b_new * c)[:, None], b_s.shape)
        b_p = tl.exp2(tl.fma(b_s, tl.full(b_s.shape, c, tl.float32), b_shift))
        b_sum = tl.fma(b_sum, tl.exp2((b_top - b_new) * c), tl.sum(b_p, 1))
        b_top = b_new
    o_out = (i_h * num_splits + i_split) * (GROUP * W) + o_r
    tl.store(p_top + o_out, b_top, mask=m_r)
    tl.store(p_sum + o_out, b_sum, mask=m_r)


@triton.jit(do_not_specialize=["W", "num_splits", "num_tiles", "H"])
def _snapkv_merge_kernel(
    p_top, p_sum, p_row, c, W, num_splits, num_tiles, H, GROUP: tl.constexpr, BM: tl.constexpr
):  # fmt: skip
    """Merge the splits of BM rows of a key head. Grid: H tiles.

    p_row: [2, H, GROUP W] fp32, the maximum and the inverse of the sum of each row.
    """
    i_h = (tl.program_id(0) // num_tiles).to(tl.int64)
    o_r = tl.program_id(0) % num_tiles * BM + tl.arange(0, BM)
    m_r = o_r < GROUP * W
    b_top = tl.full([BM], _NO_SCORE, tl.float32)
    b_sum = tl.zeros([BM], dtype=tl.float32)
    for i_split in range(num_splits):
        o_in = (i_h * num_splits + i_split) * (GROUP * W) + o_r
        b_other = tl.load(p_top + o_in, mask=m_r, other=_NO_SCORE)
        b_new = tl.maximum(b_top, b_other)
        b_more = tl.load(p_sum + o_in, mask=m_r, other=0.0) * tl.exp2((b_other - b_new) * c)
        b_sum = tl.fma(b_sum, tl.exp2((b_top - b_new) * c), b_more)
        b_top = b_new
    o_out = i_h * (GROUP * W) + o_r
    tl.store(p_row + o_out, b_top, mask=m_r)
    tl.store(p_row + H * (GROUP * W) + o_out, tl.div_rn(1.0, tl.where(m_r, b_sum, 1.0)), mask=m_r)


@triton.jit(do_not_specialize=["W", "length", "num_blocks", "num_tiles", "H"])
def _snapkv_weights_kernel(
    p_q, p_k, p_k2, p_rows, p_row, p_out, c, W, length, num_blocks, num_tiles, H, s_q, s_q_head, s_k, s_k_head, s_k2,
    s_k2_head, GROUP: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PLACED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Sum the weights of BN keys of a key head over all rows into p_out [H, length - W]. Grid: H blocks.

    Every row sees these keys, because they precede the window.
    """
    i_h = (tl.program_id(0) // num_blocks).to(tl.int64)
    o_n = tl.program_id(0) % num_blocks * BN + tl.arange(0, BN)
    m_n = o_n < length - W
    b_k = _keys(p_k + i_h * s_k_head, p_rows, o_n, m_n, s_k, D1, PLACED, WIDE)
    b_k2 = b_k
    if D2 > 0:
        b_k2 = _keys(p_k2 + i_h * s_k2_head, p_rows, o_n, m_n, s_k2, D2, PLACED, WIDE)
    b_out = tl.zeros([BN], dtype=tl.float32)
    for i_tile in range(num_tiles):
        o_r = i_tile * BM + tl.arange(0, BM)
        m_r = o_r < GROUP * W
        b_q = _queries(p_q, o_r, m_r, i_h, W, s_q, s_q_head, GROUP, 0, D1, WIDE)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
        if D2 > 0:
            b_q2 = _queries(p_q, o_r, m_r, i_h, W, s_q, s_q_head, GROUP, D1, D2, WIDE)
            b_s = tl.dot(b_q2, tl.trans(b_k2), b_s, input_precision="ieee")
        # Padding rows add nothing: their queries are zero, and their inverse is 0.
        o_row = i_h * (GROUP * W) + o_r
        b_top = tl.load(p_row + o_row, mask=m_r, other=0.0)
        b_inverse = tl.load(p_row + H * (GROUP * W) + o_row, mask=m_r, other=0.0)
        b_shift = tl.broadcast_to(-(b_top * c)[:, None], b_s.shape)
        b_p = tl.exp2(tl.fma(b_s, tl.full(b_s.shape, c, tl.float32), b_shift))
        b_out += tl.sum(b_p * b_inverse[:, None], 0)
    tl.store(p_out + i_h * (length - W) + o_n, b_out, mask=m_n)


def snapkv_scores(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    length: int,
    scale: float,
    rows: torch.Tensor | None = None,
    k_rope: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `moeyard_kernels.ops.snapkv_scores`. Raises ValueError if the grids or the products cannot hold it."""
    window, num_heads, dim = q.shape
    num_kv_heads, group = k.shape[0], num_heads // k.shape[0]
    first, second = split_dim(dim)
    if k_rope is not None and (first, second) != (k.shape[2], k_rope.shape[1]):
        raise ValueError(
            f"snapkv_scores: k {list(k.shape)} and k_rope {list(k_rope.shape)}, expected {first} and {second} wide"
        )
    if rows is not None:
        launch.check_indices("snapkv_scores", low=0, high=k.shape[1], rows=rows)
    before, count = length - window, group * window
    num_splits, num_tiles = triton.cdiv(length, SPLIT), triton.cdiv(count, BM)
    at_once = max(1, min(num_kv_heads, _MAX_PARTIAL // (num_splits * count * 8)))
    if at_once * num_splits * num_tiles > launch.MAX_GRID_X:
        raise ValueError(f"snapkv_scores: {count} rows over {length} keys exceed the grid of a GPU")
    out = launch.new_output(num_kv_heads, before, like=q, dtype=torch.float32)
    top, total = (launch.new_output(at_once, num_splits, count, like=q, dtype=torch.float32) for _ in range(2))
    merged = launch.new_output(2, at_once, count, like=q, dtype=torch.float32)
    c, num_blocks = scale * math.log2(math.e), triton.cdiv(before, BN)
    rest, rest_head = (k[..., first:], k.stride(0)) if k_rope is None else (k_rope, 0)
    shape = {"GROUP": group, "D1": first, "D2": second, "BM": BM, "BN": BN, "PLACED": rows is not None}
    shape["WIDE"] = launch.interpreted() and q.dtype == torch.bfloat16
    stages = 2 if q.dtype == torch.bfloat16 else 1
    for begin in range(0, num_kv_heads, at_once):
        heads = min(at_once, num_kv_heads - begin)
        queries, keys = q[:, begin * group :], k[begin:]
        others = (rest[begin:] if k_rope is None else rest) if second else keys
        other_strides = (others.stride(-2), rest_head if second else k.stride(0))
        tensors, strides = (queries, keys, others, rows), (*q.stride()[:2], k.stride(1), k.stride(0), *other_strides)
        _snapkv_softmax_kernel[(heads * num_splits * num_tiles,)](
            *(*tensors, top, total, c, window, length, num_splits, num_tiles),
            *strides,
            **shape,
            SPLIT=SPLIT,
            STAGES=stages,
            num_warps=4,
            **UNFUSED,
        )
        sizes = (window, num_splits, num_tiles, at_once)
        _snapkv_merge_kernel[(heads * num_tiles,)](
            top, total, merged, c, *sizes, GROUP=group, BM=BM, num_warps=2, **UNFUSED
        )
        _snapkv_weights_kernel[(heads * num_blocks,)](
            *(*tensors, merged, out[begin:], c, window, length, num_blocks, num_tiles, at_once),
            *strides,
            **shape,
            num_warps=4,
            num_stages=stages,
            **UNFUSED,
        )
    return out
