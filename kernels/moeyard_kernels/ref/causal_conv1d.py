"""A short convolution over the positions of one sequence, each channel by itself."""

import torch


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
