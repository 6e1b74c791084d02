"""Triton: residual streams after a block, and the sums over them that a site's weight gives.

A program takes BM rows and BH columns of all S streams: it computes the new streams there, stores them, and multiplies
them by the M rows of the weight. Such a split of the columns has one fp32 accumulator per sum and per piece of the
weight, on tensor cores. Sums of splits are added in the order of the columns. So the bits of a row depend only on H.
They do not depend on BM, nor on whether one program or many compute the splits.

Few rows have one program per split, because one program cannot read the weight fast enough: 2.4 MB for DeepSeek-V4
Flash. Each reads its part of the weight before it waits for the launch ahead. With many rows a program computes all
splits of its rows, and the sums of splits stay in registers.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl

from moeyard_kernels.common.checks import check_layout
from moeyard_kernels.common.dependent import dependent, let_next_begin, wait_for_previous
from moeyard_kernels.common.launch import MAX_GRID_X, MAX_GRID_Y, finish, new_output
from moeyard_kernels.common.rounding import opaque, product, round_to
from moeyard_kernels.common.tuning import Config
from moeyard_kernels.elementwise.scale_rows import scaled
from moeyard_kernels.types.layers import HyperLayer, HyperMix

# Columns of a split. The order of the sums depends on it.
COLUMNS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SumsConfig(Config):
    """BM rows per program. APART: one program per split of the columns, else all splits in one."""

    kernel: Literal["sums"] = "sums"
    BM: int
    APART: bool


# Tiles that ptxas builds without spilling registers.
CONFIGS = (
    SumsConfig(BM=16, APART=True, num_warps=4, num_stages=1),
    SumsConfig(BM=64, APART=True, num_warps=8, num_stages=1),
    *(SumsConfig(BM=16, APART=False, num_warps=4, num_stages=stages) for stages in (1, 2)),
    *(SumsConfig(BM=64, APART=False, num_warps=8, num_stages=stages) for stages in (1, 2)),
)
# Up to this many parts of a result, a second stage fits the shared memory of a Hopper GPU.
_STAGED_PARTS = 6


def default_config(num_rows: int, top_k: int, dtype: torch.dtype) -> SumsConfig:
    """Return the config of any H. 64 rows of 4096 take 12.8 us with tiles of 64 rows and 16.6 with 16 (H200)."""
    if dtype == torch.float32:
        return CONFIGS[0 if num_rows <= 2048 else 2]
    if num_rows <= 32:
        return CONFIGS[0]
    if num_rows <= 2048:
        return CONFIGS[1]
    return CONFIGS[5 if top_k <= _STAGED_PARTS else 4]


@triton.jit
def _weights(
    p_w, i_h, H: tl.constexpr, S: tl.constexpr, M: tl.constexpr, PIECES: tl.constexpr, BN: tl.constexpr,
    BH: tl.constexpr,
):  # fmt: skip
    """Return tiles [BN, BH] of columns [i_h, i_h + BH): of each stream, each piece of the weight. PIECES may be 0."""
    o_n, o_h = tl.arange(0, BN), i_h + tl.arange(0, BH)
    m_w = (o_n < M)[:, None] & (o_h < H)[None, :]
    b_ws = ()
    for k in tl.static_range(S):
        for i in tl.static_range(PIECES):
            b_w = tl.load(p_w + ((i * M + o_n) * S + k)[:, None] * H + o_h[None, :], mask=m_w, other=0.0)
            # Triton has no unpacking.
            b_ws = b_ws + (b_w,)  # type: ignore[assignment]  # noqa: RUF005
    return b_ws


@triton.jit
def _result(
    p_result, p_weights, p_shared, p_gate, gate_stride, o_r, o_h, m_r, m_x, H: tl.constexpr, K: tl.constexpr,
    HAS_SHARED: tl.constexpr, GATED: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Return a block's result [BM, BH] in fp32, rounded. K > 0: the weighted sum of K parts, the shared part last."""
    if K == 0:
        return tl.load(p_result + o_r[:, None] * H + o_h[None, :], mask=m_x, other=0.0).to(tl.float32)
    b_xs = ()
    for i in tl.static_range(K):
        b_x = tl.load(p_result + (o_r * K + i)[:, None] * H + o_h[None, :], mask=m_x, other=0.0)
        b_xs = b_xs + (b_x,)  # type: ignore[assignment]  # noqa: RUF005
    b_acc = tl.zeros(m_x.shape, dtype=tl.float32)
    for i in tl.static_range(K):
        b_w = tl.load(p_weights + o_r * K + i, mask=m_r, other=0.0)
        b_acc = tl.fma(tl.broadcast_to(b_w[:, None], m_x.shape), b_xs[i].to(tl.float32), b_acc)  # type: ignore[misc]
    if HAS_SHARED:
        b_shared = tl.load(p_shared + o_r[:, None] * H + o_h[None, :], mask=m_x, other=0.0)
        if GATED:
            b_gate = tl.load(p_gate + o_r * gate_stride, mask=m_r, other=0.0)
            b_acc += scaled(b_shared, b_gate[:, None], True, DTYPE)
        else:
            b_acc += b_shared.to(tl.float32)
    return round_to(b_acc, DTYPE)


