"""Triton: the routed experts as two launches over an `ExpertLayout`, one output row per (token, k) pair.

    h[r] = silu_mul(gate_up[slot] @ x[pair // K])   for each row r of a block and the slot of that block
    out[pair] = down[slot] @ h[r]

One kernel computes both. A program multiplies one block of rows with BN outputs of its expert (BN gates and the BN ups
that belong to them). K ascends in one fp32 accumulator per output, so a row's bits do not depend on the tile, on
`block_rows` or on the other rows. The grid covers the most blocks that the shapes allow; programs beyond the blocks in
use exit at once. Few pairs need no layout (`ExpertPairs`): the grid has a block for each pair. A program compares its
pair's expert with the others' to find its rows, or to find that an earlier pair's block has them.

The second launch finds its weights while the first one drains (`dependent`), and then waits for the rows. This saves
1.2 us of 23 with one token; prefetching the weights into the L2 cost 3 us. For one token it also copies the weights
early (`grouped_slice`). If the experts of one token are still to be chosen, programs of both launches choose them
(`grouped_choice`).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from moeyard_kernels.common import launch, tuning
from moeyard_kernels.common.dependent import dependent, let_next_begin, wait_for_previous
from moeyard_kernels.common.rounding import product, round_to, stored_as
from moeyard_kernels.common.tile_order import place
from moeyard_kernels.elementwise.silu_mul import rounded_limit, silu_mul_values
from moeyard_kernels.experts.grouped_choice import can_choose, choose_and_gate_up
from moeyard_kernels.experts.grouped_configs import CONFIGS as CONFIGS
from moeyard_kernels.experts.grouped_configs import (
    FP32,
    KINDS,
    NARROW,
    SLICE,
    WIDE,
    AnyConfig,
    ExpertConfig,
    ExpertSlice,
    ExpertStream,
    default_config,
    few_pairs_config,
    shape_class,
    slice_fits,
)
from moeyard_kernels.experts.grouped_configs import candidates as candidates
from moeyard_kernels.experts.grouped_slice import settle_choice, slice_pairs
from moeyard_kernels.experts.grouped_stream import stream_pairs
from moeyard_kernels.experts.result_rows import result_arguments, result_rows
from moeyard_kernels.types.expert_layout import ExpertLayout, ExpertPairs
from moeyard_kernels.types.peer_window import PeerWindow

OP = "grouped_gemm"


@triton.jit
def _block_of_pair(p_ids, p_slot_of_expert, i_p, P, BP: tl.constexpr, BM: tl.constexpr):
    """Return (slot, pairs [BM]) of the block that pair i_p of P begins. The slot is -1 if it begins none.

    Unused places of pairs are -1. BP is 1 for the pairs of one token: each pair has its own block.
    """
    if BP == 1:
        i_id = tl.load(p_ids + i_p).to(tl.int32)
        i_slot = tl.load(p_slot_of_expert + i_id, mask=i_id >= 0, other=-1)
        return i_slot, tl.where(tl.arange(0, BM) == 0, i_p, -1)
    o_p, o_r = tl.arange(0, BP), tl.arange(0, BM)
    b_id = tl.load(p_ids + o_p, mask=o_p < P, other=-1).to(tl.int32)
    i_id = tl.load(p_ids + i_p).to(tl.int32)
    i_slot = tl.load(p_slot_of_expert + i_id, mask=i_id >= 0, other=-1)
    m_same = b_id == i_id
    b_rank = tl.cumsum(m_same.to(tl.int32), 0) - 1
    i_rank = tl.sum((m_same & (o_p < i_p)).to(tl.int32), 0)
    m_row = m_same[None, :] & ((b_rank - i_rank)[None, :] == o_r[:, None])  # [BM, BP]
    b_pair = tl.sum(tl.where(m_row, (o_p + 1)[None, :], 0), 1) - 1
    return tl.where(i_rank % BM == 0, i_slot, -1), b_pair


@triton.jit
def _expert_tile(
    p_a, p_w, d_w, b_pair, p_out, p_table, p_state, i_slot, i_row, i_n, N: tl.constexpr, K: tl.constexpr,
    TOP_K: tl.constexpr, WORLD: tl.constexpr, HOME: tl.constexpr, GATED: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr, FEW: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Compute rows [i_row, i_row + BM) of pairs b_pair by outputs [i_n BN, i_n BN + BN), for the expert in i_slot.

    FEW: the second product also lets the next launch begin.
    """
    G: tl.constexpr = 2 if GATED else 1
    DTYPE: tl.constexpr = p_w.dtype.element_ty
    o_r = i_row + tl.arange(0, BM)
    o_n = i_n * BN + tl.arange(0, BN)
    o_k = tl.arange(0, BK)
    o_w = tl.arange(0, G * BN)
    # Gates, then ups of the same outputs. Outputs past N read the last output's weights and are not stored.
    o_w = (i_slot.to(tl.int64) * G + o_w // BN) * N + tl.minimum(i_n * BN + o_w % BN, N - 1)
    p_bw = p_w + o_w * K  # [G BN]
    m_r = b_pair >= 0
    if GATED:
        p_ba = p_a + tl.where(m_r, b_pair // TOP_K, 0).to(tl.int64) * K  # [BM]
    else:
        p_ba = p_a + o_r * K
        wait_for_previous()
        if FEW:
            let_next_begin()

    b_acc = tl.zeros([G * BN, BM] if SWAP else [BM, G * BN], dtype=tl.float32)
    for i_k in range(0, K, BK):
        m_k = (i_k + o_k < K)[None, :]
        m_a = m_r[:, None] & m_k if K % BK else m_r[:, None]
        b_a = tl.load(p_ba[:, None] + (i_k + o_k)[None, :], mask=m_a, other=0.0)  # [BM, BK]
        if TMA:
            b_w = tl.reshape(d_w.load([i_slot * G, i_n * BN, i_k]), [G * BN, BK])
        elif K % BK:
            b_w = tl.load(p_bw[:, None] + (i_k + o_k)[None, :], mask=m_k, other=0.0)
        else:
            b_w = tl.load(p_bw[:, None] + (i_k + o_k)[None, :])
        b_acc = product(b_a, b_w, b_acc, SWAP)

    if GATED:
        if SWAP:
            b_acc = tl.permute(tl.reshape(b_acc, [2, BN, BM]), (1, 2, 0))
        else:
            b_acc = tl.permute(tl.reshape(b_acc, [BM, 2, BN]), (0, 2, 1))
        b_gate, b_up = tl.split(b_acc)
        b_y = silu_mul_values(round_to(b_gate, DTYPE), round_to(b_up, DTYPE), DTYPE, LIMIT)
        # The interpreter stores h in fp32, so round here.
        b_y = round_to(b_y, DTYPE)
        p_row = p_out + o_r * N
    else:
        b_y = b_acc
        p_row, m_r = result_rows(p_out, p_table, p_state, b_pair, N, TOP_K, WORLD, HOME)
    if SWAP:
        b_y = tl.trans(b_y)
    p_by = p_row[:, None] + o_n[None, :]
    tl.store(p_by, stored_as(b_y, p_out.dtype.element_ty), mask=m_r[:, None] & (o_n < N)[None, :])


@triton.jit(do_not_specialize=["P"])
def _expert_kernel(
    p_a, p_w, d_w, p_pairs, p_slots, p_num_blocks, P, p_out, p_table, p_state, N: tl.constexpr, K: tl.constexpr,
    TOP_K: tl.constexpr, WORLD: tl.constexpr, HOME: tl.constexpr, GATED: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr, HALVES: tl.constexpr,
    GROUP: tl.constexpr, BP: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Compute one block of BM rows by BN outputs. GATED: gather a's rows and store h [rows, N].

    Otherwise read h, and store the pairs' `result_rows`.

    p_w: [S, 2 N or N, K]. d_w: [2 S or S, N, K], its descriptor if TMA. p_pairs and p_slots are the layout's pairs and
    slots of blocks. Without a layout (BP > 0) they are the ids of P pairs and the slots of experts. HALVES: a block
    whose second half is padding is computed as half a block. Grid: (most blocks * ceil(N / BN),).
    """
    if GATED:
        # Every program waits, even without work: launches after the second product rely on it.
        wait_for_previous()
    i_b = tl.program_id(0) // tl.cdiv(N, BN)
    i_n = tl.program_id(0) % tl.cdiv(N, BN)
    if BP:
        i_slot, b_pair = _block_of_pair(p_pairs, p_slots, i_b, P, BP, BM)
        i_end = tl.where(i_slot >= 0, i_b + 1, 0)
    else:
        i_end = tl.load(p_num_blocks)
    if i_b >= i_end:
        return
    if GROUP > 1:
        i_b, i_n = place(tl.program_id(0), i_end, tl.cdiv(N, BN), GROUP)
    i_row = i_b.to(tl.int64) * BM
    if GATED:
        # The launch for "down" may read the layout before it waits, because this one starts after the layout is
        # complete.
        let_next_begin()
    if not BP:
        i_slot = tl.load(p_slots + i_b)
    if HALVES and tl.load(p_pairs + i_row + BM // 2) < 0:
        b_half = tl.load(p_pairs + i_row + tl.arange(0, BM // 2))
        _expert_tile(
            p_a, p_w, d_w, b_half, p_out, p_table, p_state, i_slot, i_row, i_n, N, K, TOP_K, WORLD, HOME, GATED,
            BM // 2, BN, BK, SWAP, TMA, BP > 0, LIMIT,
        )  # fmt: skip
        return
    if not BP:
        b_pair = tl.load(p_pairs + i_row + tl.arange(0, BM))
    _expert_tile(
        p_a, p_w, d_w, b_pair, p_out, p_table, p_state, i_slot, i_row, i_n, N, K, TOP_K, WORLD, HOME, GATED, BM, BN,
        BK, SWAP, TMA, BP > 0, LIMIT,
    )  # fmt: skip


def num_blocks(layout: ExpertLayout | ExpertPairs) -> int:
    """Return the capacity in blocks."""
    return layout.num_pairs if isinstance(layout, ExpertPairs) else layout.slot_of_block.shape[0]


def num_rows(layout: ExpertLayout | ExpertPairs) -> int:
    """Return the rows of h: whole blocks."""
    return num_blocks(layout) * layout.block_rows


def _launch(
    a: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor,
    layout: ExpertLayout | ExpertPairs,
    top_k: int,
    config: AnyConfig,
    home: PeerWindow | None = None,
    limit: float | None = None,
) -> None:
    """Run one product. top_k is 0 for the second, whose results may go to `home` instead of out."""
    num_out, dim = w.shape[1] // (2 if top_k else 1), w.shape[2]
    w = launch.packed(w)
    aligned = dim * w.element_size() % 16 == 0 and w.data_ptr() % 16 == 0
    if isinstance(config, ExpertStream):
        if not top_k and aligned and isinstance(layout, ExpertLayout):
            stream_pairs(a, w, out, layout, config, home)
            return
        config = WIDE[-1]
    if isinstance(config, ExpertSlice):
        one_token = isinstance(layout, ExpertPairs) and layout.one_token and home is None
        if one_token and not top_k and aligned and slice_fits(dim, config.BN) and launch.on_hopper(w):
            assert isinstance(layout, ExpertPairs)
            slice_pairs(a, w, out, layout, config.BN)
            return
        config = NARROW[1]
    copied = config.kernel == "descriptors" and aligned
    d_w: Any = w
    if copied:
        d_w = TensorDescriptor.from_tensor(w.view(-1, num_out, dim), [2 if top_k else 1, config.BN, config.BK])
    if isinstance(layout, ExpertPairs):
        index = (layout.topk_ids, layout.slot_of_expert, layout.slot_of_expert)
        padded = 1 if layout.one_token else triton.next_power_of_2(layout.num_pairs)
    else:
        index, padded = (layout.pairs, layout.slot_of_block, layout.num_blocks), 0
    options: dict[str, Any] = result_arguments(out, home) | config.options | dict(dependent(w))
    if top_k:
        options["TOP_K"] = top_k
    grid = (num_blocks(layout) * triton.cdiv(num_out, config.BN),)
    _expert_kernel[grid](
        a,
        w,
        d_w,
        *index,
        layout.num_pairs,
        N=num_out,
        K=dim,
        GATED=top_k > 0,
        BM=layout.block_rows,
        BN=config.BN,
        BK=config.BK,
        SWAP=config.SWAP,
        TMA=copied,
        HALVES=config.HALVES and layout.block_rows >= 64,
        GROUP=1 if padded else config.GROUP,
        BP=padded,
        LIMIT=rounded_limit(limit, w.dtype),
        **options,
    )


def _config(w: torch.Tensor, layout: ExpertLayout | ExpertPairs, step: str, num_out: int) -> AnyConfig:
    if w.dtype == torch.float32:
        return FP32[0]

    if isinstance(layout, ExpertPairs) and layout.choice is not None:
        return SLICE[0]

    def default() -> AnyConfig:
        if isinstance(layout, ExpertLayout):
            return default_config(step, layout.block_rows, layout.rows_per_expert, 2 * w.shape[1] * w.shape[2])
        return few_pairs_config(step, layout.num_pairs, num_out, w.shape[2], one_token=layout.one_token)

    return tuning.choose(OP, shape_class(step, layout, num_out, w.shape[2]), w, KINDS, default)


def gate_up_rows(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    layout: ExpertLayout | ExpertPairs,
    *,
    top_k: int,
    out: torch.Tensor,
    limit: float | None = None,
    config: AnyConfig | None = None,
) -> torch.Tensor:
    """Run the first launch: write the rows of pairs in h [rows of the layout, I]."""
    config = config or _config(gate_up, layout, "gate_up", gate_up.shape[1] // 2)
    _launch(x, gate_up, out, layout, top_k, config, limit=limit)
    return out


def down_pairs(
    h: torch.Tensor,
    down: torch.Tensor,
    layout: ExpertLayout | ExpertPairs,
    *,
    out: torch.Tensor,
    home: PeerWindow | None = None,
    config: AnyConfig | None = None,
) -> torch.Tensor:
    """Run the second launch: write the rows of the layout's pairs in out [P, H] or `home`."""
    _launch(h, down, out, layout, 0, config or _config(down, layout, "down", down.shape[1]), home)
    return out


def grouped_gemm(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    layout: ExpertLayout | ExpertPairs,
    *,
    top_k: int,
    limit: float | None = None,
    out: torch.Tensor | None = None,
    home: PeerWindow | None = None,
    configs: tuple[ExpertConfig | None, AnyConfig | None] = (None, None),
) -> torch.Tensor:
    """See `moeyard_kernels.ops.grouped_gemm`. `configs` of gate_up and down replace the stored ones."""
    launch.check_layout(OP, x=x, gate_up=gate_up, down=down, out=out)
    if isinstance(layout, ExpertPairs):
        chooses = configs == (None, None) and layout.choice is not None and can_choose(layout.choice, gate_up, down)
        layout = settle_choice(layout, chooses=chooses, down=down)
        ids, slots = layout.topk_ids, layout.slot_of_expert
        launch.check_layout(OP, topk_ids=ids, slot_of_expert=slots)
        if layout.choice is None:
            launch.check_indices(OP, low=-1, high=slots.shape[0], topk_ids=ids)
        launch.check_indices(OP, low=-1, high=layout.num_slots, slot_of_expert=slots)
    hidden, inner = x.shape[1], down.shape[2]
    if num_blocks(layout) * triton.cdiv(max(hidden, inner), 16) > launch.MAX_GRID_X:
        raise ValueError(f"{OP}: {num_blocks(layout)} blocks of {hidden} outputs exceed the grid of a GPU")
    if home is not None:
        stored = out = home.views(home.rank).home.flatten(0, 1)
    else:
        stored = launch.new_output(layout.num_pairs, hidden, like=x)
    if out is not None:
        # The interpreter cannot store bf16, so it writes to an fp32 copy.
        stored = out if stored.dtype == out.dtype else stored.copy_(out)
    if layout.num_pairs and gate_up.numel():
        h = launch.new_output(num_rows(layout), inner, like=x)
        if isinstance(layout, ExpertPairs) and layout.choice is not None:
            choose_and_gate_up(x, gate_up, layout, h, limit)
        else:
            gate_up_rows(x, gate_up, layout, top_k=top_k, out=h, limit=limit, config=configs[0])
        down_pairs(h, down, layout, out=stored, home=home, config=configs[1])
    return launch.finish(stored, x.dtype) if out is None or out is stored else out.copy_(stored)
