"""The gated delta rule on a CPU: prompts in chunks of 64 positions, output positions one by one.

In a chunk the rule is a linear system (Yang et al. 2024, arXiv 2406.06484, with gates as in arXiv 2412.06464). G_i is
the sum of g up to position i of the chunk, and D_ij = exp(G_i - G_j) for j <= i. Kimi Delta Attention (arXiv
2510.26692) has a rate for each row d of the state. There D_ij k_i k_j is the sum over d of exp(G_id - G_jd) k_id k_jd:

    (I + strictly_lower(beta_i D_ij k_i k_j)) [U | W] = [beta_i v_i | beta_i exp(G_i) k_i]
    V = U - W S
    out_i = exp(G_i) q_i S + sum over j <= i of D_ij (q_i k_j) V_j
    S <- exp(G_64) S + (exp(G_64 - G) k)^T V

Every product is of one sequence, with matrices of one shape per head at every length. A partial chunk is padded with
positions that change nothing (k, v and beta zero, g zero). Chunks begin at multiples of 64 from position 0, and the
state between them is fp32. So a position's bits do not depend on how its prompt was cut there. Measured (torch 2.13):
`bmm` and `solve_triangular` give a matrix the same bits in every batch.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

CHUNK = 64
# Rows and columns of a chunk's products that are computed pair by pair if every row of the state has its own rate.
_BLOCK = 16
# Chunks of a prompt, and sequences of a decode step, are batched up to about this many values (2 MiB of fp32).
_PIECE = 512 * 1024


class DeltaRows(NamedTuple):
    """Rows of the rule, all fp32: q, k [T, Hk, Dk], v [T, Hv, Dv], g and beta [T, Hv].

    g is [T, Hv, Dk] if every row of the state has its own rate (then Hk = Hv).
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor

    def at(self, rows: slice | torch.Tensor) -> "DeltaRows":
        """Return some of the rows."""
        return DeltaRows(*(x[rows] if isinstance(rows, slice) else x.index_select(0, rows) for x in self))


