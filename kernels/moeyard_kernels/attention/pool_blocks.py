"""Triton: the entries of all blocks that end in a step's prompt chunks, one program per block."""

import torch
import triton
import triton.language as tl

from moeyard_kernels.attention.entry_places import entry_places
from moeyard_kernels.attention.pooling import NUM_WARPS, store_entry
from moeyard_kernels.common.dependent import dependent, let_next_begin, wait_for_previous
from moeyard_kernels.types.layers import Pooling
from moeyard_kernels.types.prompt_tables import PromptTables


# Sizes that change from step to step must not recompile the kernel.
@triton.jit(do_not_specialize=("MAX_PAGES",))
def _pool_blocks_kernel(
    p_new, p_old, p_bias, p_norm, p_rope, p_entries, p_chunks, p_blocks, p_pages, MAX_PAGES, eps, s_new, COLUMN,
    SIZE: tl.constexpr, W: tl.constexpr, RATIO: tl.constexpr, OVERLAPS: tl.constexpr, GRANULE: tl.constexpr,
    PAGE: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """p_new [P, .], p_old [slots, SIZE, W]. Grid: the blocks."""
    let_next_begin()
    wait_for_previous()
    i_b = tl.load(p_blocks + tl.program_id(0) * 2)
    i_w = tl.load(p_blocks + tl.program_id(0) * 2 + 1)
    i_row = tl.load(p_chunks + i_b * 4).to(tl.int64)
    i_start = tl.load(p_chunks + i_b * 4 + 1)
    i_before = tl.maximum(tl.load(p_chunks + i_b * 4 + 2), 0).to(tl.int64)
    i_place = entry_places(p_pages + i_b.to(tl.int64) * MAX_PAGES, i_w, i_w >= 0, RATIO, GRANULE, PAGE).to(tl.int64)
    store_entry(
        p_new + i_row * s_new + COLUMN, p_old + i_before * (SIZE * W) + COLUMN, s_new, W, p_bias, p_norm, p_rope,
        p_entries + i_place * D, i_w, i_start, SIZE, eps, RATIO, OVERLAPS, D, R, BD
    )  # fmt: skip


def pool_blocks(
    compressed: torch.Tensor,
    pending: torch.Tensor,
    *,
    pooling: Pooling,
    rope: torch.Tensor,
    eps: float,
    column: int,
    tables: PromptTables,
) -> None:
    """See `moeyard_kernels.ops.pool_blocks`."""
    blocks, dim = tables.blocks(pooling.ratio), pooling.norm.shape[0]
    if not len(blocks):
        return
    _pool_blocks_kernel[(len(blocks),)](
        compressed,
        pending,
        pooling.bias,
        pooling.norm,
        rope,
        pooling.entries,
        tables.chunks,
        blocks,
        tables.page_table,
        tables.page_table.shape[1],
        eps,
        compressed.stride(0),
        column,
        SIZE=pending.shape[1],
        W=pending.shape[2],
        RATIO=pooling.ratio,
        OVERLAPS=pooling.overlaps,
        GRANULE=pooling.granule,
        PAGE=tables.page_size,
        D=dim,
        R=rope.shape[1],
        BD=triton.next_power_of_2(dim),
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
        **dependent(compressed),
    )
