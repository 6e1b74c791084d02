"""Triton: pairs grouped by expert, padded to blocks of rows, without a host sync.

Every program counts all pairs, since a histogram of a few hundred values costs less than a launch. It then places BP of
them: row = start of the expert + number of earlier pairs of that expert, found by comparison with all pairs. Above
`ONE_LAUNCH` pairs, another launch counts chunks into a table that replaces the histogram. Each program adds up the
table's rows; above `_FEW_CHUNKS` rows a third launch adds them up once for all programs. The program that places the
first pair of a block writes its slot, and the program that places an expert's last pair marks the padding. So the cost
depends neither on the capacity of the tensors nor on the number of slots, which may be those of all layers.
"""

import torch
import triton
import triton.language as tl

from moeyard_kernels.common import launch
from moeyard_kernels.types.expert_layout import ExpertLayout, max_blocks

# The most pairs of one launch; half of it above 256 experts. 2048 pairs of 128 experts took 5.9 us in one launch and
# 8.4 in two; of 384 experts 9.3 and 7.9.
ONE_LAUNCH = 2048
# Pairs per row of the table of counts. Each pair is compared with all pairs of its row.
_CHUNK = 256
# The most table rows that every program adds up itself. A separate launch saved 9.5 us for 128 rows and cost 0.8 for 32
# (H100).
_FEW_CHUNKS = 64
# Columns of the table per program that adds it up, and rows at a time.
_BS, _BT = 16, 128
# Pairs placed by one program, if there are few and if there are many.
_BP = 8
_BP_MANY = 128


@triton.jit
def _experts(p_ids, p_slot_of_expert, o_p, m_p):
    """Return expert and slot of each pair, both -1 if the pair is masked or its expert has no slot."""
    b_id = tl.load(p_ids + o_p, mask=m_p, other=-1).to(tl.int32)
    b_slot = tl.load(p_slot_of_expert + b_id, mask=b_id >= 0, other=-1)
    return tl.where(b_slot >= 0, b_id, -1), b_slot


@triton.jit(do_not_specialize=["P"])
def _count_kernel(p_ids, p_slot_of_expert, p_table, P, BC: tl.constexpr, BE: tl.constexpr):
    """Count the pairs per expert of one chunk: p_table [ceil(P / BC), BE]. Grid: (ceil(P / BC),)."""
    i_c = tl.program_id(0)
    o_p = i_c * BC + tl.arange(0, BC)
    b_expert, _ = _experts(p_ids, p_slot_of_expert, o_p, o_p < P)  # [BC]
    b_count = tl.histogram(tl.maximum(b_expert, 0), BE, mask=b_expert >= 0)  # [BE]
    tl.store(p_table + i_c * BE + tl.arange(0, BE), b_count)


@triton.jit(do_not_specialize=["CHUNKS"])
def _sum_kernel(p_table, p_counts, E, CHUNKS, BE: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr):
    """Replace each chunk's counts by those of all earlier chunks; p_counts: totals. Grid: (BE / BS,)."""
    o_e = tl.program_id(0) * BS + tl.arange(0, BS)
    b_sum = tl.zeros([BS], dtype=tl.int32)
    for i_t in range(0, CHUNKS, BT):
        o_t = i_t + tl.arange(0, BT)
        p_bt = p_table + o_t[:, None] * BE + o_e[None, :]
        m_t = (o_t < CHUNKS)[:, None]
        b_t = tl.load(p_bt, mask=m_t, other=0)  # [BT, BS]
        tl.store(p_bt, b_sum[None, :] + tl.cumsum(b_t, 0) - b_t, mask=m_t)
        b_sum += tl.sum(b_t, 0)
    tl.store(p_counts + o_e, b_sum, mask=o_e < E)


