"""Gluon: a kernel of `mla_decode` for many heads on Hopper, with the same bits, two blocks of keys at a time.

One group of four warps takes the even blocks, another the odd blocks. Each computes the scores and weights of its
block, then multiplies the weights of both by half of the values' columns. So the scores need one product of 64 x 64 per
group, and one group's softmax runs beside the other's products. The groups exchange the running maximum at each block.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moeyard_kernels.attention.mla_decode_hopper import find_work, sum_over_keys, work_ends
from moeyard_kernels.common import launch
from moeyard_kernels.common.gluon import load_block

# Two barriers each, for blocks 0 and 1 of a pair: the left and the right half of the keys have arrived. Group 0 and
# group 1 are done with the block. Its weights are ready. One barrier each: the queries have arrived, and ready are the
# maximum after block 0, the sums of group 1, the inverse of all sums.
LEFT, RIGHT, DONE0, DONE1, WEIGHTS = (gl.constexpr(i) for i in (0, 2, 4, 6, 8))
QUERIES, TOP, SUMS, INVERSE, NUM_BARRIERS = (gl.constexpr(i) for i in (10, 11, 12, 13, 14))
# One thread prefetches a page of 73728 bytes into the L2.
PREFETCH = gl.constexpr("""{
    .reg .pred first; .reg .b32 lane;
    mov.u32 lane, %tid.x;
    and.b32 lane, lane, 127;
    setp.eq.u32 first, lane, 0;
    @first cp.async.bulk.prefetch.L2.global [$1], 73728;
    mov.b32 $0, 0;
}""")


@gluon.jit
def _item(i_item, b_ends, p_lens, Q: gl.constexpr, H: gl.constexpr, SPLIT: gl.constexpr, L_M: gl.constexpr):
    """Return sequence, split, first row of the tile, lengths of its rows in layout L_M, first and last + 1 key seen."""
    TILES: gl.constexpr = (Q * H + 63) // 64
    i_b, i_s = find_work(i_item // TILES, b_ends)
    i_tile = (i_item % TILES) * 64
    o_m = i_tile + gl.arange(0, 64, L_M)
    b_len = gl.load(p_lens + i_b * Q + o_m // H, mask=o_m < Q * H, other=0)
    return i_b, i_s, i_tile, b_len, i_s * SPLIT, gl.minimum(gl.max(b_len, 0), (i_s + 1) * SPLIT)


@gluon.jit
def _producer(
    d_q, d_qr, d_latent, d_rope, p_kv, p_table, p_lens, B, MAX_PAGES, S,
    s_q0, s_q1, s_qr, s_left, s_right, s_rope, bars,
    Q: gl.constexpr, H: gl.constexpr, SPLIT: gl.constexpr, BB: gl.constexpr, BQ: gl.constexpr,
):  # fmt: skip
    """Copy queries and keys into free buffers, and prefetch the next pair's pages into the L2."""
    M: gl.constexpr = Q * H
    TILES: gl.constexpr = (M + 63) // 64
    L_M: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    b_ends = work_ends(p_lens, B, S, Q, BB, BQ, SPLIT, 4)
    n_pair = 0
    for i_item in range(gl.program_id(0), gl.max(b_ends, 0) * TILES, gl.num_programs(0)):
        i_b, _, i_tile, _, i_low, i_high = _item(i_item, b_ends, p_lens, Q, H, SPLIT, L_M)
        p_pages = p_table + i_b.to(gl.int64) * MAX_PAGES
        if i_low < i_high:
            # Group 0 has used the weights of the last block, so no group computes scores now.
            mbarrier.wait(bars.index(DONE0 + 1), (n_pair & 1) ^ 1)
            mbarrier.expect(bars.index(QUERIES), 64 * 576 * 2)
            load_block(d_q, [i_b * M + i_tile, 0], bars.index(QUERIES), s_q0.index(0))
            load_block(d_q, [i_b * M + i_tile, 256], bars.index(QUERIES), s_q1.index(0))
            load_block(d_qr, [i_b * M + i_tile, 0], bars.index(QUERIES), s_qr.index(0))
        for i_n in range(i_low, i_high, 128):
            free = (n_pair & 1) ^ 1
            for g in gl.static_range(2):
                i_page = gl.load(p_pages + i_n // 64 + g, mask=i_n + 64 * g < i_high, other=0)
                mbarrier.wait(bars.index(DONE0 + g), free)
                mbarrier.expect(bars.index(LEFT + g), 64 * 256 * 2)
                load_block(d_latent, [i_page * 64, 0], bars.index(LEFT + g), s_left.index(g))
                mbarrier.wait(bars.index(DONE1 + g), free)
                mbarrier.expect(bars.index(RIGHT + g), 64 * 320 * 2)
                load_block(d_latent, [i_page * 64, 256], bars.index(RIGHT + g), s_right.index(g))
                load_block(d_rope, [i_page * 64, 512], bars.index(RIGHT + g), s_rope.index(g))
            for g in gl.static_range(2):
                if i_n + 128 + 64 * g < i_high:
                    p_page = p_kv + gl.load(p_pages + i_n // 64 + 2 + g).to(gl.int64) * (64 * 576)
                    gl.inline_asm_elementwise(PREFETCH, "=r,l", [p_page], dtype=gl.int32, is_pure=False, pack=1)
            n_pair += 1


@gluon.jit
def _zero_rows(s_x, i_end, L_X: gl.constexpr):
    """Zero the rows of s_x [64, 256] from i_end on, because rows that no query sees may be NaN."""
    for i in gl.static_range(4):
        s_part = s_x.slice(64 * i, 64, dim=1)
        b_x = s_part.load(L_X)
        o_row = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, L_X)), 1)
        b_x, m_row = gl.broadcast(b_x, o_row < i_end)
        s_part.store(gl.where(m_row, b_x, gl.full_like(b_x, 0.0)))


