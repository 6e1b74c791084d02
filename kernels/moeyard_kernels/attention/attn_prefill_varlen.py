"""Triton: causal attention of several prompt chunks over their prefixes, paged or contiguous, in one launch.

For the query at position p of head h, over keys j = 0 .. p (or the last `window`) of key head h // (Hq // Hkv):

    out = sum_j softmax_j(scale q . k_j) v_j

Keys are visited in ascending blocks of `BLOCK` positions, counted from position 0. The online softmax is fp32, with c =
scale log2(e):

    s = q . k (d ascending; 192 as 128, then 64);  m' = max(m, max s);  alpha = exp2((m - m') c)
    p = exp2(fma(s, c, -(m' c)));  l = fma(l, alpha, sum p);  acc = alpha acc + bf16(p) v;  out = acc / l

A block that a row does not see leaves its m, l and acc unchanged (alpha = 1, p = 0). So a row's bits depend on its
query and on the keys it sees, never on the tile, the chunk or the batch.
"""

import functools
import math

import torch
import triton
import triton.language as tl

from moeyard_kernels.attention.attn_prefill_hopper import MAX_REGISTERS, attn_prefill_hopper_kernel
from moeyard_kernels.attention.prefill_configs import CONFIGS as CONFIGS
from moeyard_kernels.attention.prefill_configs import (
    OP,
    PrefillConfig,
    default_config,
    shape_class,
    split_dim,
    suits_hopper,
)
from moeyard_kernels.attention.prefill_rows import Rows
from moeyard_kernels.common import launch, tuning
from moeyard_kernels.types.decode_tables import BLOCK
from moeyard_kernels.types.prefill_plan import TILE, PrefillPlan

# The least programs that start for some heads before other heads begin, so that long programs do not run last.
_WAVE = 256
# The running maximum before a row's first key. It is below any real score, and finite so that alpha is never NaN. The
# score of a masked key is lower still, so that exp2 of the difference is always 0.
_NO_SCORE = tl.constexpr(-1e30)
_UNSEEN = tl.constexpr(-2e38)