@triton.jit(do_not_specialize=["P", "CHUNKS"])
def _place_kernel(
    p_ids, p_slot_of_expert, p_table, p_counts, p_pairs, p_slot_of_block, p_num_blocks, P, E, CHUNKS,
    ONE: tl.constexpr, SUMMED: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr, BE: tl.constexpr, BT: tl.constexpr,
    BR: tl.constexpr,
):  # fmt: skip
    """Place BP pairs. Grid: (ceil(P / BP),).

    BC pairs per chunk (all pairs if ONE), BE >= E, BT table rows at a time. SUMMED: `_sum_kernel` ran before."""
    i_p = tl.program_id(0)
    o_p = i_p * BP + tl.arange(0, BP)
    o_c = i_p * BP // BC * BC + tl.arange(0, BC)
    o_e = tl.arange(0, BE)
    b_expert, b_slot = _experts(p_ids, p_slot_of_expert, o_p, o_p < P)  # [BP]
    b_others, _ = _experts(p_ids, p_slot_of_expert, o_c, o_c < P)  # [BC]
    if ONE:
        b_count = tl.histogram(tl.maximum(b_others, 0), BE, mask=b_others >= 0)  # [BE]
        b_before = tl.zeros([BE], dtype=tl.int32)
    elif SUMMED:
        b_count = tl.load(p_counts + o_e, mask=o_e < E, other=0)
        b_before = tl.load(p_table + (i_p * BP // BC) * BE + o_e)
    else:
        b_count = tl.zeros([BE], dtype=tl.int32)
        b_before = tl.zeros([BE], dtype=tl.int32)
        for i_t in range(0, CHUNKS, BT):
            o_t = i_t + tl.arange(0, BT)
            b_t = tl.load(p_table + o_t[:, None] * BE + o_e[None, :], mask=o_t[:, None] < CHUNKS, other=0)
            b_count += tl.sum(b_t, 0)
            b_before += tl.sum(tl.where(o_t[:, None] < i_p * BP // BC, b_t, 0), 0)
    b_blocks = (b_count + (BR - 1)) // BR
    b_end = tl.cumsum(b_blocks, 0)
    if i_p == 0:
        if not SUMMED:
            tl.store(p_counts + o_e, b_count, mask=o_e < E)
        tl.store(p_num_blocks, tl.sum(b_blocks, 0))

    m_here = b_expert >= 0
    b_safe = tl.maximum(b_expert, 0)
    m_same = (b_others[None, :] == b_expert[:, None]) & (o_c[None, :] < o_p[:, None])  # [BP, BC]
    b_rank = tl.sum(m_same.to(tl.int32), 1) + tl.gather(b_before, b_safe, 0)
    b_row = tl.gather(b_end - b_blocks, b_safe, 0) * BR + b_rank
    b_left = tl.gather(b_count, b_safe, 0) - b_rank - 1
    tl.store(p_pairs + b_row, o_p, mask=m_here)
    tl.store(p_slot_of_block + b_row // BR, b_slot, mask=m_here & (b_rank % BR == 0))
    m_last = m_here & (b_left == 0)
    has_last = 1
    if not ONE:
        # Only a few of many programs have an expert's last pair.
        has_last = tl.max(m_last.to(tl.int32), 0)
    if has_last > 0:
        o_r = tl.arange(0, BR)
        m_pad = m_last[:, None] & (o_r[None, :] > (b_rank % BR)[:, None])  # [BP, BR]
        tl.store(p_pairs + (b_row - b_rank % BR)[:, None] + o_r[None, :], tl.full([BP, BR], -1, tl.int32), mask=m_pad)


def expert_layout(
    topk_ids: torch.Tensor, slot_of_expert: torch.Tensor, *, num_slots: int, block_rows: int, one_in: int = 1
) -> ExpertLayout:
    """See `moeyard_kernels.ops.expert_layout`. It takes one launch for few pairs, else two or three."""
    launch.check_layout("expert_layout", topk_ids=topk_ids, slot_of_expert=slot_of_expert)
    launch.check_indices("expert_layout", low=-1, high=slot_of_expert.shape[0], topk_ids=topk_ids)
    launch.check_indices("expert_layout", low=-1, high=num_slots, slot_of_expert=slot_of_expert)
    num_pairs, num_experts = topk_ids.numel(), slot_of_expert.shape[0]
    capacity = max_blocks(num_pairs, num_experts, block_rows)
    if max(capacity, 1) * block_rows >= 2**31:
        raise ValueError(f"expert_layout: {num_pairs} pairs in blocks of {block_rows} rows exceed 32-bit row numbers")
    new = torch.empty if num_pairs else torch.zeros
    sizes = (num_experts, capacity * block_rows, capacity, 1)
    counts, pairs, slot_of_block, num_blocks = (new(n, dtype=torch.int32, device=topk_ids.device) for n in sizes)
    if num_pairs:
        one = num_pairs <= (ONE_LAUNCH if num_experts <= 256 else ONE_LAUNCH // 2)
        be = max(32, triton.next_power_of_2(num_experts))
        bc, bp = (max(32, triton.next_power_of_2(num_pairs)), _BP) if one else (_CHUNK, _BP_MANY)
        chunks = triton.cdiv(num_pairs, bc)
        summed = chunks > _FEW_CHUNKS
        table = counts if one else torch.empty(chunks, be, dtype=torch.int32, device=topk_ids.device)
        if not one:
            _count_kernel[(chunks,)](topk_ids, slot_of_expert, table, num_pairs, BC=bc, BE=be)
        if summed:
            _sum_kernel[(be // _BS,)](table, counts, num_experts, chunks, BE=be, BS=_BS, BT=_BT)
        _place_kernel[(triton.cdiv(num_pairs, bp),)](
            topk_ids,
            slot_of_expert,
            table,
            counts,
            pairs,
            slot_of_block,
            num_blocks,
            num_pairs,
            num_experts,
            chunks,
            ONE=one,
            SUMMED=summed,
            BC=bc,
            BP=bp,
            BE=be,
            BT=max(1, 4096 // be),
            BR=block_rows,
        )
    return ExpertLayout(
        block_rows=block_rows,
        num_pairs=num_pairs,
        num_slots=num_slots,
        one_in=one_in,
        counts=counts,
        pairs=pairs,
        slot_of_block=slot_of_block,
        num_blocks=num_blocks,
    )