@gluon.jit
def _group(
    p_lens, p_out, p_lse, c, B, S, s_q0, s_q1, s_qr, s_left, s_right, s_rope, s_m, bars,
    GROUP: gl.constexpr, Q: gl.constexpr, H: gl.constexpr, SPLIT: gl.constexpr,
    BB: gl.constexpr, BQ: gl.constexpr,
):  # fmt: skip
    """Compute scores of blocks GROUP, GROUP + 2, ... and columns [256 GROUP, 256 GROUP + 256) of the results."""
    M: gl.constexpr = Q * H
    TILES: gl.constexpr = (M + 63) // 64
    L_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    L_O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    L_X: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    L_M: gl.constexpr = gl.SliceLayout(1, L_S)
    L_R: gl.constexpr = gl.SliceLayout(1, L_O)
    DONE: gl.constexpr = DONE1 if GROUP else DONE0
    s_values = s_right if GROUP else s_left
    b_ends = work_ends(p_lens, B, S, Q, BB, BQ, SPLIT, 4)

    n_pair = 0
    n_queries = 0
    n_item = 0
    for i_item in range(gl.program_id(0), gl.max(b_ends, 0) * TILES, gl.num_programs(0)):
        i_b, i_s, i_tile, b_len, i_low, i_high = _item(i_item, b_ends, p_lens, Q, H, SPLIT, L_M)
        o_m = i_tile + gl.arange(0, 64, L_M)
        if i_low < i_high:
            mbarrier.wait(bars.index(QUERIES), n_queries & 1)
            n_queries += 1

        b_acc = gl.zeros([64, 256], gl.float32, L_O)
        b_l = gl.zeros([64, 64], gl.float32, L_S)
        b_zero = gl.zeros([64, 64], gl.float32, L_S)
        b_m = gl.full([64], float("-inf"), gl.float32, L_M)
        for i_n in range(i_low, i_high, 128):
            phase = n_pair & 1
            # 0, which the compiler cannot know. Else it keeps one descriptor per product over the loop, and spills.
            zero = n_pair >> 30
            i_own = i_n + 64 * GROUP
            mbarrier.wait(bars.index(LEFT + GROUP), phase)
            if i_own + 64 > i_high:
                mbarrier.wait(bars.index(RIGHT + GROUP), phase)
                _zero_rows(s_left.index(GROUP), i_high - i_own, L_X)
                _zero_rows(s_right.index(GROUP), i_high - i_own, L_X)
                fence_async_shared()
            b_s = warpgroup_mma(
                s_q0.index(zero), s_left.index(GROUP + zero).permute((1, 0)), b_zero, use_acc=False, is_async=True
            )
            mbarrier.wait(bars.index(RIGHT + GROUP), phase)
            b_s = warpgroup_mma(s_q1.index(zero), s_right.index(GROUP + zero).permute((1, 0)), b_s, is_async=True)
            b_s = warpgroup_mma(s_qr.index(zero), s_rope.index(GROUP + zero).permute((1, 0)), b_s, is_async=True)
            b_s = warpgroup_mma_wait(num_outstanding=0, deps=(b_s,))
            o_n = gl.expand_dims(i_own + gl.arange(0, 64, gl.SliceLayout(0, L_S)), 0)
            b_s = gl.where(o_n < gl.expand_dims(b_len, 1), b_s * c, float("-inf"))
            b_own = gl.max(b_s, 1)

            # Maxima after the even and the odd block. If nothing was seen they are 0, because -inf - -inf would be NaN.
            if GROUP == 0:
                b_m0 = gl.maximum(b_m, b_own)
                s_m.index(0).store(b_m0)
                mbarrier.arrive(bars.index(TOP), count=1)
                b_top0 = gl.where(b_m0 == float("-inf"), 0.0, b_m0)
                b_p = gl.exp2(b_s - gl.expand_dims(b_top0, 1))
                b_a0 = gl.exp2(b_m - b_top0)
                b_l, b_wide = gl.broadcast(b_l, gl.expand_dims(b_a0, 1))
                b_l = gl.fma(b_l, b_wide, b_p)
            else:
                mbarrier.wait(bars.index(TOP), phase)
                b_m0 = s_m.index(0).load(L_M)
                b_m1 = gl.maximum(b_m0, b_own)
                s_m.index(1).store(b_m1)
                b_top0 = gl.where(b_m0 == float("-inf"), 0.0, b_m0)
                b_top1 = gl.where(b_m1 == float("-inf"), 0.0, b_m1)
                b_p = gl.exp2(b_s - gl.expand_dims(b_top1, 1))
                b_a0, b_a1 = gl.exp2(b_m - b_top0), gl.exp2(b_m0 - b_top1)
                b_l, b_wide = gl.broadcast(b_l * gl.expand_dims(b_a0, 1), gl.expand_dims(b_a1, 1))
                b_l = gl.fma(b_l, b_wide, b_p)
            # The rope part of the keys is no longer needed, so the weights overwrite it.
            s_rope.index(GROUP).store(b_p.to(s_rope.dtype))
            fence_async_shared()
            mbarrier.arrive(bars.index(WEIGHTS + GROUP), count=1)

            b_acc = b_acc * gl.expand_dims(gl.convert_layout(b_a0, L_R), 1)
            if GROUP == 1:
                mbarrier.wait(bars.index(WEIGHTS), phase)
                mbarrier.wait(bars.index(RIGHT), phase)
            b_acc = warpgroup_mma(s_rope.index(0), s_values.index(0), b_acc, is_async=True)
            b_acc = warpgroup_mma_wait(num_outstanding=0, deps=(b_acc,))
            mbarrier.arrive(bars.index(DONE), count=1)
            if GROUP == 0:
                mbarrier.wait(bars.index(WEIGHTS + 1), phase)
                mbarrier.wait(bars.index(LEFT + 1), phase)
                b_m1 = s_m.index(1).load(L_M)
                b_a1 = gl.exp2(b_m0 - gl.where(b_m1 == float("-inf"), 0.0, b_m1))
                b_l = b_l * gl.expand_dims(b_a1, 1)
            b_acc = b_acc * gl.expand_dims(gl.convert_layout(b_a1, L_R), 1)
            b_acc = warpgroup_mma(s_rope.index(1), s_values.index(1), b_acc, is_async=True)
            b_acc = warpgroup_mma_wait(num_outstanding=0, deps=(b_acc,))
            mbarrier.arrive(bars.index(DONE + 1), count=1)
            b_m = b_m1
            n_pair += 1

        b_sum = gl.convert_layout(sum_over_keys(b_l, 64, 64, 6, 1), L_M)
        if GROUP == 0:
            mbarrier.wait(bars.index(SUMS), n_item & 1)
            b_sum = b_sum + s_m.index(2).load(L_M)
            m_any = b_sum > 0
            b_sum = gl.where(m_any, b_sum, 1.0)
            b_lse = gl.where(m_any, (b_m + gl.log2(b_sum)) * 0.6931471805599453, float("-inf"))
            b_inv = gl.where(m_any, gl.div_rn(gl.full([64], 1.0, gl.float32, L_M), b_sum), 0.0)
            s_m.index(3).store(b_inv)
            mbarrier.arrive(bars.index(INVERSE), count=1)
            gl.store(p_lse + (i_b.to(gl.int64) * S + i_s) * M + o_m, b_lse, mask=o_m < M)
        else:
            s_m.index(2).store(b_sum)
            mbarrier.arrive(bars.index(SUMS), count=1)
            mbarrier.wait(bars.index(INVERSE), n_item & 1)
            b_inv = s_m.index(3).load(L_M)
        n_item += 1  # noqa: SIM113
        b_acc = b_acc * gl.expand_dims(gl.convert_layout(b_inv, L_R), 1)
        o_mo = gl.expand_dims(i_tile + gl.arange(0, 64, L_R), 1)
        o_ro = gl.expand_dims(256 * GROUP + gl.arange(0, 256, gl.SliceLayout(0, L_O)), 0)
        p_o = p_out + ((i_b.to(gl.int64) * S + i_s) * M + o_mo) * 512 + o_ro
        gl.store(p_o, b_acc.to(p_out.dtype.element_ty), mask=o_mo < M)


