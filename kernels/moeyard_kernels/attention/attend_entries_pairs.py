"""Gluon: a kernel of `attend_entries` for Hopper, with the same bits, two blocks of keys at a time.

It is `mla_decode_pairs` with gathered keys: one group of four warps takes the even blocks, another the odd blocks. Each
computes the scores and weights of its block, then multiplies the weights of both by half of the values' columns. Four
more warps copy queries and keys. A row with an odd number of blocks ends with a block of missing keys, which changes no
bit.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from moeyard_kernels.attention.mla_decode_hopper import sum_over_keys
from moeyard_kernels.common.gluon import load_rows

# Two barriers each, for blocks 0 and 1 of a pair: the left and the right half of the keys have arrived. Group 0 and
# group 1 are done with the block. Its weights are ready. One barrier each: the queries have arrived, and ready are the
# maximum after block 0, the sums of group 1, the inverse of all sums.
LEFT, RIGHT, DONE0, DONE1, WEIGHTS = (gl.constexpr(i) for i in (0, 2, 4, 6, 8))
QUERIES, TOP_SEEN, SUMS, INVERSE, NUM_BARRIERS = (gl.constexpr(i) for i in (10, 11, 12, 13, 14))
# Threads that copy. Each arrives at a barrier when its own copies have ended.
_COPYING = gl.constexpr(128)
# Registers per thread of each group; the copying warps get the rest.
_REGISTERS = gl.constexpr((216, 216))


@gluon.jit
def _row_at(p_rows, p_chunks, i_item, P, TILES: gl.constexpr):
    """Return row, chunk, position, first row of the chunk, its position, slot before it. Later rows come first."""
    i_row = P - 1 - gl.minimum(i_item // TILES, P - 1)
    i_b = gl.load(p_rows + i_row * 2)
    i_p = gl.load(p_rows + i_row * 2 + 1)
    i_first = gl.load(p_chunks + i_b * 4)
    i_start = gl.load(p_chunks + i_b * 4 + 1)
    i_before = gl.maximum(gl.load(p_chunks + i_b * 4 + 2), 0)
    return i_row, i_b, i_p, i_first, i_start, i_before


@gluon.jit
def _seen_by(i_p, RATIO: gl.constexpr, TOP: gl.constexpr):
    """Return the number of entries that a row sees."""
    # 0, which the compiler cannot know. Else it unrolls the loop over blocks, and ptxas serializes its products.
    num_seen = (i_p >> 31) & 1024
    if RATIO > 0:
        num_seen = (i_p + 1) // RATIO
        if TOP > 0:
            num_seen = gl.minimum(num_seen, TOP)
    return num_seen


@gluon.jit
def _places(
    p_found, p_pages, i_row, i_b, i_p, i_n, MAX_PAGES, FIRST: gl.constexpr, RATIO: gl.constexpr, GRANULE: gl.constexpr,
    PAGE: gl.constexpr, TOP: gl.constexpr, BN: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """Return the places of the entries of block i_n, [BN] int32; 0 for the window, which has FIRST blocks."""
    o_e = (i_n - FIRST) * BN + gl.arange(0, BN, L)
    m_e = (o_e >= 0) & (o_e < _seen_by(i_p, RATIO, TOP))
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
def _key_rows(
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
        m_n = gl.where(i_n < FIRST, m_n, o_w - FIRST * BN < _seen_by(i_p, RATIO, TOP))
        p_row = gl.where(i_n < FIRST, p_row, p_entries + b_place.to(gl.int64) * D)
    return p_row, m_n


@gluon.jit
def _key_range(i_p, num_seen, i_n, FIRST: gl.constexpr, WINDOW: gl.constexpr, BN: gl.constexpr):
    """Return the range of keys of block i_n that a row sees."""
    in_window = i_n < FIRST
    i_low = gl.where(in_window, WINDOW - 1 - i_p - i_n * BN, 0)
    i_high = gl.where(in_window, WINDOW - i_n * BN, num_seen - (i_n - FIRST) * BN)
    return i_low, i_high


@gluon.jit
def _copy_half(p_row, m_row, s_x, FIRST: gl.constexpr, L: gl.constexpr):
    """Start to copy 256 columns from FIRST on of the rows at p_row, with zeros where not m_row."""
    o_d = FIRST + gl.arange(0, 256, gl.SliceLayout(0, L))
    # Rows begin at multiples of 16 bytes. The compiler cannot know that of rows from several tensors.
    p_x = gl.multiple_of(p_row[:, None] + o_d[None, :], [1, 16])
    load_rows(s_x, p_x, mask=m_row[:, None])


@gluon.jit
def _copy(
    p_q, p_keys, p_recent, p_entries, p_found, p_chunks, p_rows, p_pages, P, MAX_PAGES, s_row, s_head, s_key,
    s_q0, s_q1, s_left, s_right, bars,
    H: gl.constexpr, SIZE: gl.constexpr, WINDOW: gl.constexpr, RATIO: gl.constexpr, GRANULE: gl.constexpr,
    PAGE: gl.constexpr, TOP: gl.constexpr,
):  # fmt: skip
    """Copy queries and keys into free buffers."""
    TILES: gl.constexpr = (H + 63) // 64
    FIRST: gl.constexpr = (WINDOW + 63) // 64
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    L_N: gl.constexpr = gl.SliceLayout(1, L)
    n_pair = 0
    for i_item in range(gl.program_id(0), P * TILES, gl.num_programs(0)):
        i_row, i_b, i_p, i_first, i_start, i_before = _row_at(p_rows, p_chunks, i_item, P, TILES)
        num_blocks = FIRST + (_seen_by(i_p, RATIO, TOP) + 63) // 64
        o_h = i_item % TILES * 64 + gl.arange(0, 64, L_N)
        p_head = p_q + i_row.to(gl.int64) * s_row + o_h.to(gl.int64) * s_head
        # Group 0 has used the weights of the last block, so no group computes scores now.
        mbarrier.wait(bars.index(DONE0 + 1), (n_pair & 1) ^ 1)
        _copy_half(p_head, o_h < H, s_q0.index(0), 0, L)
        _copy_half(p_head, o_h < H, s_q1.index(0), 256, L)
        async_copy.mbarrier_arrive(bars.index(QUERIES), increment_count=False)
        for i_pair in range(0, (num_blocks + 1) // 2):
            free = (n_pair & 1) ^ 1
            for g in gl.static_range(2):
                i_n = 2 * i_pair + g
                b_place = gl.zeros([64], gl.int32, L_N)
                if RATIO > 0:
                    b_place = _places(
                        p_found, p_pages, i_row, i_b, i_p, i_n, MAX_PAGES, FIRST, RATIO, GRANULE, PAGE, TOP, 64, L_N
                    )
                p_row, m_row = _key_rows(
                    p_keys, p_recent, p_entries, b_place, i_n, i_p, i_first, i_start, i_before, s_key, FIRST, RATIO,
                    TOP, WINDOW, SIZE, 512, 64, L_N,
                )  # fmt: skip
                mbarrier.wait(bars.index(DONE0 + g), free)
                _copy_half(p_row, m_row, s_left.index(g), 0, L)
                async_copy.mbarrier_arrive(bars.index(LEFT + g), increment_count=False)
                mbarrier.wait(bars.index(DONE1 + g), free)
                _copy_half(p_row, m_row, s_right.index(g), 256, L)
                async_copy.mbarrier_arrive(bars.index(RIGHT + g), increment_count=False)
            n_pair += 1
    async_copy.commit_group()
    async_copy.wait_group(0)


@gluon.jit
def _group(
    p_sink, p_out, p_chunks, p_rows, P, c, s_q0, s_q1, s_left, s_right, s_p, s_m, bars,
    GROUP: gl.constexpr, H: gl.constexpr, WINDOW: gl.constexpr, RATIO: gl.constexpr, TOP: gl.constexpr,
    LOG2E: gl.constexpr, UNSEEN: gl.constexpr,
):  # fmt: skip
    """Compute scores of blocks GROUP, GROUP + 2, ... and columns [256 GROUP, 256 GROUP + 256) of the results."""
    TILES: gl.constexpr = (H + 63) // 64
    FIRST: gl.constexpr = (WINDOW + 63) // 64
    L_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    L_O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    L_M: gl.constexpr = gl.SliceLayout(1, L_S)
    L_R: gl.constexpr = gl.SliceLayout(1, L_O)
    DONE: gl.constexpr = DONE1 if GROUP else DONE0
    s_values = s_right if GROUP else s_left

    n_pair = 0
    n_item = 0
    for i_item in range(gl.program_id(0), P * TILES, gl.num_programs(0)):
        i_row, _i_b, i_p, _i_first, _i_start, _i_before = _row_at(p_rows, p_chunks, i_item, P, TILES)
        num_seen = _seen_by(i_p, RATIO, TOP)
        num_blocks = FIRST + (num_seen + 63) // 64
        o_h = i_item % TILES * 64 + gl.arange(0, 64, L_M)
        b_sink = gl.load(p_sink + o_h, mask=o_h < H, other=0.0) * LOG2E
        b_acc = gl.zeros([64, 256], gl.float32, L_O)
        b_l = gl.zeros([64, 64], gl.float32, L_S)
        b_zero = gl.zeros([64, 64], gl.float32, L_S)
        b_m = b_sink
        mbarrier.wait(bars.index(QUERIES), n_item & 1)
        for i_pair in range(0, (num_blocks + 1) // 2):
            phase = n_pair & 1
            # 0, which the compiler cannot know. Else it keeps one descriptor per product over the loop, and spills.
            zero = n_pair >> 30
            mbarrier.wait(bars.index(LEFT + GROUP), phase)
            fence_async_shared()
            b_s = warpgroup_mma(
                s_q0.index(zero), s_left.index(GROUP + zero).permute((1, 0)), b_zero, use_acc=False, is_async=True
            )
            mbarrier.wait(bars.index(RIGHT + GROUP), phase)
            fence_async_shared()
            b_s = warpgroup_mma(s_q1.index(zero), s_right.index(GROUP + zero).permute((1, 0)), b_s, is_async=True)
            b_s = warpgroup_mma_wait(num_outstanding=0, deps=(b_s,))
            i_low, i_high = _key_range(i_p, num_seen, 2 * i_pair + GROUP, FIRST, WINDOW, 64)
            o_n = gl.arange(0, 64, gl.SliceLayout(0, L_S))
            b_s = gl.where(((o_n >= i_low) & (o_n < i_high))[None, :], b_s, UNSEEN)
            b_own = gl.max(b_s, 1) * c

            # Maxima after the even and the odd block.
            b_c = gl.full([64, 64], c, gl.float32, L_S)
            if GROUP == 0:
                b_m0 = gl.maximum(b_m, b_own)
                s_m.index(0).store(b_m0)
                mbarrier.arrive(bars.index(TOP_SEEN), count=1)
                b_shift, _ = gl.broadcast((-b_m0)[:, None], b_s)
                b_p = gl.exp2(gl.fma(b_s, b_c, b_shift))
                b_a0 = gl.exp2(b_m - b_m0)
                b_wide, _ = gl.broadcast(b_a0[:, None], b_s)
                b_l = gl.fma(b_l, b_wide, b_p)
            else:
                mbarrier.wait(bars.index(TOP_SEEN), phase)
                b_m0 = s_m.index(0).load(L_M)
                b_m1 = gl.maximum(b_m0, b_own)
                s_m.index(1).store(b_m1)
                b_shift, _ = gl.broadcast((-b_m1)[:, None], b_s)
                b_p = gl.exp2(gl.fma(b_s, b_c, b_shift))
                b_a0, b_a1 = gl.exp2(b_m - b_m0), gl.exp2(b_m0 - b_m1)
                b_wide, _ = gl.broadcast(b_a1[:, None], b_s)
                b_l = gl.fma(b_l * b_a0[:, None], b_wide, b_p)
            # Both groups are done with the weights before: the keys of this block came after that.
            s_p.index(GROUP).store(b_p.to(s_p.dtype))
            fence_async_shared()
            mbarrier.arrive(bars.index(WEIGHTS + GROUP), count=1)

            b_acc = b_acc * gl.convert_layout(b_a0, L_R)[:, None]
            if GROUP == 1:
                mbarrier.wait(bars.index(WEIGHTS), phase)
                mbarrier.wait(bars.index(RIGHT), phase)
                fence_async_shared()
            b_acc = warpgroup_mma(s_p.index(0), s_values.index(0), b_acc, is_async=True)
            b_acc = warpgroup_mma_wait(num_outstanding=0, deps=(b_acc,))
            mbarrier.arrive(bars.index(DONE), count=1)
            if GROUP == 0:
                mbarrier.wait(bars.index(WEIGHTS + 1), phase)
                mbarrier.wait(bars.index(LEFT + 1), phase)
                fence_async_shared()
                b_m1 = s_m.index(1).load(L_M)
                b_a1 = gl.exp2(b_m0 - b_m1)
                b_l = b_l * b_a1[:, None]
            b_acc = b_acc * gl.convert_layout(b_a1, L_R)[:, None]
            b_acc = warpgroup_mma(s_p.index(1), s_values.index(1), b_acc, is_async=True)
            b_acc = warpgroup_mma_wait(num_outstanding=0, deps=(b_acc,))
            mbarrier.arrive(bars.index(DONE + 1), count=1)
            b_m = b_m1
            n_pair += 1

        b_sum = gl.convert_layout(sum_over_keys(b_l, 64, 64, 6, 1), L_M)
        if GROUP == 0:
            mbarrier.wait(bars.index(SUMS), n_item & 1)
            b_sum = b_sum + s_m.index(2).load(L_M) + gl.exp2(b_sink - b_m)
            b_inv = gl.div_rn(gl.full([64], 1.0, gl.float32, L_M), b_sum)
            s_m.index(3).store(b_inv)
            mbarrier.arrive(bars.index(INVERSE), count=1)
        else:
            s_m.index(2).store(b_sum)
            mbarrier.arrive(bars.index(SUMS), count=1)
            mbarrier.wait(bars.index(INVERSE), n_item & 1)
            b_inv = s_m.index(3).load(L_M)
        n_item += 1  # noqa: SIM113
        b_acc = b_acc * gl.convert_layout(b_inv, L_R)[:, None]
        o_ho = i_item % TILES * 64 + gl.arange(0, 64, L_R)
        o_d = 256 * GROUP + gl.arange(0, 256, gl.SliceLayout(0, L_O))
        p_block = p_out + (i_row.to(gl.int64) * H + o_ho)[:, None] * 512 + o_d[None, :]
        gl.store(p_block, b_acc.to(p_out.dtype.element_ty), mask=(o_ho < H)[:, None])


@gluon.jit(do_not_specialize=("P", "MAX_PAGES"))
def attend_entries_pairs_kernel(
    p_q, p_keys, p_recent, p_entries, p_found, p_sink, p_out, p_chunks, p_rows, p_pages, P, MAX_PAGES, c,
    s_row, s_head, s_key, H: gl.constexpr, D: gl.constexpr, SIZE: gl.constexpr, WINDOW: gl.constexpr,
    RATIO: gl.constexpr, GRANULE: gl.constexpr, PAGE: gl.constexpr, TOP: gl.constexpr, LOG2E: gl.constexpr,
    UNSEEN: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, LOG2_BN: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Arguments are those of `_attend_entries_kernel`, with D = 512, BM = BN = 64 and num_warps = 4."""
    DT: gl.constexpr = p_out.dtype.element_ty
    L_WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 256], DT)
    s_q0 = gl.allocate_shared_memory(DT, [1, 64, 256], L_WIDE)
    s_q1 = gl.allocate_shared_memory(DT, [1, 64, 256], L_WIDE)
    s_left = gl.allocate_shared_memory(DT, [2, 64, 256], L_WIDE)
    s_right = gl.allocate_shared_memory(DT, [2, 64, 256], L_WIDE)
    s_p = gl.allocate_shared_memory(DT, [2, 64, 64], gl.NVMMASharedLayout.get_default_for([64, 64], DT))
    s_m = gl.allocate_shared_memory(gl.float32, [4, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    bars = gl.allocate_shared_memory(gl.int64, [NUM_BARRIERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM_BARRIERS):
        mbarrier.init(bars.index(i), count=_COPYING if i < DONE0 or i == QUERIES else 1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _copy,
                (
                    p_q, p_keys, p_recent, p_entries, p_found, p_chunks, p_rows, p_pages, P, MAX_PAGES, s_row, s_head,
                    s_key, s_q0, s_q1, s_left, s_right, bars, H, SIZE, WINDOW, RATIO, GRANULE, PAGE, TOP,
                ),
            ),
            (
                _group,
                (
                    p_sink, p_out, p_chunks, p_rows, P, c, s_q0, s_q1, s_left, s_right, s_p, s_m, bars,
                    0, H, WINDOW, RATIO, TOP, LOG2E, UNSEEN,
                ),
            ),
            (
                _group,
                (
                    p_sink, p_out, p_chunks, p_rows, P, c, s_q0, s_q1, s_left, s_right, s_p, s_m, bars,
                    1, H, WINDOW, RATIO, TOP, LOG2E, UNSEEN,
                ),
            ),
        ],
        [4, 4],
        _REGISTERS,
    )  # fmt: skip
