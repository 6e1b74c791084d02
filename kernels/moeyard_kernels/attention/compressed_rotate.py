"""Triton: rotation of queries, keys and the indexer's queries of compressed attention, and the store of their state.

Values are rounded where `rms_norm` and `rope` round them. A program takes heads of one token: queries, then the key
with the state, then the indexer's queries.
"""

import torch
import triton
import triton.language as tl

from moeyard_kernels.attention.rope import half_block, rotate, token_and_block
from moeyard_kernels.common.checks import show
from moeyard_kernels.common.dependent import dependent, let_next_begin, wait_for_previous
from moeyard_kernels.common.launch import MAX_GRID_X
from moeyard_kernels.common.rounding import round_to, stored_as
from moeyard_kernels.elementwise.rms_norm import NUM_WARPS, row_scale, row_tile
from moeyard_kernels.types.compressed_rows import CompressedRows

# Columns of the pooled values that a program copies at once.
_COLUMNS = 1024


@triton.jit
def rotated_pairs(b_pairs, p_cos, p_sin, HALF: tl.constexpr, BH: tl.constexpr, DTYPE: tl.constexpr):
    """Rotate pairs (2 i, 2 i + 1) of b_pairs [BN, 2 BH]. Return first and second values [BN, BH], rounded to DTYPE."""
    o_h = tl.arange(0, BH)
    b_first, b_second = tl.split(tl.reshape(b_pairs, [b_pairs.shape[0], BH, 2]))
    b_cos = tl.load(p_cos + o_h, mask=o_h < HALF, other=0.0)[None, :]
    b_sin = tl.load(p_sin + o_h, mask=o_h < HALF, other=0.0)[None, :]
    b_first, b_second = rotate(b_first, b_second, b_cos, b_sin, tl.float32)
    return round_to(b_first, DTYPE), round_to(b_second, DTYPE)


@triton.jit
def _store_heads(p_out, o_n, m_n, b_x, b_first, b_second, D: tl.constexpr, HALF: tl.constexpr, BD: tl.constexpr,
                 BH: tl.constexpr):  # fmt: skip
    """Store heads o_n of [N, D]: the first values of b_x [BN, BD], then both halves of the rotated ones."""
    DTYPE: tl.constexpr = p_out.dtype.element_ty
    o_d, o_h = tl.arange(0, BD), tl.arange(0, BH)
    p_head = p_out + o_n.to(tl.int64)[:, None] * D
    tl.store(p_head + o_d[None, :], stored_as(b_x, DTYPE), mask=m_n[:, None] & (o_d < D - 2 * HALF)[None, :])
    p_half, m_half = p_head + (D - 2 * HALF) + o_h[None, :], m_n[:, None] & (o_h < HALF)[None, :]
    tl.store(p_half, stored_as(b_first, DTYPE), mask=m_half)
    tl.store(p_half + HALF, stored_as(b_second, DTYPE), mask=m_half)


@triton.jit
def _rotated_heads(p_x, p_cos, p_sin, o_n, m_n, eps, D: tl.constexpr, HALF: tl.constexpr, BD: tl.constexpr,
                   BH: tl.constexpr, NORM: tl.constexpr):  # fmt: skip
    """Return heads o_n of one token's [N, D] as `_store_heads` takes them. NORM: divided by the root mean square."""
    DTYPE: tl.constexpr = p_x.dtype.element_ty
    o_d, o_2h = tl.arange(0, BD), tl.arange(0, 2 * BH)
    p_head = p_x + o_n.to(tl.int64)[:, None] * D
    b_x = tl.load(p_head + o_d[None, :], mask=m_n[:, None] & (o_d < D)[None, :], other=0.0).to(tl.float32)
    m_pair = m_n[:, None] & (o_2h < 2 * HALF)[None, :]
    b_pairs = tl.load(p_head + (D - 2 * HALF) + o_2h[None, :], mask=m_pair, other=0.0).to(tl.float32)
    if NORM:
        b_scale = row_scale(b_x, D, eps)
        b_x, b_pairs = round_to(b_x * b_scale, DTYPE), round_to(b_pairs * b_scale, DTYPE)
    b_first, b_second = rotated_pairs(b_pairs, p_cos, p_sin, HALF, BH, DTYPE)
    return b_x, b_first, b_second


@triton.jit
def _turn_heads(p_x, p_out, p_cos, p_sin, o_n, N, eps, D: tl.constexpr, HALF: tl.constexpr, BD: tl.constexpr,
                BH: tl.constexpr, NORM: tl.constexpr):  # fmt: skip
    """Rotate heads o_n of one token's [N, D]."""
    b_x, b_first, b_second = _rotated_heads(
        p_x, p_cos, p_sin, o_n, o_n < N, eps, D=D, HALF=HALF, BD=BD, BH=BH, NORM=NORM
    )
    _store_heads(p_out, o_n, o_n < N, b_x, b_first, b_second, D=D, HALF=HALF, BD=BD, BH=BH)


