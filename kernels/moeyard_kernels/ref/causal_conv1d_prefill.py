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
    for part in chunks.parts:
        before = torch.zeros_like(window[part.slot]) if part.fresh else window[part.slot].clone()
        rows = slice(part.begin, part.end)
        out[rows] = F.silu(rows_apart(causal_conv1d(x[rows], weight, before))).to(x.dtype)
        inputs = torch.cat((before, x[rows]))
        for end, slot in part.stops:
            window[slot] = inputs[end - part.begin :][: weight.shape[1] - 1]
    return out
