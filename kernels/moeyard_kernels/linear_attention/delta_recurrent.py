"""Triton: the gated delta rule position by position, for decode rows with states in slots.

A program holds [Dk, BV] of one head's state in registers over all queries of its sequence. For each query: S <- decay
S; S <- fma(k, beta (v - k S), S); out = q S. Gated DeltaNet and Kimi Delta Attention differ only in the gate, which is
per head or per row of the state. All arithmetic is fp32, without tensor cores and so without tf32. Sums over Dk go by
halves, so that the bits depend neither on the tile nor on the batch.

The state is read once and written once, which takes all of the time: 64 sequences of 32 heads of 128 x 128 have 256
MiB. Programs share no columns, so one sequence has 128 to 512 programs.
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
from moeyard_kernels.linear_attention.causal_conv1d import channels, convolved, sums_before
from moeyard_kernels.linear_attention.halves import sigmoid, softplus, sum_columns, sum_rows
from moeyard_kernels.ops.linear_attention import L2_EPS
from moeyard_kernels.types.state_slots import StateSlots

# The most programs of a launch that lets the next begin before it waits (`common/dependent.py`).
_FEW = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentConfig(Config):
    """A program has BV columns of one head's state.

    EARLY: load states while the previous launch runs, if the caller says that no launch in flight writes them
    (`static_state`).
    """

    kernel: Literal["recurrent"] = "recurrent"
    num_stages: int = 1
    BV: int
    EARLY: bool = False


# Configs that are timed alone. The effect of EARLY shows only after another launch.
TIMED = tuple(
    RecurrentConfig(BV=columns, num_warps=warps)
    for columns, warps in ((8, 1), (16, 1), (32, 1), (16, 2), (32, 2), (32, 4), (64, 4), (128, 8))
)
CONFIGS = (
    *TIMED,
    *(RecurrentConfig(BV=columns, num_warps=1, EARLY=True) for columns in (8, 16, 32)),
)


def shape_class(num_sequences: int, num_heads: int, k_dim: int, v_dim: int) -> str:
    """Return the shape class. One sequence needs more programs, many need more bytes in flight."""
    few = "one" if num_sequences <= 2 else "few" if num_sequences <= 16 else "many"
    return f"{few} H{num_heads} {k_dim}x{v_dim}"


def default_config() -> RecurrentConfig:
    """Return the config of untuned shapes: one warp without shared memory, 8 KiB of a state of 128 rows."""
    return CONFIGS[1]


@triton.jit
def _total(b_x, N: tl.constexpr, LOG2_N: tl.constexpr):
    """Return the sum of b_x [N], (2 n, 2 n + 1) first, which are in one thread. Halves would take more additions."""
    return tl.sum(sum_columns(tl.reshape(b_x, [1, N]), 1, N, LOG2_N), 0)


@triton.jit(
    do_not_specialize=("stride_x", "stride_b", "stride_a"),
    do_not_specialize_on_alignment=("p_read", "p_write"),
)
def delta_recurrent_kernel(
    p_x, p_b, p_a, p_rate, p_bias, p_state, p_read, p_write, p_out, p_taps, p_window, stride_x, stride_b, stride_a,
    scale, eps, Q: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BK: tl.constexpr, LOG2_BK: tl.constexpr, BV: tl.constexpr, BY_ROW: tl.constexpr, FIRST: tl.constexpr,
    UNIT: tl.constexpr, TAPS: tl.constexpr, STATIC: tl.constexpr
):  # fmt: skip
    """Update columns [i_v BV, i_v BV + BV) of the state of one head of one sequence. Grid: (B HV ceil(DV / BV),).

    BY_ROW: a gate per row of the state. TAPS > 0: convolve rows of x over p_window first, by a weight [TAPS, channels],
    and write no window (Q is 1). Strides are in units of UNIT elements. FIRST: the next launch may begin before this
    one has waited. STATIC: no launch in flight writes slots, states or windows, so read them before the wait.
    """
    tl.static_assert(TAPS == 0 or Q == 1)
    if FIRST:
        let_next_begin()
    if not STATIC:
        wait_for_previous()
    BLOCKS: tl.constexpr = (DV + BV - 1) // BV
    EVEN: tl.constexpr = DK == BK and DV % BV == 0
    C: tl.constexpr = 2 * HK * DK + HV * DV
    i_program = tl.program_id(0)
    i_v, i_tile = i_program % BLOCKS, i_program // BLOCKS
    i_h, i_b = i_tile % HV, i_tile // HV
    i_k = i_h // (HV // HK)
    o_k, o_v = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    m_k, m_v = o_k < DK, o_v < DV
    m_state = m_k[:, None] & m_v[None, :]
    o_state = o_k[:, None] * DV + o_v[None, :]
    # A padding sequence reads no state and gives zeros. Its rows exist, so their loads need not wait for its slot.
    i_read = tl.load(p_read + i_b)
    m_live = i_read >= 0
    p_head = p_state + i_h * (DK * DV)
    m_old = m_live if EVEN else m_state & m_live
    b_state = tl.load(p_head + i_read * (HV * DK * DV) + o_state, mask=m_old, other=0.0)
    b_rate = -tl.exp(tl.load(p_rate + i_h))
    if BY_ROW:  # noqa: SIM108 - tiles of two ranks
        b_bias = channels(p_bias + i_h * DK, o_k, m_k, EVEN)
    else:
        b_bias = tl.load(p_bias + i_h)
    # Their offsets among the channels.
    o_query, o_key, o_value = i_k * DK, (HK + i_k) * DK, 2 * HK * DK + i_h * DV
    if TAPS:
        p_old = p_window + i_read * ((TAPS - 1) * C)
        b_old_q = sums_before(p_old + o_query, p_taps + o_query, o_k, m_k, m_live, C, TAPS, EVEN)
        b_old_k = sums_before(p_old + o_key, p_taps + o_key, o_k, m_k, m_live, C, TAPS, EVEN)
        b_old_v = sums_before(p_old + o_value, p_taps + o_value, o_v, m_v, m_live, C, TAPS, EVEN)
    # If not STATIC, the wait is over. This one keeps the compiler from moving gates before the loads of states, which
    # take longest. Without it those loads were issued two hundred instructions later.
    wait_for_previous()
    for i_q in range(Q):
        i_row = (i_b * Q + i_q).to(tl.int64)
        p_row = p_x + i_row * stride_x * UNIT
        # Loaded with the rest. A load after the output's store would delay the store of the state.
        i_write = tl.load(p_write + i_row)
        if TAPS:
            b_q = convolved(b_old_q, p_row + o_query, p_taps + o_query, o_k, m_k, C, TAPS, EVEN)
            b_k = convolved(b_old_k, p_row + o_key, p_taps + o_key, o_k, m_k, C, TAPS, EVEN)
            b_v = convolved(b_old_v, p_row + o_value, p_taps + o_value, o_v, m_v, C, TAPS, EVEN)
        else:
            b_q = channels(p_row + o_query, o_k, m_k, EVEN).to(tl.float32)
            b_k = channels(p_row + o_key, o_k, m_k, EVEN).to(tl.float32)
            b_v = channels(p_row + o_value, o_v, m_v, EVEN).to(tl.float32)
        b_b = tl.load(p_b + i_row * stride_b * UNIT + i_h)
        # As above: otherwise the loads of rows would follow the computation of the gates.
        wait_for_previous()
        b_beta = sigmoid(b_b.to(tl.float32))
        p_gate = p_a + i_row * stride_a * UNIT
        if BY_ROW:
            b_a = channels(p_gate + i_h * DK, o_k, m_k, EVEN).to(tl.float32)
            b_state = b_state * tl.exp(b_rate * softplus(b_a + b_bias))[:, None]
        else:
            b_a = tl.load(p_gate + i_h).to(tl.float32)
            b_state = b_state * tl.exp(b_rate * softplus(b_a + b_bias))
        # Both products read the state before its change, which q sees through q k. So neither waits for the other.
        b_kept = sum_rows(b_k[:, None] * b_state, BK, LOG2_BK, BV)
        b_seen = sum_rows(b_q[:, None] * b_state, BK, LOG2_BK, BV)
        b_by_q = tl.rsqrt(_total(b_q * b_q, BK, LOG2_BK) + eps) * scale
        b_by_k = tl.rsqrt(_total(b_k * b_k, BK, LOG2_BK) + eps)
        b_change = (b_v - b_kept * b_by_k) * (b_beta * b_by_k)
        b_wide_k = tl.broadcast_to(b_k[:, None], [BK, BV])
        b_state = tl.fma(b_wide_k, tl.broadcast_to(b_change[None, :], [BK, BV]), b_state)
        b_out = (b_seen + _total(b_q * b_k, BK, LOG2_BK) * b_change) * b_by_q
        b_out = tl.where(m_live, b_out, 0.0)
        tl.store(p_out + (i_row * HV + i_h) * DV + o_v, b_out.to(p_out.dtype.element_ty), mask=m_v)
        m_new = i_write >= 0 if EVEN else m_state & (i_write >= 0)
        tl.store(p_head + i_write * (HV * DK * DV) + o_state, b_state, mask=m_new)


def recurrent(
    rule: Literal["gdn", "kda"],
    qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    *,
    slots: StateSlots,
    static_state: bool = False,
    config: RecurrentConfig | None = None,
) -> torch.Tensor:
    """See `moeyard_kernels.ops.gdn_recurrent`. Raises ValueError if the grid cannot hold it."""
    inputs = (qkv, b, a, a_log, dt_bias, state)
    return apply_rule(rule, *inputs, slots=slots, static_state=static_state, config=config)


def apply_rule(
    rule: Literal["gdn", "kda"],
    qkv: torch.Tensor,
    *gates_and_state: torch.Tensor,
    slots: StateSlots,
    static_state: bool,
    config: RecurrentConfig | None,
    conv: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """`recurrent`, which first convolves qkv by `conv`: (weight, stored tap by tap, and window)."""
    op, (b, a, a_log, dt_bias, state) = f"{rule}_recurrent", gates_and_state
    num_slots, num_heads, k_dim, v_dim = state.shape
    check_rows(op, qkv=qkv, b=b, a=a)
    check_layout(op, state=state, a_log=a_log, dt_bias=dt_bias)
    check_indices(op, low=-1, high=num_slots, read=slots.read, write=slots.write)
    name = shape_class(slots.num_sequences, num_heads, k_dim, v_dim)
    config = config or choose(op, name, state, (RecurrentConfig,), default_config)
    block = max(16, triton.next_power_of_2(k_dim))
    num_programs = slots.num_sequences * num_heads * triton.cdiv(v_dim, config.BV)
    if num_programs > MAX_GRID_X:
        raise ValueError(f"{op}: {slots.num_sequences} sequences of {num_heads} heads exceed the grid of a GPU")
    out = new_output(slots.num_rows, num_heads, v_dim, like=qkv)
    unit = stride_unit(qkv, b, a)
    # Without a convolution these are not read, but must be tensors.
    taps, window = conv or (qkv, qkv)
    if out.numel():
        tensors = (qkv, b, a, a_log, dt_bias, state, slots.read, slots.write, out, taps, window)
        delta_recurrent_kernel[(num_programs,)](
            *tensors,
            *(x.stride(0) // unit for x in (qkv, b, a)),
            k_dim**-0.5,
            L2_EPS,
            Q=slots.num_queries,
            HK=(qkv.shape[1] - num_heads * v_dim) // (2 * k_dim),
            HV=num_heads,
            DK=k_dim,
            DV=v_dim,
            BK=block,
            LOG2_BK=block.bit_length() - 1,
            BV=config.BV,
            BY_ROW=rule == "kda",
            FIRST=num_programs <= _FEW,
            UNIT=unit,
            TAPS=0 if conv is None else taps.shape[1],
            STATIC=config.EARLY and static_state,
            enable_fp_fusion=False,
            **config.options,
            **dependent(qkv),
        )
    return finish(out, qkv.dtype)


# The ops differ only in the gate: one per head, or one per row of the state.
gdn_recurrent = functools.partial(recurrent, "gdn")
kda_recurrent = functools.partial(recurrent, "kda")
