"""Gluon: products over tiled codes on Hopper, with the bits of products over their bf16 values.

The left operand is weights. A warp loads words of codes into the registers where the tensor cores expect them, makes
bf16 values of them there, and multiplies. No value passes through shared memory. The right operand is BM rows, in
shared memory. Words come by bulk copies, and so do most rows. Those of tokens in a layout are gathered in pieces of 16
bytes. Buffers are filled in turn. K ascends in one fp32 accumulator per output, so neither tiles nor other rows change
a bit.

docs/benchmarks.md has the times. For 1, 8 and 64 tokens, Qwen3-30B-A3B's experts read fp8 codes at 53, 90 and 96 % of a
copy's bandwidth (H200, Triton 3.6, 2026-11-30). A first version in plain Triton passed values through shared memory,
and reached 40, 73 and 78 %.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moeyard_kernels.common import codes
from moeyard_kernels.common.dependent import let_next_begin, wait_for_previous
from moeyard_kernels.common.gluon import load_block, load_rows, reinterpret
from moeyard_kernels.common.tuning import Config
from moeyard_kernels.experts.grouped_choice import limited, nth_slot, score_experts, write_choice
from moeyard_kernels.experts.result_rows import result_rows
from moeyard_kernels.types.matrix import Matrix
from moeyard_kernels.types.weight_form import TILE, WeightForm

# Triton 3.7 renamed it.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
_TILE = gl.constexpr(TILE)
_FP8_0, _FP8_1 = codes.FP8_0, codes.FP8_1
_NARROW_0, _NARROW_1 = codes.NARROW_0, codes.NARROW_1
_FP4_0, _FP4_1, _FP4_2, _FP4_3 = codes.FP4_0, codes.FP4_1, codes.FP4_2, codes.FP4_3
_INT4_0, _INT4_1, _INT4_2, _INT4_3 = codes.INT4_0, codes.INT4_1, codes.INT4_2, codes.INT4_3
_WIDE_0, _WIDE_1, _WIDE_2, _WIDE_3 = codes.WIDE_0, codes.WIDE_1, codes.WIDE_2, codes.WIDE_3
# bf16 scales of fp8 codes times this are factors of values times 2^-120.
E4M3_FACTOR = gl.constexpr(2.0**120)
# How a program finds its block of rows: from a layout, or from pairs without one.
LAYOUT, PAIRS = (gl.constexpr(i) for i in range(2))


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedConfig(Config):
    """BN outputs per program (BN gates and BN ups), `tiles` tiles of codes per copy, num_stages copies in flight.

    warp_products: each warp multiplies by itself (mma.sync), which suits the shortest chains of steps: few rows.
    """

    kernel: Literal["packed"] = "packed"
    BN: int
    tiles: int
    warp_products: bool = False


@gluon.jit
def _fp8(text: gl.constexpr, b_code, b_scale):
    return gl.inline_asm_elementwise(text, "=r,r,f,f", [b_code, b_scale], dtype=gl.bfloat16, is_pure=True, pack=2)


@gluon.jit
def _int4(narrow: gl.constexpr, wide: gl.constexpr, b_code, b_zero, b_scale):
    if b_scale.dtype == gl.float32:
        args = [b_code, b_zero, b_scale]
        b_w = gl.inline_asm_elementwise(wide, "=r,r,r,f,f", args, dtype=gl.bfloat16, is_pure=True, pack=2)
    else:
        args = [b_code, b_zero, b_scale]
        b_w = gl.inline_asm_elementwise(narrow, "=r,r,r,r", args, dtype=gl.bfloat16, is_pure=True, pack=2)
    return b_w


@gluon.jit
def _exact(text: gl.constexpr, b_code, b_scale):
    return gl.inline_asm_elementwise(text, "=r,r,r", [b_code, b_scale], dtype=gl.bfloat16, is_pure=True, pack=2)


@gluon.jit
def factors(b_scale, CODES: gl.constexpr):
    """Return what `decode` multiplies by: 2^126 times the scales with these exponents, 2^120 times bf16 scales of fp8
    codes, or the scales."""
    if CODES == "fp4":
        b_scale = ((b_scale.to(gl.int16) + 126) << 7).to(gl.bfloat16, bitcast=True)
    elif CODES == "fp8" and b_scale.dtype == gl.bfloat16:
        b_scale = (b_scale.to(gl.float32) * E4M3_FACTOR).to(gl.bfloat16)
    return b_scale


@gluon.jit
def decode(b_code, b_zero, b_scale, n: gl.constexpr, CODES: gl.constexpr):
    """Return bf16 values [R, 32] of slice n of words b_code [R, 32].

    b_zero is 128 + zero point of int4 codes. b_scale is made by `factors`.
    """
    if CODES == "fp8" and b_scale.dtype == gl.bfloat16:
        if n == 0:  # noqa: SIM108 - of constants
            b_w = _exact(_NARROW_0, b_code, b_scale)
        else:
            b_w = _exact(_NARROW_1, b_code, b_scale)
    elif CODES == "fp8":
        if n == 0:  # noqa: SIM108 - of constants
            b_w = _fp8(_FP8_0, b_code, b_scale)
        else:
            b_w = _fp8(_FP8_1, b_code, b_scale)
    elif CODES == "fp4":
        if n == 0:
            b_w = _exact(_FP4_0, b_code, b_scale)
        elif n == 1:
            b_w = _exact(_FP4_1, b_code, b_scale)
        elif n == 2:
            b_w = _exact(_FP4_2, b_code, b_scale)
        else:
            b_w = _exact(_FP4_3, b_code, b_scale)
    elif n == 0:
        b_w = _int4(_INT4_0, _WIDE_0, b_code, b_zero, b_scale)
    elif n == 1:
        b_w = _int4(_INT4_1, _WIDE_1, b_code, b_zero, b_scale)
    elif n == 2:
        b_w = _int4(_INT4_2, _WIDE_2, b_code, b_zero, b_scale)
    else:
        b_w = _int4(_INT4_3, _WIDE_3, b_code, b_zero, b_scale)
    return b_w


@gluon.jit
def _gather_rows(p_a, s_a, s_o, s_x, i_k, more, L_C: gl.constexpr):
    """Copy [S, BM, 32] values of rows s_o, from column i_k on, if they are not below 0.

    The numbers of the rows are in shared memory because registers would not hold them.
    """
    L_K: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, L_C))
    b_row = s_o.load(gl.SliceLayout(0, gl.SliceLayout(2, L_C)))
    o_s = gl.arange(0, s_x.shape[0], L_K)[:, None, None]
    o_c = gl.arange(0, _TILE, gl.SliceLayout(0, gl.SliceLayout(1, L_C)))[None, None, :]
    o_x = (i_k + o_s * _TILE + o_c) + (b_row * s_a)[None, :, None]
    load_rows(s_x, p_a + o_x, mask=more & (o_x >= 0))
    async_copy.commit_group()


@gluon.jit
def _refill(
    i_s, d_w, d_a, s_w, s_x, e_w, e_x, p_a, s_a, s_o, i_slot, i_n, i_row, NUM: gl.constexpr, GATHER: gl.constexpr,
    L_C: gl.constexpr,
):  # fmt: skip
    """Copy words and rows of step i_s behind a barrier of all warps. The copies' own barriers already expect them."""
    SLICES: gl.constexpr = s_x.shape[0]
    load_block(d_w, [i_slot, i_s * s_w.shape[0], 0, i_n, 0], e_w, words_of(s_w, d_w), pred=i_s < NUM)
    if GATHER:
        _gather_rows(p_a, s_a, s_o, rows_of(s_x), i_s * (SLICES * _TILE), i_s < NUM, L_C)
    else:
        load_block(d_a, [i_s * SLICES, i_row, 0], e_x, rows_of(s_x), pred=i_s < NUM)


