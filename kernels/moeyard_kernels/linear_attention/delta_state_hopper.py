"""Gluon: the loop of `delta_chunk` over a prompt's chunks, for Hopper, with the same bits.

Each chunk depends on the previous one by a chain: S, the product of keys and S, the new values, S again. One group of
warps computes only this chain. It leaves S and the new values, rounded, in shared memory. From there another group
computes the chunk's outputs while the chain continues, and another copies the tiles of later chunks in bulk. A chunk
takes 2300 cycles on an H100. With all work in one group, even with overlapping products, it took 3600: 640 for products
of the chain, 512 for other products, the rest for copies, stores and barriers.

A program holds 64 columns of one head's S, transposed: S^T [64, 128] in registers is the accumulator of one product
and, rounded, the left operand of another.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moeyard_kernels.common import launch
from moeyard_kernels.common.dependent import dependent, wait_for_previous
from moeyard_kernels.linear_attention.delta_state_parts import (
    BARRIERS,
    BV,
    CHAIN,
    DK,
    NEW_USED,
    OUT,
    STATE_USED,
    THERE,
    TO_GIVE,
    USED,
    C,
    advance,
    copy_tiles,
    give,
    line_of,
)
from moeyard_kernels.linear_attention.halves import SNAPSHOTS, TABLE_WIDTH
from moeyard_kernels.types.state_slots import CHUNK, PromptChunks


@gluon.jit
def _zero_rows(s_x, i_end):
    """Zero the rows of s_x [64, ...] from i_end on, which belong to another prompt."""
    L_X: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    b_x = s_x.load(L_X)
    o_row = gl.expand_dims(gl.arange(0, C, gl.SliceLayout(1, L_X)), 1)
    b_x, m_row = gl.broadcast(b_x, o_row < i_end)
    s_x.store(gl.where(m_row, b_x, gl.full_like(b_x, 0.0)))


@gluon.jit
def _values(s_v, s_inverse, i_buffer, i_rest, L_P: gl.constexpr):
    """Start the product of the inverse and a chunk's values. i_rest: rows from its first to the prompt's end."""
    if i_rest < C:
        _zero_rows(s_v.index(i_buffer), i_rest)
    b_values = s_v.index(i_buffer).permute((1, 0)).load(gl.DotOperandLayout(0, L_P, 2))
    b_zero = gl.zeros([BV, C], gl.float32, L_P)
    return warpgroup_mma(b_values, s_inverse.index(i_buffer).permute((1, 0)), b_zero, use_acc=False, is_async=True)


@gluon.jit
def _go_on(
    p_left, p_state, p_prompt, s_k, s_g, s_v, s_inverse, s_seeing, s_adding, s_left, s_state, s_new, bars,
    i_unit, i_h, i_v, i_slot, i_begin, i_end, has_state, num_chunks,
    HV: gl.constexpr, DV: gl.constexpr, BY_ROW: gl.constexpr,
):  # fmt: skip
    """Update S over all chunks. Leave it rounded for the outputs, and store it for snapshots and at the end."""
    DT: gl.constexpr = s_k.dtype
    # Layouts of products with the state, whose columns are positions, and of the state.
    L_P: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    L_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DK, 16])
    L_AP: gl.constexpr = gl.DotOperandLayout(0, L_P, 2)
    L_AS: gl.constexpr = gl.DotOperandLayout(0, L_S, 2)
    o_v = gl.expand_dims(i_v * BV + gl.arange(0, BV, gl.SliceLayout(1, L_S)), 1)
    o_k = gl.expand_dims(gl.arange(0, DK, gl.SliceLayout(0, L_S)), 0)
    p_own = p_state + (i_slot * HV + i_h) * (DK * DV)
    b_state = gl.load(p_own + o_k * DV + o_v, mask=has_state, other=0.0)
    # The chunks after which snapshots are taken, and their slots. A missing snapshot follows no chunk.
    n_stops, i_stops = (), ()
    for i in gl.static_range(SNAPSHOTS):
        n_stop = ((gl.load(p_prompt + (2 + 2 * i)) - i_begin) // C - 1).to(gl.int32)
        n_stops = n_stops + (n_stop,)  # type: ignore[assignment]  # noqa: RUF005
        i_stops = i_stops + (gl.load(p_prompt + (3 + 2 * i)).to(gl.int32),)  # type: ignore[assignment]  # noqa: RUF005
    b_zero = gl.zeros([BV, C], gl.float32, L_P)
    b_new = b_zero
    left = 1.0
    if num_chunks > 0:
        mbarrier.wait(bars.index(THERE), 0)
        b_first = _values(s_v, s_inverse, 0, i_end - i_begin, L_P)
        b_new = warpgroup_mma_wait(num_outstanding=0, deps=(b_first,))
        if not BY_ROW:
            left = gl.load(p_left + i_unit)
    i_buffer, phase = 0, 0
    for n in range(num_chunks):
        i_next, next_phase = advance(i_buffer, phase, CHAIN)
        i_rest = i_end - i_begin - n * C
        if not BY_ROW:  # noqa: SIM102 - of a constant and of what is known in the kernel
            if i_rest < C:
                _zero_rows(s_k.index(i_buffer), i_rest)
                fence_async_shared()
        b_rounded = b_state.to(DT)
        b_seen = warpgroup_mma(
            gl.convert_layout(b_rounded, L_AP), s_k.index(i_buffer).permute((1, 0)), b_zero, use_acc=False,
            is_async=True,
        )  # fmt: skip
        mbarrier.wait(bars.index(STATE_USED), (n & 1) ^ 1)
        s_state.index(0).store(b_rounded)
        b_by = line_of(s_seeing, i_buffer, C, L_P)
        b_seen = warpgroup_mma_wait(num_outstanding=0, deps=(b_seen,))
        b_less = -(b_seen * b_by).to(DT)
        b_new = warpgroup_mma(
            gl.convert_layout(b_less, L_AP), s_inverse.index(i_buffer).permute((1, 0)), b_new, is_async=True
        )  # fmt: skip
        # The product of the next chunk's values (or of these again) overlaps with the rest of the chain.
        here = n + 1 < num_chunks
        i_ahead = gl.where(here, i_next, i_buffer)
        mbarrier.wait(bars.index(THERE + i_ahead), gl.where(here, next_phase, phase))
        b_after = _values(s_v, s_inverse, i_ahead, gl.where(here, i_rest - C, i_rest), L_P)
        if BY_ROW:
            b_state = b_state * line_of(s_left, i_buffer, DK, L_S)
        else:
            b_by = line_of(s_adding, i_buffer, C, L_P)
            b_state = b_state * left
            left = gl.load(p_left + i_unit + gl.where(here, n + 1, n) * HV)
        b_new = warpgroup_mma_wait(num_outstanding=1, deps=(b_new,))
        b_last = b_new.to(DT)
        b_added = b_last
        if not BY_ROW:
            b_added = (b_new * b_by).to(DT)
        b_state = warpgroup_mma(gl.convert_layout(b_added, L_AS), s_g.index(i_buffer), b_state, is_async=True)
        mbarrier.wait(bars.index(NEW_USED), (n & 1) ^ 1)
        s_new.index(0).store(b_last)
        fence_async_shared()
        mbarrier.arrive(bars.index(TO_GIVE), count=1)
        b_state, b_new = warpgroup_mma_wait(num_outstanding=0, deps=(b_state, b_after))
        mbarrier.arrive(bars.index(USED + i_buffer), count=1)
        i_buffer, phase = i_next, next_phase
        i_taken = gl.to_tensor(-1)
        for i in gl.static_range(SNAPSHOTS):
            i_taken = gl.where(n == n_stops[i], i_stops[i], i_taken)
        if i_taken >= 0:
            gl.store(p_state + (i_taken.to(gl.int64) * HV + i_h) * (DK * DV) + o_k * DV + o_v, b_state)
    gl.store(p_own + o_k * DV + o_v, b_state)


@gluon.jit
def delta_state_kernel(
    d_k, d_q, d_g, d_v, d_scores, d_inverse, d_factors, d_left, p_left, p_state, p_table, p_fresh, p_heads, p_out,
    HK: gl.constexpr, HV: gl.constexpr, DV: gl.constexpr, BY_ROW: gl.constexpr,
):  # fmt: skip
    """Update 64 columns of one head's state over all chunks of a prompt. Grid: (prompts HV DV / 64,).

    A unit is a (chunk, head) pair. With a gate per row, d_k, d_q and d_g are tiles [units 64, 128], and d_left is
    [units, 128]. Otherwise d_k and d_q are the rows of qkv [R, 2 HK 128 + HV DV], as d_v always is. Scores and inverse
    have tiles [units 64, 64], and factors are [units FACTORS, 64].
    """
    DT: gl.constexpr = d_v.dtype
    PARTS: gl.constexpr = DV // BV
    s_k = gl.allocate_shared_memory(DT, [CHAIN, C, DK], d_k.layout)
    s_g = s_k
    if BY_ROW:
        s_g = gl.allocate_shared_memory(DT, [CHAIN, C, DK], d_g.layout)
    s_v = gl.allocate_shared_memory(DT, [CHAIN, C, BV], d_v.layout)
    s_inverse = gl.allocate_shared_memory(DT, [CHAIN, C, C], d_inverse.layout)
    s_q = gl.allocate_shared_memory(DT, [OUT, C, DK], d_q.layout)
    s_scores = gl.allocate_shared_memory(DT, [OUT, C, C], d_scores.layout)
    s_seeing = gl.allocate_shared_memory(gl.float32, [CHAIN, 1, C], d_factors.layout)
    s_adding, s_left = s_seeing, s_seeing
    if BY_ROW:
        s_left = gl.allocate_shared_memory(gl.float32, [CHAIN, 1, DK], d_left.layout)
    else:
        s_adding = gl.allocate_shared_memory(gl.float32, [CHAIN, 1, C], d_factors.layout)
    s_giving = gl.allocate_shared_memory(gl.float32, [OUT, 1, C], d_factors.layout)
    L_STATE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BV, DK], DT)
    L_NEW: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BV, C], DT)
    s_state = gl.allocate_shared_memory(DT, [1, BV, DK], L_STATE)
    s_new = gl.allocate_shared_memory(DT, [1, BV, C], L_NEW)
    bars = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(BARRIERS):
        mbarrier.init(bars.index(i), count=1)
    fence_async_shared()
    wait_for_previous()
    i_program = gl.program_id(0)
    i_v, i_h, i_n = i_program % PARTS, i_program // PARTS % HV, i_program // (PARTS * HV)
    i_chunk = gl.load(p_heads + i_n).to(gl.int32)
    p_prompt = p_table + i_chunk * TABLE_WIDTH
    i_begin, i_end = gl.load(p_prompt + 1).to(gl.int32), gl.load(p_prompt + (TABLE_WIDTH - 2)).to(gl.int32)
    i_slot, has_state = gl.load(p_prompt + (TABLE_WIDTH - 1)).to(gl.int64), gl.load(p_fresh + i_chunk) == 0
    num_chunks = gl.cdiv(gl.maximum(i_end - i_begin, 0), C)
    # A captured step has room for more prompts than most steps use.
    if num_chunks == 0:
        return
    i_unit, i_query = i_chunk * HV + i_h, i_h // (HV // HK) * DK
    i_value = 2 * HK * DK + i_h * DV + i_v * BV
    gl.warp_specialize(
        [
            (
                copy_tiles,
                (
                    d_k, d_q, d_g, d_v, d_scores, d_inverse, d_factors, d_left, s_k, s_q, s_g, s_v, s_scores, s_inverse,
                    s_seeing, s_adding, s_giving, s_left, bars, i_unit, i_begin, num_chunks, HK * DK + i_query,
                    i_query, i_value, HV, BY_ROW,
                ),
            ),
            (
                _go_on,
                (
                    p_left, p_state, p_prompt, s_k, s_g, s_v, s_inverse, s_seeing, s_adding, s_left, s_state, s_new,
                    bars, i_unit, i_h, i_v, i_slot, i_begin, i_end, has_state, num_chunks, HV, DV, BY_ROW,
                ),
            ),
            (
                give,
                (
                    p_out + i_h * DV + i_v * BV, s_q, s_scores, s_giving, s_state, s_new, bars, i_begin, i_end,
                    num_chunks, HV * DV,
                ),
            ),
        ],
        [4, 4],
        [240, 128],
    )  # fmt: skip


def fits(qkv: torch.Tensor, k_dim: int, v_dim: int) -> bool:
    """Whether the kernel can run: Hopper, aligned bf16 rows, keys of 128 and values of a multiple of 64 columns."""
    aligned = qkv.data_ptr() % 16 == 0 and qkv.stride(0) % 8 == 0 and qkv.stride(1) == 1
    return qkv.dtype == torch.bfloat16 and (k_dim, v_dim % 64) == (128, 0) and aligned and launch.on_hopper(qkv)


def _blocks(x: torch.Tensor, columns: int) -> TensorDescriptor:
    """Return the descriptor of tiles of 64 rows by `columns` columns."""
    return TensorDescriptor.from_tensor(x, [CHUNK, columns], launch.shared_layout(CHUNK, columns))


def _lines(x: torch.Tensor) -> TensorDescriptor:
    """Return the descriptor of single rows of an fp32 matrix, without swizzling."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return TensorDescriptor.from_tensor(x, [1, x.shape[1]], layout)


