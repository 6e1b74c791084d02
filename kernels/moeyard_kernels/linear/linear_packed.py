"""Gluon: `linear` over tiled fp8 codes for few rows on Hopper, and all values of such a matrix for many rows.

The products have the bits of `linear` over the bf16 values: one fp32 accumulator per output, K ascending. A program
computes BN columns, 16 to 64, because a matrix of 2048 rows needs slices of 16 to occupy a GPU. All warps decode the
words of a step, which spreads the work over lanes, and pass bf16 values through shared memory. A product whose weights
stay in registers (`experts.packed_product`) needs slices of 64. It was slower than bf16 at one row: a layer of
Qwen3-30B-A3B took 19.7 us, not 12.3.

One warp copies words and rows. Four decode a step into one of three buffers while the tensor cores still read another.
The instruction reads 64 rows. Rows from BN on belong to later tiles or are never written, and their results are not
stored. So a step of 16 columns costs the tensor cores what 64 would, as in `linear_skinny`.

Prompts read a matrix many times, so `write_values` makes its values once per product. A matrix of 4096 x 16384 takes 48
us at the bandwidth of a copy, its product with 1024 rows 196 us at 700 TFLOP/s.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moeyard_kernels.common import codes, launch
from moeyard_kernels.common.dependent import dependent, let_next_begin, wait_for_previous
from moeyard_kernels.common.gluon import load_block, reinterpret
from moeyard_kernels.common.tuning import MULTIPROCESSORS, Config
from moeyard_kernels.experts.packed_product import E4M3_FACTOR, barrier, decode, factors
from moeyard_kernels.types.matrix import Matrix
from moeyard_kernels.types.weight_form import TILE

_TILE = gl.constexpr(TILE)
# Columns of a tile of fp8 codes: 128 bytes of bf16 values, the width of the shared memory swizzle.
COLUMNS = 2 * TILE
_COLUMNS = gl.constexpr(COLUMNS)
# Rows of the left operand.
_WIDTH = gl.constexpr(64)
_LARGER_VIEWS = gl.constexpr(launch.LARGER_VIEWS)
# Buffers of decoded values.
_BUFFERS = gl.constexpr(3)
_FP8_0, _FP8_1 = codes.FP8_0, codes.FP8_1
_NARROW_0, _NARROW_1 = codes.NARROW_0, codes.NARROW_1


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLinear(Config):
    """BM rows and BN columns per program, steps of `tiles` tiles, num_stages steps in flight."""

    kernel: Literal["packed"] = "packed"
    BM: int
    BN: int
    tiles: int


CONFIGS = tuple(
    PackedLinear(BM=rows, BN=columns, tiles=tiles, num_stages=stages)
    for rows, columns, tiles, stages in (
        *((8, 16, 2, 8), (8, 16, 4, 4), (8, 16, 4, 6), (8, 16, 8, 3), (8, 16, 8, 5)),
        *((8, 32, 2, 4), (8, 32, 2, 6), (8, 32, 4, 3), (8, 32, 4, 5), (8, 64, 2, 4)),
        *((16, 16, 4, 4), (16, 16, 4, 6), (16, 32, 2, 6), (16, 32, 4, 4), (16, 64, 2, 4)),
        *((32, 16, 2, 6), (32, 16, 4, 5), (32, 32, 2, 5), (32, 32, 4, 4), (32, 64, 2, 4)),
        *((64, 16, 2, 6), (64, 32, 2, 5), (64, 32, 2, 8), (64, 64, 2, 4), (64, 64, 2, 6)),
    )
)


@gluon.jit
def _advance(i_buffer, phase, STAGES: gl.constexpr):
    """Return the next buffer of the ring, and the phase of its barriers."""
    last = i_buffer == STAGES - 1
    return gl.where(last, 0, i_buffer + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def _copy(
    d_x, d_w, s_x, s_w, e, f, i_m, i_n,
    NUM: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, CH: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fill the buffers in one warp; refill each when it is free (f). A phase of e ends when all bytes have arrived."""
    BYTES: gl.constexpr = CH * (BN * _TILE + BM * _COLUMNS) * 2
    FIRST: gl.constexpr = STAGES if STAGES < NUM else NUM
    s_words = reinterpret(s_w, gl.int16, [STAGES, CH, BN, _TILE], d_w.layout)
    s_rows = reinterpret(s_x, gl.bfloat16, [STAGES, CH, BM, _COLUMNS], d_x.layout)
    # Weights do not change while a launch is in flight, so they are copied before the wait.
    for i in range(FIRST):
        mbarrier.expect(e.index(i), BYTES)
        load_block(d_w, [i * CH, i_n, 0], e.index(i), s_words.index(i))
    wait_for_previous()
    let_next_begin()
    for i in range(FIRST):
        load_block(d_x, [i * CH, i_m, 0], e.index(i), s_rows.index(i))
    i_buffer, phase = 0, 0
    for i_s in range(FIRST, NUM):
        bar = e.index(i_buffer)
        mbarrier.wait(f.index(i_buffer), phase)
        mbarrier.expect(bar, BYTES)
        load_block(d_w, [i_s * CH, i_n, 0], bar, s_words.index(i_buffer))
        load_block(d_x, [i_s * CH, i_m, 0], bar, s_rows.index(i_buffer))
        i_buffer, phase = _advance(i_buffer, phase, STAGES)


