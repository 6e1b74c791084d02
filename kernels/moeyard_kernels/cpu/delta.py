"""The gated delta rule on a CPU: prompts in chunks of 64 positions, output positions one by one.

In a chunk the rule is a linear system (Yang et al. 2024, arXiv 2406.06484, with gates as in arXiv 2412.06464). With G_i
the sum of g up to position i of the chunk, and for j <= i D_ij = exp(G_i - G_j):

    (I + strictly_lower(beta_i D_ij k_i k_j)) [U | W] = [beta_i v_i | beta_i exp(G_i) k_i]
    V = U - W S
    out_i = exp(G_i) q_i S + sum over j <= i of D_ij (q_i k_j) V_j
    S <- exp(G_64) S + (exp(G_64 - G) k)^T V

Every product is of one sequence, in matrices of one shape per head whatever the length: a chunk that is not full is
filled up with positions that change nothing (k, v and beta zero, g zero). Chunks begin at multiples of 64 from position
0 and the state between them is fp32, so a position's bits do not depend on how its prompt was cut there. Measured
(torch 2.13): `bmm` and `solve_triangular` give a matrix the same bits whatever the others of its batch.
"""

import torch
import torch.nn.functional as F

CHUNK = 64
# Chunks of a prompt, and sequences of a decode step, are taken together up to about this many values (2 MiB of fp32).
_PIECE = 512 * 1024


def chunk_delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """q, k [T, Hk, Dk], v [T, Hv, Dv], g, beta [T, Hv], all fp32, of consecutive positions -> [T, Hv, Dv] fp32.

    The first sits at a multiple of 64. state [Hv, Dk, Dv] fp32 is what was kept before them, and is replaced. See
    `ref.gated_delta_rule`.
    """
    num_tokens, num_heads, width = v.shape
    missing = -num_tokens % CHUNK
    if missing:
        q, k, v = (F.pad(x, (0, 0, 0, 0, 0, missing)) for x in (q, k, v))
        g, beta = (F.pad(x, (0, 0, 0, missing)) for x in (g, beta))
    out = torch.empty(num_tokens + missing, num_heads, width)
    step = CHUNK * max(1, _PIECE // (num_heads * CHUNK * max(CHUNK, width + k.shape[2])))
    for begin in range(0, num_tokens, step):
        part = slice(begin, begin + step)
        _chunks(q[part], k[part], v[part], g[part], beta[part], state, out[part])
    return out[:num_tokens]


def _chunks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor,
    out: torch.Tensor,
) -> None:  # fmt: skip
    """Whole chunks: what does not need the state for all of them at once, then one after the other."""
    q, k, v = (x.view(-1, CHUNK, *x.shape[1:]).transpose(1, 2).contiguous() for x in (q, k, v))  # [n, heads, 64, D]
    g, beta = (x.view(-1, CHUNK, x.shape[1]).transpose(1, 2).contiguous() for x in (g, beta))  # [n, Hv, 64]
    num, heads, _, dim = k.shape
    num_heads, width = v.shape[1], v.shape[3]
    total = g.cumsum(-1)
    grown = total.exp()
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool).triu(1)
    decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill_(later, float("-inf")).exp_()
    decay = decay.view(num, heads, -1, CHUNK, CHUNK)

    def products(x: torch.Tensor) -> torch.Tensor:
        """x_i k_j D_ij of every value head, [n, Hv, 64, 64]."""
        found = torch.bmm(x.flatten(0, 1), k.flatten(0, 1).transpose(1, 2)).view(num, heads, 1, CHUNK, CHUNK)
        return (found * decay).view(num, num_heads, CHUNK, CHUNK)

    def per_value(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """x [n, Hk, 64, Dk] times factor [n, Hv, 64], [n, Hv, 64, Dk]."""
        return (x.unsqueeze(2) * factor.view(num, heads, -1, CHUNK, 1)).view(num, num_heads, CHUNK, dim)

    system = products(k).mul_(beta.unsqueeze(-1))
    known = torch.cat((v * beta.unsqueeze(-1), per_value(k, beta * grown)), -1)
    solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    values, reads = solved[..., :width].contiguous(), solved[..., width:].contiguous()
    scores, queries = products(q), per_value(q, grown)
    keys = per_value(k, (total[..., -1:] - total).exp_()).transpose(2, 3)
    left = grown[..., -1, None, None]
    for i in range(num):
        new = values[i].sub_(torch.bmm(reads[i], state))
        done = torch.bmm(queries[i], state).add_(torch.bmm(scores[i], new))
        out[i * CHUNK : (i + 1) * CHUNK] = done.transpose(0, 1)
        state.mul_(left[i]).add_(torch.bmm(keys[i], new))


def step_delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """One position of each of B sequences: q, k [B, Hk, Dk], v [B, Hv, Dv], beta [B, Hv] -> [B, Hv, Dv], all fp32.

    decay [B, Hv, 1 or Dk] is exp(g); state [num_slots, Hv, Dk, Dv] fp32 holds theirs at `slots` [B] int64, none twice.
    What is read of the old state, by k and q at once, gives out too: q S' = (decay q) S + (q k) change.
    """
    num_rows, num_heads, width = v.shape
    dim = k.shape[2]
    groups = num_heads // k.shape[1]
    q, k = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (q, k))
    rows = torch.stack((k * decay, q * decay), 2)  # [B, Hv, 2, Dk]
    along = (q * k).sum(-1, keepdim=True)
    out = torch.empty(num_rows, num_heads, width)
    step = max(1, _PIECE // (num_heads * dim * width))
    for begin in range(0, num_rows, step):
        part = slice(begin, begin + step)
        here = slots[part]
        # One state is changed where it lies.
        alone = here.shape[0] == 1
        kept = state[int(here[0])] if alone else state.index_select(0, here).flatten(0, 1)  # [b Hv, Dk, Dv]
        read = torch.bmm(rows[part].flatten(0, 1), kept).view(-1, num_heads, 2, width)
        change = (v[part] - read[:, :, 0]).mul_(beta[part].unsqueeze(-1))
        kept.mul_(decay[part].flatten(0, 1).unsqueeze(-1))
        kept.add_(k[part].flatten(0, 1).unsqueeze(-1) * change.flatten(0, 1).unsqueeze(-2))
        if not alone:
            state.index_copy_(0, here, kept.view(-1, num_heads, dim, width))
        out[part] = read[:, :, 1] + along[part] * change
    return out
