"""Triton: the rows that a block reads from residual streams, and how the streams are mixed after the block.

A program takes one row with all streams, in a tile that depends on H only. It adds the sums of splits in order
(`hyper_sums`). If there are many splits, another program computes post and comb of the row. The normalisation of comb
is a chain of 40 dependent steps, and few rows have no other work meanwhile. Both compute the mean square by the same
tree.
"""

import torch
import triton
import triton.language as tl

from moeyard_kernels.common.dependent import dependent, let_next_begin, wait_for_previous
from moeyard_kernels.common.launch import MAX_GRID_X, finish, new_output
from moeyard_kernels.common.rounding import INTERPRETED, round_to
from moeyard_kernels.elementwise.rms_norm import normed
from moeyard_kernels.types.layers import HyperLayer, HyperMix


@triton.jit
def _sigmoid(b_x):
    return 1.0 / (1.0 + tl.exp(-b_x))


@triton.jit
def _inverse(b_x):
    """Return 1 / x to an ulp for x near 1. A division takes twice as long, and 40 depend on each other."""
    if INTERPRETED:
        b_y = 1.0 / b_x
    else:
        b_y = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=r,r", [b_x], dtype=tl.float32, is_pure=True, pack=1
        )
    return b_y


@triton.jit
def _total(p_sums, o_m, stride, NUM: tl.constexpr):
    """Return the sums at o_m, over NUM splits that are `stride` apart."""
    b_sum = tl.zeros(o_m.shape, dtype=tl.float32)
    for i in tl.static_range(NUM):
        b_sum += tl.load(p_sums + i * stride + o_m)
    return b_sum


@triton.jit
def _store_row(
    b_xs, b_scale, p_sums, p_base, p_scale, p_norm, p_row, stride, eps, rms_eps, H: tl.constexpr, S: tl.constexpr,
    NUM: tl.constexpr, BD: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Store the normalised sum of the streams, weighted by sigmoids."""
    o_s, o_d = tl.arange(0, S), tl.arange(0, BD)
    m_d = o_d < H
    b_norm = tl.load(p_norm + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_mixed = _total(p_sums, o_s, stride, NUM) * b_scale
    b_before = _sigmoid(b_mixed * tl.load(p_scale) + tl.load(p_base + o_s)) + eps
    b_row = tl.zeros([BD], dtype=tl.float32)
    for k in tl.static_range(S):
        b_w = tl.sum(tl.where(o_s == k, b_before, 0.0), 0)
        b_row = tl.fma(tl.full([BD], b_w, tl.float32), b_xs[k].to(tl.float32), b_row)
    b_y = normed(round_to(b_row, DTYPE)[None, :], b_norm, H, rms_eps, p_norm.dtype.element_ty)
    tl.store(p_row + o_d[None, :], b_y.to(p_row.dtype.element_ty), mask=m_d[None, :])


@triton.jit
def _store_mix(
    b_scale, p_sums, p_base, p_scale, p_post, p_comb, stride, eps, S: tl.constexpr, NUM: tl.constexpr,
    ITERATIONS: tl.constexpr,
):  # fmt: skip
    """Store post [S] and comb [S, S]."""
    o_s = tl.arange(0, S)
    o_c = o_s[:, None] * S + o_s[None, :]
    b_post = _total(p_sums, S + o_s, stride, NUM) * b_scale
    b_comb = _total(p_sums, 2 * S + o_c, stride, NUM) * b_scale
    b_post = _sigmoid(b_post * tl.load(p_scale + 1) + tl.load(p_base + S + o_s)) * 2.0
    tl.store(p_post + o_s, b_post)
    b_comb = b_comb * tl.load(p_scale + 2) + tl.load(p_base + 2 * S + o_c)
    b_comb = tl.exp(b_comb - tl.max(b_comb, 1)[:, None])
    b_comb = b_comb * _inverse(tl.sum(b_comb, 1))[:, None] + eps
    b_comb = b_comb * _inverse(tl.sum(b_comb, 0) + eps)[None, :]
    for _ in range(ITERATIONS - 1):
        b_comb = b_comb * _inverse(tl.sum(b_comb, 1) + eps)[:, None]
        b_comb = b_comb * _inverse(tl.sum(b_comb, 0) + eps)[None, :]
    tl.store(p_comb + o_c, b_comb)


@triton.jit(do_not_specialize=["num_rows"])
def _hyper_rows_kernel(
    p_streams, p_sums, p_base, p_scale, p_norm, p_rows, p_post, p_comb, num_rows, eps, rms_eps, H: tl.constexpr,
    S: tl.constexpr, M: tl.constexpr, NUM: tl.constexpr, ITERATIONS: tl.constexpr, APART: tl.constexpr,
    BD: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Read one row's streams. p_sums: [NUM, num_rows, M]. APART: programs from num_rows on mix. Grid: (T or 2 T,)."""
    let_next_begin()
    wait_for_previous()
    i_t = tl.program_id(0).to(tl.int64)
    if APART:
        i_t = i_t % num_rows
    o_d = tl.arange(0, BD)
    b_xs = ()
    b_square = tl.zeros([BD], dtype=tl.float32)
    for k in tl.static_range(S):
        b_x = tl.load(p_streams + (i_t * S + k) * H + o_d, mask=o_d < H, other=0.0)
        # Triton has no unpacking.
        b_xs = b_xs + (b_x,)  # type: ignore[assignment]  # noqa: RUF005
        b_square = tl.fma(b_x.to(tl.float32), b_x.to(tl.float32), b_square)
    b_scale = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tl.sum(b_square, 0), S * H * 1.0) + rms_eps))
    stride = num_rows * M
    p_sums += i_t * M
    if not APART or tl.program_id(0) < num_rows:
        _store_row(
            b_xs, b_scale, p_sums, p_base, p_scale, p_norm, p_rows + i_t * H, stride, eps, rms_eps, H, S, NUM, BD,
            DTYPE,
        )  # fmt: skip
    if M > S and (not APART or tl.program_id(0) >= num_rows):
        _store_mix(
            b_scale, p_sums, p_base, p_scale, p_post + i_t * S, p_comb + i_t * S * S, stride, eps, S, NUM, ITERATIONS
        )


