"""Triton: y[t, h] = weight[h] @ x[t, h], the per-head projections of latent attention.

Each output has one fp32 accumulator, K ascending, as in `linear`. So a row's bits depend neither on the tile nor on the
number of rows, which cuBLAS's batched product does not guarantee. With few rows, time depends on how early the weights
are requested. A program requests AHEAD steps of its slice at once, before it needs x. If no launch writes the weight
meanwhile (`static_weight`), it does so before the previous launch ends. Hopper has a second kernel,
`head_linear_hopper`. Where K is long, as in the output groups of DeepSeek-V4, the kernels of `linear` are faster: for
8 groups of [1024 x 4096] this kernel reads one row's weights at 59 % of copy bandwidth (H200, 2026-11-30).
"""

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl

from moeyard_kernels.common import launch, tuning
from moeyard_kernels.common.dependent import dependent, let_next_begin, wait_for_previous
from moeyard_kernels.common.rounding import product
from moeyard_kernels.linear import linear
from moeyard_kernels.linear.head_linear_hopper import STEP, describes, descriptors, head_linear_hopper_kernel

OP = "head_linear"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig(tuning.Config):
    """BM rows by BN outputs of a head, K in steps of BK. SWAP: the weight is the left operand.

    AHEAD steps of the weight are requested at once, and ROWS_AHEAD steps of x ahead of their use. The rest of K is a
    loop.
    """

    kernel: Literal["heads"] = "heads"
    BM: int
    BN: int
    BK: int
    AHEAD: int
    ROWS_AHEAD: int = 1
    SWAP: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class HopperHeads(tuning.Config):
    """`head_linear_hopper_kernel`, for few rows on Hopper: BM rows by BN outputs of a head, the whole of K at once."""

    kernel: Literal["hopper"] = "hopper"
    BM: int
    BN: int


