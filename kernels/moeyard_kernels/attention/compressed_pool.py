"""Triton: entries of compressed attention from the values and gates of their positions, at output positions.

For each column, tiles of positions in ascending order:

    m' = max(m, max gate);  p = 2^((gate - m') log2(e));  a = 2^((m - m') log2(e))
    l = fma(l, a, sum p);  o = fma(o, a, sum (p value))

Then o / l is rounded, normalised as in `rms_norm` and rotated. A program makes one entry, so tiles fix the order.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from moeyard_kernels.attention.rope import rotate
from moeyard_kernels.common.dependent import dependent, let_next_begin, wait_for_previous
from moeyard_kernels.common.rounding import round_to, stored_as
from moeyard_kernels.elementwise.rms_norm import normed
from moeyard_kernels.types.compressed_rows import CompressedRows
from moeyard_kernels.types.layers import Pooling

# Positions that are loaded at once, before their first use.
_POSITIONS = 16
_WARPS = 8
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _pool(
    p_row, p_bias, p_norm, p_rope, p_entry, i_p, eps,
    RATIO: tl.constexpr, OVERLAPS: tl.constexpr, RING: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr,
    HALF: tl.constexpr, BD: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """Store the entry of the block that ends at i_p. p_row: the slot's first column of these values."""
    REACH: tl.constexpr = 2 * RATIO if OVERLAPS else RATIO
    WIDTH: tl.constexpr = 2 * D if OVERLAPS else D
    o_d, o_p = tl.arange(0, BD), tl.arange(0, BP)
    m_d = o_d < D
    b_m = tl.full([BD], float("-inf"), tl.float32)
    b_l, b_o = tl.zeros([BD], tl.float32), tl.zeros([BD], tl.float32)
    for i_j in tl.range(0, REACH, BP):
        o_j = i_j + o_p
        o_at = i_p - (REACH - 1) + o_j
        m_j = (o_j < REACH) & (o_at >= 0)
        # The positions of the block itself have the second half of the columns.
        o_half = (o_j // RATIO * D)[:, None] + o_d[None, :]
        m_x = m_j[:, None] & m_d[None, :]
        p_x = p_row + tl.maximum(o_at, 0)[:, None] % RING * COLUMNS + o_half
        b_v = tl.load(p_x, mask=m_x, other=0.0)
        b_g = tl.load(p_x + WIDTH, mask=m_x, other=float("-inf"))
        b_g = b_g + tl.load(p_bias + (o_j % RATIO)[:, None] * WIDTH + o_half, mask=m_x, other=0.0)
        b_new = tl.maximum(b_m, tl.max(b_g, 0))
        # Columns past D, and blocks before position 0, have nothing yet.
        b_top = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_p = tl.exp2((b_g - b_top[None, :]) * _LOG2E)
        b_a = tl.exp2((b_m - b_top) * _LOG2E)
        b_l = tl.fma(b_l, b_a, tl.sum(b_p, 0))
        b_o = tl.fma(b_o, b_a, tl.sum(b_p * b_v, 0))
        b_m = b_new
    DTYPE: tl.constexpr = p_entry.dtype.element_ty
    WEIGHT: tl.constexpr = p_norm.dtype.element_ty
    b_x = round_to(tl.div_rn(b_o, tl.where(m_d, b_l, 1.0)), DTYPE)
    b_weight = tl.load(p_norm + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_x = round_to(normed(b_x[None, :], b_weight, D, eps, WEIGHT), DTYPE)
    # All values in pairs. Those before the last 2 HALF turn by nothing, which is exact.
    o_pair = tl.arange(0, BD // 2)
    b_first, b_second = tl.split(tl.reshape(b_x, [BD // 2, 2]))
    NOPE: tl.constexpr = D // 2 - HALF
    m_turned = (o_pair >= NOPE) & (o_pair < NOPE + HALF)
    p_angle = p_rope + (i_p - (RATIO - 1)) * (2 * HALF) + (o_pair - NOPE)
    b_cos = tl.load(p_angle, mask=m_turned, other=1.0)
    b_sin = tl.load(p_angle + HALF, mask=m_turned, other=0.0)
    b_first, b_second = rotate(b_first, b_second, b_cos, b_sin, tl.float32)
    o_first = tl.where(m_turned, o_pair + NOPE, 2 * o_pair)
    o_second = tl.where(m_turned, o_pair + NOPE + HALF, 2 * o_pair + 1)
    m_pair = o_pair < D // 2
    tl.store(p_entry + o_first, stored_as(round_to(b_first, DTYPE), DTYPE), mask=m_pair)
    tl.store(p_entry + o_second, stored_as(round_to(b_second, DTYPE), DTYPE), mask=m_pair)


@triton.jit
def _pool_kernel(
    p_pending, p_rope, p_bias, p_norm, p_entries, p_index_bias, p_index_norm, p_index_entries, p_positions, p_places,
    p_slots, eps, Q,
    RATIO: tl.constexpr, GRANULE: tl.constexpr, OVERLAPS: tl.constexpr, RING: tl.constexpr, COLUMNS: tl.constexpr,
    D: tl.constexpr, DI: tl.constexpr, HALF: tl.constexpr, BD: tl.constexpr, BDI: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """Grid: (rows, poolings)."""
    let_next_begin()
    wait_for_previous()
    i_r = tl.program_id(0)
    i_p, i_place = tl.load(p_positions + i_r), tl.load(p_places + i_r)
    if (i_p + 1) % RATIO == 0 and i_place >= 0:
        p_row = p_pending + tl.load(p_slots + i_r // Q) * (RING * COLUMNS)
        i_entry = i_place // GRANULE
        if tl.program_id(1) == 0:
            _pool(
                p_row, p_bias, p_norm, p_rope, p_entries + i_entry * D, i_p, eps, RATIO=RATIO, OVERLAPS=OVERLAPS,
                RING=RING, COLUMNS=COLUMNS, D=D, HALF=HALF, BD=BD, BP=BP
            )  # fmt: skip
        else:
            if DI > 0:
                p_row += 2 * D * (2 if OVERLAPS else 1)
                _pool(
                    p_row, p_index_bias, p_index_norm, p_rope, p_index_entries + i_entry * DI, i_p, eps, RATIO=RATIO,
                    OVERLAPS=OVERLAPS, RING=RING, COLUMNS=COLUMNS, D=DI, HALF=HALF, BD=BDI, BP=BP
                )  # fmt: skip


def compressed_pool(
    pending: torch.Tensor, rope: torch.Tensor, *, poolings: Sequence[Pooling], rows: CompressedRows, eps: float
) -> None:
    """See `moeyard_kernels.ops.compressed_pool`."""
    main, index = poolings[0], poolings[-1]
    if not rows.num_rows:
        return
    dims = [each.norm.shape[0] for each in (main, index)]
    reach = main.ratio * (2 if main.overlaps else 1)
    _pool_kernel[(rows.num_rows, len(poolings))](
        *(pending, rope),
        *(main.bias, main.norm, main.entries, index.bias, index.norm, index.entries),
        *(rows.positions, rows.places, rows.slots),
        eps,
        rows.num_queries,
        RATIO=main.ratio,
        GRANULE=main.granule,
        OVERLAPS=main.overlaps,
        RING=pending.shape[1],
        COLUMNS=pending.shape[2],
        D=dims[0],
        DI=dims[1] if len(poolings) > 1 else 0,
        HALF=rope.shape[1] // 2,
        BD=max(16, triton.next_power_of_2(dims[0])),
        BDI=max(16, triton.next_power_of_2(dims[1])),
        BP=min(_POSITIONS, triton.next_power_of_2(reach)),
        num_warps=_WARPS,
        enable_fp_fusion=False,
        **dependent(pending),
    )
