"""Triton: log-probabilities of the chosen tokens under the unmodified logits."""

import torch
import triton
import triton.language as tl

from moeyard_kernels.common.dependent import dependent, wait_for_previous
from moeyard_kernels.sampling.sample_blocks import mass, mass_scale


@triton.jit
def _total_kernel(p_logits, p_top, p_total, V, BITS: tl.constexpr, PART: tl.constexpr, BV: tl.constexpr):
    """The sum of exp(logit - largest) of PART tokens, in fixed point. Grid: (C, B)."""
    wait_for_previous()
    i_c, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    top = tl.load(p_top + i_b)
    scale = mass_scale(tl.full([], 1.0, tl.float64))
    b_sum = tl.zeros([BV], dtype=tl.int64)
    for start in range(i_c * PART, tl.minimum(i_c * PART + PART, V), BV):
        o_v = start + tl.arange(0, BV)
        b_x = tl.load(p_logits + i_b * V + o_v, mask=o_v < V, other=-float("inf")).to(tl.float32)
        b_sum += mass(b_x, top, scale, BITS)
    tl.store(p_total + i_b * tl.num_programs(0) + i_c, tl.sum(b_sum))


@triton.jit
def _logprob_kernel(p_logits, p_top, p_total, p_ids, p_out, V, C, BITS: tl.constexpr, BC: tl.constexpr):
    """log(exp(logit - largest) / total) of the chosen token; NaN if the largest logit is not finite."""
    wait_for_previous()
    i_b = tl.program_id(0).to(tl.int64)
    o_c = tl.arange(0, BC)
    total = tl.sum(tl.load(p_total + i_b * C + o_c, mask=o_c < C, other=0)).to(tl.float64) * (2.0**-BITS)
    top = tl.load(p_top + i_b).to(tl.float64)
    x = tl.load(p_logits + i_b * V + tl.load(p_ids + i_b)).to(tl.float64)
    total = tl.where((top < float("inf")) & (top > -float("inf")), total, float("nan"))
    tl.store(p_out + i_b, ((x - top) - tl.log(total)).to(tl.float32))


def log_probabilities(
    logits: torch.Tensor, top: torch.Tensor, ids: torch.Tensor, out: torch.Tensor, *, part: int, block: int, bits: int
) -> None:
    """out [B] fp32 = log softmax of logits [B, V] at ids [B], whose largest logits are `top` [B] fp32."""
    num_rows, vocab = logits.shape
    num_parts = triton.cdiv(vocab, part)
    total = logits.new_empty(num_rows, num_parts, dtype=torch.int64)
    _total_kernel[num_parts, num_rows](
        logits, top, total, vocab, BITS=bits, PART=part,
        BV=block, num_warps=4, enable_fp_fusion=False, **dependent(logits),
    )  # fmt: skip
    _logprob_kernel[num_rows,](
        logits, top, total, ids, out, vocab, num_parts, BITS=bits, BC=triton.next_power_of_2(num_parts), num_warps=1,
        **dependent(logits),
    )  # fmt: skip
