"""The short convolution over prompts of any lengths, activated."""

import torch
import torch.nn.functional as F

from moeyard_kernels.ref.causal_conv1d import causal_conv1d
from moeyard_kernels.ref.rows_apart import rows_apart
from moeyard_kernels.types.prompt_chunks import PromptChunks


def causal_conv1d_prefill(
    x: torch.Tensor, weight: torch.Tensor, window: torch.Tensor, *, chunks: PromptChunks
) -> torch.Tensor:
    """See `moeyard_kernels.ops.causal_conv1d_prefill`."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    for slot, begin, end, fresh in chunks.parts:
        before = torch.zeros_like(window[slot]) if fresh else window[slot].clone()
        out[begin:end] = F.silu(rows_apart(causal_conv1d(x[begin:end], weight, before))).to(x.dtype)
        window[slot] = torch.cat((before, x[begin:end]))[1 - weight.shape[1] :]
    return out
