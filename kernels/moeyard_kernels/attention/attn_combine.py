"""Triton: merge attention over consecutive splits of the keys, in ascending order, by their log-sum-exps.

top = max lse_s;  w_s = 2^((lse_s - top) log2(e));  l = l + w_s;  o = fma(w_s, partial_s, o);  out = o / l;
lse = top + ln(l). One split returns its partial bit for bit. A split that saw nothing (lse -inf) changes no bit.
"""

import math
from collections.abc import Iterable

import torch
import triton
import triton.language as tl

from moeyard_kernels.attention.decode_splits import UNFUSED, split_span
from moeyard_kernels.common.dependent import dependent, let_next_begin, wait_for_previous
from moeyard_kernels.common.launch import finish, interpreted, new_output
from moeyard_kernels.types.decode_tables import DecodeTables
from moeyard_kernels.types.footprint import SplitSums

# Splits read at once, and columns per program. They set the loads in flight, not the order of the sums.
_AHEAD = 16
_COLUMNS = 128
# The most one-warp programs for which the next launch may begin early: with 32768 that cost 12 us on an H200.
_MANY = tl.constexpr(1024)


@triton.jit
def _settle():
    wait_for_previous()
    if tl.num_programs(0) * tl.num_programs(1) <= _MANY:
        let_next_begin()


