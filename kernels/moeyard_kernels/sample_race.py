"""Triton: the argmax of weight / E over a whole row, and its test against top-p, without sorting or a threshold.

The race keeps the best few tokens of each part of a row by a score in fp32, which `rank` computes again in fp64. A
token is in the nucleus exactly if the mass before it is below top_p of the whole, so one pass that sums the mass before
each of the best tokens finds the winner, unless all of them lie outside: then everything after them does too, and
`settle` searches what is before, as it does where fp32 could not tell.
"""

import triton
import triton.language as tl

from moeyard_kernels.sample_blocks import NO_ID, SLACK, before, log_noise, mass, noise, values, weight


@triton.jit
def race_kernel(  # type: ignore[no-untyped-def]
    p_logits, p_words, p_bias, p_slots, p_penalties, p_top, p_open, p_temperature, p_min_p, p_seeds, p_positions,
    p_cut_x, p_cut_id, p_score, p_id, V, L,
    EDIT: tl.constexpr, TOP_K: tl.constexpr, MIN_P: tl.constexpr, J: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The J best of BV tokens by log(weight / E) in fp32: p_score, p_id [B, C, J]. Grid: (C, B)."""
    i_c, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if tl.load(p_open + i_b) == 0:
        return
    o_v = i_c * BV + tl.arange(0, BV)
    m_v = o_v < V
    b_x = values(p_logits, p_words, p_bias, p_slots, p_penalties, i_b, o_v, m_v, V, L, EDIT)
    temperature = tl.load(p_temperature + i_b)
    scale = tl.minimum(1.0 / temperature, 1e30).to(tl.float32)
    b_s = (b_x - tl.load(p_top + i_b)).to(tl.float32) * scale
    if TOP_K:
        m_v = m_v & before(b_x, o_v, tl.load(p_cut_x + i_b), tl.load(p_cut_id + i_b) + 1)
    if MIN_P:
        # All that min-p may keep; `rank` knows exactly.
        min_p = tl.load(p_min_p + i_b)
        lowest = tl.where(min_p > 0, tl.log(min_p), -float("inf"))
        m_v = m_v & (b_s >= lowest.to(tl.float32) - 1e-3)
    b_s = tl.where(m_v, b_s, -float("inf"))
    o_j = (i_b * tl.num_programs(0) + i_c) * J
    if tl.max(b_s) > -float("inf"):
        b_s -= log_noise(tl.load(p_seeds + i_b), tl.load(p_positions + i_b), i_c * BV, BV)
        for j in tl.static_range(J):
            best = tl.max(b_s)
            token = tl.min(tl.where(b_s == best, o_v, NO_ID))
            tl.store(p_score + o_j + j, best)
            tl.store(p_id + o_j + j, token)
            b_s = tl.where(o_v == token, -float("inf"), b_s)
    else:
        for j in tl.static_range(J):
            tl.store(p_score + o_j + j, -float("inf"))


@triton.jit
def rank_kernel(  # type: ignore[no-untyped-def]
    p_logits, p_words, p_bias, p_slots, p_penalties, p_top, p_open, p_temperature, p_top_p, p_min_p, p_seeds,
    p_positions, p_score, p_id, p_best_x, p_best_id, p_best_sure, p_ids, V, L, N,
    EDIT: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr, J: tl.constexpr, P: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Order the N candidates of row i_b by their exact scores: the token if top-p is off, else the best P."""
    i_b = tl.program_id(0).to(tl.int64)
    if tl.load(p_open + i_b) == 0:
        return
    o_n = tl.arange(0, BN)
    b_rough = tl.load(p_score + i_b * N + o_n, mask=o_n < N, other=-float("inf"))
    m_n = b_rough > -float("inf")
    b_id = tl.load(p_id + i_b * N + o_n, mask=m_n, other=NO_ID)
    # Nothing that was not kept has a better score than this.
    unseen = tl.exp(tl.max(tl.where(o_n % J == J - 1, b_rough, -float("inf"))).to(tl.float64) + SLACK)
    b_x = values(p_logits, p_words, p_bias, p_slots, p_penalties, i_b, b_id, m_n, V, L, EDIT)
    b_w = weight(b_x, tl.load(p_top + i_b), tl.load(p_temperature + i_b))
    if MIN_P:
        m_n = m_n & (b_w >= tl.load(p_min_p + i_b))
    b_score = tl.where(m_n, b_w / noise(tl.load(p_seeds + i_b), tl.load(p_positions + i_b), b_id), -1.0)
    nucleus = 0
    if TOP_P:
        nucleus = (tl.load(p_top_p + i_b) < 1).to(tl.int32)
    if nucleus == 0:
        best = tl.max(b_score)
        if best > unseen:
            tl.store(p_ids + i_b, tl.min(tl.where(b_score == best, b_id, NO_ID)).to(tl.int64))
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
def mass_kernel(  # type: ignore[no-untyped-def]
    p_logits, p_words, p_bias, p_slots, p_penalties, p_top, p_open, p_temperature, p_top_p, p_min_p, p_cut_x, p_cut_id,
    p_best_x, p_best_id, p_mass, V, L,
    EDIT: tl.constexpr, TOP_K: tl.constexpr, MIN_P: tl.constexpr, SCALE: tl.constexpr, P: tl.constexpr,
    ROUNDS: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The mass of what top-k and min-p keep of ROUNDS * BV tokens, and the part before each of the P best.

    p_mass: [B, C, P + 1] int64, the whole last. Grid: (C, B).
    """
    i_c, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if tl.load(p_open + i_b) == 0:
        return
    if tl.load(p_top_p + i_b) >= 1:
        return
    top, temperature = tl.load(p_top + i_b), tl.load(p_temperature + i_b)
    b_all = tl.zeros([BV], dtype=tl.int64)
    b_sums = (b_all,) * P
    for r in range(ROUNDS):
        o_v = (i_c * ROUNDS + r) * BV + tl.arange(0, BV)
        m_v = o_v < V
        b_x = values(p_logits, p_words, p_bias, p_slots, p_penalties, i_b, o_v, m_v, V, L, EDIT)
        if TOP_K:
            m_v = m_v & before(b_x, o_v, tl.load(p_cut_x + i_b), tl.load(p_cut_id + i_b) + 1)
        b_w = weight(b_x, top, temperature)
        if MIN_P:
            m_v = m_v & (b_w >= tl.load(p_min_p + i_b))
        b_mass = tl.where(m_v, mass(b_w, SCALE), 0)
        b_all += b_mass
        b_new = b_sums[:0]
        for p in tl.static_range(P):
            x, token = tl.load(p_best_x + i_b * P + p), tl.load(p_best_id + i_b * P + p)
            b_new = b_new + (b_sums[p] + tl.where(before(b_x, o_v, x, token), b_mass, 0),)  # noqa: RUF005
        b_sums = b_new
    o_m = (i_b * tl.num_programs(0) + i_c) * (P + 1)
    for p in tl.static_range(P):
        tl.store(p_mass + o_m + p, tl.sum(b_sums[p]))
    tl.store(p_mass + o_m + P, tl.sum(b_all))


@triton.jit
def settle_kernel(  # type: ignore[no-untyped-def]
    p_logits, p_words, p_bias, p_slots, p_penalties, p_top, p_open, p_temperature, p_top_p, p_min_p, p_seeds,
    p_positions, p_cut_x, p_cut_id, p_best_x, p_best_id, p_best_sure, p_mass, p_ids, V, L, C,
    EDIT: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr, SCALE: tl.constexpr,
    P: tl.constexpr, BC: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The token of a row that is still open: the best candidate in the nucleus, or the outcome of a search."""
    i_b = tl.program_id(0).to(tl.int64)
    if tl.load(p_open + i_b) == 0:
        return
    top, temperature = tl.load(p_top + i_b), tl.load(p_temperature + i_b)
    seed, position = tl.load(p_seeds + i_b), tl.load(p_positions + i_b)
    # Still in the race: what comes before this.
    x = top * 0 - float("inf")
    token = NO_ID + 0
    if TOP_K:
        x = tl.load(p_cut_x + i_b)
        token = tl.load(p_cut_id + i_b) + 1
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
                        tl.store(p_ids + i_b, best_id.to(tl.int64))
                        trying = 0
                        searching = 0
                    else:
                        if before(best_x, best_id, x, token):
                            x = best_x
                            token = best_id
                else:
                    trying = 0
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
        x = tl.max(
            values(
                p_logits, p_words, p_bias, p_slots, p_penalties, i_b, token + tl.arange(0, 2), tl.arange(0, 2) < 1, V,
                L, EDIT,
            )
        )  # fmt: skip
        searching = 0
        if TOP_P:
            b_mass = tl.zeros([BV], dtype=tl.int64)
            for start in range(0, V, BV):
                o_v = start + tl.arange(0, BV)
                b_x = values(p_logits, p_words, p_bias, p_slots, p_penalties, i_b, o_v, o_v < V, V, L, EDIT)
                b_mass += tl.where(
                    before(b_x, o_v, x, token) & (o_v < V), mass(weight(b_x, top, temperature), SCALE), 0
                )
            reached = tl.sum(b_mass)
            searching = ((reached > 0) & (reached.to(tl.float64) >= target)).to(tl.int32)
        if searching == 0:
            tl.store(p_ids + i_b, token.to(tl.int64))
