"""Triton: the short convolution and activation before linear attention, for decode rows with earlier inputs in slots.

For each channel, K products are rounded and added in the order of their positions. So every tile gives the bits of the
prompt's convolution. The whole window is read before any of it is written.
"""

import torch
import triton
import triton.language as tl

from moeyard_kernels.common.dependent import dependent, let_next_begin, wait_for_previous
from moeyard_kernels.common.launch import MAX_GRID_X, MAX_GRID_Y, check_indices, check_layout, finish, new_output
from moeyard_kernels.common.rounding import round_to
from moeyard_kernels.common.rows import check_rows, stride_unit
from moeyard_kernels.common.tuning import RowConfig, choose
from moeyard_kernels.types.state_slots import StateSlots

CONFIGS = tuple(
    RowConfig(BLOCK=block, num_warps=warps) for block, warps in ((128, 1), (256, 1), (256, 2), (512, 4), (1024, 4))
)


def shape_class(num_sequences: int, channels: int) -> str:
    """Return the shape class. Few sequences need many small programs."""
    return f"{'few' if num_sequences <= 8 else 'many'} C{channels}"


def default_config(num_sequences: int) -> RowConfig:
    """Return the config of untuned shapes: for 8192 channels, 64 programs of one sequence or 2048 of 64."""
    return CONFIGS[0 if num_sequences <= 8 else 1]


@triton.jit
def channels(p_x, o_c, m_c, EVEN: tl.constexpr):
    """Load the values at o_c, with zeros outside m_c. EVEN: m_c holds everywhere."""
    return tl.load(p_x + o_c) if EVEN else tl.load(p_x + o_c, mask=m_c, other=0.0)


@triton.jit
def activated(b_x):
    """Return silu in fp32."""
    return b_x / (1.0 + tl.exp(-b_x))


@triton.jit
def sums_before(p_old, p_weight, o_c, m_c, m_live, C: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr):
    """Return the fp32 sums of channels o_c over the K - 1 inputs before a position. The weight is stored tap by tap."""
    b_acc = tl.zeros(o_c.shape, dtype=tl.float32)
    m_old = m_live if EVEN else m_c & m_live
    for k in tl.static_range(K - 1):
        b_x = tl.load(p_old + k * C + o_c, mask=m_old, other=0.0)
        b_acc += b_x.to(tl.float32) * channels(p_weight + k * C, o_c, m_c, EVEN).to(tl.float32)
    return b_acc


