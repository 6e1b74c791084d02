"""Triton: scores of entries for the rows that choose, one program per tile of rows and of entries.

Over the heads in order, with products of the operands' dtype and sums in fp32:

    s = q . k (d ascending);  acc = fma(max(s, 0), weight scale, acc)

So a score depends on its row and entry alone.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moeyard_kernels.attention.entry_places import entry_places
from moeyard_kernels.common.launch import MAX_GRID_Y, interpreted
from moeyard_kernels.common.rounding import INTERPRETED
from moeyard_kernels.common.tuning import Config
from moeyard_kernels.types.layers import Pooling
from moeyard_kernels.types.prompt_tables import TILE, WIDTH, ChosenRows, PromptTables


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoresConfig(Config):
    """BM rows times BN entries per program."""

    BM: int = 128
    BN: int = 128


CONFIGS = (
    ScoresConfig(num_warps=8, num_stages=3),
    ScoresConfig(BN=64, num_warps=4, num_stages=3),
    ScoresConfig(BM=64, num_warps=4, num_stages=3),
    ScoresConfig(BM=64, BN=64, num_warps=4, num_stages=3),
)
# Fits a tile of fp32, whose products do not run on tensor cores.
_FP32 = ScoresConfig(BM=32, BN=32, num_warps=4, num_stages=1)


@triton.jit(do_not_specialize=("MAX_PAGES", "WIDE"))
def _index_scores_kernel(
    p_q, p_w, p_entries, p_out, p_rows, p_tiles, p_of_row, p_pages, MAX_PAGES, WIDE, scale, s_q, s_head, s_w,
    H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, RATIO: tl.constexpr, GRANULE: tl.constexpr, PAGE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """p_out [R, WIDE]. A tile has PARTS parts of BM rows. Grid: (tiles PARTS, ceil(WIDE / BN))."""
    i_tile = tl.program_id(0) // PARTS
    i_first = tl.load(p_tiles + i_tile * 2) + tl.program_id(0) % PARTS * BM
    i_end = tl.load(p_tiles + i_tile * 2 + 1)
    i_n = tl.program_id(1) * BN
    if i_first < i_end:
        o_m = i_first + tl.arange(0, BM)
        m_m = o_m < i_end
        i_last = tl.load(p_rows + tl.minimum(i_first + BM, i_end) - 1)
        num_seen = (tl.load(p_of_row + i_last * 2 + 1) + 1) // RATIO
        if i_n < num_seen:
            o_n = i_n + tl.arange(0, BN)
            o_d = tl.arange(0, BD)
            m_n = o_n < num_seen
            i_b = tl.load(p_of_row + i_last * 2)
            b_place = entry_places(p_pages + i_b.to(tl.int64) * MAX_PAGES, o_n, m_n, RATIO, GRANULE, PAGE)
            m_d = o_d < D
            b_k = tl.load(
                p_entries + b_place.to(tl.int64)[:, None] * D + o_d[None, :],
                mask=m_n[:, None] & m_d[None, :],
                other=0.0,
            )
            b_row = tl.load(p_rows + o_m, mask=m_m, other=0).to(tl.int64)
            p_head = p_q + b_row[:, None] * s_q + o_d[None, :]
            m_q = m_m[:, None] & m_d[None, :]
            b_acc = tl.zeros([BM, BN], tl.float32)
            for i_h in tl.range(0, H, num_stages=STAGES):
                b_q = tl.load(p_head + i_h * s_head, mask=m_q, other=0.0)
                b_w = tl.load(p_w + b_row * s_w + i_h, mask=m_m, other=0.0) * scale
                if INTERPRETED:
                    b_s = tl.dot(b_q.to(tl.float32), tl.trans(b_k.to(tl.float32)), input_precision="ieee")
                else:
                    b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
                b_s = tl.maximum(b_s, 0.0)
                b_acc = tl.fma(b_s, tl.broadcast_to(b_w[:, None], b_s.shape), b_acc)
            p_block = p_out + o_m.to(tl.int64)[:, None] * WIDE + o_n[None, :]
            tl.store(p_block, b_acc, mask=m_m[:, None] & m_n[None, :])


def index_scores(
    wanted: torch.Tensor,
    weights: torch.Tensor,
    *,
    pooling: Pooling,
    chosen: ChosenRows,
    tables: PromptTables,
    config: ScoresConfig | None = None,
) -> torch.Tensor:
    """See `moeyard_kernels.ops.index_scores`. Raises ValueError if the grid of a GPU cannot hold the entries."""
    _, heads, dim = wanted.shape
    num_rows = len(chosen.rows)
    if config is None:
        config = _FP32 if wanted.dtype == torch.float32 and not interpreted() else CONFIGS[0]
    if triton.cdiv(chosen.width, config.BN) > MAX_GRID_Y or chosen.width % WIDTH:
        raise ValueError(
            f"index_scores: {chosen.width} entries exceed the grid of a GPU, or are no multiple of {WIDTH}"
        )
    out = torch.empty(num_rows, chosen.width, device=wanted.device)
    if num_rows:
        parts = TILE // config.BM
        _index_scores_kernel[(len(chosen.tiles) * parts, triton.cdiv(chosen.width, config.BN))](
            wanted,
            weights,
            pooling.entries,
            out,
            chosen.rows,
            chosen.tiles,
            tables.rows,
            tables.page_table,
            tables.page_table.shape[1],
            chosen.width,
            (dim * heads) ** -0.5,
            *wanted.stride()[:2],
            weights.stride(0),
            H=heads,
            D=dim,
            BD=max(16, triton.next_power_of_2(dim)),
            RATIO=pooling.ratio,
            GRANULE=pooling.granule,
            PAGE=tables.page_size,
            BM=config.BM,
            BN=config.BN,
            PARTS=parts,
            STAGES=config.num_stages,
            enable_fp_fusion=False,
            **config.options,
        )
    return out
