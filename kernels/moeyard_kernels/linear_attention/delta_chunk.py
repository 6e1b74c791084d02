"""Triton: the gated delta rule over prompts in chunks of 64 positions, for prefill, with states in slots.

`delta_intra` computes the parts that do not need the state, for all chunks at once. It takes one launch, or two if
there are many chunks. The kernel here loops over the chunks of a prompt in order. S is the state before a chunk:

    V = T (v - kd S);  out = qg S + scores V;  S <- left S + kg^T V

A program holds BV columns of one head's S, transposed: S^T [BV, Dk] in fp32 is the accumulator of one product. Rounded,
it is the left operand of the two others, which Hopper reads from registers. So the dependency between chunks does not
go through shared memory, which receives the next chunks meanwhile. Outputs are computed in the same loop. States
between chunks, a third of all bytes, are written only for snapshots.

fp32: gates and their sums, exponentials, the state, all sums of products. bf16, for bf16 rows: operands of products,
rounded once from fp32 (fp32 rows have fp32 operands). tf32: the inverse, whose operands are up to 64 x 64 and whose
result is rounded to bf16. Relative error against float64: docs/linear_attention.md.

A prompt reads only its own chunks, and programs share no columns, so no bit depends on the batch. Chunks are counted
from the prompt's first position in every step, and the state in the slot is fp32 between steps.
"""

import functools
from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl

from moeyard_kernels.common.dependent import dependent, wait_for_previous
from moeyard_kernels.common.launch import MAX_GRID_X, check_layout, finish, new_output
from moeyard_kernels.common.rounding import opaque
from moeyard_kernels.common.rows import check_rows, stride_unit
from moeyard_kernels.common.tuning import Config, choose
from moeyard_kernels.linear_attention.delta_intra import FACTORS, delta_intra_kernel
from moeyard_kernels.linear_attention.delta_scores import operand
from moeyard_kernels.linear_attention.delta_state_hopper import fits, go_through_chunks
from moeyard_kernels.linear_attention.halves import SNAPSHOTS, TABLE_WIDTH
from moeyard_kernels.ops.linear_attention import L2_EPS
from moeyard_kernels.types.state_slots import CHUNK, PromptChunks

# The most (chunk, head) pairs for which both stages of `delta_intra` are one launch.
_FEW = 256
# The columns of Dk that a program of `delta_intra` holds at a time.
_HALF = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkConfig(Config):
    """A program of num_warps has BV columns of one head's state. fused: `delta_intra` is one launch instead of two.

    kernel: "state" is `delta_state_hopper`, with its own tiles, where that can run; otherwise "chunk". intra_warps: of
    a program of `delta_intra`; registers allow two such programs per multiprocessor with 4 warps, one with 8.
    solve_warps: of a program that only inverts. A chunk's loads begin num_stages - 2 chunks before it, after the
    products of the chunk before that (Triton's order), so with 2 stages nothing hides them.
    """

    kernel: Literal["chunk", "state"] = "chunk"
    num_stages: int = 3
    BV: int = 64
    fused: bool
    intra_warps: int = 4
    solve_warps: int = 1


# (BV, num_warps, num_stages). Wider blocks of three stages do not fit the shared memory.
_PARTS = ((64, 4, 3), (64, 4, 2), (64, 8, 2), (32, 4, 3), (32, 4, 2), (128, 8, 2), (16, 4, 3))
CONFIGS = (
    ChunkConfig(kernel="state", fused=True),
    ChunkConfig(kernel="state", fused=False),
    *(
        ChunkConfig(BV=columns, num_warps=warps, num_stages=stages, fused=fused)
        for fused in (True, False)
        for columns, warps, stages in (_PARTS if not fused else _PARTS[:1])
    ),
    ChunkConfig(fused=True, intra_warps=8),
    ChunkConfig(fused=False, intra_warps=8),
    ChunkConfig(fused=False, solve_warps=2),
)