KINDS: tuple[type[HeadConfig | HopperHeads], ...] = (HeadConfig, HopperHeads)
# Shared memory of a block on Hopper, without barriers.
_SHARED_BYTES = 227 * 1024 - 1024
_HOPPER = tuple(HopperHeads(BM=rows, BN=columns) for rows in (8, 16, 32, 64) for columns in (16, 32, 64, 128, 256))
_FEW = tuple(
    HeadConfig(BM=rows, BN=columns, BK=64, AHEAD=8, ROWS_AHEAD=rows_ahead, num_warps=max(warps, rows // 32))
    for rows, rows_ahead in ((16, 8), (32, 4), (64, 2))
    for columns, warps in ((16, 1), (32, 2), (64, 4), (128, 8))
)
_MANY = (
    HeadConfig(BM=64, BN=128, BK=64, AHEAD=0, SWAP=False, num_stages=4),
    HeadConfig(BM=128, BN=128, BK=64, AHEAD=0, SWAP=False, num_warps=8, num_stages=3),
)
# fp32 runs on the CUDA cores, which is slow with any tile.
_FP32 = HeadConfig(BM=16, BN=32, BK=32, AHEAD=0, SWAP=False, num_stages=2)
CONFIGS: tuple[HeadConfig | HopperHeads, ...] = (*_FEW, *_MANY, _FP32, *_HOPPER)

_ROWS = (16, 32, 64, 512, 4096)


def shape_class(num_rows: int, num_heads: int, num_out: int, dim: int, along_k: bool) -> str:
    """Return the class under which bf16 configs are stored. along_k: the weight is contiguous along K, not outputs."""
    rows = next((r for r in _ROWS if num_rows <= r), _ROWS[-1])
    return f"M{rows} H{num_heads} N{num_out} K{dim} {'rows' if along_k else 'columns'}"


def configs_for(num_rows: int) -> tuple[HeadConfig | HopperHeads, ...]:
    """Return the configs to time for `num_rows` rows in bf16."""
    if num_rows > 64:
        return _MANY
    few = (c for c in _FEW if c.BM // 2 < max(num_rows, 16) <= c.BM)
    return (*few, *(c for c in _HOPPER if c.BM // 2 < max(num_rows, 8) <= c.BM))


def suits(config: HopperHeads, x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether the Hopper kernel supports this tile and these tensors; if not, the default runs."""
    num_out, dim = weight.shape[1:]
    # A copy of a weight that is contiguous along its outputs is at least as wide as the swizzle.
    columns = (16 if weight.stride(2) == 1 else STEP) <= config.BN <= max(16, triton.next_power_of_2(num_out))
    rows = config.BM * (dim // STEP - 1) + 64 if launch.LARGER_VIEWS else dim
    return columns and (config.BN * dim + rows * STEP) * 2 <= _SHARED_BYTES and describes(x, weight)


def default_config(num_rows: int, num_heads: int, num_out: int) -> HeadConfig:
    """Return the config of untuned bf16 shapes."""
    if num_rows > 64:
        return _MANY[num_rows > 512]
    # Use slices of 64 columns, if these still give most multiprocessors a program.
    narrow = 8 * num_heads * triton.cdiv(num_out, 64) < 7 * tuning.MULTIPROCESSORS
    return next(c for c in _FEW if num_rows <= c.BM and (32 if narrow else 64) == c.BN)


@triton.jit
def _columns(p_bw, o_k, s_k, K: tl.constexpr, EVEN_K: tl.constexpr):
    """Load one step of a slice of the weight, [BN, BK]."""
    if EVEN_K:
        b_w = tl.load(p_bw + o_k[None, :] * s_k)
    else:
        b_w = tl.load(p_bw + o_k[None, :] * s_k, mask=(o_k < K)[None, :], other=0.0)
    return b_w


@triton.jit
def _rows(p_bx, m_m, o_k, K: tl.constexpr, EVEN_K: tl.constexpr):
    """Load one step of the rows of x, [BM, BK]."""
    m_x = m_m[:, None]
    if not EVEN_K:
        m_x = m_x & (o_k < K)[None, :]
    return tl.load(p_bx + o_k[None, :], mask=m_x, other=0.0)


@triton.jit(do_not_specialize=["T"])
def _head_linear_kernel(
    p_x, p_w, p_y, T, H, N, s_xt, s_xh, s_wh, s_wn, s_wk,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, AHEAD: tl.constexpr, SWAP: tl.constexpr,
    ROWS_AHEAD: tl.constexpr, EVEN_N: tl.constexpr, STATIC: tl.constexpr,
):  # fmt: skip
    """Compute a tile of y [T, H, N]: BM rows, BN outputs of a head. Grid: (H ceil(N / BN) ceil(T / BM),)."""
    EVEN_K: tl.constexpr = K % BK == 0
    if not STATIC:
        let_next_begin()
        wait_for_previous()
    tiles_m, tiles_n = tl.cdiv(T, BM), tl.cdiv(N, BN)
    i_m, i_slice = tl.program_id(0) % tiles_m, tl.program_id(0) // tiles_m
    i_h = (i_slice // tiles_n).to(tl.int64)
    o_m = i_m * BM + tl.arange(0, BM)
    o_n = i_slice % tiles_n * BN + tl.arange(0, BN)
    o_k = tl.arange(0, BK)
    m_m = o_m < T
    p_bx = p_x + i_h * s_xh + o_m.to(tl.int64)[:, None] * s_xt
    o_w = o_n
    if not EVEN_N:
        # Outputs past N read the last one's weights and are not stored. The minimum prevents 16-byte loads along N.
        o_w = tl.minimum(o_n, N - 1)
    p_bw = p_w + i_h * s_wh + o_w.to(tl.int64)[:, None] * s_wn
    # All loads before the first use: they are in flight together.
    b_ws = ()
    for u in tl.static_range(AHEAD):
        b_w = _columns(p_bw, u * BK + o_k, s_wk, K, EVEN_K)
        # Triton has no unpacking.
        b_ws = b_ws + (b_w,)  # type: ignore[assignment]  # noqa: RUF005
    if STATIC:
        let_next_begin()
        wait_for_previous()
    b_acc = tl.zeros([BN, BM] if SWAP else [BM, BN], dtype=tl.float32)
    b_xs = ()
    for u in tl.static_range(ROWS_AHEAD):
        b_x = _rows(p_bx, m_m, u * BK + o_k, K, EVEN_K)
        b_xs = b_xs + (b_x,)  # type: ignore[assignment]  # noqa: RUF005
    for u in tl.static_range(AHEAD):
        if u + ROWS_AHEAD < AHEAD:
            b_x = _rows(p_bx, m_m, (u + ROWS_AHEAD) * BK + o_k, K, EVEN_K)
            b_xs = b_xs + (b_x,)  # type: ignore[assignment]  # noqa: RUF005
        b_acc = product(b_xs[u], b_ws[u], b_acc, SWAP)  # type: ignore[misc]
    for i_k in range(AHEAD * BK, K, BK):
        b_w = _columns(p_bw, i_k + o_k, s_wk, K, EVEN_K)
        b_acc = product(_rows(p_bx, m_m, i_k + o_k, K, EVEN_K), b_w, b_acc, SWAP)
    if SWAP:
        b_acc = tl.trans(b_acc)
    p_by = p_y + (o_m.to(tl.int64)[:, None] * H + i_h) * N + o_n[None, :]
    tl.store(p_by, b_acc.to(p_y.dtype.element_ty), mask=m_m[:, None] & (o_n < N)[None, :])


def _launch_hopper(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, config: HopperHeads, tiles: int, *, static_weight: bool
) -> None:
    num_rows, num_heads, num_out = out.shape
    along_k = weight.stride(2) == 1
    head_linear_hopper_kernel[(tiles,)](
        *descriptors(x, weight, config.BM, config.BN),
        out,
        num_rows,
        num_heads,
        num_out,
        x.stride(1),
        weight.stride(0) // weight.stride(1 if along_k else 2),
        STEPS=x.shape[2] // STEP,
        BM=config.BM,
        BN=config.BN,
        ALONG_K=along_k,
        STATIC=static_weight,
        num_warps=config.num_warps,
        **dependent(x),
    )


def head_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    static_weight: bool = False,
    config: HeadConfig | HopperHeads | None = None,
) -> torch.Tensor:
    """See `moeyard_kernels.ops.head_linear`. Raises ValueError for what its grid cannot hold."""
    num_rows, num_heads, dim = x.shape
    num_out = weight.shape[1]
    out = launch.new_output(num_rows, num_heads, num_out, like=x)
    if not out.numel():
        return launch.finish(out, x.dtype)
    if config is None and x.dtype == torch.bfloat16 and linear.takes_groups(x, weight):
        return linear.linear_groups(x, weight, static_weight=static_weight)
    if config is None and x.dtype == torch.float32:
        config = _FP32
    if config is None:
        name = shape_class(num_rows, num_heads, num_out, dim, weight.stride(2) == 1)
        config = tuning.choose(OP, name, x, KINDS, lambda: default_config(num_rows, num_heads, num_out))
    if isinstance(config, HopperHeads) and not (launch.on_hopper(x) and suits(config, x, weight)):
        config = default_config(num_rows, num_heads, num_out) if x.dtype == torch.bfloat16 else _FP32
    tiles = num_heads * triton.cdiv(num_out, config.BN) * triton.cdiv(num_rows, config.BM)
    if tiles > launch.MAX_GRID_X:
        raise ValueError(f"{OP}: x {list(x.shape)} and weight {list(weight.shape)} exceed the grid of a GPU")
    if isinstance(config, HopperHeads):
        _launch_hopper(x, weight, out, config, tiles, static_weight=static_weight)
        return out
    ahead = min(config.AHEAD, triton.cdiv(dim, config.BK))
    _head_linear_kernel[(tiles,)](
        x,
        weight,
        out,
        num_rows,
        num_heads,
        num_out,
        *x.stride()[:2],
        *weight.stride(),
        K=dim,
        BM=config.BM,
        BN=config.BN,
        BK=config.BK,
        AHEAD=ahead,
        ROWS_AHEAD=min(config.ROWS_AHEAD, ahead),
        SWAP=config.SWAP,
        EVEN_N=num_out % config.BN == 0,
        STATIC=static_weight,
        **config.options,
        **dependent(x),
    )
    return launch.finish(out, x.dtype)
