"""Triton: the entries with the largest scores of each row, one program per row, by radix selection.

Scores become integers of the same order. Four passes over a row find the k-th largest integer, 8 bits at a time, by
counting. A last pass writes the places of entries above it, and of the lowest entries equal to it. All sums are
of integers, so the result is exact.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moeyard_kernels.attention.pool_blocks import place_of
from moeyard_kernels.common.dependent import dependent, wait_for_previous
from moeyard_kernels.common.tuning import Config
from moeyard_kernels.types.layers import Pooling
from moeyard_kernels.types.prompt_tables import ChosenRows, PromptTables


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceConfig(Config):
    """BLOCK scores at a time."""

    num_stages: int = 1
    BLOCK: int = 1024


CONFIGS = (
    ChoiceConfig(),
    ChoiceConfig(BLOCK=2048, num_warps=8),
    ChoiceConfig(BLOCK=2048),
    ChoiceConfig(BLOCK=512),
)


@triton.jit
def _order_of(p_row, o_n, count):
    """Return integers in the order of the scores o_n; those from `count` on are undefined. Both zeros are equal."""
    b_x = tl.load(p_row + o_n, mask=o_n < count, other=0.0)
    b_bits = tl.where(b_x == 0.0, 0.0, b_x).to(tl.int32, bitcast=True)
    return b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _next_digit(p_row, count, i_kth, left, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Return i_kth with its 8 bits from SHIFT on, and the rank among the integers that share all bits so far."""
    o_b = tl.arange(0, BLOCK)
    o_bin = tl.arange(0, 256)
    b_hist = tl.zeros([256], tl.int32)
    for i_n in range(0, count, BLOCK):
        b_key = _order_of(p_row, i_n + o_b, count) ^ -2147483648
        m_in = i_n + o_b < count
        if SHIFT < 24:
            m_in = m_in & ((b_key >> (SHIFT + 8)) == (i_kth >> (SHIFT + 8)))
        # The others count as digit 0, and are subtracted there.
        b_digit = tl.where(m_in, (b_key >> SHIFT) & 0xFF, 0)
        num_out = BLOCK - tl.sum(m_in.to(tl.int32), 0)
        b_hist += tl.histogram(b_digit, 256) - tl.where(o_bin == 0, num_out, 0)
    # The largest digit that, with all above it, has at least `left` integers.
    i_digit = tl.sum((tl.cumsum(b_hist, 0, reverse=True) >= left).to(tl.int32), 0) - 1
    left -= tl.sum(tl.where(o_bin > i_digit, b_hist, 0), 0)
    return i_kth | (i_digit << SHIFT), left


@triton.jit(do_not_specialize=("WIDE", "TOP", "MAX_PAGES"), do_not_specialize_on_alignment=("p_scores",))
def _choose_entries_kernel(
    p_scores, p_found, p_rows, p_of_row, p_pages, WIDE, TOP, MAX_PAGES,
    RATIO: tl.constexpr, GRANULE: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """p_scores [R, WIDE], p_found [P, TOP]. Grid: R."""
    wait_for_previous()
    i_row = tl.load(p_rows + tl.program_id(0)).to(tl.int64)
    i_b = tl.load(p_of_row + i_row * 2)
    count = (tl.load(p_of_row + i_row * 2 + 1) + 1) // RATIO
    p_row = p_scores + tl.program_id(0).to(tl.int64) * WIDE
    o_b = tl.arange(0, BLOCK)
    # The bits found so far, of the k-th largest integer with its sign bit flipped, and the rank below larger ones.
    i_kth = tl.full([], 0, tl.int32)
    left = tl.full([], 0, tl.int32) + TOP
    for i_pass in tl.static_range(4):
        i_kth, left = _next_digit(p_row, count, i_kth, left, 24 - 8 * i_pass, BLOCK)
    i_kth = i_kth ^ -2147483648
    p_out = p_found + i_row * TOP
    num_taken = tl.full([], 0, tl.int32)
    num_equal = tl.full([], 0, tl.int32)
    for i_n in range(0, count, BLOCK):
        b_key = _order_of(p_row, i_n + o_b, count)
        m_in = i_n + o_b < count
        b_equal = (m_in & (b_key == i_kth)).to(tl.int32)
        b_rank = num_equal + tl.cumsum(b_equal, 0) - b_equal
        m_take = m_in & ((b_key > i_kth) | ((b_equal > 0) & (b_rank < left)))
        b_take = m_take.to(tl.int32)
        b_place = place_of(p_pages, i_b, tl.where(m_in, i_n + o_b, 0), MAX_PAGES, RATIO, GRANULE, PAGE).to(tl.int32)
        tl.store(p_out + num_taken + tl.cumsum(b_take, 0) - b_take, b_place, mask=m_take)
        num_equal += tl.sum(b_equal, 0)
        num_taken += tl.sum(b_take, 0)


def choose_entries(
    scores: torch.Tensor,
    found: torch.Tensor,
    *,
    pooling: Pooling,
    top_k: int,
    chosen: ChosenRows,
    tables: PromptTables,
    config: ChoiceConfig = CONFIGS[0],
) -> None:
    """See `moeyard_kernels.ops.choose_entries`."""
    if not len(chosen.rows):
        return
    _choose_entries_kernel[(len(chosen.rows),)](
        scores,
        found,
        chosen.rows,
        tables.rows,
        tables.page_table,
        scores.shape[1],
        top_k,
        tables.page_table.shape[1],
        RATIO=pooling.ratio,
        GRANULE=pooling.granule,
        PAGE=tables.page_size,
        BLOCK=config.BLOCK,
        **config.options,
        **dependent(scores),
    )
