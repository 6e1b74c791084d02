"""Gluon: a kernel of `mla_decode` for Hopper, with the same bits, which issues copies a whole block ahead.

For each block of keys, the product of the scores starts while the previous block's product with the values ends. The
freed buffer is filled with the next block while scores become weights. Triton's own pipeline fills it only after that,
and both groups of warps compute all scores.

With few sequences, the time is a chain of latencies. AHEAD 1: load the page id of a block one block before its copy. If
no launch in flight writes the tables (STATIC), load the lengths and the first two page ids before the wait. AHEAD 2:
also copy the first block before the wait, if no launch in flight writes its keys (KEYS) and it does not hold the step's
own keys. If the table holds one split (ONE), no work has to be counted.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from moeyard_kernels.common.dependent import let_next_begin, wait_for_previous
from moeyard_kernels.common.gluon import load_rows, reinterpret


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def work_ends(
    p_lens, B, S, Q: gl.constexpr, BB: gl.constexpr, BQ: gl.constexpr, SPLIT: gl.constexpr, num_warps: gl.constexpr
):
    """As `decode_splits.work_ends`."""
    L_B2: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [num_warps, 1], [1, 0])
    o_b, o_q = gl.arange(0, BB, gl.SliceLayout(1, L_B2)), gl.arange(0, BQ, gl.SliceLayout(0, L_B2))
    m_b = (o_b < B)[:, None] & (o_q < Q)[None, :]
    b_end = (gl.max(gl.load(p_lens + o_b[:, None] * Q + o_q[None, :], mask=m_b, other=0), 1) + SPLIT - 1) // SPLIT
    b_count = gl.where(o_b < B, gl.maximum(b_end, gl.where(S == 1, 1, 0)), 0)
    return gl.associative_scan(gl.convert_layout(b_count, gl.BlockedLayout([1], [32], [num_warps], [0])), 0, add)


@gluon.jit
def find_work(i_work, b_ends):
    """As `decode_splits.find_work`."""
    m_before = b_ends <= i_work
    return gl.sum(m_before.to(gl.int32), 0), i_work - gl.max(gl.where(m_before, b_ends, 0), 0)


@gluon.jit
def sum_over_keys(b_x, BM: gl.constexpr, BN: gl.constexpr, LOG2_BN: gl.constexpr, AXIS: gl.constexpr):
    """As `decode_splits.sum_over_keys`."""
    for i in gl.static_range(LOG2_BN):
        if AXIS == 1:
            b_x = gl.sum(gl.reshape(b_x, [BM, 2, BN >> (i + 1)]), 1)
        else:
            b_x = gl.sum(gl.reshape(b_x, [2, BN >> (i + 1), BM]), 0)
    return gl.reshape(b_x, [BM])


@gluon.jit
def _page_of(p_pages, i_n, i_high, PAGE: gl.constexpr):
    """Return the page id of position i_n, or 0 from i_high on."""
    return gl.load(p_pages + i_n // PAGE, mask=i_n < i_high, other=0)


@gluon.jit
def _copy_block(
    p_kv, p_pages, i_page, s_kv, s_k, i_n, i_high, L_KV: gl.constexpr, L_K: gl.constexpr,
    R: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, BN: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """Start to copy positions [i_n, i_n + BN) to shared memory, with zeros from i_high on, as one group of copies.

    i_page: their page id, if pages are blocks and it was loaded before (AHEAD).
    """
    o_n = gl.arange(0, BN, gl.SliceLayout(1, L_KV))
    o_k = gl.arange(0, BN, gl.SliceLayout(1, L_K))
    o_r = gl.arange(0, R, gl.SliceLayout(0, L_KV))
    o_d = gl.arange(0, D, gl.SliceLayout(0, L_K))
    if PAGE == BN:
        if not AHEAD:
            i_page = _page_of(p_pages, i_n, i_high, PAGE)
        i_page = i_page.to(gl.int64)
        p_page = p_kv + i_page * (PAGE * (R + D))
        p_latent = p_page + (o_n[:, None] * (R + D) + o_r[None, :])
        p_rope = p_page + (o_k[:, None] * (R + D) + R + o_d[None, :])
    else:
        i_page = gl.load(p_pages + (i_n + o_n) // PAGE, mask=i_n + o_n < i_high, other=0).to(gl.int64)
        p_latent = p_kv + (i_page * PAGE + o_n % PAGE)[:, None] * (R + D) + o_r[None, :]
        i_page_k = gl.load(p_pages + (i_n + o_k) // PAGE, mask=i_n + o_k < i_high, other=0).to(gl.int64)
        p_rope = p_kv + (i_page_k * PAGE + o_k % PAGE)[:, None] * (R + D) + R + o_d[None, :]
    load_rows(s_kv, p_latent, mask=(i_n + o_n < i_high)[:, None])
    load_rows(s_k, p_rope, mask=(i_n + o_k < i_high)[:, None])
    async_copy.commit_group()


@gluon.jit(do_not_specialize=("B", "MAX_PAGES", "S"))
def mla_decode_hopper_kernel(
    p_q, p_r, p_kv, p_table, p_lens, p_out, p_lse, c, B, MAX_PAGES, S,
    Q: gl.constexpr, H: gl.constexpr, R: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr,
    SPLIT: gl.constexpr, BN: gl.constexpr, LOG2_BN: gl.constexpr, BB: gl.constexpr, BQ: gl.constexpr,
    BM: gl.constexpr, SWAP: gl.constexpr, ONE: gl.constexpr, AHEAD: gl.constexpr, STATIC: gl.constexpr,
    KEYS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """`_mla_decode_kernel` without a window, for bf16 and for powers of two R and D."""
    # Read the tables before the wait, and the first block too if its keys are old.
    EARLY: gl.constexpr = STATIC and AHEAD > 0
    OLD: gl.constexpr = EARLY and KEYS and AHEAD > 1
    LOOKED_UP: gl.constexpr = AHEAD > 0 and PAGE == BN
    if not EARLY:
        wait_for_previous()
    M: gl.constexpr = Q * H
    TILES: gl.constexpr = (M + BM - 1) // BM
    AXIS: gl.constexpr = 0 if SWAP else 1
    OTHER: gl.constexpr = 1 - AXIS
    GROUPS: gl.constexpr = num_warps // 4
    DT: gl.constexpr = p_kv.dtype.element_ty
    # Register layouts: copies of 16 bytes per lane; scores; sums of values; rows of a tile.
    L_KV: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [num_warps, 1], [1, 0])
    L_K: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // D, D // 8], [num_warps, 1], [1, 0])
    if SWAP:
        L_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, GROUPS], [16, BM // GROUPS, 16])
        L_O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BM, 16])
    else:
        L_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, GROUPS], [16, BN // GROUPS, 16])
        L_O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, GROUPS], [16, 256, 16])
    if SWAP:
        L_L: gl.constexpr = gl.BlockedLayout([BN, 1], [1, 32], [1, num_warps], [0, 1])
        L_SCRATCH: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [0, 1])
    else:
        L_L: gl.constexpr = gl.BlockedLayout([1, BN], [32, 1], [num_warps, 1], [1, 0])
        L_SCRATCH: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    L_M: gl.constexpr = gl.SliceLayout(AXIS, L_S)
    L_N: gl.constexpr = gl.SliceLayout(OTHER, L_S)
    if not ONE:
        b_ends = work_ends(p_lens, B, S, Q, BB, BQ, SPLIT, num_warps)

    s_q = gl.allocate_shared_memory(DT, [BM, R], gl.NVMMASharedLayout.get_default_for([BM, R], DT))
    s_r = gl.allocate_shared_memory(DT, [BM, D], gl.NVMMASharedLayout.get_default_for([BM, D], DT))
    s_kv = gl.allocate_shared_memory(DT, [2, BN, R], gl.NVMMASharedLayout.get_default_for([BN, R], DT))
    s_k = gl.allocate_shared_memory(DT, [2, BN, D], gl.NVMMASharedLayout.get_default_for([BN, D], DT))
    if SWAP:
        s_p = gl.allocate_shared_memory(DT, [BN, BM], gl.NVMMASharedLayout.get_default_for([BN, BM], DT))
    else:
        s_p = gl.allocate_shared_memory(DT, [BM, BN], gl.NVMMASharedLayout.get_default_for([BM, BN], DT))

    num_items = B * TILES if ONE else gl.max(b_ends, 0) * TILES
    for i_item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        if ONE:
            i_b, i_s = i_item // TILES, 0
        else:
            i_b, i_s = find_work(i_item // TILES, b_ends)
        o_m = (i_item % TILES) * BM + gl.arange(0, BM, L_M)
        m_m = o_m < M
        b_len = gl.load(p_lens + i_b * Q + o_m // H, mask=m_m, other=0)
        i_low, i_high = i_s * SPLIT, gl.minimum(gl.max(b_len, 0), (i_s + 1) * SPLIT)
        p_pages = p_table + i_b.to(gl.int64) * MAX_PAGES
        i_page, i_after = 0, 0
        if LOOKED_UP:
            i_page, i_after = _page_of(p_pages, i_low, i_high, PAGE), _page_of(p_pages, i_low + BN, i_high, PAGE)
        is_old = False
        if OLD:
            # The step's own keys begin at the least length minus one.
            is_old = i_low + BN < gl.min(gl.where(m_m, b_len, 2147483647), 0)
            if is_old:
                _copy_block(
                    p_kv, p_pages, i_page, s_kv.index(0), s_k.index(0), i_low, i_high, L_KV, L_K, R, D, PAGE, BN,
                    LOOKED_UP,
                )  # fmt: skip
        if EARLY:
            wait_for_previous()
        if not is_old:
            _copy_block(
                p_kv, p_pages, i_page, s_kv.index(0), s_k.index(0), i_low, i_high, L_KV, L_K, R, D, PAGE, BN,
                LOOKED_UP,
            )  # fmt: skip

        i_row = i_b.to(gl.int64) * M
        i_tile = (i_item % TILES) * BM
        o_mq, o_rq = i_tile + gl.arange(0, BM, gl.SliceLayout(1, L_KV)), gl.arange(0, R, gl.SliceLayout(0, L_KV))
        o_mr, o_dr = i_tile + gl.arange(0, BM, gl.SliceLayout(1, L_K)), gl.arange(0, D, gl.SliceLayout(0, L_K))
        s_q.store(gl.load(p_q + (i_row + o_mq)[:, None] * R + o_rq[None, :], mask=(o_mq < M)[:, None], other=0.0))
        s_r.store(gl.load(p_r + (i_row + o_mr)[:, None] * D + o_dr[None, :], mask=(o_mr < M)[:, None], other=0.0))
        fence_async_shared()

        if SWAP:
            b_acc = gl.zeros([R, BM], gl.float32, L_O)
            b_zero = gl.zeros([BN, BM], gl.float32, L_S)
        else:
            b_acc = gl.zeros([BM, R], gl.float32, L_O)
            b_zero = gl.zeros([BM, BN], gl.float32, L_S)
        b_l, b_l2 = b_zero, b_zero
        b_m = gl.full([BM], float("-inf"), gl.float32, L_M)
        i_buffer = 0
        for i_n in range(i_low, i_high, BN):
            async_copy.wait_group(0)
            s_values, s_rope = s_kv.index(i_buffer), s_k.index(i_buffer)
            if SWAP:
                b_s = warpgroup_mma(s_values, s_q.permute((1, 0)), b_zero, use_acc=False, is_async=True)
                b_s = warpgroup_mma(s_rope, s_r.permute((1, 0)), b_s, is_async=True)
            else:
                b_s = warpgroup_mma(s_q, s_values.permute((1, 0)), b_zero, use_acc=False, is_async=True)
                b_s = warpgroup_mma(s_r, s_rope.permute((1, 0)), b_s, is_async=True)
            _copy_block(
                p_kv, p_pages, i_after, s_kv.index(1 - i_buffer), s_k.index(1 - i_buffer), i_n + BN, i_high,
                L_KV, L_K, R, D, PAGE, BN, LOOKED_UP,
            )  # fmt: skip
            if LOOKED_UP:
                i_after = _page_of(p_pages, i_n + 2 * BN, i_high, PAGE)
            b_s = warpgroup_mma_wait(num_outstanding=0, deps=(b_s,))

            o_n = gl.expand_dims(i_n + gl.arange(0, BN, L_N), OTHER)
            b_s = gl.where(o_n < gl.expand_dims(b_len, AXIS), b_s * c, float("-inf"))
            b_new = gl.maximum(b_m, gl.max(b_s, AXIS))
            b_top = gl.where(b_new == float("-inf"), 0.0, b_new)
            b_p = gl.exp2(b_s - gl.expand_dims(b_top, AXIS))
            b_alpha = gl.exp2(b_m - b_top)
            b_m = b_new
            b_l, b_wide = gl.broadcast(b_l, gl.expand_dims(b_alpha, AXIS))
            b_l, b_l2 = b_l2 * b_wide, gl.fma(b_l, b_wide, b_p)
            s_p.store(b_p.to(DT))
            fence_async_shared()
            b_acc = b_acc * gl.expand_dims(gl.convert_layout(b_alpha, gl.SliceLayout(AXIS, L_O)), AXIS)
            if SWAP:
                b_o = warpgroup_mma(s_values.permute((1, 0)), s_p, b_acc, is_async=True)
            else:
                b_o = warpgroup_mma(s_p, s_values, b_acc, is_async=True)
            b_acc = warpgroup_mma_wait(num_outstanding=0, deps=(b_o,))
            i_buffer = 1 - i_buffer

        if i_item + gl.num_programs(0) >= num_items:
            # The next launch (the merge, if there are splits) starts beside the last results. Earlier, it would take
            # room from programs at work.
            let_next_begin()
        async_copy.wait_group(0)
        # The keys' buffer is free. Through it, each lane gets all sums of a row.
        s_l = reinterpret(s_kv, gl.float32, [R // BM, BN, BM] if SWAP else [R // BM, BM, BN], L_SCRATCH)
        s_l.index(0).store(b_l)
        s_l.index(1).store(b_l2)
        b_sum = sum_over_keys(s_l.index(0).load(L_L), BM, BN, LOG2_BN, AXIS)
        b_sum = gl.convert_layout(b_sum + sum_over_keys(s_l.index(1).load(L_L), BM, BN, LOG2_BN, AXIS), L_M)
        m_any = b_sum > 0
        b_sum = gl.where(m_any, b_sum, 1.0)
        b_lse = gl.where(m_any, (b_m + gl.log2(b_sum)) * 0.6931471805599453, float("-inf"))
        b_inv = gl.where(m_any, gl.div_rn(gl.full([BM], 1.0, gl.float32, L_M), b_sum), 0.0)
        b_acc = b_acc * gl.expand_dims(gl.convert_layout(b_inv, gl.SliceLayout(AXIS, L_O)), AXIS)
        i_out = (i_b.to(gl.int64) * S + i_s) * M
        o_mo = gl.expand_dims(i_tile + gl.arange(0, BM, gl.SliceLayout(AXIS, L_O)), AXIS)
        o_ro = gl.expand_dims(gl.arange(0, R, gl.SliceLayout(OTHER, L_O)), OTHER)
        gl.store(p_out + (i_out + o_mo) * R + o_ro, b_acc.to(p_out.dtype.element_ty), mask=o_mo < M)
        gl.store(p_lse + i_out + o_m, b_lse, mask=m_m)
    if EARLY:
        # Programs without work wait too, so that launches complete in order.
        wait_for_previous()