def hyper_rows(
    streams: torch.Tensor, sums: torch.Tensor, site: HyperLayer, *, apart: bool | None = None
) -> tuple[torch.Tensor, HyperMix | None]:
    """Return rows [T, H] and the mix of streams [T, S, H] whose sums [splits, T, M] are known.

    apart: another program computes the mix. Raises ValueError for what the grid cannot hold.
    """
    num_rows, count, hidden = streams.shape
    num_sums = sums.shape[2]
    apart = num_sums > count and (sums.shape[0] > 1 if apart is None else apart)
    if 2 * num_rows > MAX_GRID_X:
        raise ValueError(f"hyper_connections: {list(streams.shape)} exceeds the grid of a GPU")
    rows = new_output(num_rows, hidden, like=streams)
    mix = None
    if num_sums > count:
        post, comb = (sums.new_empty(num_rows, count, *more) for more in ((), (count,)))
        mix = HyperMix(post=post, comb=comb)
    block = max(16, triton.next_power_of_2(hidden))
    if num_rows:
        _hyper_rows_kernel[(num_rows * (2 if apart else 1),)](
            streams,
            sums,
            site.base,
            site.scale,
            site.norm,
            rows,
            sums if mix is None else mix.post,
            sums if mix is None else mix.comb,
            num_rows,
            site.eps,
            site.rms_eps,
            H=hidden,
            S=count,
            M=num_sums,
            NUM=sums.shape[0],
            ITERATIONS=site.iterations,
            APART=apart,
            BD=block,
            DTYPE=tl.bfloat16 if streams.dtype == torch.bfloat16 else tl.float32,
            # Both are 64 values per thread.
            num_warps=max(4, min(16, block // 512)),
            enable_fp_fusion=False,
            **dependent(streams),
        )
    return finish(rows, streams.dtype), mix
