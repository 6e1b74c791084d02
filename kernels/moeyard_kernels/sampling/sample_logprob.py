"""Triton: log-probabilities and ranks of the chosen tokens under the unmodified logits, and the likeliest tokens.

A row's sum of exponentials is a sum of integers (see `mass`), and its rank is a count. The likeliest tokens are found
by comparing 64 bits that hold a logit's key and its token. So no result depends on the parts of a row.
"""

import torch
import triton
import triton.language as tl

from moeyard_kernels.common.dependent import dependent, wait_for_previous
from moeyard_kernels.sampling.sample_blocks import from_key, mass, mass_scale, to_key
from moeyard_kernels.types.sampling import SampledTokens

_LEAST = tl.constexpr(-(2**63))


@triton.jit
def _total_kernel(
    p_logits, p_top, p_ids, p_total, p_larger, V, BITS: tl.constexpr, PART: tl.constexpr, BV: tl.constexpr
):
    """Sum exp(logit - largest) of PART tokens in fixed point, and count those above the chosen. Grid: (C, B)."""
    wait_for_previous()
    i_c, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    top = tl.load(p_top + i_b)
    chosen = tl.load(p_logits + i_b * V + tl.load(p_ids + i_b)).to(tl.float32)
    scale = mass_scale(tl.full([], 1.0, tl.float64))
    b_sum = tl.zeros([BV], dtype=tl.int64)
    b_larger = tl.zeros([BV], dtype=tl.int32)
    for start in range(i_c * PART, tl.minimum(i_c * PART + PART, V), BV):
        o_v = start + tl.arange(0, BV)
        b_x = tl.load(p_logits + i_b * V + o_v, mask=o_v < V, other=-float("inf")).to(tl.float32)
        b_sum += mass(b_x, top, scale, BITS)
        b_larger += (b_x > chosen).to(tl.int32)
    o_c = i_b * tl.num_programs(0) + i_c
    tl.store(p_total + o_c, tl.sum(b_sum))
    tl.store(p_larger + o_c, tl.sum(b_larger))


@triton.jit
def _log_total(p_top, p_total, i_b, C, BITS: tl.constexpr, BC: tl.constexpr):
    """Return the largest logit of row i_b, and the log of the sum of exp(logit - largest); NaN if it is not finite."""
    o_c = tl.arange(0, BC)
    total = tl.sum(tl.load(p_total + i_b * C + o_c, mask=o_c < C, other=0)).to(tl.float64) * (2.0**-BITS)
    top = tl.load(p_top + i_b).to(tl.float64)
    return top, tl.log(tl.where((top < float("inf")) & (top > -float("inf")), total, float("nan")))


@triton.jit
def _logprob_kernel(
    p_logits, p_top, p_total, p_larger, p_ids, p_out, p_ranks, V, C, BITS: tl.constexpr, BC: tl.constexpr
):
    """Write log(exp(logit - largest) / total) and the rank of the chosen token. Grid: (B,)."""
    wait_for_previous()
    i_b = tl.program_id(0).to(tl.int64)
    top, log_total = _log_total(p_top, p_total, i_b, C, BITS, BC)
    x = tl.load(p_logits + i_b * V + tl.load(p_ids + i_b)).to(tl.float64)
    tl.store(p_out + i_b, ((x - top) - log_total).to(tl.float32))
    o_c = tl.arange(0, BC)
    larger = tl.sum(tl.load(p_larger + i_b * C + o_c, mask=o_c < C, other=0))
    tl.store(p_ranks + i_b, larger.to(tl.int64) + 1)


@triton.jit
def _part_top_kernel(p_logits, p_best, V, NUM: tl.constexpr, BV: tl.constexpr):
    """Return the NUM largest of BV tokens, falling: the key in the upper half, falling ids in the lower."""
    wait_for_previous()
    i_c, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_v = i_c * BV + tl.arange(0, BV)
    b_x = tl.load(p_logits + i_b * V + o_v, mask=o_v < V, other=0.0).to(tl.float32)
    b_key = (to_key(b_x).to(tl.int64) << 32) | (0x7FFFFFFF - o_v).to(tl.int64)
    b_key = tl.where(o_v < V, b_key, _LEAST)
    p_part = p_best + (i_b * tl.num_programs(0) + i_c) * NUM
    for j in range(NUM):
        best = tl.max(b_key)
        tl.store(p_part + j, best)
        b_key = tl.where(b_key == best, _LEAST, b_key)


@triton.jit
def _top_logprob_kernel(
    p_best, p_top, p_total, p_top_ids, p_top_out, C, C_TOP,
    NUM: tl.constexpr, BITS: tl.constexpr, BC: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Write the NUM largest tokens of a row, from those of its C_TOP parts, and their log-probabilities. Grid: (B,)."""
    wait_for_previous()
    i_b = tl.program_id(0).to(tl.int64)
    top, log_total = _log_total(p_top, p_total, i_b, C, BITS, BC)
    o_n = tl.arange(0, BN)
    b_key = tl.load(p_best + i_b * C_TOP * NUM + o_n, mask=o_n < C_TOP * NUM, other=_LEAST)
    for j in range(NUM):
        best = tl.max(b_key)
        x = from_key((best >> 32).to(tl.int32)).to(tl.float64)
        tl.store(p_top_ids + i_b * NUM + j, 0x7FFFFFFF - (best & 0x7FFFFFFF))
        tl.store(p_top_out + i_b * NUM + j, ((x - top) - log_total).to(tl.float32))
        b_key = tl.where(b_key == best, _LEAST, b_key)


def token_logprobs(
    logits: torch.Tensor, top: torch.Tensor, out: SampledTokens, *, part: int, block: int, bits: int
) -> None:
    """Fill `out` for its ids, under logits [B, V] whose largest are `top` [B] fp32.

    part, block: tokens per program, and at a time. bits: of a mass. It takes two launches, and two more for the
    likeliest tokens.
    """
    num_rows, vocab = logits.shape
    num_parts = triton.cdiv(vocab, part)
    total, larger = (logits.new_empty(num_rows, num_parts, dtype=dtype) for dtype in (torch.int64, torch.int32))
    early = dependent(logits)
    _total_kernel[num_parts, num_rows](
        logits,
        top,
        out.ids,
        total,
        larger,
        vocab,
        BITS=bits,
        PART=part,
        BV=block,
        num_warps=4,
        enable_fp_fusion=False,
        **early,
    )
    parts = triton.next_power_of_2(num_parts)
    _logprob_kernel[num_rows,](
        logits,
        top,
        total,
        larger,
        out.ids,
        out.logprobs,
        out.ranks,
        vocab,
        num_parts,
        BITS=bits,
        BC=parts,
        num_warps=1,
        **early,
    )
    if out.top_ids is None:
        return
    count, width = out.top_ids.shape[1], min(part, triton.next_power_of_2(vocab))
    num_tops = triton.cdiv(vocab, width)
    best = logits.new_empty(num_rows, num_tops, count, dtype=torch.int64)
    _part_top_kernel[num_tops, num_rows](logits, best, vocab, NUM=count, BV=width, num_warps=8, **early)
    _top_logprob_kernel[num_rows,](
        best,
        top,
        total,
        out.top_ids,
        out.top_logprobs,
        num_parts,
        num_tops,
        NUM=count,
        BITS=bits,
        BC=parts,
        BN=triton.next_power_of_2(num_tops * count),
        num_warps=4,
        **early,
    )