@gluon.jit
def expect(s_w, s_x, e_w, e_x, more, GATHER: gl.constexpr):
    """Let the barriers of a buffer wait for the bytes of its copies."""
    mbarrier.expect(e_w, s_w.shape[0] * s_w.shape[1] * _TILE * 2, pred=more)
    if not GATHER:
        mbarrier.expect(e_x, s_x.shape[0] * s_x.shape[1] * _TILE * 2, pred=more)


@gluon.jit
def _of_rows(s_r, b_tile, L_A: gl.constexpr):
    """Return the value of each row, s_r [R], for all columns of b_tile [R, 32]."""
    b_r, _ = gl.broadcast(gl.expand_dims(s_r.load(gl.SliceLayout(1, L_A)), 1), b_tile)
    return b_r


@gluon.jit
def _multiply_step(
    b_acc, i_s, phase, i_zero, d_w, d_a, s_w, s_x, s_s, s_z, e_w, e_x, p_a, s_a, s_o, i_slot, i_n, i_row,
    B: gl.constexpr, NUM: gl.constexpr, GATHER: gl.constexpr, CODES: gl.constexpr, STAGES: gl.constexpr,
    SK: gl.constexpr, ZEROS: gl.constexpr, L_A: gl.constexpr, L_C: gl.constexpr,
):  # fmt: skip
    """Add the products of step i_s, which is in buffer B, and refill the buffer of the step before.

    Every buffer is an allocation of its own. For views of one allocation the compiler would fence its copies from the
    products, and wait for rows that a later step needs. i_zero is 0, which the compiler does not know. So it computes
    the addresses of rows where they are used. Kept for all buffers, they would exceed the uniform registers.
    """
    CH: gl.constexpr = s_w[0].shape[0]
    R: gl.constexpr = s_w[0].shape[1]
    SLICES: gl.constexpr = s_x[0].shape[0]
    PER: gl.constexpr = SLICES // CH
    F: gl.constexpr = (B + STAGES - 1) % STAGES
    # Gathered rows of few tokens take longer to arrive than their products take, so they are asked for first.
    EARLY: gl.constexpr = GATHER and s_x[0].shape[1] <= 32
    DT: gl.constexpr = gl.bfloat16
    i_next = i_s + STAGES - 1
    b_tile = gl.zeros([R, _TILE], DT, L_A)
    b_zero = gl.full([R, _TILE], 136.0, DT, L_A)
    if GATHER:
        async_copy.wait_group(STAGES - 2)
        fence_async_shared()
        if EARLY:
            b_acc = warpgroup_mma_wait(num_outstanding=0, deps=(b_acc,))
            expect(s_w[F], s_x[F], e_w[F], e_x[F], i_next < NUM, GATHER)
        barrier()
        if EARLY:
            _refill(
                i_next, d_w, d_a, s_w[F], s_x[F], e_w[F], e_x[F], p_a, s_a, s_o, i_slot, i_n, i_row, NUM, GATHER, L_C
            )
    else:
        mbarrier.wait(e_x[B], phase)
    mbarrier.wait(e_w[B], phase)
    for u in gl.static_range(CH):
        b_code = s_w[B].index(u).load(L_A)
        for n in gl.static_range(PER):
            if (u * PER + n) * _TILE % SK == 0 or u + n == 0:
                i_scale = (i_s * SLICES + u * PER + n) * _TILE // SK
                b_scale = _of_rows(s_s.index(i_scale), b_tile, L_A)
                if ZEROS:
                    b_zero = _of_rows(s_z.index(i_scale), b_tile, L_A)
            b_w = decode(b_code, b_zero, b_scale, n, CODES)
            b_acc = warpgroup_mma(b_w, s_x[B].index(u * PER + n + i_zero).permute((1, 0)), b_acc, is_async=True)
            # Codes are decoded while the last product runs.
            b_acc = warpgroup_mma_wait(num_outstanding=1, deps=(b_acc,))
            if u + n == 0 and not EARLY:
                # The products of the step before are complete in all warps behind the barrier.
                expect(s_w[F], s_x[F], e_w[F], e_x[F], i_next < NUM, GATHER)
                barrier()
                _refill(
                    i_next, d_w, d_a, s_w[F], s_x[F], e_w[F], e_x[F], p_a, s_a, s_o, i_slot, i_n, i_row, NUM, GATHER,
                    L_C,
                )  # fmt: skip
    return b_acc