def go_through_chunks(
    qkv: torch.Tensor,
    tiles: tuple[torch.Tensor, ...] | None,
    scores: torch.Tensor,
    inverse: torch.Tensor,
    factors: torch.Tensor,
    left: torch.Tensor,
    state: torch.Tensor,
    chunks: PromptChunks,
    out: torch.Tensor,
) -> None:
    """Write out [R, HV, DV] and all prompts' states from the results of `delta_intra_kernel`. tiles: kd, kg, qg."""
    _, num_heads, k_dim, v_dim = state.shape
    rows, lines = _blocks(qkv, k_dim), _lines(factors.view(-1, CHUNK))
    d_k, d_g, d_q = (rows,) * 3 if tiles is None else tuple(_blocks(x.view(-1, k_dim), k_dim) for x in tiles)
    programs = chunks.heads.shape[0] * num_heads * v_dim // BV.value
    squares = (_blocks(x.view(-1, CHUNK), CHUNK) for x in (scores, inverse))
    descriptors = (d_k, d_q, d_g, _blocks(qkv, BV.value), *squares, lines, lines if tiles is None else _lines(left))
    tensors = (left, state, chunks.table, chunks.fresh, chunks.heads, out)
    delta_state_kernel[(programs,)](
        *descriptors,
        *tensors,
        HK=(qkv.shape[1] - num_heads * v_dim) // (2 * k_dim),
        HV=num_heads,
        DV=v_dim,
        BY_ROW=tiles is not None,
        num_warps=4,
        enable_fp_fusion=False,
        **dependent(qkv),
    )
