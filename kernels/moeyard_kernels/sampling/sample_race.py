"""Triton: the argmax of weight / E over a whole row, and its test against top-p, without sorting or a threshold.

The race keeps the best few quads of tokens of each part of a row, by an fp32 score that `rank` computes again in fp64.
A token is in the nucleus exactly if the mass before it is below top_p of the whole. So one pass that sums the mass
before each of the best tokens finds the winner, unless all of them are outside. Then everything after them is outside
too, and a second round races the tokens before them. If that does not decide, `settle` searches the row.

The race covers the tokens before (end_x, end_id); initially that is the end of top-k.
"""

import triton
import triton.language as tl

from moeyard_kernels.common.dependent import wait_for_previous
from moeyard_kernels.sampling.sample_blocks import (
    NO_ID,
    SLACK,
    before,
    from_key,
    log_noise,
    mass,
    mass_scale,
    noise,
    to_key,
    values,
    weight,
)


@triton.jit
def race_kernel(
    p_logits, p_words, p_bias, p_slots, p_penalties, p_top, p_open, p_temperature, p_min_p, p_seeds, p_positions,
    p_end_x, p_end_id, p_score, p_quad, V, L,
    EDIT: tl.constexpr, ENDS: tl.constexpr, MIN_P: tl.constexpr, J: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Find the J best quads of BV tokens by log(weight / E) in fp32: p_score, p_quad [B, C, J]. Grid: (C, B)."""
    wait_for_previous()
    i_c, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    # All loads before the branch share one wait.
    is_open, top, temperature = tl.load(p_open + i_b), tl.load(p_top + i_b), tl.load(p_temperature + i_b)
    seed, position = tl.load(p_seeds + i_b), tl.load(p_positions + i_b)
    if is_open == 0:
        return
    o_v = i_c * BV + tl.arange(0, BV)
    m_v = o_v < V
    b_x = values(p_logits, p_words, p_bias, p_slots, p_penalties, i_b, o_v, m_v, V, L, EDIT)
    scale = tl.maximum(tl.minimum(1.0 / temperature, 1e30), 1e-30).to(tl.float32)
    # -inf beyond the row.
    b_s = (b_x - top).to(tl.float32) * scale
    if ENDS:
        m_v = before(b_x, o_v, tl.load(p_end_x + i_b), tl.load(p_end_id + i_b))
        b_s = tl.where(m_v, b_s, -float("inf"))
    if MIN_P:
        # Keep all tokens that min-p may keep; `rank` decides exactly.
        min_p = tl.load(p_min_p + i_b)
        lowest = tl.where(min_p > 0, tl.log(min_p), -float("inf"))
        b_s = tl.where(b_s >= lowest.to(tl.float32) - 1e-3, b_s, -float("inf"))
    racing = 1
    if ENDS or MIN_P:
        racing = (tl.max(b_s) > -float("inf")).to(tl.int32)
    o_j = (i_b * tl.num_programs(0) + i_c) * J
    if racing == 1:
        b_s -= log_noise(seed, position, i_c * BV, BV)
        b_q = tl.max(tl.reshape(b_s, [BV // 4, 4]), 1)
        o_q = i_c * (BV // 4) + tl.arange(0, BV // 4)
        for j in tl.static_range(J):
            best = tl.max(b_q)
            quad = tl.min(tl.where(b_q == best, o_q, NO_ID))
            tl.store(p_score + o_j + j, best)
            tl.store(p_quad + o_j + j, quad)
            b_q = tl.where(o_q == quad, -float("inf"), b_q)
    else:
        for j in tl.static_range(J):
            tl.store(p_score + o_j + j, -float("inf"))


@triton.jit
def rank_kernel(
    p_logits, p_words, p_bias, p_slots, p_penalties, p_top, p_open, p_temperature, p_top_p, p_min_p, p_seeds,
    p_positions, p_end_x, p_end_id, p_score, p_quad, p_best_x, p_best_id, p_best_sure, p_ids, V, L, N,
    EDIT: tl.constexpr, ENDS: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr, J: tl.constexpr,
    P: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Order the tokens of row i_b's N quads by exact scores. Without top-p, write the token, else the best P."""
    wait_for_previous()
    i_b = tl.program_id(0).to(tl.int64)
    is_open, top, temperature = tl.load(p_open + i_b), tl.load(p_top + i_b), tl.load(p_temperature + i_b)
    seed, position = tl.load(p_seeds + i_b), tl.load(p_positions + i_b)
    if is_open == 0:
        return
    o_t = tl.arange(0, BN * 4)
    o_n = o_t >> 2
    b_rough = tl.load(p_score + i_b * N + o_n, mask=o_n < N, other=-float("inf"))
    m_t = b_rough > -float("inf")
    b_id = tl.load(p_quad + i_b * N + o_n, mask=m_t, other=0) * 4 + (o_t & 3)
    m_t = m_t & (b_id < V)
    # Bound of the scores of all tokens in other quads.
    unseen = tl.exp(tl.max(tl.where(o_n % J == J - 1, b_rough, -float("inf"))).to(tl.float64) + SLACK)
    b_x = values(p_logits, p_words, p_bias, p_slots, p_penalties, i_b, b_id, m_t, V, L, EDIT)
    b_w = weight(b_x, top, temperature)
    if ENDS:
        m_t = m_t & before(b_x, b_id, tl.load(p_end_x + i_b), tl.load(p_end_id + i_b))
    if MIN_P:
        m_t = m_t & (b_w >= tl.load(p_min_p + i_b))
    b_score = tl.where(m_t, b_w / noise(seed, position, b_id), -1.0)
    b_id = tl.where(m_t, b_id, NO_ID)
    nucleus = 0
    if TOP_P:
        nucleus = (tl.load(p_top_p + i_b) < 1).to(tl.int32)
    if nucleus == 0:
        best = tl.max(b_score)
        if best > unseen:
            tl.store(p_ids + i_b, tl.min(tl.where(b_score == best, b_id, NO_ID)))
            tl.store(p_open + i_b, 0)
    if TOP_P:
        for p in tl.static_range(P):
            best = tl.max(b_score)
            token = tl.min(tl.where(b_score == best, b_id, NO_ID))
            tl.store(p_best_x + i_b * P + p, tl.max(tl.where(b_id == token, b_x, -float("inf"))))
            tl.store(p_best_id + i_b * P + p, token)
            tl.store(p_best_sure + i_b * P + p, (best > unseen).to(tl.int32))
            b_score = tl.where(b_id == token, -1.0, b_score)


@triton.jit
def mass_kernel(
    p_logits, p_words, p_bias, p_slots, p_penalties, p_top, p_open, p_temperature, p_top_p, p_min_p, p_cut_x, p_cut_id,
    p_best_x, p_best_id, p_mass, V, L,
    EDIT: tl.constexpr, TOP_K: tl.constexpr, MIN_P: tl.constexpr, BITS: tl.constexpr, P: tl.constexpr,
    PART: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Sum the mass that top-k and min-p keep of PART tokens, and the mass before each of the P best.

    p_mass: [B, C, P + 1] int64, the whole mass last. Grid: (C, B).
    """
    wait_for_previous()
    i_c, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    is_open, top, temperature = tl.load(p_open + i_b), tl.load(p_top + i_b), tl.load(p_temperature + i_b)
    if (is_open == 0) | (tl.load(p_top_p + i_b) >= 1):
        return
    scale = mass_scale(temperature)
    b_all = tl.zeros([BV], dtype=tl.int64)
    b_sums = (b_all,) * P
    for start in range(i_c * PART, tl.minimum(i_c * PART + PART, V), BV):
        o_v = start + tl.arange(0, BV)
        b_x = values(p_logits, p_words, p_bias, p_slots, p_penalties, i_b, o_v, o_v < V, V, L, EDIT)
        # 0 beyond the row.
        b_mass = mass(b_x, top, scale, BITS)
        if TOP_K:
            m_v = before(b_x, o_v, tl.load(p_cut_x + i_b), tl.load(p_cut_id + i_b))
            b_mass = tl.where(m_v, b_mass, 0)
        if MIN_P:
            b_mass = tl.where(weight(b_x, top, temperature) >= tl.load(p_min_p + i_b), b_mass, 0)
        b_all += b_mass
        b_new = b_sums[:0]
        for p in tl.static_range(P):
            x, token = tl.load(p_best_x + i_b * P + p), tl.load(p_best_id + i_b * P + p)
            # If all ids are below the token's, equals come before it too.
            below = tl.where(start + BV <= token, from_key(to_key(x) - 1), x)
            b_new = b_new + (b_sums[p] + tl.where(b_x > below, b_mass, 0),)  # noqa: RUF005
        b_sums = b_new
    o_m = (i_b * tl.num_programs(0) + i_c) * (P + 1)
    for p in tl.static_range(P):
        x, token = tl.load(p_best_x + i_b * P + p), tl.load(p_best_id + i_b * P + p)
        total = tl.sum(b_sums[p])
        if token // PART == i_c:
            # Equals in the token's block all have the same mass.
            o_v = token // BV * BV + tl.arange(0, BV)
            b_x = values(p_logits, p_words, p_bias, p_slots, p_penalties, i_b, o_v, o_v < token, V, L, EDIT)
            total += tl.sum((b_x == x).to(tl.int64)) * mass(x, top, scale, BITS)
        tl.store(p_mass + o_m + p, total)
    tl.store(p_mass + o_m + P, tl.sum(b_all))


@triton.jit
def settle_kernel(
    p_logits, p_words, p_bias, p_slots, p_penalties, p_top, p_open, p_temperature, p_top_p, p_min_p, p_seeds,
    p_positions, p_cut_x, p_cut_id, p_end_x, p_end_id, p_best_x, p_best_id, p_best_sure, p_mass, p_ids, V, L, C,
    EDIT: tl.constexpr, ENDS: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr, BITS: tl.constexpr,
    P: tl.constexpr, SEARCH: tl.constexpr, BC: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Decide an open row: the best candidate in the nucleus, or the outcome of a search.

    Without SEARCH a row may stay open; its race then ends at (end_x, end_id).
    """
    wait_for_previous()
    i_b = tl.program_id(0).to(tl.int64)
    is_open, top, temperature = tl.load(p_open + i_b), tl.load(p_top + i_b), tl.load(p_temperature + i_b)
    if is_open == 0:
        return
    x = top * 0 - float("inf")
    token = NO_ID + 0
    if ENDS:
        x = tl.load(p_cut_x + i_b)
        token = tl.load(p_cut_id + i_b)
    searching = 1
    target = temperature * 0 + float("inf")
    if TOP_P:
        top_p = tl.load(p_top_p + i_b)
        if top_p < 1:
            o_c = tl.arange(0, BC)
            o_m = (i_b * C + o_c) * (P + 1)
            target = top_p * tl.sum(tl.load(p_mass + o_m + P, mask=o_c < C, other=0)).to(tl.float64)
            trying = 1
            for p in range(P):
                reached = tl.sum(tl.load(p_mass + o_m + p, mask=o_c < C, other=0))
                if (trying == 1) & (tl.load(p_best_sure + i_b * P + p) == 1):
                    best_x, best_id = tl.load(p_best_x + i_b * P + p), tl.load(p_best_id + i_b * P + p)
                    if (reached == 0) | (reached.to(tl.float64) < target):
                        tl.store(p_ids + i_b, best_id)
                        tl.store(p_open + i_b, 0)
                        trying = 0
                        searching = 0
                    else:
                        if before(best_x, best_id, x, token):
                            x = best_x
                            token = best_id
                else:
                    trying = 0
    if SEARCH:
        if searching == 1:
            found = _search(
                p_logits, p_words, p_bias, p_slots, p_penalties, p_min_p, p_seeds, p_positions, i_b, top, temperature,
                x, token, target, V, L, EDIT, TOP_P, MIN_P, BITS, BV,
            )  # fmt: skip
            tl.store(p_ids + i_b, found)
    else:
        tl.store(p_end_x + i_b, x)
        tl.store(p_end_id + i_b, token)


@triton.jit
def _search(
    p_logits, p_words, p_bias, p_slots, p_penalties, p_min_p, p_seeds, p_positions, i_b, top, temperature, x, token,
    target, V, L, EDIT: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr, BITS: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Return the winner of the race before (x, token), in fp64; while it is outside the nucleus, race before it."""
    seed, position = tl.load(p_seeds + i_b), tl.load(p_positions + i_b)
    searching = 1
    while searching == 1:
        b_best = tl.full([BV], -1.0, tl.float64)
        b_id = tl.full([BV], NO_ID, tl.int32)
        for start in range(0, V, BV):
            o_v = start + tl.arange(0, BV)
            b_x = values(p_logits, p_words, p_bias, p_slots, p_penalties, i_b, o_v, o_v < V, V, L, EDIT)
            m_v = before(b_x, o_v, x, token) & (o_v < V)
            b_w = weight(b_x, top, temperature)
            if MIN_P:
                m_v = m_v & (b_w >= tl.load(p_min_p + i_b))
            b_score = tl.where(m_v, b_w / noise(seed, position, o_v), -1.0)
            b_id = tl.where(b_score > b_best, o_v, b_id)
            b_best = tl.maximum(b_score, b_best)
        token = tl.min(tl.where(b_best == tl.max(b_best), b_id, NO_ID))
        o_2 = tl.arange(0, 2)
        x = tl.max(values(p_logits, p_words, p_bias, p_slots, p_penalties, i_b, token + o_2, o_2 < 1, V, L, EDIT))
        searching = 0
        if TOP_P:
            scale = mass_scale(temperature)
            b_mass = tl.zeros([BV], dtype=tl.int64)
            for start in range(0, V, BV):
                o_v = start + tl.arange(0, BV)
                b_x = values(p_logits, p_words, p_bias, p_slots, p_penalties, i_b, o_v, o_v < V, V, L, EDIT)
                b_mass += tl.where(before(b_x, o_v, x, token), mass(b_x, top, scale, BITS), 0)
            reached = tl.sum(b_mass)
            searching = ((reached > 0) & (reached.to(tl.float64) >= target)).to(tl.int32)
    return token
