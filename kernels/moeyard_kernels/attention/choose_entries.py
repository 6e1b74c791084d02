"""Triton: the places of the entries with the largest scores of each row, one program per row (`radix_choice`)."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moeyard_kernels.attention.entry_places import entry_places
from moeyard_kernels.attention.radix_choice import least_chosen, take
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
    i_least, i_need = least_chosen(p_row, count, TOP, BLOCK)
    i_taken, i_equal = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for i_n in tl.range(0, count, BLOCK):
        o_n = i_n + tl.arange(0, BLOCK)
        m_take, o_out, i_taken, i_equal = take(p_row, o_n, count, i_least, i_need, i_taken, i_equal)
        b_place = entry_places(p_pages + i_b.to(tl.int64) * MAX_PAGES, o_n, m_take, RATIO, GRANULE, PAGE)
        tl.store(p_found + i_row * TOP + o_out, b_place, mask=m_take)


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