@gluon.jit(do_not_specialize=("B", "MAX_PAGES", "S"))
def mla_decode_pairs_kernel(
    d_q, d_qr, d_latent, d_rope, p_kv, p_table, p_lens, p_out, p_lse, c, B, MAX_PAGES, S,
    Q: gl.constexpr, H: gl.constexpr, SPLIT: gl.constexpr, BB: gl.constexpr, BQ: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """`_mla_decode_kernel` without a window, for bf16, R = 512, D = 64, pages and blocks of 64, tiles of 64 rows.

    Shapes and blocks: d_q [B Q H, 512] by [64, 256]; d_qr [B Q H, 64] by [64, 64]. The cache [num_pages 64, 576] is
    d_latent by [64, 256], and d_rope by [64, 64].
    """
    s_q0 = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 256], d_q.layout)
    s_q1 = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 256], d_q.layout)
    s_qr = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 64], d_qr.layout)
    s_left = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 256], d_latent.layout)
    s_right = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 256], d_latent.layout)
    s_rope = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], d_rope.layout)
    s_m = gl.allocate_shared_memory(gl.float32, [4, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    bars = gl.allocate_shared_memory(gl.int64, [NUM_BARRIERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM_BARRIERS):
        mbarrier.init(bars.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _producer,
                (
                    d_q, d_qr, d_latent, d_rope, p_kv, p_table, p_lens, B, MAX_PAGES, S,
                    s_q0, s_q1, s_qr, s_left, s_right, s_rope, bars, Q, H, SPLIT, BB, BQ,
                ),
            ),
            (
                _group,
                (
                    p_lens, p_out, p_lse, c, B, S, s_q0, s_q1, s_qr, s_left, s_right, s_rope, s_m, bars,
                    0, Q, H, SPLIT, BB, BQ,
                ),
            ),
            (
                _group,
                (
                    p_lens, p_out, p_lse, c, B, S, s_q0, s_q1, s_qr, s_left, s_right, s_rope, s_m, bars,
                    1, Q, H, SPLIT, BB, BQ,
                ),
            ),
        ],
        [4, 4],
        [240, 240],
    )  # fmt: skip


def descriptors(
    q_latent: torch.Tensor, q_rope: torch.Tensor, latent_cache: torch.Tensor
) -> tuple[TensorDescriptor, ...]:
    """Return the tensor descriptors of the kernel: d_q, d_qr, d_latent, d_rope."""
    wide, narrow = launch.shared_layout(64, 256), launch.shared_layout(64, 64)
    keys = latent_cache.view(-1, latent_cache.shape[2])
    return (
        TensorDescriptor.from_tensor(q_latent.view(-1, q_latent.shape[2]), [64, 256], wide),
        TensorDescriptor.from_tensor(q_rope.view(-1, q_rope.shape[2]), [64, 64], narrow),
        TensorDescriptor.from_tensor(keys, [64, 256], wide),
        TensorDescriptor.from_tensor(keys, [64, 64], narrow),
    )
