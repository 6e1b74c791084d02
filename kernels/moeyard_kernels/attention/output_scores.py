"""Triton: the indexer's scores of entries, for output positions that see more entries than they may choose.

score = sum over heads of relu(q k) / sqrt(Di) * (weight / sqrt(Hi)), in fp32. Heads are summed by halves, in one order.
"""

import torch
import triton
import triton.language as tl

from moeyard_kernels.attention.decode_splits import UNFUSED, sum_over_keys
from moeyard_kernels.attention.entry_places import entry_places
from moeyard_kernels.common.dependent import dependent, wait_for_previous
from moeyard_kernels.common.launch import interpreted
from moeyard_kernels.types.compressed_rows import CompressedRows

# Entries of a program with many rows, and of a product, which is a program's with up to _FEW rows. Neither changes a
# bit.
_SPAN, _BLOCK, _FEW = 256, 64, 8


@triton.jit(do_not_specialize=("N", "MAX_PAGES"))
def _scores_kernel(
    p_q, p_w, p_entries, p_positions, p_table, p_out, N, MAX_PAGES, s_w, Q, head_scale, dim_scale,
    H: tl.constexpr, D: tl.constexpr, RATIO: tl.constexpr, GRANULE: tl.constexpr, PAGE: tl.constexpr,
    TOP_K: tl.constexpr, SPAN: tl.constexpr, BN: tl.constexpr, BH: tl.constexpr, LOG2_BH: tl.constexpr,
    BD: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Grid: (rows, ceil(N / SPAN))."""
    wait_for_previous()
    i_r = tl.program_id(0).to(tl.int64)
    i_count = ((tl.load(p_positions + i_r) + 1) // RATIO).to(tl.int32)
    i_low = tl.program_id(1) * SPAN
    if i_count > TOP_K and i_low < i_count:
        i_high = tl.minimum(i_low + SPAN, i_count)
        o_h, o_d = tl.arange(0, BH), tl.arange(0, BD)
        m_h, m_d = o_h < H, o_d < D
        b_q = tl.load(p_q + (i_r * H + o_h)[:, None] * D + o_d[None, :], mask=m_h[:, None] & m_d[None, :], other=0.0)
        if UPCAST:
            b_q = b_q.to(tl.float32)
        b_w = tl.load(p_w + i_r * s_w + o_h, mask=m_h, other=0.0) * head_scale
        p_pages = p_table + i_r // Q * MAX_PAGES
        for i_e in tl.range(i_low, i_high, BN):
            o_e = i_e + tl.arange(0, BN)
            m_e = o_e < i_high
            o_row = entry_places(p_pages, o_e, m_e, RATIO, GRANULE, PAGE)
            p_row = p_entries + o_row.to(tl.int64)[:, None] * D
            b_k = tl.load(p_row + o_d[None, :], mask=m_e[:, None] & m_d[None, :], other=0.0)
            if UPCAST:
                b_k = b_k.to(tl.float32)
            b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
            b_s = tl.maximum(b_s, 0.0) * dim_scale * b_w[:, None]
            b_sum = sum_over_keys(b_s, BN, BH, LOG2_BH, 0)
            # A negative zero equals a positive one, but its bits are lower.
            tl.store(p_out + i_r * N + o_e, tl.where(b_sum == 0.0, 0.0, b_sum), mask=m_e)


def output_scores(
    wanted: torch.Tensor,
    weights: torch.Tensor,
    entries: torch.Tensor,
    *,
    rows: CompressedRows,
    ratio: int,
    granule: int,
    top_k: int,
) -> torch.Tensor:
    """See `moeyard_kernels.ops.output_scores`."""
    count, heads, dim = wanted.shape
    num = rows.num_entries(ratio)
    out = torch.empty(count, num, dtype=torch.float32, device=wanted.device)
    # In the interpreter, a program costs the same for every size.
    span = triton.next_power_of_2(num) if interpreted() else _BLOCK if count <= _FEW else _SPAN
    padded = max(16, triton.next_power_of_2(heads))
    if count:
        _scores_kernel[(count, triton.cdiv(num, span))](
            *(wanted, weights, entries, rows.positions, rows.page_table, out),
            *(num, rows.page_table.shape[1], weights.stride(0), rows.num_queries),
            *(heads**-0.5, dim**-0.5),
            H=heads,
            D=dim,
            RATIO=ratio,
            GRANULE=granule,
            PAGE=rows.page_size,
            TOP_K=top_k,
            SPAN=span,
            BN=_BLOCK,
            BH=padded,
            LOG2_BH=padded.bit_length() - 1,
            BD=max(16, triton.next_power_of_2(dim)),
            UPCAST=interpreted(),
            num_warps=4,
            num_stages=3,
            **UNFUSED,
            **dependent(wanted),
        )
    return out
