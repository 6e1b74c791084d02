"""Triton: the second product of `grouped_gemm` for prompts: persistent programs, both operands by the copy engine.

The layout's rows of h are consecutive, so they can be copied in blocks like the weights. A program goes from tile to
tile, and the first copies of one overlap the last products of another. That matters because 768 values of K are only
twelve steps per tile (8192 tokens of Qwen3-30B-A3B on an H200: 361 us, not 420). K ascends in one fp32 accumulator.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from moeyard_kernels.common import launch
from moeyard_kernels.common.rounding import product, stored_as
from moeyard_kernels.common.tile_order import place
from moeyard_kernels.experts.grouped_configs import ExpertStream
from moeyard_kernels.experts.result_rows import result_arguments, result_rows
from moeyard_kernels.types.expert_layout import ExpertLayout
from moeyard_kernels.types.peer_window import PeerWindow

# Programs in the interpreter, where each costs time.
_FEW_PROGRAMS = 3


@triton.jit
def _expert_stream_kernel(
    d_h, d_w, p_pairs, p_slots, p_num_blocks, p_out, p_table, p_state, N: tl.constexpr, K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, TOP_K: tl.constexpr, WORLD: tl.constexpr,
    HOME: tl.constexpr,
):  # fmt: skip
    """Compute tiles of BM rows by BN outputs into the pairs' `result_rows`. Grid: programs that fill the device.

    d_h: rows of the layout [rows, K] in blocks [BM, BK]; d_w: [S, N, K] in blocks [1, BN, BK].
    """
    NUM_N: tl.constexpr = (N + BN - 1) // BN
    num_blocks = tl.load(p_num_blocks)
    for i_tile in tl.range(tl.program_id(0), num_blocks * NUM_N, tl.num_programs(0), flatten=True):
        if GROUP > 1:
            i_b, i_n = place(i_tile, num_blocks, NUM_N, GROUP)
        else:
            i_b, i_n = i_tile // NUM_N, i_tile % NUM_N
        i_slot = tl.load(p_slots + i_b)
        b_acc = tl.zeros([BM, BN], dtype=tl.float32)
        for i_k in range(0, K, BK):
            b_w = tl.reshape(d_w.load([i_slot, i_n * BN, i_k]), [BN, BK])
            b_acc = product(d_h.load([i_b * BM, i_k]), b_w, b_acc, False)
        b_pair = tl.load(p_pairs + i_b * BM + tl.arange(0, BM))
        o_n = i_n * BN + tl.arange(0, BN)
        p_row, m_row = result_rows(p_out, p_table, p_state, b_pair, N, TOP_K, WORLD, HOME)
        b_y = stored_as(b_acc, p_out.dtype.element_ty)
        tl.store(p_row[:, None] + o_n[None, :], b_y, mask=m_row[:, None] & (o_n < N)[None, :])


def stream_pairs(
    h: torch.Tensor,
    down: torch.Tensor,
    out: torch.Tensor,
    layout: ExpertLayout,
    config: ExpertStream,
    home: PeerWindow | None = None,
) -> None:
    """Compute the layout's pairs of out [P, H], or of `home`, from h [rows of the layout, I] and down [S, H, I].

    Rows of I values are multiples of 16 bytes.
    """
    num_out, dim = down.shape[1:]
    programs = _FEW_PROGRAMS
    if h.is_cuda:
        programs = config.PER_SM * launch.num_multiprocessors(h)
    d_h = TensorDescriptor.from_tensor(h, [layout.block_rows, config.BK])
    d_w = TensorDescriptor.from_tensor(down, [1, config.BN, config.BK])
    _expert_stream_kernel[programs,](
        d_h,
        d_w,
        layout.pairs,
        layout.slot_of_block,
        layout.num_blocks,
        N=num_out,
        K=dim,
        BM=layout.block_rows,
        BN=config.BN,
        BK=config.BK,
        GROUP=config.GROUP,
        **result_arguments(out, home),
        **config.options,
    )