@triton.jit
def _turn_key(
    p_x, p_out, p_cos, p_sin, p_recent, p_compressed, p_pending, p_positions, p_places, p_slots, i_t, Q, eps,
    D: tl.constexpr, HALF: tl.constexpr, RING: tl.constexpr, PENDING: tl.constexpr, COLUMNS: tl.constexpr,
    STORED: tl.constexpr, BD: tl.constexpr, BH: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Rotate the key of token i_t. If STORED and it has a place, store it and its pooled values in its slot."""
    o_n = tl.arange(0, 1)
    b_x, b_first, b_second = _rotated_heads(
        p_x, p_cos, p_sin, o_n, o_n < 1, eps, D=D, HALF=HALF, BD=BD, BH=BH, NORM=False
    )
    _store_heads(p_out, o_n, o_n < 1, b_x, b_first, b_second, D=D, HALF=HALF, BD=BD, BH=BH)
    if STORED:  # noqa: SIM102 - the pointers of rows that store nothing are none
        if tl.load(p_places + i_t) >= 0:
            i_slot, i_p = tl.load(p_slots + i_t // Q), tl.load(p_positions + i_t)
            p_key = p_recent + (i_slot * RING + i_p % RING) * D
            _store_heads(p_key, o_n, o_n < 1, b_x, b_first, b_second, D=D, HALF=HALF, BD=BD, BH=BH)
            if COLUMNS > 0:
                p_row = p_pending + (i_slot * PENDING + i_p % PENDING) * COLUMNS
                for i_c in tl.static_range(0, COLUMNS, BC):
                    o_c = i_c + tl.arange(0, BC)
                    b_c = tl.load(p_compressed + o_c, mask=o_c < COLUMNS, other=0.0)
                    tl.store(p_row + o_c, b_c, mask=o_c < COLUMNS)


@triton.jit
def _rotate_kernel(
    p_q, p_kv, p_cos, p_sin, p_queries, p_keys, p_wanted, p_recent, p_compressed, p_pending, p_positions, p_places,
    p_slots, num_blocks, s_q, s_kv, s_cos, s_compressed, eps, Q,
    H: tl.constexpr, D: tl.constexpr, HI: tl.constexpr, DI: tl.constexpr, HALF: tl.constexpr, RING: tl.constexpr,
    PENDING: tl.constexpr, COLUMNS: tl.constexpr, STORED: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    BNI: tl.constexpr, BDI: tl.constexpr, BH: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Grid: T num_blocks, where num_blocks = ceil(H / BN) + 1 + ceil(HI / BNI). COLUMNS: of `pending`, 0 without."""
    let_next_begin()
    wait_for_previous()
    i_t, i_block = token_and_block(num_blocks)
    p_cos, p_sin = p_cos + i_t * s_cos, p_sin + i_t * s_cos
    BLOCKS: tl.constexpr = (H + BN - 1) // BN
    if i_block < BLOCKS:
        _turn_heads(
            p_q + i_t * s_q, p_queries + i_t * (H * D), p_cos, p_sin, i_block * BN + tl.arange(0, BN), H, eps, D=D,
            HALF=HALF, BD=BD, BH=BH, NORM=True
        )  # fmt: skip
    elif i_block == BLOCKS:
        _turn_key(
            p_kv + i_t * s_kv, p_keys + i_t * D, p_cos, p_sin, p_recent, p_compressed + i_t * s_compressed, p_pending,
            p_positions, p_places, p_slots, i_t, Q, eps, D=D, HALF=HALF, RING=RING, PENDING=PENDING, COLUMNS=COLUMNS,
            STORED=STORED, BD=BD, BH=BH, BC=BC
        )  # fmt: skip
    else:
        if HI > 0:
            _turn_heads(
                p_q + i_t * s_q + H * D, p_wanted + i_t * (HI * DI), p_cos, p_sin,
                (i_block - BLOCKS - 1) * BNI + tl.arange(0, BNI), HI, eps, D=DI, HALF=HALF, BD=BDI, BH=BH, NORM=False
            )  # fmt: skip


@triton.jit
def turned_back(b_first, b_second, b_cos, b_sin, DTYPE: tl.constexpr):
    """Undo the rotation of b_first and b_second [BN, BH] fp32. Return the pairs [BN, 2 BH], rounded to DTYPE."""
    b_first, b_second = rotate(b_first, b_second, b_cos, -b_sin, tl.float32)
    b_pairs = tl.join(round_to(b_first, DTYPE), round_to(b_second, DTYPE))
    return tl.reshape(b_pairs, [b_first.shape[0], 2 * b_first.shape[1]])


@triton.jit
def _rotate_back_kernel(
    p_x, p_cos, p_sin, p_out, num_blocks, s_cos,
    H: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """Grid: T num_blocks, where num_blocks = ceil(H / BN)."""
    let_next_begin()
    wait_for_previous()
    i_t, i_block = token_and_block(num_blocks)
    DTYPE: tl.constexpr = p_out.dtype.element_ty
    o_n, o_d, o_h, o_2h = i_block * BN + tl.arange(0, BN), tl.arange(0, BD), tl.arange(0, BH), tl.arange(0, 2 * BH)
    m_n, m_h = (o_n < H)[:, None], o_h < HALF
    m_d, m_2h = m_n & (o_d < D - 2 * HALF)[None, :], m_n & (o_2h < 2 * HALF)[None, :]
    o_head = (i_t * H + o_n)[:, None] * D
    tl.store(p_out + o_head + o_d[None, :], tl.load(p_x + o_head + o_d[None, :], mask=m_d, other=0.0), mask=m_d)
    o_last = o_head + (D - 2 * HALF)
    b_first = tl.load(p_x + o_last + o_h[None, :], mask=m_n & m_h[None, :], other=0.0).to(tl.float32)
    b_second = tl.load(p_x + o_last + HALF + o_h[None, :], mask=m_n & m_h[None, :], other=0.0).to(tl.float32)
    b_cos = tl.load(p_cos + i_t * s_cos + o_h, mask=m_h, other=0.0)[None, :]
    b_sin = tl.load(p_sin + i_t * s_cos + o_h, mask=m_h, other=0.0)[None, :]
    b_pairs = turned_back(b_first, b_second, b_cos, b_sin, DTYPE)
    tl.store(p_out + o_last + o_2h[None, :], stored_as(b_pairs, DTYPE), mask=m_2h)


def compressed_rotate(
    q: torch.Tensor,
    kv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    recent: torch.Tensor,
    *,
    heads: int,
    index_heads: int,
    eps: float,
    compressed: torch.Tensor | None = None,
    pending: torch.Tensor | None = None,
    rows: CompressedRows | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """See `moeyard_kernels.ops.compressed_rotate`."""
    count, dim = kv.shape
    index_dim = (q.shape[1] - heads * dim) // index_heads if index_heads else 0
    queries, keys = q.new_empty(count, heads, dim), q.new_empty(count, dim)
    wanted = q.new_empty(count, index_heads, index_dim) if index_heads else None
    _check_angles("compressed_rotate", cos, sin)
    (tile, block), (index_tile, index_block) = row_tile(dim), row_tile(index_dim)
    num_blocks = triton.cdiv(heads, tile) + 1 + triton.cdiv(index_heads, index_tile)
    if count * num_blocks > MAX_GRID_X:
        raise ValueError(f"compressed_rotate: {list(q.shape)} exceeds the grid of a GPU")
    if count:
        stored = rows is not None
        state = (rows.positions, rows.places, rows.slots) if rows is not None else (q, q, q)
        columns = pending.shape[2] if stored and pending is not None else 0
        _rotate_kernel[(count * num_blocks,)](
            *(q, kv, cos, sin, queries, keys, q if wanted is None else wanted, recent),
            *((q, q) if compressed is None or pending is None else (compressed, pending)),
            *state,
            num_blocks,
            *(q.stride(0), kv.stride(0), cos.stride(0), 0 if compressed is None else compressed.stride(0)),
            eps,
            rows.num_queries if rows is not None else 1,
            H=heads,
            D=dim,
            HI=index_heads,
            DI=index_dim,
            HALF=cos.shape[1],
            RING=recent.shape[1],
            PENDING=pending.shape[1] if pending is not None else 1,
            COLUMNS=columns,
            STORED=stored,
            BN=tile,
            BD=block,
            BNI=index_tile,
            BDI=index_block,
            BH=half_block(2 * cos.shape[1]),
            BC=_COLUMNS,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
            **dependent(q),
        )
    return queries, keys, wanted


def rotate_back(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """See `moeyard_kernels.ops.rotate_back`."""
    count, heads, dim = x.shape
    out = torch.empty_like(x)
    _check_angles("rotate_back", cos, sin)
    tile, block = row_tile(dim)
    num_blocks = triton.cdiv(heads, tile)
    if count * num_blocks > MAX_GRID_X:
        raise ValueError(f"rotate_back: {list(x.shape)} exceeds the grid of a GPU")
    if out.numel():
        _rotate_back_kernel[(count * num_blocks,)](
            *(x, cos, sin, out),
            num_blocks,
            cos.stride(0),
            H=heads,
            D=dim,
            HALF=cos.shape[1],
            BN=tile,
            BD=block,
            BH=half_block(2 * cos.shape[1]),
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
            **dependent(x),
        )
    return out


def _check_angles(op: str, cos: torch.Tensor, sin: torch.Tensor) -> None:
    if cos.stride() != sin.stride() or (cos.shape[1] > 1 and cos.stride(1) != 1):
        raise ValueError(f"{op}: cos {show(cos)} with strides {cos.stride()}, sin with {sin.stride()}")
