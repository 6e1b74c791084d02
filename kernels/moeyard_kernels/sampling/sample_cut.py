"""Triton: the end of top-k in a row, and the token of a row whose top-k fits into one block.

The largest logits of many groups of tokens bound the k-th largest logit from below: at least k tokens reach the k-th
largest of them. `gather` lists the tokens that reach the bound, a little more than k, and the rest happens in
registers. For a row that gathers too many (k of thousands, or masses of equal logits), bisection over the row finds the
end of top-k, and the race finds the token.
"""

import triton
import triton.language as tl

from moeyard_kernels.common.dependent import wait_for_previous
from moeyard_kernels.sampling.sample_blocks import (
    NO_ID,
    before,
    from_key,
    kth_largest,
    mass,
    mass_scale,
    middle,
    narrow,
    noise,
    quarters,
    reaching,
    to_key,
    values,
    weight,
)

# Lists up to this length use a smaller block.
_SHORT = tl.constexpr(512)


@triton.jit
def group_bound(p_groups, i_b, k, high, V, G, BG: tl.constexpr, BL: tl.constexpr):
    """Return a key that at least k tokens reach, and 1 if probably few other tokens reach it."""
    low = to_key(from_key(high) * 0 - float("inf"))
    useful = 1
    if V > BL:
        if k > G // 2:
            useful = 0
        else:
            o_g = tl.arange(0, BG)
            b_group = tl.load(p_groups + i_b * G + o_g, mask=o_g < G, other=low)
            # A bound that a few more groups reach serves as well as the k-th largest.
            enough = k + (k >> 2) + 32
            reached = G + 0
            while (low < high) & (reached > enough):
                half = middle(low, high)
                count = tl.sum((b_group >= half).to(tl.int32))
                if count >= k:
                    low = half
                    reached = count
                else:
                    high = half - 1
    return low, useful


