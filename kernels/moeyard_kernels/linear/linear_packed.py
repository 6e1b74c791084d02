"""Gluon: `linear` over tiled fp8 codes for up to 64 rows on Hopper, and all values of such a matrix for more.

The products have the bits of `linear` over the bf16 values: one fp32 accumulator per output, K ascending. Values are
decoded in registers, so they never pass through shared memory. Up to 16 rows, each warp multiplies 16 outputs by itself
(mma.sync, which has the bits of wgmma). More rows are multiplied by four warps together (wgmma).

A chain of products is K / 16 long, and each takes 40 to 56 cycles (H200, Triton 3.6, 2026-11-30). So a long K limits
small matrices. A product of 2048 outputs and 4096 columns takes 7.7 us, not 6.2 as in bf16. One of 32768 outputs and
1024 columns takes 12 to 13, not 16 to 17.

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
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moeyard_kernels.common import codes, launch
from moeyard_kernels.common.dependent import dependent, let_next_begin, wait_for_previous
from moeyard_kernels.common.gluon import load_block, reinterpret
from moeyard_kernels.common.tuning import Config
from moeyard_kernels.experts.packed_product import (
    E4M3_FACTOR,
    expect,
    factors,
    group_products,
    rows_of,
    warp_products,
    words_of,
)
from moeyard_kernels.types.matrix import Matrix
from moeyard_kernels.types.weight_form import TILE

_TILE = gl.constexpr(TILE)
# Columns of a tile of fp8 codes.
COLUMNS = 2 * TILE
_FP8_0, _FP8_1 = codes.FP8_0, codes.FP8_1
_NARROW_0, _NARROW_1 = codes.NARROW_0, codes.NARROW_1


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLinear(Config):
    """BM rows and BN columns per program, steps of `tiles` tiles, num_stages steps in flight.

    warp_products: as `experts.packed_product.PackedConfig` has it. Without it BN is a multiple of 64.
    """

    kernel: Literal["packed"] = "packed"
    BM: int
    BN: int
    tiles: int
    warp_products: bool = True


CONFIGS = tuple(
    PackedLinear(BM=rows, BN=columns, tiles=tiles, num_stages=stages, num_warps=columns // 16, warp_products=by_warps)
    for by_warps, rows, columns, tiles, stages in (
        *((True, 8, 16, 4, 4), (True, 8, 32, 8, 3), (True, 8, 64, 2, 6), (True, 8, 64, 4, 4), (True, 8, 64, 8, 3)),
        *((True, 16, 16, 8, 3), (True, 16, 32, 8, 3), (True, 16, 64, 2, 6), (True, 16, 64, 4, 3)),
        *((False, 16, 64, 2, 6), (False, 16, 64, 4, 4), (True, 32, 32, 4, 4), (True, 32, 64, 2, 4)),
        *((False, 32, 64, 2, 6), (False, 32, 64, 4, 4), (False, 32, 128, 2, 4), (True, 64, 32, 4, 3)),
        *((False, 64, 64, 2, 6), (False, 64, 64, 4, 4), (False, 64, 128, 1, 6), (False, 64, 128, 2, 4)),
    )
)


@gluon.jit(do_not_specialize=["M"])
def linear_packed_kernel(
    d_x, d_w, p_s, p_bias, p_y, M, N: gl.constexpr, K: gl.constexpr, SR: gl.constexpr, SK: gl.constexpr,
    KS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, CH: gl.constexpr, STAGES: gl.constexpr, NW: gl.constexpr,
    WARPS: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """Compute [BM, BN] of x [M, K] @ w [N, K].T (+ bias).

    - d_x: x as [K / 32, M, 32] in blocks [2 CH, BM, 32]. CH divides K / 64.
    - d_w: words [1, K / 64, 1, N, 32] in blocks [1, CH, 1, BN, 32].
    - p_s: scales [K / SK, N / SR] in fp32 or bf16. KS, a power of 2, covers K / SK.

    Grid: (ceil(M / BM) * ceil(N / BN),).
    """
    NUM: gl.constexpr = K // (CH * 2 * _TILE)
    NB: gl.constexpr = (N + SR - 1) // SR
    DT: gl.constexpr = gl.bfloat16
    ST: gl.constexpr = p_s.dtype.element_ty
    L_Y: gl.constexpr = gl.NVMMADistributedLayout([2 if WARPS else 3, 0], [NW, 1], [16, 8] if WARPS else [16, BM, 16])
    L_A: gl.constexpr = gl.DotOperandLayout(0, L_Y, 2)
    L_X: gl.constexpr = gl.NVMMASharedLayout(64, 16, 2)
    L_S: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [NW, 1], [1, 0])
    # Each buffer is an allocation of its own, as in `experts.packed_product`.
    s_w, s_x, e_w, e_x = (), (), (), ()
    for _ in gl.static_range(STAGES):
        s_w = s_w + (gl.allocate_shared_memory(gl.int16, [CH, BN, _TILE], L_X),)  # type: ignore[assignment]  # noqa: RUF005
        s_x = s_x + (gl.allocate_shared_memory(DT, [2 * CH, BM, _TILE], L_X),)  # type: ignore[assignment]  # noqa: RUF005
        e_w = e_w + (gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),)  # type: ignore[assignment]  # noqa: RUF005
        e_x = e_x + (gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),)  # type: ignore[assignment]  # noqa: RUF005
    s_s = gl.allocate_shared_memory(ST, [KS, BN], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for i in gl.static_range(STAGES):
        mbarrier.init(e_w[i], count=1)
        mbarrier.init(e_x[i], count=1)
    fence_async_shared()
    i_m, i_n = gl.program_id(0) // gl.cdiv(N, BN) * BM, gl.program_id(0) % gl.cdiv(N, BN) * BN
    # Weights do not change while a launch is in flight, so they are copied before the wait.
    for i in gl.static_range(STAGES - 1):
        expect(s_w[i], s_x[i], e_w[i], e_x[i], i < NUM, False)
        load_block(d_w, [0, i * CH, 0, i_n, 0], e_w[i], words_of(s_w[i], d_w), pred=i < NUM)
    o_r, o_g = gl.arange(0, BN, gl.SliceLayout(0, L_S)), gl.arange(0, KS, gl.SliceLayout(1, L_S))
    p_by = p_s + o_g[:, None] * NB + (gl.minimum(i_n + o_r, N - 1) // SR)[None, :]
    b_s = gl.load(p_by, mask=(o_g < (K + SK - 1) // SK)[:, None] & (o_r >= 0)[None, :], other=0)
    reinterpret(s_s, ST, [KS, BN], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])).store(factors(b_s, "fp8"))
    wait_for_previous()
    let_next_begin()
    for i in gl.static_range(STAGES - 1):
        load_block(d_x, [2 * i * CH, i_m, 0], e_x[i], rows_of(s_x[i]), pred=i < NUM)
    b_acc = gl.zeros([BN, BM], gl.float32, L_Y)
    if WARPS:
        b_acc = warp_products(
            b_acc, d_w, d_x, s_w, s_x, s_s, s_s, e_w, e_x, 0, i_n, i_m, NUM, STAGES, "fp8", SK, False, L_A,
            gl.DotOperandLayout(1, L_Y, 2),
        )  # fmt: skip
    else:
        b_acc = group_products(
            b_acc, M, d_w, d_x, s_w, s_x, s_s, s_s, e_w, e_x, p_y, 0, s_s, 0, i_n, i_m, NUM, False, "fp8", STAGES, SK,
            False, L_A, L_Y,
        )  # fmt: skip
    o_n, o_m = i_n + gl.arange(0, BN, gl.SliceLayout(1, L_Y)), i_m + gl.arange(0, BM, gl.SliceLayout(0, L_Y))
    if HAS_BIAS:
        b_acc += gl.load(p_bias + o_n, mask=o_n < N, other=0.0).to(gl.float32)[:, None]
    p_out = p_y + o_m.to(gl.int64)[None, :] * N + o_n[:, None]
    gl.store(p_out, b_acc.to(DT), mask=(o_n < N)[:, None] & (o_m < M)[None, :])


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
    """Return the config for `num_rows` rows, by times on an H200 (Triton 3.6, 2026-11-30).

    Few outputs make too few programs, so the rows are divided too.
    """
    num_out, dim = weight.shape
    rows = min(64, max(8, triton.next_power_of_2(num_rows)))
    if num_out <= 4096:
        rows = max(8, rows // 2)
    many = num_out >= 16384
    columns, tiles, stages = {
        8: (64, 4, 4),
        16: (32, 8, 3) if num_out <= 4096 else (64, 2, 6),
        32: (128, 2, 4) if many else (64, 4, 4),
        64: (128, 1, 6) if many else (64, 2, 6),
    }[rows]
    while dim // COLUMNS % tiles:
        tiles //= 2
    warps = columns // 16
    return PackedLinear(BM=rows, BN=columns, tiles=tiles, num_stages=stages, num_warps=warps, warp_products=rows <= 16)


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
    words = weight.data.unsqueeze(0)
    block = [2 * config.tiles, config.BM, TILE]
    rows = TensorDescriptor(x, [dim // TILE, num_rows, TILE], [TILE, dim, 1], block, gl.NVMMASharedLayout(64, 16, 3))
    block = [1, config.tiles, 1, config.BN, TILE]
    tiles = TensorDescriptor(words, list(words.shape), list(words.stride()), block, gl.NVMMASharedLayout(64, 16, 5))
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
        KS=triton.next_power_of_2(triton.cdiv(dim, part.columns or dim)),
        BM=config.BM,
        BN=config.BN,
        CH=config.tiles,
        STAGES=config.num_stages,
        NW=config.num_warps,
        WARPS=config.warp_products,
        HAS_BIAS=bias is not None,
        num_warps=config.num_warps,
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
            weight.data,
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