@triton.jit(
    do_not_specialize=(
        "N",
        "S",
    )
)
def _attn_combine_kernel(
    p_part, p_lse, p_lens, p_out, p_out_lse, N, S,
    M: tl.constexpr, Q: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr, SPLIT: tl.constexpr,
    HAS_LENS: tl.constexpr, BX: tl.constexpr, BQ: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr,
    AHEAD: tl.constexpr, ONCE: tl.constexpr, STATIC: tl.constexpr,
):  # fmt: skip
    """Merge BD columns of BX of the N rows of p_part [N / M, S, M, D] and p_lse [N / M, S, M] into p_out [N, D].

    STATIC: read lengths before the wait. Grid: (ceil(N / BX), ceil(D / BD)).
    """
    if not STATIC:
        _settle()
    o_x = tl.program_id(0) * BX + tl.arange(0, BX)
    o_d, o_s = tl.program_id(1) * BD + tl.arange(0, BD), tl.arange(0, BS)
    m_x, m_d = o_x < N, o_d < D
    if HAS_LENS:
        o_q = tl.arange(0, BQ)
        m_q = m_x[:, None] & (o_q < Q)[None, :]
        b_lens = tl.load(p_lens + (o_x // M)[:, None] * Q + o_q[None, :], mask=m_q, other=0)
        i_first, i_end = split_span(b_lens, WINDOW, SPLIT, 1)
        b_count = i_end - i_first
    else:
        b_count = tl.where(m_x, S, 0)
    i_count = tl.max(b_count, 0)
    if STATIC:
        _settle()
    # The row of split 0. The next split is M rows further.
    o_row = (o_x // M).to(tl.int64) * S * M + o_x % M
    b_top = tl.zeros([BX], dtype=tl.float32)
    if not ONCE:
        b_tops = tl.full([BX, BS], float("-inf"), dtype=tl.float32)
        for i_s in tl.range(0, i_count, BS):
            m_s = (i_s + o_s)[None, :] < b_count[:, None]
            b_lse = tl.load(p_lse + o_row[:, None] + (i_s + o_s)[None, :] * M, mask=m_s, other=float("-inf"))
            b_tops = tl.maximum(b_tops, b_lse)
        b_top = tl.max(b_tops, 1)
        b_top = tl.where(b_top == float("-inf"), 0.0, b_top)
    b_sum = tl.zeros([BX], dtype=tl.float32)
    b_acc = tl.zeros([BX, BD], dtype=tl.float32)
    for i_s in tl.range(0, i_count, AHEAD):
        # Issue all loads before the first use, so that they are in flight together.
        b_lses = ()
        b_parts = ()
        for u in tl.static_range(AHEAD):
            m_s = i_s + u < b_count
            o_part = o_row + (i_s + u) * M
            m_part = m_s[:, None] & m_d[None, :]
            b_lse = tl.load(p_lse + o_part, mask=m_s, other=float("-inf"))
            b_part = tl.load(p_part + o_part[:, None] * D + o_d[None, :], mask=m_part, other=0.0)
            # Triton has no unpacking.
            b_lses = b_lses + (b_lse,)  # type: ignore[assignment]  # noqa: RUF005
            b_parts = b_parts + (b_part,)  # type: ignore[assignment]  # noqa: RUF005
        if ONCE:
            # All splits are loaded, so no earlier pass has to find the largest log-sum-exp.
            b_top = b_lses[0]  # type: ignore[misc]
            for u in tl.static_range(1, AHEAD):
                b_top = tl.maximum(b_top, b_lses[u])
            b_top = tl.where(b_top == float("-inf"), 0.0, b_top)
        for u in tl.static_range(AHEAD):
            b_w = tl.exp2((b_lses[u] - b_top) * 1.4426950408889634)
            b_sum += b_w
            b_acc = tl.fma(tl.broadcast_to(b_w[:, None], b_acc.shape), b_parts[u], b_acc)
    m_any = b_sum > 0
    b_sum = tl.where(m_any, b_sum, 1.0)
    b_lse = tl.where(m_any, b_top + tl.log2(b_sum) * 0.6931471805599453, float("-inf"))
    b_acc = b_acc * tl.div_rn(tl.full([BX], 1.0, dtype=tl.float32), b_sum)[:, None]
    p_o = p_out + o_x[:, None].to(tl.int64) * D + o_d[None, :]
    tl.store(p_o, b_acc.to(p_out.dtype.element_ty), mask=m_x[:, None] & m_d[None, :])
    tl.store(p_out_lse + o_x, b_lse, mask=m_x & (tl.program_id(1) == 0))


def attn_combine(partial: torch.Tensor, lse: torch.Tensor, *, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """See `moeyard_kernels.ops.attn_combine`."""
    return _combine(partial, lse, dtype=dtype, heads=partial.shape[2], tables=None, split=1)


def new_partials(like: torch.Tensor, *, tables: DecodeTables, sums: SplitSums) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate the results that a decode attention writes for `combine_splits`: `SplitSums.shape`, and their lse.

    S is the number of splits that the table can hold. The dtype is fp32, or that of `like` if S is 1, because then
    nothing is merged. If sequences run in turns, the allocation has its full size for every table, so that one block of
    memory serves all tables and graphs.
    """
    shape = sums.shape(tables.num_sequences, tables.num_queries, tables.num_positions)
    size, dtype = math.prod(shape), like.dtype if shape[1] == 1 else torch.float32
    room = new_output(max(size, tables.most // 4) if tables.in_turn else size, like=like, dtype=dtype)
    return room[:size].view(shape), new_output(*shape[:-1], like=like, dtype=torch.float32)


def concatenate(results: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Concatenate out and lse of sequences that ran in turns (`DecodeTables.turns`)."""
    outs, lses = zip(*results, strict=True)
    return torch.cat(outs), torch.cat(lses)


def combine_splits(
    partial: torch.Tensor,
    lse: torch.Tensor,
    *,
    dtype: torch.dtype,
    heads: int,
    tables: DecodeTables,
    split: int,
    static_tables: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the written splits of a decode attention, partial [B, S, Q heads, D] and lse [B, S, Q heads].

    Return (out [B Q, heads, D], lse [B Q, heads]). static_tables: neither the attention's launch nor the launch before
    it writes lengths.
    """
    if partial.shape[1] == 1:
        return finish(partial, dtype).view(-1, heads, partial.shape[3]), lse.view(-1, heads)
    return _combine(partial, lse, dtype=dtype, heads=heads, tables=tables, split=split, static=static_tables)


def _combine(
    partial: torch.Tensor,
    lse: torch.Tensor,
    *,
    dtype: torch.dtype,
    heads: int,
    tables: DecodeTables | None,
    split: int,
    static: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_sequences, num_splits, num_rows, dim = partial.shape
    count = num_sequences * num_rows
    out = new_output(count, dim, like=partial, dtype=dtype)
    out_lse = new_output(count, like=partial)
    # In the interpreter, a program costs the same for every tile size.
    rows = triton.next_power_of_2(count) if interpreted() else 1
    columns = triton.next_power_of_2(dim) if interpreted() else min(_COLUMNS, triton.next_power_of_2(dim))
    if out.numel():
        tensors = (partial, lse, lse if tables is None else tables.kv_lens, out, out_lse)
        _attn_combine_kernel[(triton.cdiv(count, rows), triton.cdiv(dim, columns))](
            *tensors,
            count,
            num_splits,
            M=num_rows,
            Q=num_rows // heads,
            D=dim,
            WINDOW=0 if tables is None else tables.window or 0,
            SPLIT=split,
            HAS_LENS=tables is not None,
            BX=rows,
            BQ=triton.next_power_of_2(num_rows // heads),
            BS=min(256, triton.next_power_of_2(num_splits)),
            BD=columns,
            AHEAD=min(_AHEAD, triton.next_power_of_2(num_splits)),
            ONCE=num_splits <= _AHEAD,
            STATIC=static,
            num_warps=1,
            **UNFUSED,
            **dependent(partial),
        )
    rows_out = count // heads
    return finish(out, dtype).view(rows_out, heads, dim), out_lse.view(rows_out, heads)