@triton.jit
def _split(
    p_streams, b_ws, p_result, p_weights, p_shared, p_gate, p_post, p_comb, p_out, o_r, i_h, num_rows, gate_stride,
    H: tl.constexpr, S: tl.constexpr, PIECES: tl.constexpr, K: tl.constexpr, HAS_SHARED: tl.constexpr,
    GATED: tl.constexpr, LEAVES: tl.constexpr, BN: tl.constexpr, BH: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Return sums [BM, BN] over columns [i_h, i_h + BH) of rows o_r. LEAVES: of new streams, which are stored.

    Without pieces of a weight the sums are zero.
    """
    o_h = i_h + tl.arange(0, BH)
    m_r = o_r < num_rows
    m_x = m_r[:, None] & (o_h < H)[None, :]
    b_xs = ()
    for k in tl.static_range(S):
        b_x = tl.load(p_streams + (o_r * S + k)[:, None] * H + o_h[None, :], mask=m_x, other=0.0)
        b_xs = b_xs + (b_x,)  # type: ignore[assignment]  # noqa: RUF005
    if LEAVES:
        b_result = _result(
            p_result, p_weights, p_shared, p_gate, gate_stride, o_r, o_h, m_r, m_x, H, K, HAS_SHARED, GATED, DTYPE
        )
    b_0 = tl.zeros([m_x.shape[0], BN], dtype=tl.float32)
    b_1, b_2 = b_0, b_0
    for k in tl.static_range(S):
        if LEAVES:
            b_post = tl.load(p_post + o_r * S + k, mask=m_r, other=0.0)
            b_y = b_post[:, None] * b_result
            for j in tl.static_range(S):
                b_comb = tl.load(p_comb + (o_r * S + j) * S + k, mask=m_r, other=0.0)
                b_y = tl.fma(tl.broadcast_to(b_comb[:, None], m_x.shape), b_xs[j].to(tl.float32), b_y)  # type: ignore[misc]
            b_y = round_to(b_y, DTYPE)
            tl.store(p_out + (o_r * S + k)[:, None] * H + o_h[None, :], b_y.to(p_out.dtype.element_ty), mask=m_x)
            # Otherwise Triton computes all of this in the layout of the product's operand, which warps share.
            b_y = opaque(b_y.to(DTYPE), DTYPE)
        else:
            b_y = b_xs[k]  # type: ignore[misc]
        if PIECES > 0:
            b_0 = product(b_y, b_ws[k * PIECES], b_0, False)
        if PIECES == 3:
            b_1 = product(b_y, b_ws[k * PIECES + 1], b_1, False)
            b_2 = product(b_y, b_ws[k * PIECES + 2], b_2, False)
    return b_0 + (b_1 + b_2) if PIECES == 3 else b_0


@triton.jit(do_not_specialize=["num_rows"])
def _hyper_sums_kernel(
    p_streams, p_w, p_result, p_weights, p_shared, p_gate, p_post, p_comb, p_out, p_sums, num_rows, gate_stride,
    H: tl.constexpr, S: tl.constexpr, M: tl.constexpr, PIECES: tl.constexpr, K: tl.constexpr,
    HAS_SHARED: tl.constexpr, GATED: tl.constexpr, LEAVES: tl.constexpr, APART: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BH: tl.constexpr, STAGES: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Store new streams of BM rows, and their sums [splits or 1, num_rows, M]. Grid: (ceil(rows / BM), splits or 1).

    p_w: [PIECES, M, S, H]. There are no sums without pieces. p_result, p_weights, p_shared and p_gate: as in
    `ops.hyper_leave`, K = 0 for rows.
    """
    o_r = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    o_n = tl.arange(0, BN)
    if APART:
        let_next_begin()
        i_h = tl.program_id(1) * BH
        # Weights do not change while a model serves.
        b_ws = _weights(p_w, i_h, H, S, M, PIECES, BN, BH)
        wait_for_previous()
        b_sum = _split(
            p_streams, b_ws, p_result, p_weights, p_shared, p_gate, p_post, p_comb, p_out, o_r, i_h, num_rows,
            gate_stride, H, S, PIECES, K, HAS_SHARED, GATED, LEAVES, BN, BH, DTYPE,
        )  # fmt: skip
    else:
        wait_for_previous()
        b_sum = tl.zeros([BM, BN], dtype=tl.float32)
        for i_h in tl.range(0, H, BH, num_stages=STAGES):
            b_ws = _weights(p_w, i_h, H, S, M, PIECES, BN, BH)
            b_sum += _split(
                p_streams, b_ws, p_result, p_weights, p_shared, p_gate, p_post, p_comb, p_out, o_r, i_h, num_rows,
                gate_stride, H, S, PIECES, K, HAS_SHARED, GATED, LEAVES, BN, BH, DTYPE,
            )  # fmt: skip
    if PIECES > 0:
        p_row = p_sums + (tl.program_id(1).to(tl.int64) * num_rows + o_r) * M
        tl.store(p_row[:, None] + o_n[None, :], b_sum, mask=(o_r < num_rows)[:, None] & (o_n < M)[None, :])


def hyper_sums(
    streams: torch.Tensor,
    site: HyperLayer | None,
    *,
    result: torch.Tensor | None = None,
    mix: HyperMix | None = None,
    weights: torch.Tensor | None = None,
    shared: torch.Tensor | None = None,
    shared_gate: torch.Tensor | None = None,
    config: SumsConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (streams [T, S, H], sums [splits, T, M] fp32). With result and mix the streams are new ones.

    Without a site M is 0.
    Raises ValueError for tensors that are not contiguous, for a number of streams that is no power of two, and for what
    the grid cannot hold.
    """
    op = "hyper_connections"
    num_rows, count, hidden = streams.shape
    pieces = streams.new_empty(0, 0, count * hidden) if site is None else site.weight.data
    check_layout(op, streams=streams, weight=pieces, result=result, weights=weights, shared=shared)
    if site is not None:
        check_layout(op, base=site.base, scale=site.scale, norm=site.norm)
    top_k = 0 if weights is None else weights.shape[1]
    config = config or default_config(0 if site is None else num_rows, top_k, streams.dtype)
    num_sums, splits = pieces.shape[1], triton.cdiv(hidden, COLUMNS)
    grid = triton.cdiv(num_rows, config.BM), splits if config.APART else 1
    if count & (count - 1) or grid[0] > MAX_GRID_X or grid[1] > MAX_GRID_Y:
        raise ValueError(f"{op}: {list(streams.shape)} is no power of two of streams, or exceeds the grid of a GPU")
    sums = streams.new_empty(grid[1], num_rows, num_sums, dtype=torch.float32)
    out = streams if result is None else new_output(*streams.shape, like=streams)
    if num_rows:
        _hyper_sums_kernel[grid](
            streams,
            pieces,
            streams if result is None else result,
            sums if weights is None else weights,
            streams if shared is None else shared,
            sums if shared_gate is None else shared_gate,
            sums if mix is None else mix.post,
            sums if mix is None else mix.comb,
            out,
            sums,
            num_rows,
            1 if shared_gate is None else shared_gate.stride(0),
            H=hidden,
            S=count,
            M=num_sums,
            PIECES=pieces.shape[0],
            K=top_k,
            HAS_SHARED=shared is not None,
            GATED=shared_gate is not None,
            LEAVES=result is not None,
            APART=config.APART,
            BM=config.BM,
            BN=max(16, triton.next_power_of_2(num_sums)),
            BH=COLUMNS,
            STAGES=config.num_stages,
            DTYPE=tl.bfloat16 if streams.dtype == torch.bfloat16 else tl.float32,
            num_warps=config.num_warps,
            enable_fp_fusion=False,
            **dependent(streams),
        )
    return finish(out, streams.dtype), sums
