"""Gluon: a warp-specialized kernel of `attn_prefill_varlen` for Hopper, with the same bits.

One warp copies. Two groups of four warps compute 64 queries each. A group starts the scores of a block, then the
product of the previous block's weights and values, and computes the new weights meanwhile. Triton's own pipeline waits
for every product of scores before it continues.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from moeyard_kernels.common.gluon import load_block

# Registers per thread: of the compiled kernel, and of the second group and the copying warp after the warps specialize
# (the first group gets the rest).
MAX_REGISTERS = 168
_REGISTERS = gl.constexpr((240, 24))


@gluon.constexpr_function
def _mma(columns):
    """Return the layout of 64 rows over four warps, each row in four lanes of a warp, as in Triton's own kernel."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def _copy(
    d_q, d_q2, d_k, d_k2, d_v, s_q, s_q2, s_k, s_k2, s_v, e_q, e_k, e_v, f_k, f_v, p_pages,
    i_q, i_col_q, i_base, i_col_k, i_col_k2, i_col_v, num_blocks,
    D1: gl.constexpr, D2: gl.constexpr, DV: gl.constexpr, BN: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fill each buffer when it is free (f_*) and signal that it is full (e_*)."""
    mbarrier.expect(e_q, 128 * (D1 + D2) * 2)
    for g in gl.static_range(2):
        load_block(d_q, [i_q + g * 64, i_col_q], e_q, s_q.index(g))
        if D2 > 0:
            load_block(d_q2, [i_q + g * 64, i_col_q], e_q, s_q2.index(g))
    for i_n in range(num_blocks):
        i_buffer, phase = i_n % STAGES, (i_n // STAGES) & 1
        i_row = i_base + i_n * BN
        if PAGE > 0:
            i_row = i_base + gl.load(p_pages + i_n * BN // PAGE) * PAGE + i_n * BN % PAGE
        mbarrier.wait(f_k.index(i_buffer), phase ^ 1)
        mbarrier.expect(e_k.index(i_buffer), BN * (D1 + D2) * 2)
        load_block(d_k, [i_row, i_col_k], e_k.index(i_buffer), s_k.index(i_buffer))
        if D2 > 0:
            load_block(d_k2, [i_row, i_col_k2], e_k.index(i_buffer), s_k2.index(i_buffer))
        mbarrier.wait(f_v.index(i_buffer), phase ^ 1)
        mbarrier.expect(e_v.index(i_buffer), BN * DV * 2)
        load_block(d_v, [i_row, i_col_v], e_v.index(i_buffer), s_v.index(i_buffer))


@gluon.jit
def _scores(s_q, s_q2, s_k, s_k2, D2: gl.constexpr, BN: gl.constexpr):
    """Start the product q . k of one block."""
    b_zero = gl.zeros([64, BN], gl.float32, _mma(BN))
    b_s = warpgroup_mma(s_q, s_k.permute((1, 0)), b_zero, use_acc=False, is_async=True)
    if D2 > 0:
        b_s = warpgroup_mma(s_q2, s_k2.permute((1, 0)), b_s, is_async=True)
    return b_s


@gluon.jit
def _weights(b_s, b_m, b_l, o_p, i_n, c, MASKED: gl.constexpr, BN: gl.constexpr, UNSEEN: gl.constexpr):
    """Return (p, m, l, alpha) of the online softmax, as in `attn_prefill_varlen._attend`."""
    L_S: gl.constexpr = _mma(BN)
    if MASKED:
        o_n = i_n * BN + gl.arange(0, BN, gl.SliceLayout(0, L_S))
        b_s = gl.where(o_n[None, :] <= o_p[:, None], b_s, UNSEEN)
    b_top = gl.maximum(b_m, gl.max(b_s, 1))
    b_alpha = gl.exp2((b_m - b_top) * c)
    b_shift, _ = gl.broadcast((-(b_top * c))[:, None], b_s)
    b_p = gl.exp2(gl.fma(b_s, gl.full(b_s.shape, c, gl.float32, L_S), b_shift))
    return b_p, b_top, gl.fma(b_l, b_alpha, gl.sum(b_p, 1)), b_alpha


@gluon.jit
def _attend(
    b_acc, b_p, b_m, b_l, s_q, s_q2, s_k, s_k2, s_v, e_k, e_v, f_k, f_v, o_p, i_begin, i_end, c,
    D2: gl.constexpr, DV: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr,
    UNSEEN: gl.constexpr,
):  # fmt: skip
    """Add the values of blocks [i_begin - 1, i_end - 1). Turn the scores of [i_begin, i_end) into weights b_p."""
    L_O: gl.constexpr = _mma(DV)
    for i_n in range(i_begin, i_end):
        i_buffer, i_last = i_n % STAGES, (i_n - 1) % STAGES
        mbarrier.wait(e_k.index(i_buffer), (i_n // STAGES) & 1)
        b_s = _scores(s_q, s_q2, s_k.index(i_buffer), s_k2.index(i_buffer), D2, BN)
        mbarrier.wait(e_v.index(i_last), ((i_n - 1) // STAGES) & 1)
        b_o = warpgroup_mma(b_p, s_v.index(i_last), b_acc, is_async=True)
        b_s = warpgroup_mma_wait(num_outstanding=1, deps=(b_s,))
        mbarrier.arrive(f_k.index(i_buffer), count=1)
        b_next, b_m, b_l, b_alpha = _weights(b_s, b_m, b_l, o_p, i_n, c, MASKED, BN, UNSEEN)
        b_acc = warpgroup_mma_wait(num_outstanding=0, deps=(b_o,))
        mbarrier.arrive(f_v.index(i_last), count=1)
        b_acc = b_acc * gl.convert_layout(b_alpha, gl.SliceLayout(1, L_O))[:, None]
        b_p = gl.convert_layout(b_next.to(s_v.dtype), gl.DotOperandLayout(0, L_O, 2))
    return b_acc, b_p, b_m, b_l


@gluon.jit
def _compute(
    s_q, s_q2, s_k, s_k2, s_v, e_q, e_k, e_v, f_k, f_v, p_out, p_lse, i_h, i_q, i_first, num_q, start, num_blocks, H, c,
    D2: gl.constexpr, DV: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, LSE: gl.constexpr,
    NO_SCORE: gl.constexpr, UNSEEN: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Compute the 64 queries from i_first + 64 GROUP on of a chunk."""
    L_S: gl.constexpr = _mma(BN)
    L_O: gl.constexpr = _mma(DV)
    L_V: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DV, DV // 8], [4, 1], [1, 0])
    i_first += GROUP * 64
    i_p = start + i_first
    o_p = i_p + gl.arange(0, 64, gl.SliceLayout(1, L_S))
    b_m = gl.full([64], NO_SCORE, gl.float32, gl.SliceLayout(1, L_S))
    b_l = gl.zeros([64], gl.float32, gl.SliceLayout(1, L_S))
    b_acc = gl.zeros([64, DV], gl.float32, L_O)
    s_q, s_q2 = s_q.index(GROUP), s_q2.index(GROUP)

    mbarrier.wait(e_q, 0)
    mbarrier.wait(e_k.index(0), 0)
    b_s = _scores(s_q, s_q2, s_k.index(0), s_k2.index(0), D2, BN)
    b_s = warpgroup_mma_wait(num_outstanding=0, deps=(b_s,))
    mbarrier.arrive(f_k.index(0), count=1)
    b_p, b_m, b_l, _ = _weights(b_s, b_m, b_l, o_p, 0, c, True, BN, UNSEEN)
    b_p = gl.convert_layout(b_p.to(s_v.dtype), gl.DotOperandLayout(0, L_O, 2))
    # First the blocks that every query sees completely, then the others.
    i_upper = gl.minimum(gl.maximum((i_p + 1) // BN, 1), num_blocks)
    b_acc, b_p, b_m, b_l = _attend(
        b_acc, b_p, b_m, b_l, s_q, s_q2, s_k, s_k2, s_v, e_k, e_v, f_k, f_v, o_p, 1, i_upper, c,
        D2, DV, BN, STAGES, False, UNSEEN,
    )  # fmt: skip
    b_acc, b_p, b_m, b_l = _attend(
        b_acc, b_p, b_m, b_l, s_q, s_q2, s_k, s_k2, s_v, e_k, e_v, f_k, f_v, o_p, i_upper, num_blocks, c,
        D2, DV, BN, STAGES, True, UNSEEN,
    )  # fmt: skip

    i_last = num_blocks - 1
    s_last = s_v.index(i_last % STAGES)
    mbarrier.wait(e_v.index(i_last % STAGES), (i_last // STAGES) & 1)
    if num_blocks * BN > start + num_q:
        # Memory after the last known position may hold anything. Both groups write the same zeros.
        o_n = i_last * BN + gl.arange(0, BN, gl.SliceLayout(1, L_V))
        b_v = s_last.load(L_V)
        s_last.store(gl.where((o_n < start + num_q)[:, None], b_v, gl.zeros([BN, DV], s_v.dtype, L_V)))
        fence_async_shared()
    b_o = warpgroup_mma(b_p, s_last, b_acc, is_async=True)
    b_acc = warpgroup_mma_wait(num_outstanding=0, deps=(b_o,))

    o_m = i_first + gl.arange(0, 64, gl.SliceLayout(1, L_S))
    b_l = gl.where(o_m < num_q, b_l, 1.0)
    if LSE:
        b_lse = gl.fma(b_m, gl.full(b_m.shape, c, gl.float32, b_m.type.layout), gl.log2(b_l)) * 0.6931471805599453
        gl.store(p_lse + (i_q + o_m).to(gl.int64) * H + i_h, b_lse, mask=o_m < num_q)
    b_wide, _ = gl.broadcast(gl.convert_layout(b_l, gl.SliceLayout(1, L_O))[:, None], b_acc)
    b_out = gl.div_rn(b_acc, b_wide) + 0.0
    o_m = i_first + gl.arange(0, 64, gl.SliceLayout(1, L_O))
    o_out = (i_q + o_m).to(gl.int64) * (H * DV) + i_h * DV
    p_block = p_out + o_out[:, None] + gl.arange(0, DV, gl.SliceLayout(0, L_O))[None, :]
    gl.store(p_block, b_out.to(p_out.dtype.element_ty), mask=(o_m < num_q)[:, None])


@gluon.jit(do_not_specialize=["num_pages", "max_pages", "num_near", "num_parts"])
def attn_prefill_hopper_kernel(
    d_q, d_q2, d_k, d_k2, d_v, p_out, p_lse, p_cu_q, p_starts, p_tiles, p_keys,
    c, s_q_head, s_k_head, s_k2_head, s_v_head, num_pages, max_pages, H, num_near, num_parts,
    GROUP: gl.constexpr, D1: gl.constexpr, D2: gl.constexpr, DV: gl.constexpr, BN: gl.constexpr, PAGE: gl.constexpr,
    LSE: gl.constexpr, STAGES: gl.constexpr, NO_SCORE: gl.constexpr, UNSEEN: gl.constexpr,
):  # fmt: skip
    """Compute one tile (128 queries) of one head. Arguments and order are those of `_attn_prefill_kernel`."""
    i_pair = gl.program_id(0) % (num_near * num_parts)
    i_h = gl.program_id(0) // (num_near * num_parts) * num_near + i_pair % num_near
    i_tile = i_pair // num_near
    i_b = gl.load(p_tiles + i_tile * 2)
    i_first = gl.load(p_tiles + i_tile * 2 + 1)
    i_q = gl.load(p_cu_q + i_b)
    num_q = gl.load(p_cu_q + i_b + 1) - i_q
    # A captured step has room for more tiles than most steps use.
    if i_first >= num_q:
        return
    start = gl.load(p_starts + i_b)
    i_kv = i_h // GROUP
    num_blocks = (start + gl.minimum(i_first + 128, num_q) + BN - 1) // BN
    p_pages = p_keys + i_b.to(gl.int64) * max_pages
    i_base = i_kv * num_pages * PAGE if PAGE > 0 else gl.load(p_keys + i_b)

    DT: gl.constexpr = p_out.dtype.element_ty
    s_q = gl.allocate_shared_memory(DT, [2, 64, D1], d_q.layout)
    s_k = gl.allocate_shared_memory(DT, [STAGES, BN, D1], d_k.layout)
    s_v = gl.allocate_shared_memory(DT, [STAGES, BN, DV], d_v.layout)
    s_q2, s_k2 = s_q, s_k
    if D2 > 0:
        s_q2 = gl.allocate_shared_memory(DT, [2, 64, D2], d_q2.layout)
        s_k2 = gl.allocate_shared_memory(DT, [STAGES, BN, D2], d_k2.layout)
    e_q = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    e_k = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    e_v = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    f_k = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    f_v = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(e_q, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(e_k.index(i), count=1)
        mbarrier.init(e_v.index(i), count=1)
        mbarrier.init(f_k.index(i), count=2)
        mbarrier.init(f_v.index(i), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_compute, (
                s_q, s_q2, s_k, s_k2, s_v, e_q, e_k, e_v, f_k, f_v, p_out, p_lse, i_h, i_q, i_first, num_q, start,
                num_blocks, H, c, D2, DV, BN, STAGES, LSE, NO_SCORE, UNSEEN, 0,
            )),
            (_compute, (
                s_q, s_q2, s_k, s_k2, s_v, e_q, e_k, e_v, f_k, f_v, p_out, p_lse, i_h, i_q, i_first, num_q, start,
                num_blocks, H, c, D2, DV, BN, STAGES, LSE, NO_SCORE, UNSEEN, 1,
            )),
            (_copy, (
                d_q, d_q2, d_k, d_k2, d_v, s_q, s_q2, s_k, s_k2, s_v, e_q, e_k, e_v, f_k, f_v, p_pages,
                i_q + i_first, i_h * s_q_head, i_base, i_kv * s_k_head, i_kv * s_k2_head, i_kv * s_v_head, num_blocks,
                D1, D2, DV, BN, PAGE, STAGES,
            )),
        ],
        [4, 1],
        _REGISTERS,
    )  # fmt: skip
