"""Triton: a decode step of linear attention between its projections: convolution, delta rule, gated norm.

The step takes three launches, or two by a stored config, with the same bits. In two, each program of the rule convolves
its own inputs, so the programs of a head repeat its queries and keys. With few programs this costs less than a launch.
A window must not change while other programs read it, so the launch of the norm updates it.
"""

import functools
from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl

from moeyard_kernels.common.dependent import dependent, let_next_begin, wait_for_previous
from moeyard_kernels.common.launch import MAX_GRID_X, check_indices, check_layout, finish, new_output
from moeyard_kernels.common.rows import check_rows, stride_unit
from moeyard_kernels.common.tuning import Config, choose
from moeyard_kernels.elementwise.gated_rms_norm import gated_rms_norm, gated_rows
from moeyard_kernels.elementwise.rms_norm import NUM_WARPS, row_tile
from moeyard_kernels.linear_attention.causal_conv1d import causal_conv1d_update, channels, tap_by_tap
from moeyard_kernels.linear_attention.delta_recurrent import RecurrentConfig, apply_rule, recurrent, shape_class
from moeyard_kernels.types.state_slots import StateSlots

__all__ = ["CONFIGS", "gdn_step", "kda_step", "shape_class"]

# Channels of a window that a program of the second launch shifts, 8 per thread.
_CHANNELS = 32 * 8 * NUM_WARPS


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain(Config):
    """Three launches with the configs of their ops."""

    kernel: Literal["chain"] = "chain"


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoLaunches(Config):
    """Two launches. num_warps, BV and EARLY are those of `RecurrentConfig`."""

    kernel: Literal["two"] = "two"
    num_stages: int = 1
    BV: int
    EARLY: bool = False

    @property
    def rule(self) -> RecurrentConfig:
        """Config of the first launch."""
        return RecurrentConfig(BV=self.BV, EARLY=self.EARLY, num_warps=self.num_warps, num_stages=self.num_stages)


KINDS: tuple[type[Chain | TwoLaunches], ...] = (Chain, TwoLaunches)
CONFIGS: tuple[Chain | TwoLaunches, ...] = (
    Chain(),
    *(TwoLaunches(BV=columns, num_warps=warps) for columns, warps in ((8, 1), (16, 1), (32, 1), (32, 2), (64, 4))),
    *(
        TwoLaunches(BV=columns, num_warps=warps, EARLY=True)
        for columns, warps in ((8, 1), (16, 1), (16, 2), (32, 1), (32, 4))
    ),
)


@triton.jit(
    do_not_specialize=("stride_gate", "stride_x", "num_norm", "num_rows"),
    do_not_specialize_on_alignment=("p_read", "p_write"),
)
def _norm_and_windows_kernel(
    p_x, p_gate, p_weight, p_rows, p_out, p_inputs, p_window, p_read, p_write, num_norm, num_rows, stride_gate,
    stride_x, eps, H: tl.constexpr, D: tl.constexpr, SIGMOID: tl.constexpr, FROM_ROWS: tl.constexpr,
    BR: tl.constexpr, BD: tl.constexpr, EVEN: tl.constexpr, UNIT: tl.constexpr, C: tl.constexpr, K: tl.constexpr,
    BC: tl.constexpr
):  # fmt: skip
    """`gated_rms_norm` in the first num_norm programs. Each other program shifts BC channels of a window by one row.

    Grid: (num_norm + B ceil(C / BC),). p_inputs: the convolved rows, one per sequence. Strides are in units of UNIT
    elements.
    """
    let_next_begin()
    wait_for_previous()
    i_program = tl.program_id(0)
    if i_program < num_norm:
        gated_rows(
            p_x, p_gate, p_weight, p_rows, p_out, i_program, num_rows, H, stride_gate * UNIT, D, eps,
            SIGMOID, FROM_ROWS, BR, BD, EVEN,
        )  # fmt: skip
    else:
        BLOCKS: tl.constexpr = (C + BC - 1) // BC
        i_b, i_c = (i_program - num_norm) // BLOCKS, (i_program - num_norm) % BLOCKS
        o_c = i_c * BC + tl.arange(0, BC)
        m_c = o_c < C
        i_read, i_write = tl.load(p_read + i_b), tl.load(p_write + i_b)
        p_old, p_new = p_window + i_read * ((K - 1) * C) + o_c, p_window + i_write * ((K - 1) * C) + o_c
        m_new = m_c & (i_write >= 0)
        # Each thread reads all its values before it writes them, because both slots may be the same.
        b_xs = ()
        for k in tl.static_range(1, K - 1):
            b_x = tl.load(p_old + k * C, mask=m_new & (i_read >= 0), other=0.0)
            # Triton has no unpacking.
            b_xs = b_xs + (b_x,)  # type: ignore[assignment]  # noqa: RUF005
        b_last = channels(p_inputs + i_b.to(tl.int64) * stride_x * UNIT, o_c, m_c, C % BC == 0)
        for k in tl.static_range(K - 2):
            tl.store(p_new + k * C, b_xs[k], mask=m_new)  # type: ignore[misc]
        tl.store(p_new + (K - 2) * C, b_last, mask=m_new)