@gluon.jit
def _multiply(
    p_s, p_bias, p_y, s_x, s_w, s_v, e, f, i_m, i_n, M, N: gl.constexpr, SR: gl.constexpr, SK: gl.constexpr,
    NUM: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, CH: gl.constexpr, STAGES: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """Decode and multiply in four warps. A step is decoded while the products of the last one run."""
    DT: gl.constexpr = gl.bfloat16
    NB: gl.constexpr = (N + SR - 1) // SR
    L_Y: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    # Two warps or four, side by side, cover all rows: 8 lanes each.
    WS: gl.constexpr = 2 if BN == 16 else 1
    L_C: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 8, 4], [WS, 4 // WS, 1], [2, 1, 0])
    L_S: gl.constexpr = gl.SliceLayout(2, L_C)
    L_W3: gl.constexpr = gl.NVMMASharedLayout(64, 16, 3)
    L_V: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    L_V3: gl.constexpr = gl.NVMMASharedLayout(128, 16, 3)
    s_words = reinterpret(s_w, gl.int16, [STAGES, CH, BN, _TILE], L_W3)
    o_u, o_r = gl.arange(0, CH, gl.SliceLayout(1, L_S)), gl.arange(0, BN, gl.SliceLayout(0, L_S))
    p_row = p_s + gl.minimum(i_n + o_r, N - 1)[None, :] // SR
    b_scale = factors(gl.load(p_row + (o_u * _COLUMNS // SK * NB)[:, None]), "fp8")
    i_buffer, phase, i_value = 0, 0, 0
    # This loop runs once. Without it ptxas lets each product wait for the last one (its note C7514).
    for _tile in range(gl.program_id(0), gl.cdiv(M, BM) * gl.cdiv(N, BN), gl.num_programs(0)):
        b_acc = gl.zeros([_WIDTH, BM], gl.float32, L_Y)
        for i_s in range(NUM):
            b_next = b_scale
            if SK < NUM * CH * _COLUMNS:
                i_next = gl.minimum(i_s + 1, NUM - 1) * CH
                b_next = factors(gl.load(p_row + ((i_next + o_u) * _COLUMNS // SK * NB)[:, None]), "fp8")
            mbarrier.wait(e.index(i_buffer), phase)
            b_code = s_words.index(i_buffer).load(L_C)
            b_each, _ = gl.broadcast(gl.expand_dims(b_scale, 2), b_code)
            b_low = decode(b_code, b_code, b_each, 0, "fp8")
            b_high = decode(b_code, b_code, b_each, 1, "fp8")
            b_both = gl.reshape(gl.permute(gl.join(b_low, b_high), (0, 1, 3, 2)), [CH, BN, _COLUMNS])
            # All warps passed the last barrier when the products of the step three before this one were complete.
            if _LARGER_VIEWS:
                reinterpret(s_v.index(i_value * CH), DT, [CH, BN, _COLUMNS], L_V3).store(b_both)
            else:
                s_v.index(i_value).slice(0, BN, dim=1).store(b_both)
            fence_async_shared()
            barrier()
            # Now they have those of the step two before, so its words and rows may be replaced.
            i_free = gl.where(i_buffer >= 2, i_buffer - 2, i_buffer + STAGES - 2)
            mbarrier.arrive(f.index(i_free), count=1, pred=i_s >= 2)
            for u in gl.static_range(CH):
                if _LARGER_VIEWS:
                    s_left = reinterpret(s_v.index(i_value * CH + u), DT, [_WIDTH, _COLUMNS], L_V)
                else:
                    s_left = reinterpret(s_v.index(i_value), DT, [CH, _WIDTH, _COLUMNS], L_V).index(u)
                s_rows = s_x.index(i_buffer * CH + u).permute((1, 0))
                b_acc = warpgroup_mma(s_left, s_rows, b_acc, is_async=True)
            # With 64 columns ptxas would let each product in flight wait for the last one.
            b_acc = warpgroup_mma_wait(num_outstanding=CH if BN < _WIDTH else 0, deps=(b_acc,))
            b_scale = b_next
            i_buffer, phase = _advance(i_buffer, phase, STAGES)
            i_value = gl.where(i_value == _BUFFERS - 1, 0, i_value + 1)
        b_acc = warpgroup_mma_wait(num_outstanding=0, deps=(b_acc,))
        o_n, o_m = gl.arange(0, _WIDTH, gl.SliceLayout(1, L_Y)), i_m + gl.arange(0, BM, gl.SliceLayout(0, L_Y))
        m_n = (o_n < BN) & (i_n + o_n < N)
        if HAS_BIAS:
            b_acc += gl.load(p_bias + i_n + o_n, mask=m_n, other=0.0).to(gl.float32)[:, None]
        p_by = p_y + o_m.to(gl.int64)[None, :] * N + (i_n + o_n)[:, None]
        gl.store(p_by, b_acc.to(gl.bfloat16), mask=m_n[:, None] & (o_m < M)[None, :])


@gluon.jit(do_not_specialize=["M"])
def linear_packed_kernel(
    d_x, d_w, p_s, p_bias, p_y, M, N: gl.constexpr, K: gl.constexpr, SR: gl.constexpr, SK: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, CH: gl.constexpr, STAGES: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """Compute [BM, BN] of x [M, K] @ w [N, K].T (+ bias).

    - d_x: x as [K / 64, M, 64] in blocks [CH, BM, 64]. CH divides K / 64.
    - d_w: words [K / 64, N, 32] in blocks [CH, BN, 32].
    - p_s: scales [K / SK, N / SR] in fp32 or bf16.

    Grid: (ceil(M / BM) * ceil(N / BN),).
    """
    NUM: gl.constexpr = K // (CH * _COLUMNS)
    L_W: gl.constexpr = gl.NVMMASharedLayout(64, 16, 2)
    L_V: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    s_w = gl.allocate_shared_memory(gl.int16, [STAGES * CH, BN, _TILE], L_W)
    s_x = gl.allocate_shared_memory(gl.bfloat16, [STAGES * CH, BM, _COLUMNS], L_V)
    if _LARGER_VIEWS:
        # The buffers extend past the last tile by a whole operand.
        s_v = gl.allocate_shared_memory(gl.bfloat16, [_BUFFERS * CH + _WIDTH // BN - 1, BN, _COLUMNS], L_V)
    else:
        L_V3: gl.constexpr = gl.NVMMASharedLayout(128, 16, 3)
        s_v = gl.allocate_shared_memory(gl.bfloat16, [_BUFFERS, CH, _WIDTH, _COLUMNS], L_V3)
    e = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    f = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(e.index(i), count=1)
        mbarrier.init(f.index(i), count=1)
    fence_async_shared()
    i_m, i_n = gl.program_id(0) // gl.cdiv(N, BN) * BM, gl.program_id(0) % gl.cdiv(N, BN) * BN
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    p_s, p_bias, p_y, s_x, s_w, s_v, e, f, i_m, i_n, M, N, SR, SK,
                    NUM, BM, BN, CH, STAGES, HAS_BIAS,
                ),
            ),
            (_copy, (d_x, d_w, s_x, s_w, e, f, i_m, i_n, NUM, BM, BN, CH, STAGES)),
        ],
        [1],
        [40],
    )  # fmt: skip


@triton.jit
def write_values_kernel(
    p_w, p_s, p_y, N, K, SR, SK, BT: tl.constexpr, BN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the bf16 values [N, K] of words [K / 64, N, 32] and scales [K / SK, N / SR]. Grid: (K / 64 / BT, N / BN),
    rounded up."""
    o_t = tl.program_id(0) * BT + tl.arange(0, BT)
    o_n = tl.program_id(1) * BN + tl.arange(0, BN)
    o_c = tl.arange(0, TILE)
    m = (o_t < K // (2 * TILE))[:, None] & (o_n < N)[None, :]
    # An earlier product may still read the output.
    wait_for_previous()
    o_w = (o_t.to(tl.int64)[:, None] * N + o_n[None, :])[:, :, None] * TILE + o_c
    b_code = tl.load(p_w + o_w, mask=m[:, :, None], other=0)
    o_s = (o_t * (2 * TILE) // SK)[:, None] * tl.cdiv(N, SR) + (o_n // SR)[None, :]
    b_scale, _ = tl.broadcast(tl.load(p_s + o_s, mask=m, other=0.0)[:, :, None], b_code)
    o_y = (o_n.to(tl.int64) * K)[None, :, None] + (o_t * (2 * TILE))[:, None, None] + o_c
    if b_scale.dtype == tl.bfloat16:
        b_scale = (b_scale.to(tl.float32) * E4M3_FACTOR).to(tl.bfloat16)
        b_low = tl.inline_asm_elementwise(_NARROW_0, "=r,r,r", [b_code, b_scale], tl.bfloat16, is_pure=True, pack=2)
        b_high = tl.inline_asm_elementwise(_NARROW_1, "=r,r,r", [b_code, b_scale], tl.bfloat16, is_pure=True, pack=2)
    else:
        b_low = tl.inline_asm_elementwise(_FP8_0, "=r,r,f,f", [b_code, b_scale], tl.bfloat16, is_pure=True, pack=2)
        b_high = tl.inline_asm_elementwise(_FP8_1, "=r,r,f,f", [b_code, b_scale], tl.bfloat16, is_pure=True, pack=2)
    tl.store(p_y + o_y, b_low, mask=m[:, :, None])
    tl.store(p_y + o_y + TILE, b_high, mask=m[:, :, None])


def default_config(num_rows: int, weight: Matrix) -> PackedLinear:
    """Return the config for `num_rows` rows: the widest slices that still occupy most of a GPU.

    Every slice reads all rows, so wider slices are better for more rows. Two programs of up to 16 rows fit a
    multiprocessor.
    """
    num_out, dim = weight.shape
    rows = min(64, max(8, triton.next_power_of_2(num_rows)))
    least = MULTIPROCESSORS * 7 // 8 if rows <= 16 else MULTIPROCESSORS // 2
    columns = next((n for n in (64, 32) if n <= max(32, rows) and triton.cdiv(num_out, n) >= least), 16)
    tiles, stages = (4, 6) if columns == 16 and rows <= 16 else (2, 6)
    while dim // COLUMNS % tiles:
        tiles //= 2
    return PackedLinear(BM=rows, BN=columns, tiles=tiles, num_stages=stages)


def shared_bytes(config: PackedLinear) -> int:
    """Return the shared memory of a program."""
    stage = config.tiles * (config.BN * TILE + config.BM * COLUMNS) * 2 + 16
    values = 3 * config.tiles * 64
    if launch.LARGER_VIEWS:
        values = (3 * config.tiles - 1) * config.BN + 64
    return config.num_stages * stage + values * COLUMNS * 2


def _words(weight: Matrix) -> torch.Tensor:
    """Return the words of one matrix [K / 64, N, 32]."""
    return weight.data.squeeze(1)


def linear_packed(
    x: torch.Tensor, weight: Matrix, bias: torch.Tensor | None = None, *, config: PackedLinear | None = None
) -> torch.Tensor:
    """See `moeyard_kernels.ops.linear_packed`. `config` is one of CONFIGS whose tiles divide those of the matrix; every
    one gives the same bits."""
    if not launch.on_hopper(x):
        raise ValueError(f"linear_packed: products over {weight.form.name} codes need bf16 rows and a Hopper GPU")
    launch.check_layout("linear_packed", x=x, bias=bias)
    (num_rows, dim), num_out, part = x.shape, weight.shape[0], weight.form.parts[1]
    out = x.new_empty(num_rows, num_out)
    if not num_rows or not num_out:
        return out
    config = config or default_config(num_rows, weight)
    assert dim // COLUMNS % config.tiles == 0, f"steps of {config.tiles} tiles do not divide {dim} columns"
    x = launch.packed(x)
    steps, words = dim // COLUMNS, _words(weight)
    # Two ranks of one layout: copies bring 3 dimensions.
    rows = TensorDescriptor(
        x,
        [steps, num_rows, COLUMNS],
        [COLUMNS, dim, 1],
        [config.tiles, config.BM, COLUMNS],
        gl.NVMMASharedLayout(128, 16, 3),
    )
    block = [config.tiles, config.BN, TILE]
    tiles = TensorDescriptor(words, list(words.shape), list(words.stride()), block, gl.NVMMASharedLayout(64, 16, 3))
    grid = triton.cdiv(num_rows, config.BM) * triton.cdiv(num_out, config.BN)
    linear_packed_kernel[grid,](
        rows,
        tiles,
        weight.scales,
        x if bias is None else bias,
        out,
        num_rows,
        N=num_out,
        K=dim,
        SR=part.rows or num_out,
        SK=part.columns or dim,
        BM=config.BM,
        BN=config.BN,
        CH=config.tiles,
        STAGES=config.num_stages,
        HAS_BIAS=bias is not None,
        num_warps=4,
        # Two programs share a multiprocessor.
        maxnreg=128,
        enable_fp_fusion=False,
        **dependent(x),
    )
    return out


def write_values(out: torch.Tensor, weight: Matrix) -> torch.Tensor:
    """See `moeyard_kernels.ops.write_values`."""
    num_out, dim = weight.shape
    part, steps = weight.form.parts[1], dim // COLUMNS
    if out.numel():
        block_t, block_n = 4, 32
        write_values_kernel[triton.cdiv(steps, block_t), triton.cdiv(num_out, block_n)](
            _words(weight),
            weight.scales,
            out,
            num_out,
            dim,
            part.rows or num_out,
            part.columns or dim,
            BT=block_t,
            BN=block_n,
            TILE=TILE,
            num_warps=8,
            **dependent(out),
        )
    return out
