"""A short convolution over the positions of one sequence, each channel by itself."""

import torch
import torch.nn.functional as F

from moeyard_kernels.common.checks import check_indices
from moeyard_kernels.ref.rows_apart import rows_apart
from moeyard_kernels.types.state_slots import StateSlots


def causal_conv1d(x: torch.Tensor, weight: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """x [T, C], weight [C, K], before [K - 1, C] (the inputs ahead of x, zeros at a sequence's start) -> [T, C] fp32.

    out[t] = sum over i of weight[:, i] * x[t - K + 1 + i], added in the order of i; each product and each sum is
    rounded, so that a position's bits depend on its own K inputs and on nothing else.
    """
    num_tokens, size = x.shape[0], weight.shape[1]
    inputs, factors = torch.cat((before, x)).float(), weight.float().t().contiguous()
    out = inputs[:num_tokens] * factors[0]
    for i in range(1, size):
        out += inputs[i : i + num_tokens] * factors[i]
    return out


def causal_conv1d_update(
    x: torch.Tensor, weight: torch.Tensor, window: torch.Tensor, *, slots: StateSlots
) -> torch.Tensor:
    """See `moeyard_kernels.ops.causal_conv1d_update`."""
    check_indices("causal_conv1d_update", low=-1, high=window.shape[0], read=slots.read, write=slots.write)
    out, before = torch.zeros_like(x, memory_format=torch.contiguous_format), weight.shape[1] - 1
    for n, slot in enumerate(slots.read.tolist()):
        if slot < 0:
            continue
        rows = slice(n * slots.num_queries, (n + 1) * slots.num_queries)
        inputs = torch.cat((window[slot], x[rows]))
        out[rows] = F.silu(rows_apart(causal_conv1d(x[rows], weight, window[slot]))).to(x.dtype)
        for j, target in enumerate(slots.write[n].tolist(), 1):
            if target >= 0:
                window[target] = inputs[j : j + before]
    return out