def chunk_delta_rule(rows: DeltaRows, state: torch.Tensor) -> torch.Tensor:
    """Apply the rule to consecutive positions -> [T, Hv, Dv] fp32. The first position is a multiple of 64. state [Hv,
    Dk, Dv] fp32 is the state before, and is overwritten. See `ref.gated_delta_rule`."""
    num_tokens, num_heads, width = rows.v.shape
    missing = -num_tokens % CHUNK
    if missing:
        rows = DeltaRows(*(F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing)) for x in rows))
    dim, by_row = rows.k.shape[2], rows.g.dim() == 3
    out = torch.empty(num_tokens + missing, num_heads, width)
    widest = max(CHUNK, width + dim, _BLOCK * _BLOCK * dim // CHUNK if by_row else 0)
    step = CHUNK * max(1, _PIECE // (num_heads * CHUNK * widest))
    for begin in range(0, num_tokens, step):
        part = slice(begin, begin + step)
        _chunks(rows.at(part), state, out[part])
    return out[:num_tokens]


def _chunks(rows: DeltaRows, state: torch.Tensor, out: torch.Tensor) -> None:
    """Compute whole chunks: first everything that does not need the state, for all, then one after the other."""
    # [n, heads, 64, D], where g and beta may have no D.
    q, k, v, g, beta = (x.unflatten(0, (-1, CHUNK)).transpose(1, 2).contiguous() for x in rows)
    num, width = v.shape[0], v.shape[3]
    total, beta = g.cumsum(2), beta.unsqueeze(-1)
    if g.dim() == 3:
        pairs, scores = _scores(q, k, total)
        total = total.unsqueeze(-1)
    else:
        pairs, scores = _scores_by_row(q, k, total)
    grown = total.exp()

    def per_value(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """x [n, Hk, 64, Dk] times factor [n, Hv, 64, 1 or Dk] -> [n, Hv, 64, Dk]."""
        return (x.unsqueeze(2) * factor.unflatten(1, (x.shape[1], -1))).flatten(1, 2)

    known = torch.cat((v * beta, per_value(k, beta * grown)), -1)
    solved = torch.linalg.solve_triangular(pairs.mul_(beta), known, upper=False, unitriangular=True)
    values, reads = solved[..., :width].contiguous(), solved[..., width:].contiguous()
    queries, keys = per_value(q, grown), per_value(k, (total[:, :, -1:] - total).exp_()).transpose(2, 3)
    left = grown[:, :, -1].unsqueeze(-1)  # [n, Hv, 1 or Dk, 1]
    for i in range(num):
        new = values[i].sub_(torch.bmm(reads[i], state))
        done = torch.bmm(queries[i], state).add_(torch.bmm(scores[i], new))
        out[i * CHUNK : (i + 1) * CHUNK] = done.transpose(0, 1)
        state.mul_(left[i]).add_(torch.bmm(keys[i], new))


def _scores(q: torch.Tensor, k: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return k_i k_j D_ij and q_i k_j D_ij, 0 for j > i, [n, Hv, 64, 64]; q, k [n, Hk, 64, Dk], total [n, Hv, 64]."""
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool).triu(1)
    decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill_(later, float("-inf")).exp_()
    decay = decay.unflatten(1, (k.shape[1], -1))

    def products(x: torch.Tensor) -> torch.Tensor:
        found = torch.bmm(x.flatten(0, 1), k.flatten(0, 1).transpose(1, 2)).view(*k.shape[:2], 1, CHUNK, CHUNK)
        return (found * decay).flatten(1, 2)

    return products(k), products(q)


def _scores_by_row(q: torch.Tensor, k: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same with a rate for each row of the state: sum over d of k_i k_j exp(G_i - G_j); total [n, H, 64,
    Dk].

    exp(-G_j) alone may exceed fp32, so the factors are relative to a position between i and j. Rows of a block of 16
    meet all columns before the block relative to the last of these; inside the block each pair is computed directly.
    """
    num, heads = k.shape[:2]
    pairs, scores = (k.new_zeros(num, heads, CHUNK, CHUNK) for _ in range(2))
    later = torch.ones(_BLOCK, _BLOCK, dtype=torch.bool).triu(1).unsqueeze(-1)
    for begin in range(0, CHUNK, _BLOCK):
        block = slice(begin, begin + _BLOCK)
        here = total[:, :, block]
        decay = (here.unsqueeze(3) - here.unsqueeze(2)).masked_fill_(later, float("-inf")).exp_()
        decay *= k[:, :, None, block]
        # Both from the same factors, and by sums of Dk values each.
        for x, out in ((k, pairs), (q, scores)):
            out[:, :, block, block] = (decay * x[:, :, block].unsqueeze(3)).sum(-1)
        if begin:
            between = total[:, :, begin - 1 : begin]
            columns = (k[:, :, :begin] * (between - total[:, :, :begin]).exp_()).flatten(0, 1).transpose(1, 2)
            since = (here - between).exp_()
            for x, out in ((k, pairs), (q, scores)):
                found = torch.bmm((x[:, :, block] * since).flatten(0, 1), columns)
                out[:, :, block, :begin] = found.view(num, heads, _BLOCK, begin)
    return pairs, scores


def step_delta_rule(
    rows: DeltaRows, state: torch.Tensor, read_from: torch.Tensor, write_to: torch.Tensor
) -> torch.Tensor:
    """Apply the rule to one position of each of B sequences -> [B, Hv, Dv] fp32. `rows.g` [B, Hv, 1 or Dk] is exp(g).

    The state [num_slots, Hv, Dk, Dv] fp32 is read at `read_from` [B] and written at `write_to` [B], int64. A slot
    belongs to one sequence. One product of k and q with the old state also gives the output: q S' = (decay q) S + (q k)
    change.
    """
    q, k, v, decay, beta = rows
    num_rows, num_heads, width = v.shape
    dim = k.shape[2]
    groups = num_heads // k.shape[1]
    q, k = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (q, k))
    pairs = torch.stack((k * decay, q * decay), 2)  # [B, Hv, 2, Dk]
    along = (q * k).sum(-1, keepdim=True)
    out = torch.empty(num_rows, num_heads, width)
    step = max(1, _PIECE // (num_heads * dim * width))
    for begin in range(0, num_rows, step):
        part = slice(begin, begin + step)
        here, there = read_from[part], write_to[part]
        # A single state is updated in place, or directly in its new slot.
        alone = here.shape[0] == 1
        kept = state[int(here[0])] if alone else state.index_select(0, here).flatten(0, 1)  # [b Hv, Dk, Dv]
        left = state[int(there[0])] if alone else kept
        read = torch.bmm(pairs[part].flatten(0, 1), kept).view(-1, num_heads, 2, width)
        change = (v[part] - read[:, :, 0]).mul_(beta[part].unsqueeze(-1))
        torch.mul(kept, decay[part].flatten(0, 1).unsqueeze(-1), out=left)
        left.add_(k[part].flatten(0, 1).unsqueeze(-1) * change.flatten(0, 1).unsqueeze(-2))
        if not alone:
            state.index_copy_(0, there, left.view(-1, num_heads, dim, width))
        out[part] = read[:, :, 1] + along[part] * change
    return out
