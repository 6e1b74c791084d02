"""Triton: attention of prompt rows over a window of keys and over entries, one program per row and tile of heads.

A row sees its keys in blocks of BN: first the window, from its oldest position on, then the entries in ascending order.
With c = scale log2(e):

    s = q . k (d ascending);  m' = max(m, c max s);  p = 2^fma(s, c, -m');  a = 2^(m - m')
    l = fma(l, a, p), l2 = l2 a per key of a block, then l and l2 swap;  o = o a + bf16(p) k
    out = o (1 / (sum l + sum l2 + 2^(sink log2(e) - m)))

m begins as the sink. Even and odd blocks have separate sums, so that different warps may take them. A row's bits depend
on its query and its keys alone. Keys are gathered, so nothing is shared between rows: a row whose entries are chosen
costs the same behind any prompt.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl

from moeyard_kernels.attention.attend_entries_pairs import attend_entries_pairs_kernel
from moeyard_kernels.attention.decode_splits import sum_over_keys
from moeyard_kernels.attention.entry_places import entry_places
from moeyard_kernels.common.launch import (
    MAX_GRID_X,
    finish,
    interpreted,
    new_output,
    num_multiprocessors,
    on_hopper,
)
from moeyard_kernels.common.rounding import INTERPRETED, round_to
from moeyard_kernels.common.tuning import Config
from moeyard_kernels.types.decode_tables import BLOCK
from moeyard_kernels.types.layers import Pooling
from moeyard_kernels.types.prompt_tables import PromptTables

LOG2E = math.log2(math.e)
# The score of a masked key: below any real one, and finite.
_UNSEEN = tl.constexpr(-2e38)


@dataclass(frozen=True, slots=True, kw_only=True)
class EntriesConfig(Config):
    """BM heads per program. kernel: the Triton kernel, or `attend_entries_pairs` where it can run."""

    kernel: Literal["triton", "pairs"]
    BM: int


CONFIGS = (
    EntriesConfig(kernel="pairs", BM=64, num_warps=4, num_stages=2),
    EntriesConfig(kernel="triton", BM=64, num_warps=8, num_stages=2),
    EntriesConfig(kernel="triton", BM=16, num_warps=4, num_stages=2),
)
# Fits a tile of fp32, whose products do not run on tensor cores.
_FP32 = EntriesConfig(kernel="triton", BM=16, num_warps=8, num_stages=1)


@triton.jit
def _add_block(
    b_acc, b_m, b_l, b_l2, b_q, p_row, m_n, c, D: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr
):
    """Add the keys at p_row [BN] where m_n."""
    o_d = tl.arange(0, BD)
    b_k = tl.load(p_row[:, None] + o_d[None, :], mask=m_n[:, None] & (o_d < D)[None, :], other=0.0)
    DTYPE: tl.constexpr = b_k.dtype
    if INTERPRETED:
        b_k = b_k.to(tl.float32)
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
    b_s = tl.where(m_n[None, :], b_s, _UNSEEN)
    b_top = tl.maximum(b_m, tl.max(b_s, 1) * c)
    b_alpha = tl.exp2(b_m - b_top)
    b_shift = tl.broadcast_to((-b_top)[:, None], b_s.shape)
    b_p = tl.exp2(tl.fma(b_s, tl.full(b_s.shape, c, tl.float32), b_shift))
    b_wide = tl.broadcast_to(b_alpha[:, None], b_l.shape)
    b_l, b_l2 = b_l2 * b_wide, tl.fma(b_l, b_wide, b_p)
    if INTERPRETED:
        b_p = round_to(b_p, DTYPE)
    b_acc = b_acc * b_alpha[:, None]
    b_acc = tl.dot(b_p.to(b_k.dtype), b_k, b_acc, input_precision="ieee")
    return b_acc, b_top, b_l, b_l2


@triton.jit(do_not_specialize=("P", "MAX_PAGES"))
def _attend_entries_kernel(
    p_q, p_keys, p_recent, p_entries, p_found, p_sink, p_out, p_chunks, p_rows, p_pages, P, MAX_PAGES, c,
    s_q, s_head, s_key, H: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, WINDOW: tl.constexpr,
    RATIO: tl.constexpr, GRANULE: tl.constexpr, PAGE: tl.constexpr, TOP: tl.constexpr, LOG2E: tl.constexpr,
    BM: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, LOG2_BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """p_recent [slots, SIZE, D]. RATIO 0: no entries. TOP 0: a row sees all entries. Grid: P ceil(H / BM)."""
    TILES: tl.constexpr = (H + BM - 1) // BM
    # Later rows see more entries, so they start first.
    i_row = P - 1 - tl.program_id(0) // TILES
    o_h = tl.program_id(0) % TILES * BM + tl.arange(0, BM)
    o_d = tl.arange(0, BD)
    m_q = (o_h < H)[:, None] & (o_d < D)[None, :]
    i_b = tl.load(p_rows + i_row * 2)
    i_p = tl.load(p_rows + i_row * 2 + 1)
    i_first = tl.load(p_chunks + i_b * 4)
    i_start = tl.load(p_chunks + i_b * 4 + 1)
    i_before = tl.maximum(tl.load(p_chunks + i_b * 4 + 2), 0).to(tl.int64)
    b_q = tl.load(
        p_q + i_row.to(tl.int64) * s_q + o_h.to(tl.int64)[:, None] * s_head + o_d[None, :], mask=m_q, other=0.0
    )
    if INTERPRETED:
        b_q = b_q.to(tl.float32)
    b_sink = tl.load(p_sink + o_h, mask=o_h < H, other=0.0) * LOG2E
    b_m = b_sink
    b_l = tl.zeros([BM, BN], tl.float32)
    b_l2 = tl.zeros([BM, BN], tl.float32)
    b_acc = tl.zeros([BM, BD], tl.float32)

    for i_n in range(0, WINDOW, BN):
        o_n = i_n + tl.arange(0, BN)
        o_p = i_p - WINDOW + 1 + o_n
        m_n = (o_n < WINDOW) & (o_p >= 0)
        p_old = p_recent + (i_before * SIZE + tl.where(o_p >= 0, o_p, 0) % SIZE) * D
        p_row = tl.where(o_p >= i_start, p_keys + (i_first + o_p - i_start).to(tl.int64) * s_key, p_old)
        b_acc, b_m, b_l, b_l2 = _add_block(b_acc, b_m, b_l, b_l2, b_q, p_row, m_n, c, D, BM, BD, BN)

    if RATIO > 0:
        num_seen = (i_p + 1) // RATIO
        is_chosen = False
        if TOP > 0:
            is_chosen = num_seen > TOP
            num_seen = tl.minimum(num_seen, TOP)
        for i_n in tl.range(0, num_seen, BN, num_stages=STAGES):
            o_n = i_n + tl.arange(0, BN)
            m_n = o_n < num_seen
            b_place = entry_places(p_pages + i_b.to(tl.int64) * MAX_PAGES, o_n, m_n, RATIO, GRANULE, PAGE)
            if TOP > 0:
                b_found = tl.load(p_found + i_row.to(tl.int64) * TOP + o_n, mask=m_n & is_chosen, other=0)
                b_place = tl.where(is_chosen, b_found, b_place)
            b_acc, b_m, b_l, b_l2 = _add_block(
                b_acc, b_m, b_l, b_l2, b_q, p_entries + b_place.to(tl.int64) * D, m_n, c, D, BM, BD, BN
            )

    b_total = sum_over_keys(b_l, BM, BN, LOG2_BN, 1) + sum_over_keys(b_l2, BM, BN, LOG2_BN, 1)
    b_total += tl.exp2(b_sink - b_m)
    b_out = b_acc * tl.div_rn(tl.full([BM], 1.0, tl.float32), b_total)[:, None]
    p_block = p_out + (i_row.to(tl.int64) * H + o_h)[:, None] * D + o_d[None, :]
    tl.store(p_block, b_out.to(p_out.dtype.element_ty), mask=m_q)


def default_config(queries: torch.Tensor) -> EntriesConfig:
    """Return the config of untuned shapes."""
    if queries.dtype == torch.float32 and not interpreted():
        return _FP32
    return CONFIGS[0 if queries.shape[1] > 16 else 2]


def suits_hopper(queries: torch.Tensor, keys: torch.Tensor, recent: torch.Tensor, window: int) -> bool:
    """Return whether the Hopper kernel can run: keys of 512 values in aligned rows, and a window of several blocks."""
    aligned = all(stride % 8 == 0 for stride in (*queries.stride()[:2], keys.stride(0)))
    fits = recent.shape[0] * recent.shape[1] < 2**31 and queries.shape[2] == 512
    return on_hopper(queries) and aligned and fits and window > BLOCK


def attend_entries(
    queries: torch.Tensor,
    keys: torch.Tensor,
    recent: torch.Tensor,
    sink: torch.Tensor,
    *,
    window: int,
    scale: float,
    tables: PromptTables,
    pooling: Pooling | None = None,
    found: torch.Tensor | None = None,
    config: EntriesConfig | None = None,
) -> torch.Tensor:
    """See `moeyard_kernels.ops.attend_entries`. Raises ValueError for rows that the grid of a GPU cannot hold."""
    num_rows, heads, dim = queries.shape
    config = config or default_config(queries)
    grid = num_rows * triton.cdiv(heads, config.BM)
    if grid > MAX_GRID_X:
        raise ValueError(f"attend_entries: {num_rows} rows of {heads} heads exceed the grid of a GPU")
    out = new_output(num_rows, heads, dim, like=queries)
    if not grid:
        return finish(out, queries.dtype)
    arguments = (
        queries,
        keys,
        recent,
        recent if pooling is None else pooling.entries,
        tables.rows if found is None else found,
        sink,
        out,
        tables.chunks,
        tables.rows,
        tables.page_table,
        num_rows,
        tables.page_table.shape[1],
        scale * LOG2E,
        *queries.stride()[:2],
        keys.stride(0),
    )
    sizes = {
        "H": heads,
        "D": dim,
        "SIZE": recent.shape[1],
        "WINDOW": window,
        "RATIO": 0 if pooling is None else pooling.ratio,
        "GRANULE": 1 if pooling is None else pooling.granule,
        "PAGE": tables.page_size,
        "TOP": 0 if found is None else found.shape[1],
        "LOG2E": LOG2E,
        "BM": config.BM,
        "BN": BLOCK,
        "LOG2_BN": BLOCK.bit_length() - 1,
    }
    if config.kernel == "pairs" and suits_hopper(queries, keys, recent, window):
        programs = min(grid, num_multiprocessors(queries))
        attend_entries_pairs_kernel[(programs,)](
            *arguments, **sizes, UNSEEN=_UNSEEN.value, num_warps=config.num_warps, enable_fp_fusion=False
        )
    else:
        _attend_entries_kernel[(grid,)](
            *arguments,
            **sizes,
            BD=max(16, triton.next_power_of_2(dim)),
            STAGES=config.num_stages,
            enable_fp_fusion=False,
            **config.options,
        )
    return finish(out, queries.dtype)
