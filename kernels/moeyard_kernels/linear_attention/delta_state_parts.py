"""Gluon: the work beside the chain of `delta_state_hopper`: copies of later tiles, and outputs."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from moeyard_kernels.common.gluon import load_block, reinterpret
from moeyard_kernels.linear_attention.delta_intra import FACTORS
from moeyard_kernels.types.state_slots import CHUNK

# Columns of keys, columns of values of a program, and positions of a chunk.
DK, BV, C = gl.constexpr(128), gl.constexpr(64), gl.constexpr(CHUNK)
# Rows of a unit's factors: of k S with a gate per head, of outputs, of values added to S.
_SEEING, _GIVING, _ADDING = gl.constexpr(3), gl.constexpr(2), gl.constexpr(4)
# Buffers of chunks for the chain and for the outputs.
CHAIN, OUT = gl.constexpr(3), gl.constexpr(2)
# Barriers: tiles of the chain have arrived, are used; the same for outputs; S and new values are ready, are used.
THERE, USED, OUT_THERE, _OUT_USED = gl.constexpr(0), gl.constexpr(3), gl.constexpr(6), gl.constexpr(8)
TO_GIVE, STATE_USED, NEW_USED, BARRIERS = gl.constexpr(10), gl.constexpr(11), gl.constexpr(12), gl.constexpr(13)
_LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def advance(i_buffer, phase, COUNT: gl.constexpr):
    """Return the next buffer of a ring and the phase of its barriers."""
    last = i_buffer == COUNT - 1
    return gl.where(last, 0, i_buffer + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def copy_tiles(
    d_k, d_q, d_g, d_v, d_scores, d_inverse, d_factors, d_left, s_k, s_q, s_g, s_v, s_scores, s_inverse, s_seeing,
    s_adding, s_giving, s_left, bars, i_unit, i_row, num_chunks, i_key, i_query, i_value,
    HV: gl.constexpr, BY_ROW: gl.constexpr,
):  # fmt: skip
    """Copy the tiles of all chunks: those of the chain one chunk ahead of those of the outputs."""
    LINES: gl.constexpr = (C + DK if BY_ROW else 2 * C) * 4
    TILES: gl.constexpr = C * ((2 if BY_ROW else 1) * DK + BV + C) * 2
    # A new barrier has passed the phase before its first, so buffers start free.
    i_buffer, phase = 0, 1
    i_out, out_phase = 0, 1
    for n in range(num_chunks + 1):
        if n < num_chunks:
            bar, i_tile, i_now = bars.index(THERE + i_buffer), (i_unit + n * HV) * C, i_row + n * C
            i_line = (i_unit + n * HV) * FACTORS
            mbarrier.wait(bars.index(USED + i_buffer), phase)
            mbarrier.expect(bar, TILES + LINES)
            if BY_ROW:
                load_block(d_k, [i_tile, 0], bar, s_k.index(i_buffer))
                load_block(d_g, [i_tile, 0], bar, s_g.index(i_buffer))
                load_block(d_factors, [i_line, 0], bar, s_seeing.index(i_buffer))
                load_block(d_left, [i_unit + n * HV, 0], bar, s_left.index(i_buffer))
            else:
                load_block(d_k, [i_now, i_key], bar, s_k.index(i_buffer))
                load_block(d_factors, [i_line + _SEEING, 0], bar, s_seeing.index(i_buffer))
                load_block(d_factors, [i_line + _ADDING, 0], bar, s_adding.index(i_buffer))
            load_block(d_v, [i_now, i_value], bar, s_v.index(i_buffer))
            load_block(d_inverse, [i_tile, 0], bar, s_inverse.index(i_buffer))
            i_buffer, phase = advance(i_buffer, phase, CHAIN)
        if n > 0:
            bar, i_before = bars.index(OUT_THERE + i_out), i_unit + (n - 1) * HV
            mbarrier.wait(bars.index(_OUT_USED + i_out), out_phase)
            mbarrier.expect(bar, C * (DK + C) * 2 + C * 4)
            if BY_ROW:
                load_block(d_q, [i_before * C, 0], bar, s_q.index(i_out))
            else:
                load_block(d_q, [i_row + (n - 1) * C, i_query], bar, s_q.index(i_out))
            load_block(d_scores, [i_before * C, 0], bar, s_scores.index(i_out))
            load_block(d_factors, [i_before * FACTORS + _GIVING, 0], bar, s_giving.index(i_out))
            i_out, out_phase = advance(i_out, out_phase, OUT)


@gluon.jit
def line_of(s_lines, i_buffer, SIZE: gl.constexpr, L_X: gl.constexpr):
    """Load a line of factors as [1, SIZE] in the columns of L_X."""
    s_line = reinterpret(s_lines.index(i_buffer), gl.float32, [SIZE], _LINE)
    return gl.expand_dims(s_line.load(gl.SliceLayout(0, L_X)), 0)


@gluon.jit
def give(p_out, s_q, s_scores, s_giving, s_state, s_new, bars, i_row, i_end, num_chunks, stride):
    """Compute the outputs of all chunks and store them to rows of `stride` values."""
    DT: gl.constexpr = s_q.dtype
    L_P: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    L_O: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    b_zero = gl.zeros([BV, C], gl.float32, L_P)
    i_buffer, phase = 0, 0
    for n in range(num_chunks):
        mbarrier.wait(bars.index(OUT_THERE + i_buffer), phase)
        mbarrier.wait(bars.index(TO_GIVE), n & 1)
        b_out = warpgroup_mma(
            s_state.index(0), s_q.index(i_buffer).permute((1, 0)), b_zero, use_acc=False, is_async=True
        )  # fmt: skip
        b_out = warpgroup_mma_wait(num_outstanding=0, deps=(b_out,))
        mbarrier.arrive(bars.index(STATE_USED), count=1)
        b_out = b_out * line_of(s_giving, i_buffer, C, L_P)
        b_out = warpgroup_mma(s_new.index(0), s_scores.index(i_buffer).permute((1, 0)), b_out, is_async=True)
        b_out = warpgroup_mma_wait(num_outstanding=0, deps=(b_out,))
        mbarrier.arrive(bars.index(NEW_USED), count=1)
        mbarrier.arrive(bars.index(_OUT_USED + i_buffer), count=1)
        i_buffer, phase = advance(i_buffer, phase, OUT)
        b_rows = gl.convert_layout(gl.permute(b_out.to(DT), (1, 0)), L_O)
        o_c = gl.expand_dims(i_row + n * C + gl.arange(0, C, gl.SliceLayout(1, L_O)), 1)
        o_v = gl.expand_dims(gl.arange(0, BV, gl.SliceLayout(0, L_O)), 0)
        p_rows, m_rows = gl.broadcast(p_out + o_c.to(gl.int64) * stride + o_v, o_c < i_end)
        gl.store(p_rows, b_rows, mask=m_rows)
