"""Triton: where top-k ends in a row, and the token of a row whose top-k fits into one block.

The largest logits of many groups of tokens bound the k-th largest logit from below; what reaches the bound is gathered,
a little more than k tokens, and the rest happens in registers. Rows that gather too many (k of thousands, or masses of
equal logits) have the cut found by bisection over the row, and their token by the kernels of `sample`.
"""

import triton
import triton.language as tl

from moeyard_kernels.sample_blocks import NO_ID, before, from_key, kth_largest, mass, noise, to_key, values, weight


@triton.jit
def cut_kernel(  # type: ignore[no-untyped-def]
    p_logits, p_words, p_bias, p_slots, p_penalties, p_top, p_open, p_temperature, p_top_k, p_top_p, p_min_p,
    p_seeds, p_positions, p_groups, p_list, p_cut_x, p_cut_id, p_ids, V, L, G,
    EDIT: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr, SCALE: tl.constexpr, BG: tl.constexpr,
    BV: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """Row i_b: top-k ends at (cut_x, cut_id), both included. Writes the token and closes the row if BL holds it all."""
    i_b = tl.program_id(0).to(tl.int64)
    k = tl.load(p_top_k + i_b)
    top = tl.load(p_top + i_b)
    tl.store(p_cut_x + i_b, -float("inf"))
    tl.store(p_cut_id + i_b, NO_ID)
    if (tl.load(p_open + i_b) == 0) | (k <= 0) | (k >= V):
        return
    high = to_key(top)
    low = to_key(top * 0 - float("inf"))
    if (k <= G) & (V > BL):
        o_g = tl.arange(0, BG)
        b_group = tl.load(p_groups + i_b * G + o_g, mask=o_g < G, other=low)
        low = kth_largest(b_group, k, low, high)
    bound = from_key(low)
    # The list of what reaches the bound, ids ascending.
    count = 0
    if (k <= G) | (V <= BL):
        b_next = values(
            p_logits, p_words, p_bias, p_slots, p_penalties, i_b, tl.arange(0, BV), tl.arange(0, BV) < V, V, L, EDIT
        )
        for start in range(0, V, BV):
            o_v = start + tl.arange(0, BV)
            b_x = b_next
            o_n = o_v + BV
            b_next = values(p_logits, p_words, p_bias, p_slots, p_penalties, i_b, o_n, o_n < V, V, L, EDIT)
            m_v = (b_x >= bound) & (o_v < V)
            found = tl.sum(m_v.to(tl.int32))
            if found > 0:
                o_l = count + tl.cumsum(m_v.to(tl.int32), 0) - 1
                tl.store(p_list + i_b * BL + o_l, o_v, mask=m_v & (o_l < BL))
                count += found
        tl.debug_barrier()
    if (count > 0) & (count <= BL):
        o_l = tl.arange(0, BL)
        m_l = o_l < count
        b_id = tl.load(p_list + i_b * BL + o_l, mask=m_l, other=0)
        b_x = values(p_logits, p_words, p_bias, p_slots, p_penalties, i_b, b_id, m_l, V, L, EDIT)
        b_key = to_key(b_x)
        last = kth_largest(b_key, k, low, high)
        b_rest = k - tl.sum((b_key > last).to(tl.int32))
        b_tied = (b_key == last) & m_l
        m_l = m_l & ((b_key > last) | (b_tied & (tl.cumsum(b_tied.to(tl.int32), 0) <= b_rest)))
        temperature = tl.load(p_temperature + i_b)
        b_w = weight(b_x, top, temperature)
        if MIN_P:
            m_l = m_l & (b_w >= tl.load(p_min_p + i_b))
        b_score = tl.where(m_l, b_w / noise(tl.load(p_seeds + i_b), tl.load(p_positions + i_b), b_id), -1.0)
        b_mass = tl.where(m_l, mass(b_w, SCALE), 0)
        target = temperature * 0 + float("inf")
        if TOP_P:
            top_p = tl.load(p_top_p + i_b)
            if top_p < 1:
                target = top_p * tl.sum(b_mass).to(tl.float64)
        token = 0
        searching = 1
        while searching == 1:
            token = tl.min(tl.where(b_score == tl.max(b_score), b_id, NO_ID))
            x = tl.max(tl.where(b_id == token, b_x, -float("inf")))
            b_before = before(b_x, b_id, x, token)
            reached = tl.sum(tl.where(b_before, b_mass, 0))
            if (reached == 0) | (reached.to(tl.float64) < target):
                searching = 0
            # It is outside of the nucleus, and so is everything after it.
            b_score = tl.where(b_before, b_score, -1.0)
        tl.store(p_ids + i_b, token)
        tl.store(p_open + i_b, 0)
    else:
        _cut_row(
            p_logits, p_words, p_bias, p_slots, p_penalties, p_cut_x, p_cut_id, i_b, k, low, high, V, L, EDIT, BV
        )  # fmt: skip


@triton.jit
def _cut_row(  # type: ignore[no-untyped-def]
    p_logits, p_words, p_bias, p_slots, p_penalties, p_cut_x, p_cut_id, i_b, k, low, high, V, L,
    EDIT: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The k-th largest of a whole row by bisection on its key, then on the id among equals."""
    while low < high:
        middle = (low | high) - ((low ^ high) >> 1)
        b_count = tl.zeros([BV], dtype=tl.int32)
        for start in range(0, V, BV):
            o_v = start + tl.arange(0, BV)
            b_x = values(p_logits, p_words, p_bias, p_slots, p_penalties, i_b, o_v, o_v < V, V, L, EDIT)
            b_count += ((to_key(b_x) >= middle) & (o_v < V)).to(tl.int32)
        if tl.sum(b_count) >= k:
            low = middle
        else:
            high = middle - 1
    x = from_key(low)
    b_count = tl.zeros([BV], dtype=tl.int32)
    for start in range(0, V, BV):
        o_v = start + tl.arange(0, BV)
        b_x = values(p_logits, p_words, p_bias, p_slots, p_penalties, i_b, o_v, o_v < V, V, L, EDIT)
        b_count += ((b_x > x) & (o_v < V)).to(tl.int32)
    rest = k - tl.sum(b_count)
    first = 0
    last = V - 1
    while first < last:
        half = (first + last) // 2
        b_count = tl.zeros([BV], dtype=tl.int32)
        for start in range(0, half + 1, BV):
            o_v = start + tl.arange(0, BV)
            b_x = values(p_logits, p_words, p_bias, p_slots, p_penalties, i_b, o_v, o_v < V, V, L, EDIT)
            b_count += ((b_x == x) & (o_v <= half)).to(tl.int32)
        if tl.sum(b_count) >= rest:
            last = half
        else:
            first = half + 1
    tl.store(p_cut_x + i_b, x)
    tl.store(p_cut_id + i_b, last)