@triton.jit
def convolved(
    b_before, p_x, p_weight, o_c, m_c, C: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """Return channels o_c of the row at p_x after `sums_before`, in fp32 with the bits of `causal_conv1d_update`."""
    b_x = channels(p_x, o_c, m_c, EVEN).to(tl.float32)
    b_acc = b_before + b_x * channels(p_weight + (K - 1) * C, o_c, m_c, EVEN).to(tl.float32)
    return round_to(activated(b_acc), p_x.dtype.element_ty)


@triton.jit(do_not_specialize=("stride_x",), do_not_specialize_on_alignment=("p_read", "p_write"))
def _conv_update_kernel(
    p_x, p_weight, p_window, p_read, p_write, p_out, stride_x, C: tl.constexpr,
    Q: tl.constexpr, K: tl.constexpr, BC: tl.constexpr, UNIT: tl.constexpr, TAPS: tl.constexpr
):  # fmt: skip
    """Convolve channels [i_c BC, i_c BC + BC) of the queries of one sequence. Grid: (B, ceil(C / BC)).

    stride_x is in units of UNIT elements. TAPS: the weight is stored tap by tap, so that channels are adjacent.
    """
    let_next_begin()
    wait_for_previous()
    EVEN: tl.constexpr = C % BC == 0
    i_b = tl.program_id(0)
    o_c = tl.program_id(1) * BC + tl.arange(0, BC)
    m_c = o_c < C
    # A padding sequence reads no window and gives zeros. Its rows exist, so their loads need not wait for its slot.
    i_read = tl.load(p_read + i_b)
    p_old = p_window + i_read * ((K - 1) * C)
    b_xs = ()
    for k in tl.static_range(K - 1):
        b_x = tl.load(p_old + k * C + o_c, mask=m_c & (i_read >= 0), other=0.0)
        # Triton has no unpacking.
        b_xs = b_xs + (b_x,)  # type: ignore[assignment]  # noqa: RUF005
    i_row = i_b.to(tl.int64) * Q
    for q in tl.static_range(Q):
        b_x = channels(p_x + (i_row + q) * stride_x * UNIT, o_c, m_c, EVEN)
        b_xs = b_xs + (b_x,)  # type: ignore[assignment]  # noqa: RUF005
    b_ws = ()
    for k in tl.static_range(K):
        o_w = k * C + o_c if TAPS else o_c * K + k
        b_w = channels(p_weight, o_w, m_c, EVEN).to(tl.float32)
        b_ws = b_ws + (b_w,)  # type: ignore[assignment]  # noqa: RUF005
    # Loaded with the rest, before all stores.
    i_writes = ()
    for q in tl.static_range(Q):
        i_write = tl.load(p_write + i_row + q)
        i_writes = i_writes + (i_write,)  # type: ignore[assignment]  # noqa: RUF005
    for q in tl.static_range(Q):
        b_acc = tl.zeros([BC], dtype=tl.float32)
        for k in tl.static_range(K):
            b_acc += b_xs[q + k].to(tl.float32) * b_ws[k]  # type: ignore[misc]
        b_y = tl.where(i_read >= 0, activated(b_acc), 0.0)
        tl.store(p_out + (i_row + q) * C + o_c, b_y.to(p_out.dtype.element_ty), mask=m_c)
        i_write = i_writes[q]  # type: ignore[misc]
        p_new = p_window + i_write * ((K - 1) * C)
        for k in tl.static_range(K - 1):
            tl.store(p_new + k * C + o_c, b_xs[q + 1 + k], mask=m_c & (i_write >= 0))  # type: ignore[misc]


def tap_by_tap(op: str, weight: torch.Tensor) -> bool:
    """Whether the channels of a tap are adjacent in weight [C, K], instead of the taps of a channel.

    Raises ValueError if neither are adjacent.
    """
    if weight.is_contiguous():
        return False
    if weight.t().is_contiguous():
        return True
    raise ValueError(f"{op}: weight {list(weight.shape)} with strides {weight.stride()} is contiguous in no order")


def causal_conv1d_update(
    x: torch.Tensor,
    weight: torch.Tensor,
    window: torch.Tensor,
    *,
    slots: StateSlots,
    config: RowConfig | None = None,
) -> torch.Tensor:
    """See `moeyard_kernels.ops.causal_conv1d_update`. Raises ValueError if the grid cannot hold it."""
    op = "causal_conv1d_update"
    channels, size = weight.shape
    check_rows(op, x=x)
    check_layout(op, window=window)
    taps = tap_by_tap(op, weight)
    check_indices(op, low=-1, high=window.shape[0], read=slots.read, write=slots.write)
    name = shape_class(slots.num_sequences, channels)
    config = config or choose(op, name, x, (RowConfig,), lambda: default_config(slots.num_sequences))
    num_blocks = triton.cdiv(channels, config.BLOCK)
    if num_blocks > MAX_GRID_Y or slots.num_sequences > MAX_GRID_X:
        raise ValueError(f"{op}: {slots.num_sequences} sequences of {channels} channels exceed the grid of a GPU")
    out = new_output(slots.num_rows, channels, like=x)
    unit = stride_unit(x)
    if out.numel():
        tensors = (x, weight, window, slots.read, slots.write, out)
        _conv_update_kernel[(slots.num_sequences, num_blocks)](
            *tensors,
            x.stride(0) // unit,
            channels,
            Q=slots.num_queries,
            K=size,
            BC=config.BLOCK,
            UNIT=unit,
            TAPS=taps,
            enable_fp_fusion=False,
            **config.options,
            **dependent(x),
        )
    return finish(out, x.dtype)
