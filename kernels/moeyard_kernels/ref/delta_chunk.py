"""The gated delta rule of prompts, over states in slots: position by position, whatever the chunks."""

import torch

from moeyard_kernels.ref.delta_recurrent import rule_inputs
from moeyard_kernels.ref.gated_delta_rule import gated_delta_rule
from moeyard_kernels.types.prompt_chunks import PromptChunks


def gdn_chunk_prefill(
    qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    *,
    chunks: PromptChunks,
) -> torch.Tensor:
    """See `moeyard_kernels.ops.gdn_chunk_prefill`: in the dtype of the state."""
    return _prompts(qkv, b, a, a_log, dt_bias, state, chunks)


def kda_chunk_prefill(
    qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    *,
    chunks: PromptChunks,
) -> torch.Tensor:
    """See `moeyard_kernels.ops.kda_chunk_prefill`: in the dtype of the state."""
    gates = a.unflatten(1, tuple(state.shape[1:3]))
    return _prompts(qkv, b, gates, a_log.unsqueeze(1), dt_bias, state, chunks)


def _prompts(
    qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor,
    state: torch.Tensor, chunks: PromptChunks,
) -> torch.Tensor:  # fmt: skip
    inputs = rule_inputs(qkv, b, a, a_log, dt_bias, state)
    out = torch.empty_like(inputs[2])
    for part in chunks.parts:
        kept = torch.zeros_like(state[part.slot]) if part.fresh else state[part.slot]
        begin = part.begin
        for end, slot in part.stops:
            q, k, v, g, beta = (x[begin:end] for x in inputs)
            out[begin:end], kept = gated_delta_rule(q, k, v, g, beta, kept)
            state[slot], begin = kept, end
    return out.to(qkv.dtype)
