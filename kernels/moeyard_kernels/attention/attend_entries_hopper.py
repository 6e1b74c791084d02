"""Gluon: a kernel of `attend_entries` for Hopper, with the same bits, which issues copies a whole block ahead.

A program takes every num_programs-th row and treats all their blocks as one sequence. While a block's scores are
computed, the next block is copied, which may be the first one of the next row. The query of the next row is copied
during the last product of the row before. Places of entries are loaded two blocks ahead, so no copy waits for them.
Two groups of four warps compute half of the keys' scores each, and then half of the values each.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from moeyard_kernels.attention.mla_decode_hopper import sum_over_keys


@gluon.jit
def row_at(p_rows, p_chunks, i_item, P, TILES: gl.constexpr):
    """Return row, chunk, position, first row of the chunk, its position, slot before it. Later rows come first."""
    i_row = P - 1 - gl.minimum(i_item // TILES, P - 1)
    i_b = gl.load(p_rows + i_row * 2)
    i_p = gl.load(p_rows + i_row * 2 + 1)
    i_first = gl.load(p_chunks + i_b * 4)
    i_start = gl.load(p_chunks + i_b * 4 + 1)
    i_before = gl.maximum(gl.load(p_chunks + i_b * 4 + 2), 0)
    return i_row, i_b, i_p, i_first, i_start, i_before


@gluon.jit
def seen_by(i_p, RATIO: gl.constexpr, TOP: gl.constexpr):
    """Return the number of entries that a row sees."""
    # 0, which the compiler cannot know. Else it unrolls the loop over blocks, and ptxas serializes its products.
    num_seen = (i_p >> 31) & 1024
    if RATIO > 0:
        num_seen = (i_p + 1) // RATIO
        if TOP > 0:
            num_seen = gl.minimum(num_seen, TOP)
    return num_seen


@gluon.jit
def places(
    p_found, p_pages, i_row, i_b, i_p, i_n, MAX_PAGES, FIRST: gl.constexpr, RATIO: gl.constexpr, GRANULE: gl.constexpr,
    PAGE: gl.constexpr, TOP: gl.constexpr, BN: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """Return the places of the entries of block i_n, [BN] int32; 0 for the window, which has FIRST blocks."""
    o_e = (i_n - FIRST) * BN + gl.arange(0, BN, L)
    m_e = (o_e >= 0) & (o_e < seen_by(i_p, RATIO, TOP))
    i_end = o_e * RATIO + (RATIO - 1)
    m_page = m_e if TOP == 0 else m_e & ((i_p + 1) // RATIO <= TOP)
    b_page = gl.load(p_pages + i_b.to(gl.int64) * MAX_PAGES + i_end // PAGE, mask=m_page, other=0)
    b_place = (b_page * PAGE + i_end % PAGE) // GRANULE
    if TOP > 0:
        is_chosen = (i_p + 1) // RATIO > TOP
        b_found = gl.load(p_found + i_row.to(gl.int64) * TOP + o_e, mask=m_e & is_chosen, other=0)
        b_place = gl.where(is_chosen, b_found, b_place)
    return b_place


@gluon.jit
def key_rows(
    p_keys, p_recent, p_entries, b_place, i_n, i_p, i_first, i_start, i_before, s_key, FIRST: gl.constexpr,
    RATIO: gl.constexpr, TOP: gl.constexpr, WINDOW: gl.constexpr, SIZE: gl.constexpr, D: gl.constexpr,
    BN: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """Return pointers to the keys of block i_n of a row, and which of them it sees."""
    o_w = i_n * BN + gl.arange(0, BN, L)
    o_p = i_p - WINDOW + 1 + o_w
    m_n = (o_p >= 0) & (o_w < WINDOW)
    p_new = p_keys + (i_first + o_p - i_start).to(gl.int64) * s_key
    p_old = p_recent + (i_before.to(gl.int64) * SIZE + gl.maximum(o_p, 0) % SIZE) * D
    p_row = gl.where(o_p >= i_start, p_new, p_old)
    if RATIO > 0:
        m_n = gl.where(i_n < FIRST, m_n, o_w - FIRST * BN < seen_by(i_p, RATIO, TOP))
        p_row = gl.where(i_n < FIRST, p_row, p_entries + b_place.to(gl.int64) * D)
    return p_row, m_n


@gluon.jit
def key_range(i_p, num_seen, i_n, FIRST: gl.constexpr, WINDOW: gl.constexpr, BN: gl.constexpr):
    """Return the range of keys of block i_n that a row sees."""
    in_window = i_n < FIRST
    i_low = gl.where(in_window, WINDOW - 1 - i_p - i_n * BN, 0)
    i_high = gl.where(in_window, WINDOW - i_n * BN, num_seen - (i_n - FIRST) * BN)
    return i_low, i_high


@gluon.jit
def _copy_keys(
    p_keys, p_recent, p_entries, b_place, s_kv, i_n, i_p, i_first, i_start, i_before, s_key, FIRST: gl.constexpr,
    RATIO: gl.constexpr, TOP: gl.constexpr, WINDOW: gl.constexpr, SIZE: gl.constexpr, D: gl.constexpr,
    BN: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """Start to copy block i_n of a row, with zeros for missing keys, as one group of copies."""
    p_row, m_n = key_rows(
        p_keys, p_recent, p_entries, b_place, i_n, i_p, i_first, i_start, i_before, s_key, FIRST, RATIO, TOP, WINDOW,
        SIZE, D, BN, gl.SliceLayout(1, L),
    )  # fmt: skip
    o_d = gl.arange(0, D, gl.SliceLayout(0, L))
    async_copy.async_copy_global_to_shared(s_kv, p_row[:, None] + o_d[None, :], mask=m_n[:, None])
    async_copy.commit_group()


@gluon.jit
def _copy_query(
    p_q, s_q, i_row, i_tile, s_row, s_head, H: gl.constexpr, BM: gl.constexpr, D: gl.constexpr, L: gl.constexpr
):
    """Start to copy the heads of a tile, as one group of copies."""
    o_h = i_tile * BM + gl.arange(0, BM, gl.SliceLayout(1, L))
    o_d = gl.arange(0, D, gl.SliceLayout(0, L))
    p_head = p_q + i_row.to(gl.int64) * s_row + o_h.to(gl.int64) * s_head
    async_copy.async_copy_global_to_shared(s_q, p_head[:, None] + o_d[None, :], mask=(o_h < H)[:, None])
    async_copy.commit_group()


@gluon.jit(do_not_specialize=("P", "MAX_PAGES"))
def attend_entries_hopper_kernel(
    p_q, p_keys, p_recent, p_entries, p_found, p_sink, p_out, p_chunks, p_rows, p_pages, P, MAX_PAGES, c,
    s_row, s_head, s_key, H: gl.constexpr, D: gl.constexpr, SIZE: gl.constexpr, WINDOW: gl.constexpr,
    RATIO: gl.constexpr, GRANULE: gl.constexpr, PAGE: gl.constexpr, TOP: gl.constexpr, LOG2E: gl.constexpr,
    UNSEEN: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, LOG2_BN: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Arguments are those of `_attend_entries_kernel`. The window has two blocks at least, and D is a power of two."""
    TILES: gl.constexpr = (H + BM - 1) // BM
    FIRST: gl.constexpr = (WINDOW + BN - 1) // BN
    DT: gl.constexpr = p_out.dtype.element_ty
    # Register layouts: copies of 16 bytes per lane; scores; sums of values; rows of a tile, and keys of a block.
    L_KV: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [num_warps, 1], [1, 0])
    L_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, num_warps // 4], [16, BN // (num_warps // 4), 16])
    L_O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, num_warps // 4], [16, 256, 16])
    L_L: gl.constexpr = gl.BlockedLayout([1, BN], [32, 1], [num_warps, 1], [1, 0])
    L_M: gl.constexpr = gl.SliceLayout(1, L_S)
    L_OM: gl.constexpr = gl.SliceLayout(1, L_O)
    L_N: gl.constexpr = gl.SliceLayout(1, L_KV)

    s_q = gl.allocate_shared_memory(DT, [BM, D], gl.NVMMASharedLayout.get_default_for([BM, D], DT))
    s_kv = gl.allocate_shared_memory(DT, [2, BN, D], gl.NVMMASharedLayout.get_default_for([BN, D], DT))
    s_p = gl.allocate_shared_memory(DT, [BM, BN], gl.NVMMASharedLayout.get_default_for([BM, BN], DT))
    s_l = gl.allocate_shared_memory(gl.float32, [BM, BN], gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))

    num_items = P * TILES
    i_item = gl.program_id(0)
    i_row, i_b, i_p, i_first, i_start, i_before = row_at(p_rows, p_chunks, i_item, P, TILES)
    b_place = gl.zeros([BN], gl.int32, L_N)
    _copy_query(p_q, s_q, i_row, i_item % TILES, s_row, s_head, H, BM, D, L_KV)
    _copy_keys(
        p_keys, p_recent, p_entries, b_place, s_kv.index(0), 0, i_p, i_first, i_start, i_before, s_key, FIRST, RATIO,
        TOP, WINDOW, SIZE, D, BN, L_KV,
    )  # fmt: skip
    i_buffer = 0
    b_zero = gl.zeros([BM, BN], gl.float32, L_S)
    for i_item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        # The row after this one. The last row is followed by copies of row 0, which nothing reads.
        i_after = i_item + gl.num_programs(0)
        x_row, x_b, x_p, x_first, x_start, x_before = row_at(p_rows, p_chunks, i_after, P, TILES)
        num_seen = seen_by(i_p, RATIO, TOP)
        num_blocks = FIRST + (num_seen + BN - 1) // BN
        o_h = i_item % TILES * BM + gl.arange(0, BM, L_M)
        b_sink = gl.load(p_sink + o_h, mask=o_h < H, other=0.0) * LOG2E
        b_m = b_sink
        b_l = b_zero
        b_l2 = b_zero
        b_acc = gl.zeros([BM, D], gl.float32, L_O)
        for i_n in range(0, num_blocks):
            async_copy.wait_group(0)
            fence_async_shared()
            s_keys = s_kv.index(i_buffer)
            b_s = warpgroup_mma(s_q, s_keys.permute((1, 0)), b_zero, use_acc=False, is_async=True)
            # The next block: of this row, or the first one of the next row.
            is_last = i_n + 1 == num_blocks
            _copy_keys(
                p_keys, p_recent, p_entries, b_place, s_kv.index(1 - i_buffer), gl.where(is_last, 0, i_n + 1),
                gl.where(is_last, x_p, i_p), gl.where(is_last, x_first, i_first), gl.where(is_last, x_start, i_start),
                gl.where(is_last, x_before, i_before), s_key, FIRST, RATIO, TOP, WINDOW, SIZE, D, BN, L_KV,
            )  # fmt: skip
            if RATIO > 0:
                b_place = places(
                    p_found, p_pages, i_row, i_b, i_p, i_n + 2, MAX_PAGES, FIRST, RATIO, GRANULE, PAGE, TOP, BN, L_N
                )
            b_s = warpgroup_mma_wait(num_outstanding=0, deps=(b_s,))

            i_low, i_high = key_range(i_p, num_seen, i_n, FIRST, WINDOW, BN)
            o_n = gl.arange(0, BN, gl.SliceLayout(0, L_S))
            b_s = gl.where(((o_n >= i_low) & (o_n < i_high))[None, :], b_s, UNSEEN)
            b_top = gl.maximum(b_m, gl.max(b_s, 1) * c)
            b_alpha = gl.exp2(b_m - b_top)
            b_shift, _ = gl.broadcast((-b_top)[:, None], b_s)
            b_p = gl.exp2(gl.fma(b_s, gl.full([BM, BN], c, gl.float32, L_S), b_shift))
            b_wide, _ = gl.broadcast(b_alpha[:, None], b_s)
            b_l, b_l2 = b_l2 * b_wide, gl.fma(b_l, b_wide, b_p)
            b_m = b_top
            s_p.store(b_p.to(DT))
            fence_async_shared()
            b_acc = b_acc * gl.convert_layout(b_alpha, L_OM)[:, None]
            b_o = warpgroup_mma(s_p, s_keys, b_acc, is_async=True)
            if is_last:
                # All warps have read the query: they met before the product with the values.
                _copy_query(p_q, s_q, x_row, i_after % TILES, s_row, s_head, H, BM, D, L_KV)
            b_acc = warpgroup_mma_wait(num_outstanding=0, deps=(b_o,))
            i_buffer = 1 - i_buffer

        # Through shared memory each lane gets all sums of a row.
        s_l.store(b_l)
        b_sum = sum_over_keys(s_l.load(L_L), BM, BN, LOG2_BN, 1)
        s_l.store(b_l2)
        b_sum = gl.convert_layout(b_sum + sum_over_keys(s_l.load(L_L), BM, BN, LOG2_BN, 1), L_M)
        b_inv = gl.div_rn(gl.full([BM], 1.0, gl.float32, L_M), b_sum + gl.exp2(b_sink - b_m))
        b_acc = b_acc * gl.convert_layout(b_inv, L_OM)[:, None]
        o_ho = i_item % TILES * BM + gl.arange(0, BM, L_OM)
        o_d = gl.arange(0, D, gl.SliceLayout(0, L_O))
        p_block = p_out + (i_row.to(gl.int64) * H + o_ho)[:, None] * D + o_d[None, :]
        gl.store(p_block, b_acc.to(DT), mask=(o_ho < H)[:, None])
        i_row, i_b, i_p, i_first, i_start, i_before = x_row, x_b, x_p, x_first, x_start, x_before
    async_copy.wait_group(0)
