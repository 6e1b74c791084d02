"""Triton: the gated delta rule over prompts in chunks of 64 positions, for prefill; the state goes on in its slot.

Two parts. `delta_intra` computes what does not need the state, of all chunks at once, in one launch or, where there are
many chunks, in three. The kernel here goes through the chunks of a prompt in order, S being the state before a chunk:

    V = u - w S;  out = qg S + scores V;  S <- left S + kg^T V

A program holds BV columns of one head's S, turned: S^T [BV, Dk] in fp32 is the accumulator of one product and,
rounded, the left operand of the two others, which Hopper's products take out of registers. So what one chunk waits for
in the one before goes through no shared memory; chunks to come are on their way there. Outputs are computed along the
way: the states between chunks are never written, which would be a third of all bytes, but where a snapshot is wanted.

fp32: gates and their sums, exponentials, the state, all sums of products. bf16, of bf16 rows: operands of products,
each rounded once from fp32 (those of fp32 rows are fp32). tf32: the inverse, whose operands are up to 64 x 64 and whose
result is rounded to bf16. Relative error of the outputs against float64: docs/kernels.md.

Prompts read only their own chunks and a program's columns are its own, so no bit depends on the batch; a chunk is a
chunk of the prompt, whatever step it comes in, and the state in the slot is fp32 between steps.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl

from moeyard_kernels.common.dependent import dependent, wait_for_previous
from moeyard_kernels.common.launch import MAX_GRID_X, check_layout, finish, new_output
from moeyard_kernels.common.rows import check_rows
from moeyard_kernels.common.tuning import Config, choose
from moeyard_kernels.linear_attention.delta_intra import delta_intra_kernel, operand
from moeyard_kernels.linear_attention.halves import SNAPSHOTS, TABLE_WIDTH
from moeyard_kernels.types.prompt_chunks import CHUNK, PromptChunks

# Beside the sum of squares of a query or key.
L2_EPS = 1e-6
# Of so many chunks and heads at most, the stages of a chunk are one launch.
_FEW = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkConfig(Config):
    """BV columns of one head's state are a program of num_warps; the stages before are one launch, or three.

    intra_warps: of a program of those. Loads of num_stages - 1 chunks are on the way.
    """

    kernel: Literal["chunk"] = "chunk"
    num_stages: int = 2
    BV: int = 64
    fused: bool
    intra_warps: int = 8


CONFIGS = (
    *(
        ChunkConfig(BV=columns, num_warps=warps, num_stages=stages, fused=fused)
        for fused in (True, False)
        for columns, warps, stages in ((64, 4, 2), (64, 4, 3), (32, 4, 2), (32, 4, 3), (128, 8, 2), (16, 4, 3))
    ),
    ChunkConfig(fused=True, intra_warps=4),
)


def shape_class(num_chunks: int, num_prompts: int, num_heads: int, k_dim: int, v_dim: int) -> str:
    """By how long the prompts are together, in steps of four, and whether there are several."""
    bucket = next((most for most in (4, 16, 64, 256) if num_chunks <= most), 1024)
    return f"{bucket} {'one' if num_prompts == 1 else 'several'} H{num_heads} {k_dim}x{v_dim}"


def default_config(num_programs: int) -> ChunkConfig:
    """The config of shapes that nobody tuned, of so many chunks and heads."""
    return ChunkConfig(fused=num_programs <= _FEW)


@triton.jit
def _delta_chunk_kernel(
    p_w, p_u, p_kg, p_qg, p_scores, p_left, p_state, p_table, p_fresh, p_heads, p_out,
    HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BU: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, BY_ROW: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    """Columns [i_v BV, i_v BV + BV) of one head's state, over all chunks of a prompt. Grid: (prompts HV BU / BV,).

    BU: columns that p_u has, DV and more. DTYPE: what operands are rounded to.
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
    m_v = o_v < DV
    m_state = m_v[:, None] & (o_k < DK)[None, :]
    o_state = o_k[None, :] * DV + o_v[:, None]
    b_state = tl.load(p_state + (i_slot * HV + i_h) * (DK * DV) + o_state, mask=m_state & has_state, other=0.0)
    o_read, o_square, o_u = o_c[:, None] * BK + o_k[None, :], o_c[:, None] * C + o_c[None, :], o_v[:, None] * C + o_c
    i_end = tl.load(p_prompt + (TABLE_WIDTH - 2))
    # Behind which chunks snapshots are, and where they go; one that there is not is behind none.
    n_stops, i_stops = (), ()
    for i in tl.static_range(SNAPSHOTS):
        # Triton has no unpacking.
        n_stop = ((tl.load(p_prompt + (2 + 2 * i)) - i_begin) // C - 1).to(tl.int32)
        n_stops = n_stops + (n_stop,)  # type: ignore[assignment]  # noqa: RUF005
        i_stops = i_stops + (tl.load(p_prompt + (3 + 2 * i)).to(tl.int32),)  # type: ignore[assignment]  # noqa: RUF005
    for n in range(tl.cdiv(i_end - i_begin, C)):
        i_unit = (i_chunk + n) * HV + i_h
        b_w, b_u = tl.load(p_w + i_unit * (C * BK) + o_read), tl.load(p_u + i_unit * (BU * C) + o_u)
        b_qg, b_kg = tl.load(p_qg + i_unit * (C * BK) + o_read), tl.load(p_kg + i_unit * (C * BK) + o_read)
        b_scores = tl.load(p_scores + i_unit * (C * C) + o_square)
        b_rounded = operand(b_state, DTYPE)
        b_new = b_u - tl.dot(b_rounded, tl.trans(b_w), input_precision="ieee")
        b_out = tl.dot(b_rounded, tl.trans(b_qg), input_precision="ieee")
        b_new = operand(b_new, DTYPE)
        b_out = tl.dot(b_new, tl.trans(b_scores), b_out, input_precision="ieee")
        if BY_ROW:
            b_left = tl.load(p_left + i_unit * BK + o_k)
            b_state = b_state * b_left[None, :]
        else:
            b_state = b_state * tl.load(p_left + i_unit)
        b_state = tl.dot(b_new, b_kg, b_state, input_precision="ieee")
        i_row = i_begin + n * C + o_c
        p_row = p_out + (i_row[:, None] * HV + i_h) * DV + o_v[None, :]
        tl.store(p_row, tl.trans(b_out).to(p_out.dtype.element_ty), mask=(i_row < i_end)[:, None] & m_v[None, :])
        i_taken = tl.full([], -1, tl.int32)
        for i in tl.static_range(SNAPSHOTS):
            i_taken = tl.where(n == n_stops[i], i_stops[i], i_taken)  # type: ignore[misc]
        if i_taken >= 0:
            p_taken = p_state + (i_taken.to(tl.int64) * HV + i_h) * (DK * DV)
            tl.store(p_taken + o_state, b_state, mask=m_state)
    # What `heads` has room for and no prompt names a row of padding: it has a slot, too, and nothing for it.
    tl.store(p_state + (i_slot * HV + i_h) * (DK * DV) + o_state, b_state, mask=m_state & (i_end > i_begin))


def gdn_chunk_prefill(
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
    """See `moeyard_kernels.ops.gdn_chunk_prefill`. Raises ValueError for what its grid cannot hold."""
    return _prefill("gdn_chunk_prefill", False, qkv, b, a, a_log, dt_bias, state, chunks, config)


def kda_chunk_prefill(
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
    """See `moeyard_kernels.ops.kda_chunk_prefill`. Raises ValueError for what its grid cannot hold."""
    return _prefill("kda_chunk_prefill", True, qkv, b, a, a_log, dt_bias, state, chunks, config)


def _prefill(
    op: str, by_row: bool, qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, a_log: torch.Tensor,
    dt_bias: torch.Tensor, state: torch.Tensor, chunks: PromptChunks, config: ChunkConfig | None,
) -> torch.Tensor:  # fmt: skip
    _, num_heads, k_dim, v_dim = state.shape
    check_rows(op, qkv=qkv, b=b, a=a)
    check_layout(op, state=state, a_log=a_log, dt_bias=dt_bias, table=chunks.table, heads=chunks.heads)
    num_chunks, num_prompts = chunks.table.shape[0], chunks.heads.shape[0]
    num_units = num_chunks * num_heads
    name = shape_class(num_chunks, num_prompts, num_heads, k_dim, v_dim)
    config = config or choose(op, name, state, (ChunkConfig,), lambda: default_config(num_units))
    rows, columns = (max(16, triton.next_power_of_2(dim)) for dim in (k_dim, v_dim))
    if num_units * columns > MAX_GRID_X:
        raise ValueError(f"{op}: {num_chunks} chunks of {num_heads} heads exceed the grid of a GPU")
    out = new_output(chunks.num_rows, num_heads, v_dim, like=qkv)
    if not out.numel():
        return finish(out, qkv.dtype)

    def scratch(*shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return new_output(num_units, *shape, like=qkv, dtype=dtype)

    scores, w, kg, qg = scratch(CHUNK, CHUNK), *(scratch(CHUNK, rows) for _ in range(3))
    # u is not rounded: w S is taken from it in fp32.
    u = scratch(columns, CHUNK, dtype=torch.float32)
    left = scratch(rows if by_row else 1, dtype=torch.float32)
    # What only passes between stages, where there is something to pass.
    sums = scratch(CHUNK, rows, dtype=torch.float32) if by_row else left
    pairs, inverse = (left, left) if config.fused else (scratch(2, CHUNK, CHUNK, dtype=torch.float32),
                                                        scratch(CHUNK, CHUNK))  # fmt: skip
    stages = (
        ((True, True, True),) if config.fused else ((True, False, False), (False, True, False), (False, False, True))
    )
    for blocks, solve, reads in stages:
        delta_intra_kernel[(num_units,)](
            qkv, b, a, a_log, dt_bias, chunks.table, sums, pairs, scores, inverse, w, u, kg, qg, left,
            qkv.stride(0), b.stride(0), a.stride(0), k_dim**-0.5, L2_EPS,
            HK=(qkv.shape[1] - num_heads * v_dim) // (2 * k_dim), HV=num_heads, DK=k_dim, DV=v_dim,
            BK=rows, LOG2_BK=rows.bit_length() - 1, BV=columns, C=CHUNK, BY_ROW=by_row,
            BLOCKS=blocks, SOLVE=solve, READS=reads,
            enable_fp_fusion=False, num_warps=config.intra_warps, num_stages=1, **dependent(qkv),
        )  # fmt: skip
    width = min(config.BV, columns)
    _delta_chunk_kernel[(num_prompts * num_heads * columns // width,)](
        w, u, kg, qg, scores, left, state, chunks.table, chunks.fresh, chunks.heads, out,
        HV=num_heads, DK=k_dim, DV=v_dim, BK=rows, BU=columns, BV=width, C=CHUNK, BY_ROW=by_row,
        DTYPE=tl.float32 if qkv.dtype == torch.float32 else tl.bfloat16,
        enable_fp_fusion=False, **config.options, **dependent(qkv),
    )  # fmt: skip
    return finish(out, qkv.dtype)
