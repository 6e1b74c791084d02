"""Triton: the short convolution and activation over prompts of any lengths. `causal_conv1d` has that of decode rows.

A program takes consecutive rows of one chunk and some channels, and reads the K - 1 rows before them again. Only the
program of a prompt's first rows reads its window, and only it writes the new window, from the prompt's last rows. A
thread reads and writes the same channels, so nothing is overwritten before it is read. The program of the rows before a
snapshot writes the snapshot's window, to a slot that this launch does not read.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl

from moeyard_kernels.common.dependent import dependent, wait_for_previous
from moeyard_kernels.common.launch import MAX_GRID_X, MAX_GRID_Y, check_layout, finish, new_output
from moeyard_kernels.common.rows import check_rows, stride_unit
from moeyard_kernels.common.tuning import Config, choose
from moeyard_kernels.linear_attention.causal_conv1d import activated, channels, tap_by_tap
from moeyard_kernels.linear_attention.halves import SNAPSHOTS, TABLE_WIDTH
from moeyard_kernels.types.state_slots import CHUNK, PromptChunks


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvConfig(Config):
    """A program takes ROWS positions of BC channels."""

    kernel: Literal["rows"] = "rows"
    num_stages: int = 1
    ROWS: int
    BC: int


CONFIGS = tuple(
    ConvConfig(ROWS=rows, BC=channels, num_warps=warps)
    for rows, channels, warps in ((8, 256, 1), (8, 512, 2), (16, 256, 1), (16, 256, 2), (16, 512, 4), (32, 256, 2))
)


def shape_class(channels: int) -> str:
    """Return the shape class. Prompts of all lengths have enough programs."""
    return f"C{channels}"


def default_config() -> ConvConfig:
    """Return the config of untuned shapes. With 4 taps, a thread loads 16 bytes of each of 11 rows at once."""
    return CONFIGS[1]


@triton.jit(do_not_specialize=("stride_x",))
def _conv_prefill_kernel(
    p_x, p_weight, p_window, p_table, p_fresh, p_out, stride_x, C: tl.constexpr,
    K: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, BC: tl.constexpr, UNIT: tl.constexpr, TAPS: tl.constexpr
):  # fmt: skip
    """Convolve rows [i ROWS, i ROWS + ROWS) of a chunk, channels [i_c BC, i_c BC + BC).

    Grid: (chunks PARTS, ceil(C / BC)). stride_x is in units of UNIT elements. TAPS: the weight is stored tap by tap.
    """
    wait_for_previous()
    i_chunk, i_part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    o_c = tl.program_id(1) * BC + tl.arange(0, BC)
    m_c = o_c < C
    p_chunk = p_table + i_chunk * TABLE_WIDTH
    i_first, i_begin = tl.load(p_chunk) + i_part * ROWS, tl.load(p_chunk + 1)
    i_end, i_slot = tl.load(p_chunk + (TABLE_WIDTH - 2)), tl.load(p_chunk + (TABLE_WIDTH - 1))
    has_window = tl.load(p_fresh + i_chunk) == 0
    p_slot = p_window + i_slot * ((K - 1) * C)
    m_head = m_c & (i_first == i_begin)
    b_olds = ()
    for k in tl.static_range(K - 1):
        b_old = tl.load(p_slot + k * C + o_c, mask=m_head & has_window, other=0.0)
        # Triton has no unpacking.
        b_olds = b_olds + (b_old,)  # type: ignore[assignment]  # noqa: RUF005
    b_xs = ()
    for r in tl.static_range(K - 1 + ROWS):
        i_row = i_first + (r - (K - 1))
        m_row = m_c & (i_row >= i_begin) & (i_row < i_end)
        b_x = tl.load(p_x + i_row * stride_x * UNIT + o_c, mask=m_row, other=0.0)
        if r < K - 1:
            # Rows before a prompt's first come from its window. For other programs b_olds are zeros.
            b_x = tl.where(i_row >= i_begin, b_x, b_olds[r])  # type: ignore[misc]
        b_xs = b_xs + (b_x,)  # type: ignore[assignment]  # noqa: RUF005
    b_ws = ()
    for k in tl.static_range(K):
        o_w = k * C + o_c if TAPS else o_c * K + k
        b_w = channels(p_weight, o_w, m_c, C % BC == 0).to(tl.float32)
        b_ws = b_ws + (b_w,)  # type: ignore[assignment]  # noqa: RUF005
    for r in tl.static_range(ROWS):
        b_acc = tl.zeros([BC], dtype=tl.float32)
        for k in tl.static_range(K):
            b_acc += b_xs[r + k].to(tl.float32) * b_ws[k]  # type: ignore[misc]
        tl.store(
            p_out + (i_first + r) * C + o_c,
            activated(b_acc).to(p_out.dtype.element_ty),
            mask=m_c & (i_first + r < i_end),
        )
    # A snapshot follows a full chunk, so its window is the last of these rows.
    i_taken = tl.full([], -1, tl.int64)
    for i in tl.static_range(SNAPSHOTS):
        m_stop = tl.load(p_chunk + (2 + 2 * i)) == i_first + ROWS
        i_taken = tl.where(m_stop, tl.load(p_chunk + (3 + 2 * i)), i_taken)
    for k in tl.static_range(K - 1):
        p_taken = p_window + (i_taken * (K - 1) + k) * C + o_c
        tl.store(p_taken, b_xs[ROWS + k], mask=m_c & (i_taken >= 0))  # type: ignore[misc]
    for k in tl.static_range(K - 1):
        # A prompt shorter than the window keeps the last rows of the old window.
        i_row = i_end + (k - (K - 1))
        b_new = tl.load(p_x + i_row * stride_x * UNIT + o_c, mask=m_head & (i_row >= i_begin), other=0.0)
        for u in tl.static_range(K - 1):
            b_new = tl.where(i_row - i_begin + (K - 1) == u, b_olds[u], b_new)  # type: ignore[misc]
        tl.store(p_slot + k * C + o_c, b_new, mask=m_head)


def causal_conv1d_prefill(
    x: torch.Tensor,
    weight: torch.Tensor,
    window: torch.Tensor,
    *,
    chunks: PromptChunks,
    config: ConvConfig | None = None,
) -> torch.Tensor:
    """See `moeyard_kernels.ops.causal_conv1d_prefill`. Raises ValueError if the grid cannot hold it."""
    op = "causal_conv1d_prefill"
    num_channels, size = weight.shape
    check_rows(op, x=x)
    check_layout(op, window=window, table=chunks.table)
    taps, unit = tap_by_tap(op, weight), stride_unit(x)
    config = config or choose(op, shape_class(num_channels), x, (ConvConfig,), default_config)
    parts, num_blocks = CHUNK // config.ROWS, triton.cdiv(num_channels, config.BC)
    num_programs = chunks.table.shape[0] * parts
    if num_blocks > MAX_GRID_Y or num_programs > MAX_GRID_X:
        raise ValueError(f"{op}: {num_programs} parts of {num_channels} channels exceed the grid of a GPU")
    out = new_output(chunks.num_rows, num_channels, like=x)
    if out.numel():
        tensors = (x, weight, window, chunks.table, chunks.fresh, out)
        _conv_prefill_kernel[(num_programs, num_blocks)](
            *tensors,
            x.stride(0) // unit,
            num_channels,
            K=size,
            ROWS=config.ROWS,
            PARTS=parts,
            BC=config.BC,
            UNIT=unit,
            TAPS=taps,
            enable_fp_fusion=False,
            **config.options,
            **dependent(x),
        )
    return finish(out, x.dtype)
