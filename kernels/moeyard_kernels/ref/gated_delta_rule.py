"""The gated delta rule, position by position: what linear attention keeps of a sequence, and what it reads from it.

Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464), and Kimi Delta Attention, whose state forgets each row at a rate of
its own (Kimi Team 2025, arXiv 2510.26692).
"""

import torch


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q, k [T, Hk, Dk], v [T, Hv, Dv], beta [T, Hv], state [Hv, Dk, Dv] -> (out [T, Hv, Dv], the state behind them).

    g [T, Hv] is the logarithm of what is left of the state at each position, or [T, Hv, Dk] of each of its rows. Value
    head h reads with key head h // (Hv // Hk); queries and keys are normalised and queries scaled before. In the dtype
    of the state, position by position: S <- exp(g) S; S <- S + k (beta (v - k S)); out = q S.
    """
    num_tokens, num_heads = v.shape[:2]
    q, k = (x.to(state.dtype).repeat_interleave(num_heads // x.shape[1], 1) for x in (q, k))
    decay = g.to(state.dtype).exp()
    if decay.dim() == 2:
        decay = decay.unsqueeze(-1)
    out = state.new_empty(num_tokens, num_heads, v.shape[2])
    for t in range(num_tokens):
        state = state * decay[t].unsqueeze(-1)
        read = torch.einsum("hd,hdv->hv", k[t], state)
        change = (v[t].to(state.dtype) - read) * beta[t].to(state.dtype).unsqueeze(-1)
        state = state + k[t].unsqueeze(-1) * change.unsqueeze(-2)
        out[t] = torch.einsum("hd,hdv->hv", q[t], state)
    return out, state