def step(
    rule: Literal["gdn", "kda"],
    qkv: torch.Tensor,
    conv: torch.Tensor,
    window: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    gate: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    *,
    slots: StateSlots,
    sigmoid: bool = False,
    rows: torch.Tensor | None = None,
    static_state: bool = False,
    config: Chain | TwoLaunches | None = None,
) -> torch.Tensor:
    """See `moeyard_kernels.ops.gdn_step`. Raises ValueError if the grid cannot hold it."""
    op, gates = f"{rule}_step", (b, a, a_log, dt_bias, state)
    config = config or choose(op, shape_class(slots.num_sequences, *state.shape[1:]), state, KINDS, Chain)
    # If the taps of a channel are adjacent, every program of the rule would load them one by one.
    if isinstance(config, Chain) or slots.num_queries > 1 or not tap_by_tap(op, conv):
        mixed = causal_conv1d_update(qkv, conv, window, slots=slots)
        mixed = recurrent(rule, mixed, *gates, slots=slots, static_state=static_state)
        return gated_rms_norm(mixed, gate, norm, eps, sigmoid=sigmoid, rows=rows)
    check_layout(op, window=window, norm=norm, rows=rows)
    check_indices(op, low=-1, high=window.shape[0], read=slots.read, write=slots.write)
    mixed = apply_rule(
        rule, qkv, *gates, slots=slots, static_state=static_state, config=config.rule, conv=(conv, window)
    )
    check_rows(op, x=mixed, gate=gate, qkv=qkv)
    num_tokens, heads, dim = mixed.shape
    if rows is not None:
        check_indices(op, low=0, high=num_tokens, rows=rows)
    (num_channels, size), (together, block) = conv.shape, row_tile(dim)
    num_rows, unit = num_tokens * heads, stride_unit(gate, qkv)
    num_norm = triton.cdiv(num_rows, together)
    num_programs = num_norm + num_tokens * triton.cdiv(num_channels, _CHANNELS)
    # Rows are counted in 32 bits.
    if max(num_rows + together, num_programs) > MAX_GRID_X:
        raise ValueError(f"{op}: {num_tokens} sequences of {heads} heads exceed the grid of a GPU")
    out = new_output(num_tokens, heads * dim, like=mixed)
    if out.numel():
        tensors = (mixed, gate, norm, norm if rows is None else rows, out, qkv, window, slots.read, slots.write)
        sizes = (num_norm, num_rows, gate.stride(0) // unit, qkv.stride(0) // unit, eps)
        _norm_and_windows_kernel[(num_programs,)](
            *tensors,
            *sizes,
            H=heads,
            D=dim,
            SIGMOID=sigmoid,
            FROM_ROWS=rows is not None,
            BR=together,
            BD=block,
            EVEN=num_rows % together == 0 and dim == block,
            UNIT=unit,
            C=num_channels,
            K=size,
            BC=_CHANNELS,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
            **dependent(mixed),
        )
    return finish(out, mixed.dtype)


gdn_step = functools.partial(step, "gdn")
kda_step = functools.partial(step, "kda")
