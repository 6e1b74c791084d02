"""Triton: the second product of `grouped_gemm` for prompts: persistent programs, both operands by the copy engine.

The layout's rows of h lie one behind the other, so they come in blocks as the weights do. A program goes from tile to
tile, and the first copies of one run beside the last products of another: of 768 values of K a tile has but twelve
steps (8192 tokens of Qwen3-30B-A3B on an H200: 361 us, 420 without). K ascends in one fp32 accumulator as everywhere.

HALVES: every expert ends in a block that is full by chance only; of 2048 tokens half of the experts have a second one,
of a few rows. A tile's height cannot change on the way, so the programs go through all blocks that need their whole
height, and then through the halves, in turns that go on where the others ended. One program lists the blocks before.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from moeyard_kernels.common.dependent import dependent, wait_for_previous
from moeyard_kernels.common.rounding import product
from moeyard_kernels.experts.grouped_configs import ExpertStream
from moeyard_kernels.types.expert_layout import ExpertLayout

# Rows of a block whose halves are still worth a warp group's product.
_HALVED = 128
# In the interpreter, where programs cost time.
_FEW_PROGRAMS = 3


@triton.jit
def _halves_last_kernel(p_pairs, p_num_blocks, p_order, BM: tl.constexpr, BB: tl.constexpr):
    """p_order: [1 + blocks], how many blocks have rows in their second half; these, then the others. Grid: (1,)."""
    wait_for_previous()
    o_b = tl.arange(0, BB)
    m_b = o_b < tl.load(p_num_blocks)
    is_whole = m_b & (tl.load(p_pairs + o_b.to(tl.int64) * BM + BM // 2, mask=m_b, other=-1) >= 0)
    b_whole = tl.cumsum(is_whole.to(tl.int32), 0)
    num_whole = tl.sum(is_whole.to(tl.int32), 0)
    o_order = tl.where(is_whole, b_whole - 1, num_whole + o_b - b_whole)
    tl.store(p_order + 1 + o_order, o_b, mask=m_b)
    tl.store(p_order, num_whole)


@triton.jit
def _stream_tile(
    d_h, d_w, p_pairs, p_slots, p_out, i_b, i_n, N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, ROWS: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The first ROWS of block i_b, of BM rows, by outputs [i_n BN, i_n BN + BN)."""
    i_slot = tl.load(p_slots + i_b)
    b_acc = tl.zeros([ROWS, BN], dtype=tl.float32)
    for i_k in range(0, K, BK):
        b_w = tl.reshape(d_w.load([i_slot, i_n * BN, i_k]), [BN, BK])
        b_acc = product(d_h.load([i_b * BM, i_k]), b_w, b_acc, False)
    b_pair = tl.load(p_pairs + i_b * BM + tl.arange(0, ROWS))
    o_n = i_n * BN + tl.arange(0, BN)
    p_by = p_out + b_pair.to(tl.int64)[:, None] * N + o_n[None, :]
    tl.store(p_by, b_acc.to(p_out.dtype.element_ty), mask=(b_pair >= 0)[:, None] & (o_n < N)[None, :])


@triton.jit
def _expert_stream_kernel(
    d_h, d_half, d_w, p_pairs, p_slots, p_num_blocks, p_order, p_out, N: tl.constexpr, K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Tiles of BM rows by BN outputs in turn, to the pairs' rows of out [P, N]. Grid: programs that fill the device.

    d_h: rows of the layout [rows, K] in blocks [BM, BK]; d_half: the same in blocks [BM / 2, BK] if HALVES; d_w:
    [S, N, K] in blocks [1, BN, BK].
    """
    NUM_N: tl.constexpr = (N + BN - 1) // BN
    num_tiles = tl.load(p_num_blocks) * NUM_N
    if HALVES:
        num_whole = tl.load(p_order) * NUM_N
        for i_tile in tl.range(tl.program_id(0), num_whole, tl.num_programs(0), flatten=True):
            i_b = tl.load(p_order + 1 + i_tile // NUM_N)
            _stream_tile(d_h, d_w, p_pairs, p_slots, p_out, i_b, i_tile % NUM_N, N, K, BM, BM, BN, BK)
        num_turns = tl.cdiv(tl.maximum(num_whole - tl.program_id(0), 0), tl.num_programs(0))
        i_first = tl.program_id(0) + num_turns * tl.num_programs(0)
        for i_tile in tl.range(i_first, num_tiles, tl.num_programs(0), flatten=True):
            i_b = tl.load(p_order + 1 + i_tile // NUM_N)
            _stream_tile(d_half, d_w, p_pairs, p_slots, p_out, i_b, i_tile % NUM_N, N, K, BM, BM // 2, BN, BK)
    else:
        for i_tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=True):
            i_b, i_n = i_tile // NUM_N, i_tile % NUM_N
            _stream_tile(d_h, d_w, p_pairs, p_slots, p_out, i_b, i_n, N, K, BM, BM, BN, BK)


def stream_pairs(
    h: torch.Tensor, down: torch.Tensor, out: torch.Tensor, layout: ExpertLayout, config: ExpertStream
) -> None:
    """out [P, H] of the layout's pairs from h [rows of the layout, I] and down [S, H, I], I in steps of 16 bytes."""
    num_out, dim = down.shape[1:]
    programs = _FEW_PROGRAMS
    if h.is_cuda:
        programs = config.PER_SM * torch.cuda.get_device_properties(h.device).multi_processor_count
    rows = layout.block_rows
    halves = config.HALVES and rows >= _HALVED
    d_h = TensorDescriptor.from_tensor(h, [rows, config.BK])
    d_half = TensorDescriptor.from_tensor(h, [rows // 2, config.BK]) if halves else d_h
    d_w = TensorDescriptor.from_tensor(down, [1, config.BN, config.BK])
    order = layout.slot_of_block
    if halves:
        blocks = layout.slot_of_block.shape[0]
        order = torch.empty(1 + blocks, dtype=torch.int32, device=h.device)
        _halves_last_kernel[1,](
            layout.pairs, layout.num_blocks, order, BM=rows, BB=triton.next_power_of_2(blocks), num_warps=8,
            **dependent(h),
        )  # fmt: skip
    _expert_stream_kernel[programs,](
        d_h, d_half, d_w, layout.pairs, layout.slot_of_block, layout.num_blocks, order, out, N=num_out, K=dim,
        BM=rows, BN=config.BN, BK=config.BK, HALVES=halves, **config.options,
    )  # fmt: skip