@triton.jit
def _load(
    p_x, d_x, i_row, o_row, m_row, s_row, i_col,
    D: tl.constexpr, TMA: tl.constexpr, MASKED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Load a block [BN, D] of keys or values. If MASKED, rows outside m_row are zero."""
    if TMA:
        b_x = d_x.load([i_row, i_col])
    else:
        p_block = p_x + o_row[:, None] * s_row + i_col + tl.arange(0, D)[None, :]
        b_x = tl.load(p_block, mask=m_row[:, None], other=0.0) if MASKED else tl.load(p_block)
    return b_x.to(tl.float32) if WIDE else b_x


@triton.jit
def _attend(
    b_acc, b_m, b_l, b_q, b_q2, o_p, i_low, i_begin, i_end, i_seen, i_base, p_pages,
    p_k, p_k2, p_v, d_k, d_k2, d_v, s_k, s_k2, s_v, i_col_k, i_col_k2, i_col_v, c, window,
    D1: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr, BN: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    TMA: tl.constexpr, MASKED: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add the keys of blocks [i_begin, i_end). If MASKED, keys outside [i_low, i_seen) are loaded as zeros."""
    i_page = 0
    if PAGE > 0 and TMA:
        i_page = tl.load(p_pages + i_begin * BN // PAGE, mask=i_begin < i_end, other=0)
    for i_n in tl.range(i_begin, i_end, num_stages=STAGES):
        o_n = i_n * BN + tl.arange(0, BN)
        m_n = (o_n >= i_low) & (o_n < i_seen)
        i_row = i_base + i_n * BN
        o_row = i_base.to(tl.int64) + o_n
        if PAGE > 0:
            if TMA:
                i_row = i_base + i_page * PAGE + i_n * BN % PAGE
                # The page id is loaded one block ahead, so that no copy waits for its address.
                i_page = tl.load(p_pages + (i_n + 1) * BN // PAGE, mask=i_n + 1 < i_end, other=0)
            else:
                b_page = tl.load(p_pages + o_n // PAGE, mask=m_n, other=0) if MASKED else tl.load(p_pages + o_n // PAGE)
                o_row = i_base.to(tl.int64) + b_page.to(tl.int64) * PAGE + o_n % PAGE

        b_k = _load(p_k, d_k, i_row, o_row, m_n, s_k, i_col_k, D1, TMA, MASKED, WIDE)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
        if D2 > 0:
            b_k2 = _load(p_k2, d_k2, i_row, o_row, m_n, s_k2, i_col_k2, D2, TMA, MASKED, WIDE)
            b_s = tl.dot(b_q2, tl.trans(b_k2), b_s, input_precision="ieee")
        if MASKED:
            m_s = o_n[None, :] <= o_p[:, None]
            if WINDOW:
                m_s = m_s & (o_n[None, :] > o_p[:, None] - window)
            b_s = tl.where(m_s, b_s, _UNSEEN)
        b_top = tl.maximum(b_m, tl.max(b_s, 1))
        b_alpha = tl.exp2((b_m - b_top) * c)
        b_shift = -(b_top * c)
        b_p = tl.exp2(tl.fma(b_s, tl.full(b_s.shape, c, tl.float32), tl.broadcast_to(b_shift[:, None], b_s.shape)))
        b_l = tl.fma(b_l, b_alpha, tl.sum(b_p, 1))
        b_m = b_top
        b_v = _load(p_v, d_v, i_row, o_row, m_n, s_v, i_col_v, DV, TMA, MASKED, WIDE)
        b_acc = b_acc * b_alpha[:, None]
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision="ieee")
    return b_acc, b_m, b_l


# Sizes that change from step to step must not recompile the kernel.
@triton.jit(do_not_specialize=["window", "num_pages", "max_pages", "num_near", "num_parts"])
def _attn_prefill_kernel(
    p_q, p_k, p_k2, p_v, d_k, d_k2, d_v, p_out, p_lse, p_cu_q, p_starts, p_tiles, p_keys,
    c, window, s_q, s_q_head, s_k, s_k_head, s_k2, s_k2_head, s_v, s_v_head,
    num_pages, max_pages, H, num_near, num_parts,
    GROUP: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, PARTS: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    TMA: tl.constexpr, LSE: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute BM queries of one head. Grid: H num_parts; a tile of the plan has PARTS parts.

    Programs start roughly in the order of their ids: those of `num_near` heads, the longest first, then those of the
    next `num_near` heads. So the keys in use fit the L2.
    """
    i_pair = tl.program_id(0) % (num_near * num_parts)
    i_h = tl.program_id(0) // (num_near * num_parts) * num_near + i_pair % num_near
    i_part = i_pair // num_near
    i_b = tl.load(p_tiles + i_part // PARTS * 2)
    i_first = tl.load(p_tiles + i_part // PARTS * 2 + 1) + (PARTS - 1 - i_part % PARTS) * BM
    i_q = tl.load(p_cu_q + i_b)
    num_q = tl.load(p_cu_q + i_b + 1) - i_q
    if i_first < num_q:
        start = tl.load(p_starts + i_b)
        i_kv = i_h // GROUP
        o_m = i_first + tl.arange(0, BM)
        m_m = o_m < num_q
        o_p = start + o_m

        # The position of the tile's first query, and the position after its last query.
        i_p = start + i_first
        i_seen = tl.minimum(i_p + BM, start + num_q)
        i_low = 0
        i_start = 0
        i_lower = 0
        if WINDOW:
            i_low = tl.maximum(i_p - window + 1, 0)
            i_start = i_low // BN
            # The first block that no query's window cuts.
            i_lower = tl.cdiv(tl.maximum(i_seen - window, 0), BN)
        i_stop = tl.cdiv(i_seen, BN)
        i_lower = tl.minimum(i_lower, i_stop)
        # Blocks before this one are seen completely by every query.
        i_upper = tl.maximum((i_p + 1) // BN, i_lower)

        p_pages = p_keys + i_b.to(tl.int64) * max_pages
        i_base = i_kv * num_pages * PAGE if PAGE > 0 else tl.load(p_keys + i_b)
        i_col_k = i_kv * s_k_head
        i_col_k2 = i_kv * s_k2_head
        i_col_v = i_kv * s_v_head

        o_q = (i_q + o_m).to(tl.int64) * s_q + i_h * s_q_head
        b_q = tl.load(p_q + o_q[:, None] + tl.arange(0, D1)[None, :], mask=m_m[:, None], other=0.0)
        b_q2 = b_q
        if D2 > 0:
            b_q2 = tl.load(p_q + o_q[:, None] + (D1 + tl.arange(0, D2))[None, :], mask=m_m[:, None], other=0.0)
        if WIDE:
            b_q = b_q.to(tl.float32)
            b_q2 = b_q2.to(tl.float32)

        b_acc = tl.zeros([BM, DV], dtype=tl.float32)
        b_m = tl.full([BM], _NO_SCORE, tl.float32)
        b_l = tl.zeros([BM], dtype=tl.float32)
        if WINDOW:
            b_acc, b_m, b_l = _attend(
                b_acc, b_m, b_l, b_q, b_q2, o_p, i_low, i_start, i_lower, i_seen, i_base, p_pages,
                p_k, p_k2, p_v, d_k, d_k2, d_v, s_k, s_k2, s_v, i_col_k, i_col_k2, i_col_v, c, window,
                D1, D2, DV, BN, PAGE, WINDOW, False, True, WIDE, 1,
            )  # fmt: skip
        b_acc, b_m, b_l = _attend(
            b_acc, b_m, b_l, b_q, b_q2, o_p, i_low, i_lower, i_upper, i_seen, i_base, p_pages,
            p_k, p_k2, p_v, d_k, d_k2, d_v, s_k, s_k2, s_v, i_col_k, i_col_k2, i_col_v, c, window,
            D1, D2, DV, BN, PAGE, WINDOW, TMA, False, WIDE, STAGES,
        )  # fmt: skip
        b_acc, b_m, b_l = _attend(
            b_acc, b_m, b_l, b_q, b_q2, o_p, i_low, i_upper, i_stop, i_seen, i_base, p_pages,
            p_k, p_k2, p_v, d_k, d_k2, d_v, s_k, s_k2, s_v, i_col_k, i_col_k2, i_col_v, c, window,
            D1, D2, DV, BN, PAGE, WINDOW, False, True, WIDE, 1,
        )  # fmt: skip

        b_l = tl.where(m_m, b_l, 1.0)
        # An accumulator that underflowed to -0 becomes +0 only if it meets a masked block. Adding 0 makes it +0 always.
        b_out = tl.div_rn(b_acc, tl.broadcast_to(b_l[:, None], b_acc.shape)) + 0.0
        o_out = (i_q + o_m).to(tl.int64) * (H * DV) + i_h * DV
        p_block = p_out + o_out[:, None] + tl.arange(0, DV)[None, :]
        tl.store(p_block, b_out.to(p_out.dtype.element_ty), mask=m_m[:, None])
        if LSE:
            b_lse = tl.fma(b_m, tl.full(b_m.shape, c, tl.float32), tl.log2(b_l)) * 0.6931471805599453
            tl.store(p_lse + (i_q + o_m).to(tl.int64) * H + i_h, b_lse, mask=m_m)


def attn_prefill_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    plan: PrefillPlan,
    scale: float,
    k_rope: torch.Tensor | None = None,
    return_lse: bool = False,
    config: PrefillConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `moeyard_kernels.ops.attn_prefill_varlen`. Raises ValueError if the grid or the products cannot hold it."""
    num_rows, num_heads, dim_k = q.shape
    paged = plan.page_size > 0
    dim_v, num_kv_heads = v.shape[-1], k.shape[0] if paged else k.shape[1]
    first, second = split_dim(dim_k)
    if dim_v != split_dim(dim_v)[0]:
        raise ValueError(f"{OP}: value dimension {dim_v} is no power of two")
    if k_rope is not None and (first, second) != (k.shape[-1], k_rope.shape[-1]):
        raise ValueError(f"{OP}: k {list(k.shape)} and k_rope {list(k_rope.shape)}, expected {first} and {second} wide")
    if config is None:
        default = functools.partial(default_config, q, v, plan)
        config = tuning.choose(OP, shape_class(q, v, plan), q, (PrefillConfig,), default)
    if paged and k.shape[0] * k.shape[1] * k.shape[2] >= 2**31:
        raise ValueError(f"{OP}: k {list(k.shape)} holds more than 2^31 - 1 rows")
    if plan.page_table is not None:
        launch.check_indices(OP, low=0, high=k.shape[1], page_table=plan.page_table)
    out = launch.new_output(num_rows, num_heads, dim_v, like=q)
    lse = launch.new_output(num_rows, num_heads, like=q, dtype=torch.float32) if return_lse else out
    if out.numel():
        keys = Rows(k, first, paged)
        rope = Rows(k[..., first:] if k_rope is None else k_rope, second, paged) if second else keys
        values = Rows(v, dim_v, paged)
        queries = Rows(q, first, False)
        ready = plan.page_size % BLOCK == 0 and all(x.tma_ready() for x in (keys, rope, values))
        hopper = config.kernel == "hopper" and ready and queries.tma_ready() and suits_hopper(q, v, plan)
        tma = config.kernel != "pointers" and ready
        group, parts = num_heads // num_kv_heads, TILE // config.BM
        num_parts = plan.tiles.shape[0] * parts
        if num_parts * num_heads > launch.MAX_GRID_X:
            raise ValueError(f"{OP}: {plan.tiles.shape[0]} tiles of {TILE} queries exceed the grid of a GPU")
        grid = (num_parts * num_heads,)
        index = (plan.cu_q, plan.starts, plan.tiles, plan.page_table if paged else plan.cu_kv)
        c = scale * math.log2(math.e)
        sizes = (
            k.shape[1] if paged else 0,
            plan.page_table.shape[1] if plan.page_table is not None else 0,
            num_heads,
            _near(num_kv_heads, group * plan.num_full_tiles * parts) * group,
            num_parts,
        )
        shape = {"GROUP": group, "D1": first, "D2": second, "DV": dim_v, "BN": BLOCK, "PAGE": plan.page_size}
        if hopper:
            rest = Rows(q[..., first:], second, False) if second else queries
            operands = (queries, rest, keys, rope, values)
            heads = (queries.head, keys.head, rope.head, values.head)
            attn_prefill_hopper_kernel[grid](
                *(x.gluon_descriptor() for x in operands),
                out,
                lse,
                *index,
                c,
                *heads,
                *sizes,
                **shape,
                LSE=return_lse,
                STAGES=config.num_stages,
                NO_SCORE=_NO_SCORE.value,
                UNSEEN=_UNSEEN.value,
                num_warps=4,
                maxnreg=MAX_REGISTERS,
            )
        else:
            descriptors = [x.descriptor() if tma else None for x in (keys, rope, values)]
            strides = (*q.stride()[:2], keys.row, keys.head, rope.row, rope.head, values.row, values.head)
            _attn_prefill_kernel[grid](
                q,
                keys.x,
                rope.x,
                values.x,
                *descriptors,
                out,
                lse,
                *index,
                c,
                plan.window or 0,
                *strides,
                *sizes,
                **shape,
                BM=config.BM,
                PARTS=parts,
                WINDOW=plan.window is not None,
                TMA=tma,
                LSE=return_lse,
                WIDE=launch.interpreted() and q.dtype == torch.bfloat16,
                STAGES=config.num_stages,
                num_warps=config.num_warps,
                num_stages=config.num_stages,
            )
    return launch.finish(out, q.dtype), lse if return_lse else None


def _near(num_kv_heads: int, programs: int) -> int:
    """Return the fewest key heads that make up a wave, with `programs` programs each."""
    fits = (n for n in range(1, num_kv_heads) if num_kv_heads % n == 0 and n * programs >= _WAVE)
    return next(fits, num_kv_heads)