@triton.jit
def gather_kernel(
    p_logits, p_words, p_bias, p_slots, p_penalties, p_open, p_bound, p_count, p_list, V, L,
    EDIT: tl.constexpr, BV: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """Append the tokens of BV that reach the bound to the row's list, in no order, and count all. Grid: (C, B)."""
    wait_for_previous()
    i_c, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    bound = tl.load(p_bound + i_b)
    # The list is known to be too long or unused.
    if (tl.load(p_open + i_b) == 0) | (tl.load(p_count + i_b) > BL):
        return
    o_v = i_c * BV + tl.arange(0, BV)
    b_x = values(p_logits, p_words, p_bias, p_slots, p_penalties, i_b, o_v, o_v < V, V, L, EDIT)
    m_v = (b_x >= from_key(bound)) & (o_v < V)
    found = tl.sum(m_v.to(tl.int32))
    if found > BV // 8:
        # A block with this many means a long list: give it up instead of adding tokens one by one.
        tl.atomic_add(p_count + i_b, BL + 1)
    else:
        if found > 0:
            o_l = tl.atomic_add(p_count + i_b + tl.zeros_like(o_v), 1, mask=m_v)
            tl.store(p_list + i_b * BL + o_l, o_v, mask=m_v & (o_l < BL))


@triton.jit
def cut_kernel(
    p_logits, p_words, p_bias, p_slots, p_penalties, p_top, p_open, p_temperature, p_top_k, p_top_p, p_min_p,
    p_seeds, p_positions, p_bound, p_count, p_list, p_cut_x, p_cut_id, p_ids, V, L,
    EDIT: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr, BITS: tl.constexpr, BV: tl.constexpr,
    BL: tl.constexpr,
):  # fmt: skip
    """Close row i_b if its list holds all of top-k; else top-k ends at (cut_x, cut_id - 1) of the row."""
    wait_for_previous()
    i_b = tl.program_id(0).to(tl.int64)
    k, top = tl.load(p_top_k + i_b), tl.load(p_top + i_b)
    count, low = tl.load(p_count + i_b), tl.load(p_bound + i_b)
    tl.store(p_cut_x + i_b, -float("inf"))
    tl.store(p_cut_id + i_b, NO_ID)
    if (tl.load(p_open + i_b) == 0) | (k <= 0) | (k >= V):
        return
    if count <= BL:
        if (count <= _SHORT) & (BL > _SHORT):
            _draw_from_list(
                p_logits, p_words, p_bias, p_slots, p_penalties, p_temperature, p_top_p, p_min_p, p_seeds, p_positions,
                p_list, p_ids, i_b, k, top, low, count, V, L, EDIT, TOP_P, MIN_P, BITS, BL, _SHORT,
            )  # fmt: skip
        else:
            _draw_from_list(
                p_logits, p_words, p_bias, p_slots, p_penalties, p_temperature, p_top_p, p_min_p, p_seeds, p_positions,
                p_list, p_ids, i_b, k, top, low, count, V, L, EDIT, TOP_P, MIN_P, BITS, BL, BL,
            )  # fmt: skip
        tl.store(p_open + i_b, 0)
    else:
        x, token = _cut_row(p_logits, p_words, p_bias, p_slots, p_penalties, i_b, k, low, to_key(top), V, L, EDIT, BV)
        tl.store(p_cut_x + i_b, x)
        tl.store(p_cut_id + i_b, token + 1)


@triton.jit
def _draw_from_list(
    p_logits, p_words, p_bias, p_slots, p_penalties, p_temperature, p_top_p, p_min_p, p_seeds, p_positions,
    p_list, p_ids, i_b, k, top, low, count, V, L,
    EDIT: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr, BITS: tl.constexpr, STRIDE: tl.constexpr,
    BL: tl.constexpr,
):  # fmt: skip
    """Apply top-k, min-p, top-p and the race to `count` tokens that include the k largest."""
    o_l = tl.arange(0, BL)
    m_l = o_l < count
    b_id = tl.load(p_list + i_b * STRIDE + o_l, mask=m_l, other=0)
    b_x = values(p_logits, p_words, p_bias, p_slots, p_penalties, i_b, b_id, m_l, V, L, EDIT)
    b_key = to_key(b_x)
    last = kth_largest(b_key, k, low, to_key(top))
    rest = k - tl.sum((b_key > last).to(tl.int32))
    b_tied = (b_key == last) & m_l
    # Among equals at the end, the lowest ids win.
    first = 1 - V
    if tl.sum(b_tied.to(tl.int32)) > rest:
        first = kth_largest(tl.where(b_tied, -b_id, -V), rest, first, V * 0)
    m_l = m_l & ((b_key > last) | (b_tied & (-b_id >= first)))
    temperature = tl.load(p_temperature + i_b)
    b_w = weight(b_x, top, temperature)
    if MIN_P:
        m_l = m_l & (b_w >= tl.load(p_min_p + i_b))
    b_score = tl.where(m_l, b_w / noise(tl.load(p_seeds + i_b), tl.load(p_positions + i_b), b_id), -1.0)
    b_mass = tl.where(m_l, mass(b_x, top, mass_scale(temperature), BITS), 0)
    target = temperature * 0 + float("inf")
    if TOP_P:
        top_p = tl.load(p_top_p + i_b)
        if top_p < 1:
            target = top_p * tl.sum(b_mass).to(tl.float64)
    searching = 1
    while searching == 1:
        token = tl.min(tl.where(b_score == tl.max(b_score), b_id, NO_ID))
        x = tl.max(tl.where((b_id == token) & m_l, b_x, -float("inf")))
        b_before = before(b_x, b_id, x, token)
        reached = tl.sum(tl.where(b_before, b_mass, 0))
        if (reached == 0) | (reached.to(tl.float64) < target):
            tl.store(p_ids + i_b, token)
            searching = 0
        # Otherwise it is outside of the nucleus, and so is everything after it.
        b_score = tl.where(b_before, b_score, -1.0)


@triton.jit
def _cut_row(
    p_logits, p_words, p_bias, p_slots, p_penalties, i_b, k, low, high, V, L, EDIT: tl.constexpr, BV: tl.constexpr
):
    """Return (value, id) of a row's k-th token, by bisection on its key, then on the id among equals."""
    while low < high:
        first, second, third = quarters(low, high)
        b_counts = tl.zeros([BV], dtype=tl.int64)
        for start in range(0, V, BV):
            o_v = start + tl.arange(0, BV)
            b_x = values(p_logits, p_words, p_bias, p_slots, p_penalties, i_b, o_v, o_v < V, V, L, EDIT)
            b_counts += tl.where(o_v < V, reaching(to_key(b_x), first, second, third), 0)
        low, high = narrow(tl.sum(b_counts), k, low, first, second, third, high)
    x = from_key(low)
    # Counts: tokens above x in the high half of the word, tokens equal to it in the low half.
    b_counts = tl.zeros([BV], dtype=tl.int64)
    for start in range(0, V, BV):
        o_v = start + tl.arange(0, BV)
        b_x = values(p_logits, p_words, p_bias, p_slots, p_penalties, i_b, o_v, o_v < V, V, L, EDIT)
        b_counts += ((b_x > x).to(tl.int64) << 32) + ((b_x == x) & (o_v < V)).to(tl.int64)
    counts = tl.sum(b_counts)
    rest = k - (counts >> 32)
    first = 0
    last = V - 1
    if (counts & 0xFFFFFFFF) == rest:
        first = V - 1
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
    return x, last
