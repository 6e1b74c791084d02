"""Choosing a token per row of logits, in float64, one row after the other: the formulas of the engine's CPU sampler.

Order: logit bias, penalties, temperature, min-p, top-k, top-p, then the argmax of weight / E, where E ~ Exp(1) is drawn
by Philox4x32-10 from (seed, position, token id) alone (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC
2011). Temperature 0 takes the largest logit. Ties go to the lowest id.

What differs from the CPU sampler, and from the kernels: a row whose largest logit (after the edits) is not finite is
greedy here, lowest NaN first, where the CPU sampler draws from nothing, and edits leave infinities what they are. The
kernels order tokens by logits instead of by weights (which may be equal where logits are not, 2^-53 from each other),
and compare masses rounded to 2^-44 of the likeliest token's: a cut could fall elsewhere only if top_p of the mass lay
so close to the sum up to a token.
"""

import torch

from moeyard_kernels.types.logit_edits import COUNT_SHIFT, IN_PROMPT, MAX_BIASES, LogitEdits

_LOW = 0xFFFFFFFF


def philox4x32(counter: torch.Tensor, position: int, seed: int) -> torch.Tensor:
    """Ten rounds over the counters (counter [N] int64, position, 0, 0), keyed by seed: [N, 4] int64 below 2^32."""
    c0, c1 = counter & _LOW, torch.full_like(counter, position & _LOW)
    c2, c3 = torch.zeros_like(counter), torch.zeros_like(counter)
    k0, k1 = seed & _LOW, seed >> 32 & _LOW
    for _ in range(10):
        # The low 64 bits of a product are the same whether signed or not.
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (b >> 32 & _LOW) ^ c1 ^ k0, b & _LOW, (a >> 32 & _LOW) ^ c3 ^ k1, a & _LOW
        k0, k1 = k0 + 0x9E3779B9 & _LOW, k1 + 0xBB67AE85 & _LOW
    return torch.stack((c0, c1, c2, c3), dim=1)


def exponential_noise(seed: int, position: int, ids: torch.Tensor) -> torch.Tensor:
    """An Exp(1) variate per token id [N]: -log((word + 0.5) / 2^32), word id % 4 of block id // 4."""
    words = philox4x32(ids >> 2, position, seed)[torch.arange(ids.numel()), ids & 3]
    return -torch.log((words.double() + 0.5) * 2.0**-32)


def edit(row: torch.Tensor, words: torch.Tensor, bias: torch.Tensor, penalties: torch.Tensor) -> torch.Tensor:
    """Bias, then repetition, frequency and presence penalties of one row [V] fp64; see `LogitEdits`."""
    index, count = (words & MAX_BIASES).long(), words >> COUNT_SHIFT
    repetition, frequency, presence = penalties.tolist()
    added = torch.cat((bias.new_zeros(1), bias))[index]
    x = torch.where(added == -torch.inf, added, row + added)
    x = torch.where(words >= IN_PROMPT, torch.where(x > 0, x / repetition, x * repetition), x)
    return torch.where(count > 0, x - (frequency * count.double() + presence), x)


def sample(
    logits: torch.Tensor,
    *,
    temperature: torch.Tensor | None = None,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    edits: LogitEdits | None = None,
    logprobs: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `moeyard_kernels.ops.sample`."""
    if edits is not None:
        _check_indices(edits)
    ids = torch.empty(logits.shape[0], dtype=torch.int64)
    chosen = torch.empty(logits.shape[0], dtype=torch.float32)
    for b in range(logits.shape[0]):
        raw = logits[b].double()
        slot = -1 if edits is None else int(edits.slots[b])
        x = raw
        if edits is not None and slot >= 0:
            x = edit(raw, edits.words[slot], edits.bias[slot], edits.penalties[b])
        best = _lowest_argmax(x)
        if temperature is None or temperature[b] == 0 or not x[best].isfinite():
            ids[b] = best
        else:
            assert seeds is not None, "the door demands seeds"
            assert positions is not None, "the door demands positions"
            kept, weights = _candidates(
                x,
                float(temperature[b]),
                0 if top_k is None else int(top_k[b]),
                1.0 if top_p is None else float(top_p[b]),
                0.0 if min_p is None else float(min_p[b]),
            )
            score = weights / exponential_noise(int(seeds[b]), int(positions[b]), kept)
            ids[b] = kept[(score == score.max()).nonzero()[0, 0]]
        shifted = raw - raw.max()
        chosen[b] = shifted[ids[b]] - shifted.exp().sum().log()
    return ids, chosen if logprobs else None


def _check_indices(edits: LogitEdits) -> None:
    num_slots, slots = edits.words.shape[0], edits.slots
    if slots.numel() and (slots.min() < -1 or slots.max() >= num_slots):
        raise ValueError(f"sample: slots holds {int(slots.min())} to {int(slots.max())}, outside -1 to {num_slots - 1}")
    index = edits.words[slots[slots >= 0]] & MAX_BIASES
    if index.numel() and index.max() > edits.bias.shape[1]:
        raise ValueError(f"sample: words name bias {int(index.max())} of {edits.bias.shape[1]} per slot")


def _lowest_argmax(x: torch.Tensor) -> int:
    """The lowest id of a NaN if there is one, else of the largest value."""
    return int((x.isnan() if x.isnan().any() else x == x.max()).nonzero()[0, 0])


def _candidates(
    x: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids that survive min-p, top-k and top-p, with their weights relative to the likeliest token's."""
    weights = ((x - x.max()) / temperature).exp()
    ids = torch.arange(x.numel())
    if min_p > 0:
        ids = (weights >= min_p).nonzero().flatten()
    if 0 < top_k < ids.numel() or top_p < 1:
        ids = ids[torch.sort(weights[ids], descending=True, stable=True).indices]
        if top_k > 0:
            ids = ids[:top_k]
        if top_p < 1:
            mass = weights[ids].cumsum(0)
            # Up to and including the token that reaches the mass.
            ids = ids[: int(torch.searchsorted(mass, top_p * mass[-1])) + 1]
    return ids, weights[ids]
