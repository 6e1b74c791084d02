"""Triton: where the entries of a sequence lie in the pages."""

import triton
import triton.language as tl


@triton.jit
def entry_places(p_pages, o_e, m_e, RATIO: tl.constexpr, GRANULE: tl.constexpr, PAGE: tl.constexpr):
    """Return int32: the rows of entries o_e where m_e, by the sequence's row of the page table at p_pages."""
    o_end = (o_e + 1) * RATIO - 1
    i_page = tl.load(p_pages + o_end // PAGE, mask=m_e, other=0)
    return i_page * (PAGE // GRANULE) + o_end % PAGE // GRANULE