def shape_class(num_chunks: int, num_prompts: int, num_heads: int, k_dim: int, v_dim: int) -> str:
    """Return the shape class: chunks of all prompts in steps of four, one or several prompts, shape of the state."""
    bucket = next((most for most in (4, 16, 64, 256) if num_chunks <= most), 1024)
    return f"{bucket} {'one' if num_prompts == 1 else 'several'} H{num_heads} {k_dim}x{v_dim}"


def default_config(num_programs: int, dtype: torch.dtype = torch.bfloat16) -> ChunkConfig:
    """Return the config of untuned shapes of `num_programs` (chunk, head) pairs. fp32 has no room for prefetching."""
    fused = num_programs <= _FEW
    if dtype == torch.float32:
        return ChunkConfig(fused=fused, num_stages=1)
    return ChunkConfig(kernel="state", fused=fused)


@triton.jit
def _held(b_x):
    """Return b_x as an opaque value, so that each thread holds it from one chunk to the next.

    Otherwise Triton moves the load to its use, and pays the latency, because no product takes it.
    """
    return opaque(b_x, tl.float32)


@triton.jit(do_not_specialize=("stride_x",))
def _delta_chunk_kernel(
    p_x, p_kd, p_kg, p_qg, p_scores, p_inverse, p_factors, p_left, p_state, p_table, p_fresh, p_heads, p_out, stride_x,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BU: tl.constexpr,
    BV: tl.constexpr, C: tl.constexpr, BY_ROW: tl.constexpr, DTYPE: tl.constexpr, UNIT: tl.constexpr
):  # fmt: skip
    """Update columns [i_v BV, i_v BV + BV) of one head's state over all chunks of a prompt.

    Grid: (prompts HV BU / BV,). BU: DV, rounded up to whole blocks. DTYPE: of rounded operands. stride_x is in units of
    UNIT values (`delta_intra_kernel`). p_kd, p_kg and p_qg have operands with a gate per row, else the rows have them.
    """
    wait_for_previous()
    PARTS: tl.constexpr = BU // BV
    i_program = tl.program_id(0)
    i_v, i_h, i_n = i_program % PARTS, i_program // PARTS % HV, i_program // (PARTS * HV)
    i_chunk = tl.load(p_heads + i_n)
    p_prompt = p_table + i_chunk * TABLE_WIDTH
    i_begin, i_slot = tl.load(p_prompt + 1), tl.load(p_prompt + (TABLE_WIDTH - 1))
    has_state = tl.load(p_fresh + i_chunk) == 0
    o_c, o_k, o_v = tl.arange(0, C), tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    m_k, m_v = o_k < DK, o_v < DV
    m_state = m_v[:, None] & m_k[None, :]
    o_state = o_k[None, :] * DV + o_v[:, None]
    b_state = tl.load(p_state + (i_slot * HV + i_h) * (DK * DV) + o_state, mask=m_state & has_state, other=0.0)
    N_LEFT: tl.constexpr = BK if BY_ROW else 1
    o_read, o_square = o_c[:, None] * BK + o_k[None, :], o_c[:, None] * C + o_c[None, :]
    i_end = tl.load(p_prompt + (TABLE_WIDTH - 2))
    p_q = p_x + i_h // (HV // HK) * DK + o_k[None, :]
    p_v = p_x + (2 * HK * DK + i_h * DV) + o_v[None, :]
    # The chunks after which snapshots are taken, and their slots. A missing snapshot follows no chunk.
    n_stops, i_stops = (), ()
    for i in tl.static_range(SNAPSHOTS):
        # Triton has no unpacking.
        n_stop = ((tl.load(p_prompt + (2 + 2 * i)) - i_begin) // C - 1).to(tl.int32)
        n_stops = n_stops + (n_stop,)  # type: ignore[assignment]  # noqa: RUF005
        i_stops = i_stops + (tl.load(p_prompt + (3 + 2 * i)).to(tl.int32),)  # type: ignore[assignment]  # noqa: RUF005
    o_left = o_k if BY_ROW else tl.arange(0, 1)
    p_lefts = p_left + o_left
    b_next_left = tl.load(p_lefts + (i_chunk * HV + i_h) * N_LEFT)
    num_chunks = tl.cdiv(i_end - i_begin, C)
    for n in range(num_chunks):
        i_unit = (i_chunk + n) * HV + i_h
        p_factor = p_factors + i_unit * (FACTORS * C) + o_c
        b_factor, b_left = tl.load(p_factor + 2 * C), _held(b_next_left)
        b_next_left = tl.load(p_lefts + tl.where(n + 1 < num_chunks, i_unit + HV, i_unit) * N_LEFT)
        i_row = i_begin + n * C + o_c
        m_row = (i_row < i_end)[:, None]
        o_x = i_row[:, None] * (stride_x * UNIT)
        if BY_ROW:
            b_kd, b_qg = tl.load(p_kd + i_unit * (C * BK) + o_read), tl.load(p_qg + i_unit * (C * BK) + o_read)
            b_kg = tl.load(p_kg + i_unit * (C * BK) + o_read)
        else:
            b_kd = operand(tl.load(p_q + HK * DK + o_x, mask=m_row & m_k[None, :], other=0.0), DTYPE)
            b_qg = operand(tl.load(p_q + o_x, mask=m_row & m_k[None, :], other=0.0), DTYPE)
            b_kg = b_kd
        b_v = operand(tl.load(p_v + o_x, mask=m_row & m_v[None, :], other=0.0), DTYPE)
        b_scores = tl.load(p_scores + i_unit * (C * C) + o_square)
        b_inverse = tl.load(p_inverse + i_unit * (C * C) + o_square)
        b_rounded = operand(b_state, DTYPE)
        b_seen = tl.dot(b_rounded, tl.trans(b_kd), input_precision="ieee")
        b_seen = operand(b_seen * tl.load(p_factor + (0 if BY_ROW else 3 * C))[None, :], DTYPE)
        b_out = tl.dot(b_rounded, tl.trans(b_qg), input_precision="ieee") * b_factor[None, :]
        # This product needs no state but is not first. Otherwise the product before it would overlap with it, and ptxas
        # would wait for each step of each product (C7514).
        b_new = tl.dot(tl.trans(b_v), tl.trans(b_inverse), input_precision="ieee")
        b_new = tl.dot(-b_seen, tl.trans(b_inverse), b_new, input_precision="ieee")
        b_last = operand(b_new, DTYPE)
        b_out = tl.dot(b_last, tl.trans(b_scores), b_out, input_precision="ieee")
        b_state = b_state * b_left[None, :]
        if not BY_ROW:
            b_last = operand(b_new * tl.load(p_factor + 4 * C)[None, :], DTYPE)
        b_state = tl.dot(b_last, b_kg, b_state, input_precision="ieee")
        p_row = p_out + (i_row[:, None] * HV + i_h) * DV + o_v[None, :]
        tl.store(p_row, tl.trans(b_out).to(p_out.dtype.element_ty), mask=m_row & m_v[None, :])
        i_taken = tl.full([], -1, tl.int32)
        for i in tl.static_range(SNAPSHOTS):
            i_taken = tl.where(n == n_stops[i], i_stops[i], i_taken)  # type: ignore[misc]
        if i_taken >= 0:
            p_taken = p_state + (i_taken.to(tl.int64) * HV + i_h) * (DK * DV)
            tl.store(p_taken + o_state, b_state, mask=m_state)
    # Unused entries of `heads` name a row of padding, which has a slot but nothing to store in it.
    tl.store(p_state + (i_slot * HV + i_h) * (DK * DV) + o_state, b_state, mask=m_state & (i_end > i_begin))


def chunk_prefill(
    rule: Literal["gdn", "kda"],
    qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    *,
    chunks: PromptChunks,
    config: ChunkConfig | None = None,
) -> torch.Tensor:
    """See `moeyard_kernels.ops.gdn_chunk_prefill`. Raises ValueError if the grid cannot hold it."""
    op, by_row = f"{rule}_chunk_prefill", rule == "kda"
    _, num_heads, k_dim, v_dim = state.shape
    check_rows(op, qkv=qkv, b=b, a=a)
    check_layout(op, state=state, a_log=a_log, dt_bias=dt_bias, table=chunks.table, heads=chunks.heads)
    num_chunks, num_prompts = chunks.table.shape[0], chunks.heads.shape[0]
    num_units = num_chunks * num_heads
    name = shape_class(num_chunks, num_prompts, num_heads, k_dim, v_dim)
    config = config or choose(op, name, state, (ChunkConfig,), lambda: default_config(num_units, qkv.dtype))
    rows, columns = (max(16, triton.next_power_of_2(dim)) for dim in (k_dim, v_dim))
    if num_units * columns > MAX_GRID_X:
        raise ValueError(f"{op}: {num_chunks} chunks of {num_heads} heads exceed the grid of a GPU")
    out = new_output(chunks.num_rows, num_heads, v_dim, like=qkv)
    if not out.numel():
        return finish(out, qkv.dtype)

    def scratch(*shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return new_output(num_units, *shape, like=qkv, dtype=dtype)

    scores, inverse = scratch(CHUNK, CHUNK), scratch(CHUNK, CHUNK)
    factors = scratch(FACTORS.value, CHUNK, dtype=torch.float32)
    left = scratch(rows if by_row else 1, dtype=torch.float32)
    sums = scratch(CHUNK, rows, dtype=torch.float32) if by_row else scratch(2, CHUNK, dtype=torch.float32)
    lower = scratch(CHUNK, CHUNK, dtype=torch.float32)
    # With a gate per head these are not read, but must be tensors.
    kd, kg, qg = (scratch(CHUNK, rows) for _ in range(3)) if by_row else (scores,) * 3
    half, unit = min(rows, _HALF), stride_unit(qkv)
    options = {"HK": (qkv.shape[1] - num_heads * v_dim) // (2 * k_dim), "HV": num_heads, "DK": k_dim, "BK": rows}
    options |= {"C": CHUNK, "BY_ROW": by_row, "UNIT": unit, "enable_fp_fusion": False, **dependent(qkv)}
    inputs, strides = (qkv, b, a, a_log, dt_bias, chunks.table), (qkv.stride(0) // unit, b.stride(0), a.stride(0))
    results = (sums, lower, scores, inverse, factors, kd, kg, qg, left)
    for blocks, solve in ((True, True),) if config.fused else ((True, False), (False, True)):
        delta_intra_kernel[(num_units,)](
            *inputs,
            *results,
            *strides,
            k_dim**-0.5,
            L2_EPS,
            LOG2_BK=rows.bit_length() - 1,
            HALF=half,
            LOG2_HALF=half.bit_length() - 1,
            BLOCKS=blocks,
            SOLVE=solve,
            num_warps=config.intra_warps if blocks else config.solve_warps,
            num_stages=1,
            **options,
        )
    if config.kernel == "state" and fits(qkv, k_dim, v_dim):
        go_through_chunks(qkv, (kd, kg, qg) if by_row else None, scores, inverse, factors, left, state, chunks, out)
        return finish(out, qkv.dtype)
    width = min(config.BV, columns)
    tensors = (qkv, kd, kg, qg, scores, inverse, factors, left, state, chunks.table, chunks.fresh, chunks.heads, out)
    _delta_chunk_kernel[(num_prompts * num_heads * columns // width,)](
        *tensors,
        qkv.stride(0) // unit,
        DV=v_dim,
        BU=columns,
        BV=width,
        DTYPE=tl.float32 if qkv.dtype == torch.float32 else tl.bfloat16,
        **config.options,
        **options,
    )
    return finish(out, qkv.dtype)


# The ops differ only in the gate: one per head, or one per row of the state.
gdn_chunk_prefill = functools.partial(chunk_prefill, "gdn")
kda_chunk_prefill = functools.partial(chunk_prefill, "kda")