@gluon.jit
def group_products(
    b_acc, P, d_w, d_a, s_w, s_x, s_s, s_z, e_w, e_x, p_a, s_a, s_o, i_slot, i_n, i_row,
    NUM: gl.constexpr, GATHER: gl.constexpr, CODES: gl.constexpr, STAGES: gl.constexpr, SK: gl.constexpr,
    ZEROS: gl.constexpr, L_A: gl.constexpr, L_C: gl.constexpr,
):  # fmt: skip
    """Add the products of all NUM steps; the first STAGES - 1 are on their way. Four warps multiply together (wgmma).

    P is a number below 2^30 that the compiler does not know. Without GATHER, p_a, s_a, s_o and L_C are not used.
    """
    for i_o in range(NUM // STAGES):
        for i in gl.static_range(STAGES):
            b_acc = _multiply_step(
                b_acc, i_o * STAGES + i, i_o & 1, (i_o + P) >> 30, d_w, d_a, s_w, s_x, s_s, s_z, e_w, e_x, p_a,
                s_a, s_o, i_slot, i_n, i_row, i, NUM, GATHER, CODES, STAGES, SK, ZEROS, L_A, L_C,
            )  # fmt: skip
    for i in gl.static_range(NUM % STAGES):
        b_acc = _multiply_step(
            b_acc, NUM // STAGES * STAGES + i, NUM // STAGES % 2, P >> 30, d_w, d_a, s_w, s_x, s_s, s_z, e_w,
            e_x, p_a, s_a, s_o, i_slot, i_n, i_row, i, NUM, GATHER, CODES, STAGES, SK, ZEROS, L_A, L_C,
        )  # fmt: skip
    return warpgroup_mma_wait(num_outstanding=0, deps=(b_acc,))


@gluon.jit
def _warp_step(
    b_acc, words, i_s, phase, d_w, d_a, s_w, s_x, s_s, s_z, e_w, e_x, i_slot, i_n, i_row,
    B: gl.constexpr, MORE: gl.constexpr, NUM: gl.constexpr, STAGES: gl.constexpr, CODES: gl.constexpr,
    SK: gl.constexpr, ZEROS: gl.constexpr, L_A: gl.constexpr, L_B: gl.constexpr,
):  # fmt: skip
    """Add the products of step i_s, of words in registers and rows in buffer B, and return the words of the next step.

    Products wait for each other, so all that the next steps need is done between them. Without MORE there is none.
    """
    CH: gl.constexpr = s_w[B].shape[0]
    SLICES: gl.constexpr = s_x[B].shape[0]
    PER: gl.constexpr = SLICES // CH
    F: gl.constexpr = (B + STAGES - 1) % STAGES
    J: gl.constexpr = (B + 1) % STAGES
    b_tile = gl.zeros([b_acc.shape[0], _TILE], gl.bfloat16, L_A)
    b_zero = gl.full([b_acc.shape[0], _TILE], 136.0, gl.bfloat16, L_A)
    i_fill = i_s + STAGES - 1
    later = ()
    for u in gl.static_range(CH):
        for n in gl.static_range(PER):
            if (u * PER + n) * _TILE % SK == 0 or u + n == 0:
                i_scale = (i_s * SLICES + u * PER + n) * _TILE // SK
                b_scale = _of_rows(s_s.index(i_scale), b_tile, L_A)
                if ZEROS:
                    b_zero = _of_rows(s_z.index(i_scale), b_tile, L_A)
            b_w = decode(words[u], b_zero, b_scale, n, CODES)
            b_acc = mma_v2(b_w, s_x[B].index(u * PER + n).permute((1, 0)).load(L_B), b_acc)
            if MORE and u + n == 0:
                expect(s_w[F], s_x[F], e_w[F], e_x[F], i_fill < NUM, False)
                # All warps have multiplied the step before.
                barrier()
                load_block(d_w, [i_slot, i_fill * CH, 0, i_n, 0], e_w[F], words_of(s_w[F], d_w), pred=i_fill < NUM)
                load_block(d_a, [i_fill * SLICES, i_row, 0], e_x[F], rows_of(s_x[F]), pred=i_fill < NUM)
        if MORE:
            if u == 0:
                # The next step has the next buffer, or the first one in its next phase.
                mbarrier.wait(e_w[J], phase if B + 1 < STAGES else phase ^ 1)
                mbarrier.wait(e_x[J], phase if B + 1 < STAGES else phase ^ 1)
            later = later + (s_w[J].index(u).load(L_A),)  # type: ignore[assignment]  # noqa: RUF005
    return b_acc, later


@gluon.jit
def warp_products(
    b_acc, d_w, d_a, s_w, s_x, s_s, s_z, e_w, e_x, i_slot, i_n, i_row,
    NUM: gl.constexpr, STAGES: gl.constexpr, CODES: gl.constexpr, SK: gl.constexpr, ZEROS: gl.constexpr,
    L_A: gl.constexpr, L_B: gl.constexpr,
):  # fmt: skip
    """Add the products of all NUM steps; the first STAGES - 1 are on their way.

    Each warp multiplies by itself (mma.sync, which has the bits of wgmma). Words of a step are loaded into registers
    while the products of the step before run.
    """
    ROUNDS: gl.constexpr = (NUM - 1) // STAGES
    LAST: gl.constexpr = (NUM - 1) % STAGES
    CH: gl.constexpr = s_w[0].shape[0]
    words = ()
    mbarrier.wait(e_w[0], 0)
    mbarrier.wait(e_x[0], 0)
    for u in gl.static_range(CH):
        words = words + (s_w[0].index(u).load(L_A),)  # type: ignore[assignment]  # noqa: RUF005
    for i_o in range(ROUNDS):
        for i in gl.static_range(STAGES):
            b_acc, words = _warp_step(
                b_acc, words, i_o * STAGES + i, i_o & 1, d_w, d_a, s_w, s_x, s_s, s_z, e_w, e_x, i_slot, i_n, i_row,
                i, True, NUM, STAGES, CODES, SK, ZEROS, L_A, L_B,
            )  # fmt: skip
    for i in gl.static_range(LAST + 1):
        b_acc, words = _warp_step(
            b_acc, words, ROUNDS * STAGES + i, ROUNDS % 2, d_w, d_a, s_w, s_x, s_s, s_z, e_w, e_x, i_slot, i_n, i_row,
            i, i < LAST, NUM, STAGES, CODES, SK, ZEROS, L_A, L_B,
        )  # fmt: skip
    return b_acc


@gluon.jit
def words_of(s_w, d_w):
    """Return a buffer [CH, R, 32] as the block of words that a copy writes."""
    return reinterpret(s_w, gl.int16, d_w.block_type.shape, d_w.layout)


@gluon.jit
def rows_of(s_x):
    """Return a buffer [S, BM, 32] as the block of rows that a copy writes."""
    return reinterpret(s_x, gl.bfloat16, s_x.shape, gl.NVMMASharedLayout(64, 16, 3))


@gluon.jit
def _pairs_of_expert(
    p_ids, i_p, P, BP: gl.constexpr, BM: gl.constexpr, TOP: gl.constexpr, NW: gl.constexpr, L_M: gl.constexpr
):
    """Return whether pair i_p of P begins a block, and the pair [BM] of each token in it or -1.

    The first pair of an expert does, with the first pair of each token. So does a repeated expert of a token, which
    only tables by token ids can name, with itself.
    """
    L_Q: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [NW, 1], [1, 0])
    o_q, o_r = gl.arange(0, BP, gl.SliceLayout(0, L_Q)), gl.arange(0, BM, gl.SliceLayout(1, L_Q))
    b_q = gl.load(p_ids + o_q, mask=o_q < P, other=-1).to(gl.int32)
    m_q = b_q == gl.load(p_ids + i_p).to(gl.int32)
    m_before = m_q & (o_q < i_p)
    repeats = gl.sum((m_before & (o_q // TOP == i_p // TOP)).to(gl.int32), 0) > 0
    begins = repeats | (gl.sum(m_before.to(gl.int32), 0) == 0)
    m_row = m_q[None, :] & ((o_q // TOP)[None, :] == o_r[:, None])
    b_left = gl.max(gl.where(m_row, (BP - o_q)[None, :], 0), 1)
    b_pair = gl.where(b_left > 0, BP - b_left, -1)
    b_pair = gl.where(repeats, gl.where(o_r == i_p // TOP, i_p, -1), b_pair)
    return begins, gl.convert_layout(b_pair, L_M)


# A plan's entries begin after those of its earlier parts, at any alignment.
@gluon.jit(do_not_specialize=["P"], do_not_specialize_on_alignment=["p_entries"])
def packed_product_kernel(
    p_a, d_a, d_w, p_s, p_z, p_pairs, p_slots, p_num_blocks, P, p_out, p_table, p_state, s_a, s_scale, s_zero,
    p_logits, p_bias, p_counts, p_entries, p_weights, scaling,
    N: gl.constexpr, K: gl.constexpr, TOP_K: gl.constexpr, WORLD: gl.constexpr, HOME: gl.constexpr,
    ROWS: gl.constexpr, GATED: gl.constexpr, SOURCE_K: gl.constexpr, CODES: gl.constexpr, BM: gl.constexpr,
    BN: gl.constexpr, CH: gl.constexpr, STAGES: gl.constexpr, SR: gl.constexpr, SK: gl.constexpr, KS: gl.constexpr,
    ZEROS: gl.constexpr, BP: gl.constexpr, NW: gl.constexpr, WARPS: gl.constexpr,
    LIMIT: gl.constexpr, E: gl.constexpr, SOFTMAX: gl.constexpr, HAS_BIAS: gl.constexpr, L_E: gl.constexpr,
    CHOSEN: gl.constexpr, BC: gl.constexpr, RENORMALIZE: gl.constexpr, HAS_COUNTS: gl.constexpr,
):  # fmt: skip
    """Compute one block of BM rows by BN outputs. Grid: (blocks * ceil(N / BN),).

    - GATED: the first product, of tokens' rows. It stores h = silu_mul of gates and ups. Row r of block b is row
      BM * b + r of h. Without a layout an expert has one block, and its row r belongs to token r.
    - d_w: words [S, tiles, G, N, 32] in blocks [1, CH, G, BN, 32].
    - p_s, p_z: scales and zero points [S, K / SK, G, N / SR]. Slots are s_scale and s_zero apart. KS covers K / SK.
    - d_a: rows as [K / 32, rows, 32] in blocks [CH * slices, BM, 32]. The first product with a layout reads p_a
      instead, whose rows are s_a apart.
    - E > 0: one token still has to choose CHOSEN of E experts. The second product writes ids to p_pairs, and weights.
    """
    G: gl.constexpr = 2 if GATED else 1
    R: gl.constexpr = G * BN
    GATHER: gl.constexpr = GATED and ROWS == LAYOUT
    PER: gl.constexpr = 2 if CODES == "fp8" else 4
    SLICES: gl.constexpr = CH * PER
    NUM: gl.constexpr = K // (SLICES * _TILE)
    NB: gl.constexpr = (N + SR - 1) // SR
    DT: gl.constexpr = gl.bfloat16
    ST: gl.constexpr = DT if CODES == "fp4" else p_s.dtype.element_ty
    L_Y: gl.constexpr = gl.NVMMADistributedLayout([2 if WARPS else 3, 0], [NW, 1], [16, 8] if WARPS else [16, BM, 16])
    L_A: gl.constexpr = gl.DotOperandLayout(0, L_Y, 2)
    L_X: gl.constexpr = gl.NVMMASharedLayout(64, 16, 2)
    L_B: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    WS: gl.constexpr = SLICES if SLICES < NW else NW
    L_C: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 8, 4], [WS, NW // WS, 1], [2, 1, 0])
    L_M: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, L_C))
    L_S: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [NW, 1], [1, 0])
    # Triton 3.6 has no unpacking of tuples.
    s_w, s_x, e_w, e_x = (), (), (), ()
    for _ in gl.static_range(STAGES):
        s_w = s_w + (gl.allocate_shared_memory(gl.int16, [CH, R, _TILE], L_X),)  # type: ignore[assignment]  # noqa: RUF005
        s_x = s_x + (gl.allocate_shared_memory(DT, [SLICES, BM, _TILE], L_X),)  # type: ignore[assignment]  # noqa: RUF005
        e_w = e_w + (gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),)  # type: ignore[assignment]  # noqa: RUF005
        e_x = e_x + (gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),)  # type: ignore[assignment]  # noqa: RUF005
    s_s = gl.allocate_shared_memory(ST, [KS, R], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    s_z = s_s
    if ZEROS:
        s_z = gl.allocate_shared_memory(DT, [KS, R], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    s_o = gl.allocate_shared_memory(gl.int32, [BM], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for i in gl.static_range(STAGES):
        mbarrier.init(e_w[i], count=1)
        mbarrier.init(e_x[i], count=1)
    fence_async_shared()
    if GATED:
        # In every program: the second product reads ids and weights before it waits, and relies on this wait.
        wait_for_previous()
    i_b, i_n = gl.program_id(0) // gl.cdiv(N, BN), gl.program_id(0) % gl.cdiv(N, BN) * BN
    o_m = gl.arange(0, BM, L_M)
    if ROWS == LAYOUT:
        here = i_b < gl.load(p_num_blocks)
        i_slot = gl.load(p_slots + i_b, mask=here, other=0)
        b_pair = gl.load(p_pairs + i_b.to(gl.int64) * BM + o_m, mask=here, other=-1)
    elif E:
        # As in `expert_slice_kernel`.
        o_e, b_key, b_max, b_sum = score_experts(p_logits, p_bias, E, SOFTMAX, HAS_BIAS, L_E)
        i_slot = nth_slot(o_e, b_key, gl.load(p_slots + o_e, mask=o_e < E, other=0), i_b)
        here = i_slot >= 0
        b_pair = gl.where(o_m == 0, i_b, -1)
        if not GATED:  # noqa: SIM102 - of a constant and of what is known in the kernel
            if gl.program_id(0) == 0:
                write_choice(
                    p_logits, p_counts, p_entries, p_weights, p_pairs, o_e, b_key, b_max, b_sum, scaling,
                    CHOSEN, BC, SOFTMAX, RENORMALIZE, HAS_COUNTS, NW,
                )  # fmt: skip
    else:
        i_id = gl.load(p_pairs + i_b).to(gl.int32)
        i_slot = gl.load(p_slots + gl.maximum(i_id, 0))
        here = (i_id >= 0) & (i_slot >= 0)
        if BP == 1:
            b_pair = gl.where(o_m == 0, i_b, -1)
        else:
            begins, b_pair = _pairs_of_expert(p_pairs, i_b, P, BP, BM, SOURCE_K, NW, L_M)
            here = here & begins
    if GATED:
        let_next_begin()
    i_row = i_b * BM
    # The first product without a layout reads all tokens.
    i_first = 0 if GATED else i_row
    if here:
        for i in gl.static_range(STAGES - 1):
            # A copy past the end would have no reader, and could still write when the program has ended.
            expect(s_w[i], s_x[i], e_w[i], e_x[i], i < NUM, GATHER)
            load_block(d_w, [i_slot, i * CH, 0, i_n, 0], e_w[i], words_of(s_w[i], d_w), pred=i < NUM)
        o_r = gl.arange(0, R, gl.SliceLayout(0, L_S))
        o_g = gl.arange(0, KS, gl.SliceLayout(1, L_S))
        o_s = o_g[:, None] * (G * NB) + (o_r // BN * NB + gl.minimum(i_n + o_r % BN, N - 1) // SR)[None, :]
        m_s = (o_g < (K + SK - 1) // SK)[:, None] & (o_r >= 0)[None, :]
        p_s += i_slot.to(gl.int64) * s_scale
        p_z += i_slot.to(gl.int64) * s_zero
        b_s = factors(gl.load(p_s + o_s, mask=m_s, other=0), CODES)
        reinterpret(s_s, ST, [KS, R], L_B).store(b_s)
        if ZEROS:
            b_z = gl.load(p_z + o_s, mask=m_s, other=0)
            reinterpret(s_z, DT, [KS, R], L_B).store((b_z.to(gl.float32) + 128.0).to(DT))
        if not GATED:
            wait_for_previous()
            let_next_begin()
        if GATHER:
            # Rows below 0 are not copied. The results of padding, of whichever bytes are there, are not stored.
            s_o.store(gl.where(b_pair >= 0, b_pair // SOURCE_K, -1))
        for i in gl.static_range(STAGES - 1):
            if GATHER:
                _gather_rows(p_a, s_a, s_o, rows_of(s_x[i]), i * SLICES * _TILE, i < NUM, L_C)
            else:
                load_block(d_a, [i * SLICES, i_first, 0], e_x[i], rows_of(s_x[i]), pred=i < NUM)
        b_acc = gl.zeros([R, BM], gl.float32, L_Y)
        if WARPS:
            b_acc = warp_products(
                b_acc, d_w, d_a, s_w, s_x, s_s, s_z, e_w, e_x, i_slot, i_n, i_first, NUM, STAGES, CODES, SK, ZEROS,
                L_A, gl.DotOperandLayout(1, L_Y, 2),
            )  # fmt: skip
        else:
            b_acc = group_products(
                b_acc, P, d_w, d_a, s_w, s_x, s_s, s_z, e_w, e_x, p_a, s_a, s_o, i_slot, i_n, i_first, NUM, GATHER,
                CODES, STAGES, SK, ZEROS, L_A, L_C,
            )  # fmt: skip
        if GATHER:
            async_copy.wait_group(0)
        if GATED:
            b_both = gl.permute(gl.reshape(b_acc, [2, BN, BM]), (1, 2, 0))
            if BN != 16 * NW:
                # Gates and ups are in different warps.
                b_both = gl.convert_layout(b_both, gl.BlockedLayout([1, 1, 2], [4, 8, 1], [NW, 1, 1], [2, 1, 0]))
            b_gate, b_up = gl.split(b_both)
            b_gate, b_up = limited(b_gate.to(DT).to(gl.float32), b_up.to(DT).to(gl.float32), LIMIT)
            b_y = ((b_gate / (1.0 + gl.exp(-b_gate))).to(DT).to(gl.float32) * b_up).to(DT)
        else:
            b_y = b_acc.to(DT)
        if BM >= 64:
            # Neighbouring lanes store 16 bytes each.
            LN: gl.constexpr = BN // 8 if BN < 256 else 32
            L_T: gl.constexpr = gl.BlockedLayout([8, 1], [LN, 32 // LN], [1, NW], [0, 1])
            s_y = gl.allocate_shared_memory(DT, [BN, BM], gl.SwizzledSharedLayout(8, 1, 8, [0, 1]), b_y)
            b_y = s_y.load(L_T)
        L_O: gl.constexpr = b_y.type.layout
        o_n, o_o = i_n + gl.arange(0, BN, gl.SliceLayout(1, L_O)), gl.arange(0, BM, gl.SliceLayout(0, L_O))
        b_row = gl.convert_layout(b_pair, gl.SliceLayout(0, L_O))
        if GATED:
            p_row, m_r = p_out + (i_row.to(gl.int64) + o_o) * N, b_row >= 0
        else:
            p_row, m_r = result_rows(p_out, p_table, p_state, b_row, N, TOP_K, WORLD, HOME)
        gl.store(p_row[None, :] + o_n[:, None], b_y, mask=(o_n < N)[:, None] & m_r[None, :])
    elif not GATED:
        # Every program waits, even without work, so that launches complete in order.
        wait_for_previous()


def scale_columns(config: PackedConfig, form: WeightForm, dim: int) -> int:
    """Return the column blocks of scales that a program keeps for matrices of `dim` columns: all, and a power of 2."""
    step = config.tiles * form.tile_columns
    return triton.next_power_of_2(triton.cdiv(triton.cdiv(dim, step) * step, form.parts[1].columns or dim))


def shared_bytes(config: PackedConfig, form: WeightForm, *, dim: int, rows: int, gated: bool) -> int:
    """Return the shared memory of a program for blocks of `rows` rows and matrices of `dim` columns."""
    outputs, step = config.BN * (2 if gated else 1), config.tiles * form.tile_columns
    scale = (4 if form.parts[1].dtype == "float32" else 2) + (2 if len(form.parts) > 2 else 0)
    # Each stage has two barriers of 8 bytes, and an allocation is a multiple of 16. The last one needs no padding.
    stage = config.tiles * TILE * 2 * outputs + step * 2 * rows + 32
    of_rows = 4 * rows if gated else 0
    return scale_columns(config, form, dim) * outputs * scale + config.num_stages * stage + of_rows - 8


def product_arguments(
    weight: Matrix, config: PackedConfig, a: torch.Tensor, block_rows: int, *, gated: bool, gathers: bool
) -> dict[str, Any]:
    """Return the arguments of the kernel that follow from the tiled matrices [S, G N, K], the rows a and the config."""
    words, scales, *zeros = weight.arrays
    num_out, dim, part = words.shape[3], weight.shape[-1], weight.form.parts[1]
    box = [1, config.tiles, words.shape[2], config.BN, TILE]
    tiles = TensorDescriptor(words, list(words.shape), list(words.stride()), box, gl.NVMMASharedLayout(64, 16, 5))
    rows = tiles
    if not gathers:
        slices = config.tiles * weight.form.tile_columns // TILE
        shape, box = [dim // TILE, a.shape[0], TILE], [slices, block_rows, TILE]
        rows = TensorDescriptor(a, shape, [TILE, a.stride(0), 1], box, gl.NVMMASharedLayout(64, 16, 3))
    return {
        "d_w": tiles,
        "d_a": rows,
        "p_s": scales,
        "p_z": zeros[0] if zeros else scales,
        "s_scale": scales.stride(0),
        "s_zero": zeros[0].stride(0) if zeros else 0,
        "N": num_out,
        "K": dim,
        "GATED": gated,
        "CODES": weight.form.name,
        "BN": config.BN,
        "CH": config.tiles,
        "STAGES": config.num_stages,
        "SR": part.rows or num_out,
        "SK": part.columns or dim,
        "KS": scale_columns(config, weight.form, dim),
        "ZEROS": bool(zeros),
        "NW": config.num_warps,
        "WARPS": config.warp_products,
        "num_warps": config.num_warps,
        "enable_fp_fusion": False,
    }
