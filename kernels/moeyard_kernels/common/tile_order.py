"""Triton: order of the tiles of a product."""

import triton
import triton.language as tl


@triton.jit
def place(i_tile, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Return row and column of a tile: rows fastest, in groups of GROUP, so that concurrent tiles share operands."""
    i_group = i_tile // (GROUP * tiles_n)
    rows_here = tl.minimum(tiles_m - i_group * GROUP, GROUP)
    i_in = i_tile % (GROUP * tiles_n)
    return i_group * GROUP + i_in % rows_here, i_in // rows_here
