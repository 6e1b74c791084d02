"""Triton: rotary position embedding in the two layouts that checkpoints use."""

import torch
import triton
import triton.language as tl

from moeyard_kernels.common.dependent import dependent, let_next_begin, wait_for_previous
from moeyard_kernels.common.launch import MAX_GRID_X, finish, new_output
from moeyard_kernels.common.rounding import round_to
from moeyard_kernels.common.rows import check_rows
from moeyard_kernels.common.tuning import RowConfig, choose
from moeyard_kernels.elementwise.rms_norm import NUM_WARPS, row_scale, row_tile

_TILES = ((4, 1), (8, 1), (8, 2), (8, 4), (16, 1), (16, 2), (16, 4), (32, 1), (32, 2), (32, 4), (64, 2), (64, 4))
CONFIGS = tuple(RowConfig(BLOCK=heads, num_warps=warps) for heads, warps in _TILES)


def shape_class(num_tokens: int, num_heads: int, dim: int, *, normed: bool = False) -> str:
    """Return the shape class. Decode steps need many small programs, prompts few large ones."""
    return f"{'few' if num_tokens <= 64 else 'many'} N{num_heads} D{dim}{' normed' if normed else ''}"


def default_config(num_heads: int, dim: int, *, normed: bool = False) -> RowConfig:
    """Return the config of untuned shapes: 512 pairs per program, a few per thread. If normed, the norm's tile."""
    if normed:
        return RowConfig(BLOCK=row_tile(dim)[0], num_warps=NUM_WARPS)
    half = half_block(dim)
    heads = min(max(1, 512 // half), triton.next_power_of_2(num_heads))
    return RowConfig(BLOCK=heads, num_warps=max(1, min(4, heads * half // 128)))


@triton.jit
def rotate(b_first, b_second, b_cos, b_sin, WIDE: tl.constexpr):
    """Return (a cos - b sin, b cos + a sin), each product and sum rounded to WIDE, the wider dtype of x and cos.

    Launch with `enable_fp_fusion=False`, because in fp32 only separate instructions round the products.
    """
    b_new_first = round_to(b_first * b_cos, WIDE) - round_to(b_second * b_sin, WIDE)
    b_new_second = round_to(b_second * b_cos, WIDE) + round_to(b_first * b_sin, WIDE)
    return round_to(b_new_first, WIDE), round_to(b_new_second, WIDE)


@triton.jit
def _split_pairs(b_x, BH: tl.constexpr):
    """Return the first and second values of the BH pairs in the last dimension of b_x [2 BH] or [N, 2 BH]."""
    if len(b_x.shape) == 1:
        b_first, b_second = tl.split(tl.reshape(b_x, [BH, 2]))
    else:
        b_first, b_second = tl.split(tl.reshape(b_x, [b_x.shape[0], BH, 2]))
    return b_first, b_second


@triton.jit
def rotated_heads(
    p_x, stride_n, o_n, N, p_cos, p_sin, p_norm, eps, HALF,
    INTERLEAVED: tl.constexpr, BN: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr, REST: tl.constexpr
):  # fmt: skip
    """Return the rotated halves [BN, BH] of heads o_n of one token, fp32 rounded to x's dtype, and the norm's scale.

    BH covers HALF. A head has D = 2 HALF + REST values, and the last REST are not rotated (`move_rest`). If BD >
    0, each head is normalised first, by the weight p_norm [D]. The scale [BN, 1] (1 without a norm) has the bits of
    rms_norm, whose order of sums depends on the tile [BN, BD] (see `rope_cache_write`). That tile is a second load of
    the heads. It is cheaper than splitting one tile: both loads are in flight together and share cache lines.
    """
    DTYPE: tl.constexpr = p_x.dtype.element_ty
    o_h = tl.arange(0, BH)
    m_h = o_h < HALF
    m_n = (o_n < N)[:, None]
    p_head = p_x + o_n.to(tl.int64)[:, None] * stride_n
    if BD > 0:
        o_x = tl.arange(0, BD)
        b_whole = tl.load(p_head + o_x[None, :], mask=m_n & (o_x < 2 * HALF + REST)[None, :], other=0.0).to(tl.float32)
    if INTERLEAVED:
        o_d = tl.arange(0, 2 * BH)
        m_d = o_d < 2 * HALF
        b_x = tl.load(p_head + o_d[None, :], mask=m_n & m_d[None, :], other=0.0).to(tl.float32)
        b_first, b_second = _split_pairs(b_x, BH)
        if BD > 0:
            b_weight = tl.load(p_norm + o_d, mask=m_d, other=0.0).to(tl.float32)
            b_weight_first, b_weight_second = _split_pairs(b_weight, BH)
    else:
        p_first = p_head + o_h[None, :]
        b_first = tl.load(p_first, mask=m_n & m_h[None, :], other=0.0).to(tl.float32)
        b_second = tl.load(p_first + HALF, mask=m_n & m_h[None, :], other=0.0).to(tl.float32)
        if BD > 0:
            b_weight_first = tl.load(p_norm + o_h, mask=m_h, other=0.0).to(tl.float32)
            b_weight_second = tl.load(p_norm + HALF + o_h, mask=m_h, other=0.0).to(tl.float32)
    b_cos = tl.load(p_cos + o_h, mask=m_h, other=0.0).to(tl.float32)[None, :]
    b_sin = tl.load(p_sin + o_h, mask=m_h, other=0.0).to(tl.float32)[None, :]
    b_scale = 1.0
    if BD > 0:
        # A weight in fp32 is applied before the rounding, one in x's dtype after it: see the reference of `rms_norm`.
        WEIGHT: tl.constexpr = p_norm.dtype.element_ty
        b_scale = row_scale(b_whole, 2 * HALF + REST, eps)
        b_first = round_to(round_to(b_first * b_scale, WEIGHT) * b_weight_first[None, :], DTYPE)
        b_second = round_to(round_to(b_second * b_scale, WEIGHT) * b_weight_second[None, :], DTYPE)
    if p_cos.dtype.element_ty == tl.float32:
        b_first, b_second = rotate(b_first, b_second, b_cos, b_sin, tl.float32)
    else:
        b_first, b_second = rotate(b_first, b_second, b_cos, b_sin, DTYPE)
    return round_to(b_first, DTYPE), round_to(b_second, DTYPE), b_scale


@triton.jit
def move_rest(
    p_x, stride_n, p_out, stride_out, o_n, N, m_n, p_norm, b_scale, FIRST,
    BD: tl.constexpr, REST: tl.constexpr, BREST: tl.constexpr
):  # fmt: skip
    """Store values [FIRST, FIRST + REST) of heads o_n where m_n, normalised by b_scale if BD > 0."""
    DTYPE: tl.constexpr = p_x.dtype.element_ty
    o_d = tl.arange(0, BREST)
    m_d = (o_d < REST)[None, :]
    o_head = o_n.to(tl.int64)[:, None]
    b_x = tl.load(p_x + o_head * stride_n + (FIRST + o_d)[None, :], mask=(o_n < N)[:, None] & m_d, other=0.0)
    if BD > 0:
        b_weight = tl.load(p_norm + FIRST + o_d, mask=o_d < REST, other=0.0).to(tl.float32)
        b_y = round_to(b_x.to(tl.float32) * b_scale, p_norm.dtype.element_ty) * b_weight[None, :]
        b_x = round_to(b_y, DTYPE).to(DTYPE)
    p_rest = p_out + o_head * stride_out + (FIRST + o_d)[None, :]
    tl.store(p_rest, b_x.to(p_out.dtype.element_ty), mask=m_n[:, None] & m_d)


@triton.jit
def store_halves(p_out, stride_n, o_n, m_n, b_first, b_second, HALF, BH: tl.constexpr):
    """Store both halves [BN, BH] of heads o_n where m_n."""
    o_h = tl.arange(0, BH)
    m_x = m_n[:, None] & (o_h < HALF)[None, :]
    p_first = p_out + o_n.to(tl.int64)[:, None] * stride_n + o_h[None, :]
    tl.store(p_first, b_first.to(p_out.dtype.element_ty), mask=m_x)
    tl.store(p_first + HALF, b_second.to(p_out.dtype.element_ty), mask=m_x)


@triton.jit
def token_and_block(num_blocks):
    """Return (token, block) of this program. A token's blocks are consecutive, so that cheap ones run among others.

    rope_cache_write_mla of 4096 tokens on an H200 takes 36.6 us. With the first block of every token before any second
    block it takes 39.5 us (docs/journal.md).
    """
    i_program = tl.program_id(0)
    i_t = i_program // num_blocks
    return i_t.to(tl.int64), i_program - i_t * num_blocks


@triton.jit
def rotate_block(
    p_x, p_cos, p_sin, p_norm, p_out, i_t, i_n, N, stride_t, stride_n, stride_cos, stride_sin, eps, HALF,
    INTERLEAVED: tl.constexpr, BN: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr, REST: tl.constexpr,
    BREST: tl.constexpr,
):  # fmt: skip
    """Rotate heads [i_n BN, i_n BN + BN) of token i_t of x into out [T, N, D], normalised first if BD > 0."""
    o_n = i_n * BN + tl.arange(0, BN)
    b_first, b_second, b_scale = rotated_heads(
        p_x + i_t * stride_t, stride_n, o_n, N, p_cos + i_t * stride_cos, p_sin + i_t * stride_sin, p_norm, eps, HALF,
        INTERLEAVED=INTERLEAVED, BN=BN, BH=BH, BD=BD, REST=REST
    )  # fmt: skip
    p_token = p_out + i_t * N * (2 * HALF + REST)
    store_halves(p_token, 2 * HALF + REST, o_n, o_n < N, b_first, b_second, HALF, BH=BH)
    if REST > 0:
        move_rest(
            p_x + i_t * stride_t, stride_n, p_token, 2 * HALF + REST, o_n, N, o_n < N, p_norm, b_scale, 2 * HALF,
            BD=BD, REST=REST, BREST=BREST
        )  # fmt: skip


@triton.jit
def _rope_kernel(
    p_x, p_cos, p_sin, p_out, N, HALF, num_blocks, stride_t, stride_n, stride_cos, stride_sin,
    INTERLEAVED: tl.constexpr, BN: tl.constexpr, BH: tl.constexpr
):  # fmt: skip
    """Grid: T num_blocks, where num_blocks = ceil(N / BN)."""
    let_next_begin()
    wait_for_previous()
    i_t, i_n = token_and_block(num_blocks)
    rotate_block(
        p_x, p_cos, p_sin, p_x, p_out, i_t, i_n, N, stride_t, stride_n, stride_cos, stride_sin, 0.0, HALF,
        INTERLEAVED=INTERLEAVED, BN=BN, BH=BH, BD=0, REST=0, BREST=1
    )  # fmt: skip


def stored_config(op: str, x: torch.Tensor, *, normed: bool) -> RowConfig | None:
    """Return the stored config of a launch that rotates x [T, heads, D], normalised or not, or None."""
    none = RowConfig(BLOCK=0)
    found = choose(op, shape_class(*x.shape, normed=normed), x, (RowConfig,), lambda: none)
    return None if found is none else found


def launch_plan(
    op: str, x: torch.Tensor, config: RowConfig | None, *, more_blocks: int = 0, normed: bool = False
) -> tuple[RowConfig, int, torch.Tensor]:
    """Return (config, blocks of heads, output) of a launch that rotates x [T, heads, D], normalised first or not.

    Raises ValueError if the grid of a GPU cannot hold these blocks and `more_blocks` others for each token.
    """
    num_tokens, num_heads, dim = x.shape
    name = shape_class(num_tokens, num_heads, dim, normed=normed)
    config = config or choose(op, name, x, (RowConfig,), lambda: default_config(num_heads, dim, normed=normed))
    num_blocks = triton.cdiv(num_heads, config.BLOCK)
    if num_tokens * (num_blocks + more_blocks) > MAX_GRID_X:
        raise ValueError(f"{op}: {list(x.shape)} exceeds the grid of a GPU")
    return config, num_blocks, new_output(*x.shape, like=x)


def half_block(dim: int) -> int:
    """Return the size of a block that covers half a head of `dim` values."""
    return max(16, triton.next_power_of_2(dim // 2))


def rope(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool, config: RowConfig | None = None
) -> torch.Tensor:
    """See `moeyard_kernels.ops.rope`. x [T, heads, D] may be a view whose heads are contiguous each."""
    num_tokens, num_heads, dim = x.shape
    check_rows("rope", x=x, cos=cos, sin=sin)
    config, num_blocks, out = launch_plan("rope", x, config)
    if out.numel():
        sizes, strides = (num_heads, dim // 2, num_blocks), (*x.stride()[:2], cos.stride(0), sin.stride(0))
        _rope_kernel[(num_tokens * num_blocks,)](
            *(x, cos, sin, out),
            *sizes,
            *strides,
            INTERLEAVED=interleaved,
            BH=half_block(dim),
            BN=config.BLOCK,
            enable_fp_fusion=False,
            **config.options,
            **dependent(x),
        )
    return finish(out, x.dtype)
