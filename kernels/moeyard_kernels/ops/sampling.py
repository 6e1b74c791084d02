"""The choice of a token per row of logits, and log-probabilities.

The reference works row by row, in float64 if a row needs it. A CPU serves with it: greedy rows cost one pass in their
dtype, and cuts sort only the likeliest tokens. Philox4x32-10 draws the noise from (seed, position, token id)
alone (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011). The kernels differ in two ways. They
order tokens by logits instead of weights: weights may be equal if logits differ by 2^-53. They compare masses rounded
to 2^-44 of the likeliest token's. So a cut differs only if top_p of the mass is that close to the sum up to a token.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from moeyard_kernels.ops.op import op
from moeyard_kernels.types.sampling import COUNT_SHIFT, IN_PROMPT, MAX_BIASES, MAX_TOP, LogitEdits, SampledTokens

_LOW = 0xFFFFFFFF
# The least weight of the tokens that are sorted (the likeliest token has 1), lowered until the tokens to keep are among
# them. Rows of at most `_SHORT` tokens are sorted completely.
_LEVELS = (2.0**-7, 2.0**-14, 0.0)
_SHORT = 4096
# Sums of the same weights in different orders differ by less than this share.
_SAME_SUM = 1e-9
# The most blocks of four tokens whose noise is drawn at once, for several rows, so that they stay in a core's cache.
_PIECE = 16384

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]


@op(
    "sampling.sample",
    "V > 0",
    "temperature is not None or (top_k is None and top_p is None and min_p is None)",
    "temperature is not None or (seeds is None and positions is None)",
    "temperature is None or (seeds is not None and positions is not None)",
    f"logprobs is None or 0 <= logprobs <= {MAX_TOP}",
    f"edits is None or L + (edits.allowed is not None) <= {MAX_BIASES}",
    logits="float [B, V]",
    temperature="fp64 [B]?",
    top_k="int64 [B]?",
    top_p="fp64 [B]?",
    min_p="fp64 [B]?",
    seeds="int64 [B]?",
    positions="int64 [B]?",
    **{
        "edits.words": "int32 [S, V]",
        "edits.bias": "fp64 [S, L]",
        "edits.slots": "int64 [B]",
        "edits.penalties": "fp64 [B, 3]",
        "edits.allowed": "int32 [S, -(-V // 32)]?",
    },
)
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
    logprobs: int | None = None,
) -> SampledTokens:
    """Choose a token per row of logits [B, V] (fp32 or bf16); see `SampledTokens`.

    logprobs: None computes none. n from 0 to 20 gives the chosen tokens' log-probabilities and ranks, and the n
    likeliest tokens (at most V), all under the unmodified logits.

    Order: edits, temperature, min-p, top-k, top-p. Edits are bias, repetition, frequency and presence penalties in
    fp64, then the mask of allowed tokens. The token is the argmax of exp((x - max) / temperature) / E over the
    remaining tokens, with E ~ Exp(1) from (seed, position, token id). All ties go to the lowest id.

    Settings are fp64 [B] (temperature, top_p, min_p) or int64 [B] (top_k, seeds of 64 bits, positions). They are off at
    1 for top_p in (0, 1], at 0 for min_p in [0, 1], and at 0 or V for top_k. None turns a setting off for all rows, and
    saves time. Rows of temperature 0 take the largest logit, as do rows whose largest logit is infinite after the
    edits. Rows with NaNs take the lowest id of a NaN. Edits do not change infinities. A temperature needs seeds and
    positions. A row's token depends on that row's arguments alone. Slots must lie in [-1, S). This is checked on a CPU,
    and on a GPU within `launch.checked()`. A top_k of thousands, or one that cuts through thousands of equal logits, is
    exact but slow on a GPU (half a millisecond).
    """
    num_rows = logits.shape[0]
    if edits is not None:
        _check_indices(edits)
    # The lowest id of a NaN, else of the largest logit: the token of a greedy row.
    ids = logits.argmax(1)
    temperatures = [0.0] * num_rows if temperature is None else temperature.tolist()
    slots = [-1] * num_rows if edits is None else edits.slots.tolist()
    draws = []
    for b, (t, slot) in enumerate(zip(temperatures, slots, strict=True)):
        if t == 0 and slot < 0:
            continue
        if edits is None or slot < 0:
            x, best = logits[b].double().numpy(), int(ids[b])
        else:
            x = edit(logits[b], edits.words[slot], edits.bias[slot], edits.penalties[b])
            if edits.allowed is not None:
                bits = np.unpackbits(edits.allowed[slot].numpy().view(np.uint8), bitorder="little")
                x[bits[: x.size] == 0] = -np.inf
            best = int(x.argmax())
            ids[b] = best
        if t == 0 or not np.isfinite(x[best]):
            continue
        assert seeds is not None, "seeds are checked"
        assert positions is not None, "positions are checked"
        kept, weights = candidates(
            x,
            t,
            top_k=0 if top_k is None else int(top_k[b]),
            top_p=1.0 if top_p is None else float(top_p[b]),
            min_p=0.0 if min_p is None else float(min_p[b]),
        )
        if edits is not None and edits.allowed is not None:
            # A masked token cannot win, so its noise is not drawn.
            kept, weights = kept[weights > 0], weights[weights > 0]
        draws.append(_Draw(row=b, seed=int(seeds[b]), position=int(positions[b]), ids=kept, weights=weights))
    _draw(draws, ids)
    return SampledTokens(ids=ids) if logprobs is None else token_logprobs.reference(logits, ids, logprobs)


@op("sampling.token_logprobs", "V > 0", f"0 <= num_top <= {MAX_TOP}", logits="float [B, V]", ids="int64 [B]")
def token_logprobs(logits: torch.Tensor, ids: torch.Tensor, num_top: int) -> SampledTokens:
    """Log-probability and rank of token ids[b] under each row of logits [B, V], and the num_top likeliest (0 to 20).

    logits are fp32 or bf16. ids int64 [B] must lie in [0, V), which is not checked. For tokens that `sample` chose, the
    result has the bits of `sample`: see `SampledTokens`. Sums of the reference are fp64.
    """
    count = min(num_top, logits.shape[1])
    out = SampledTokens.room(ids, count)
    assert out.logprobs is not None, "there is room for them"
    assert out.ranks is not None, "there is room for them"
    chosen, top = logits.gather(1, ids[:, None]), logits.amax(1, keepdim=True).double()
    log_sum = torch.tensor([_log_sum(row, t) for row, t in zip(logits, top.flatten().tolist(), strict=True)])
    log_sum = log_sum.double()[:, None]
    out.logprobs.copy_((chosen.double() - top - log_sum).squeeze(1))
    torch.sum(logits > chosen, 1, out=out.ranks).add_(1)
    if out.top_ids is not None and out.top_logprobs is not None:
        out.top_ids.copy_(_likeliest(logits, count))
        out.top_logprobs.copy_(logits.gather(1, out.top_ids).double() - top - log_sum)
    return out


def _check_indices(edits: LogitEdits) -> None:
    num_slots, slots = edits.words.shape[0], edits.slots
    if slots.numel() and (slots.min() < -1 or slots.max() >= num_slots):
        raise ValueError(f"sample: slots holds {int(slots.min())} to {int(slots.max())}, outside -1 to {num_slots - 1}")
    for slot in slots[slots >= 0].tolist():
        index = int((edits.words[slot] & MAX_BIASES).max())
        if index > edits.bias.shape[1]:
            raise ValueError(f"sample: words name bias {index} of {edits.bias.shape[1]} per slot")


def edit(row: torch.Tensor, words: torch.Tensor, bias: torch.Tensor, penalties: torch.Tensor) -> Floats:
    """Apply bias, then repetition, frequency and presence penalties to one row [V] (fp32 or bf16) -> fp64."""
    out: Floats = row.double().numpy()
    # Most tokens have no edits.
    ids = np.flatnonzero(words.numpy())
    if not ids.size:
        return out
    x, found = out[ids], words.numpy()[ids]
    index, count = found & MAX_BIASES, found >> COUNT_SHIFT
    repetition, frequency, presence = penalties.tolist()
    added = np.concatenate(([0.0], bias.numpy()))[index]
    with np.errstate(all="ignore"):
        x = np.where(added == -np.inf, added, x + added)
        x = np.where(found >= IN_PROMPT, np.where(x > 0, x / repetition, x * repetition), x)
        out[ids] = np.where(count > 0, x - (frequency * count + presence), x)
    return out


def candidates(x: Floats, temperature: float, *, top_k: int, top_p: float, min_p: float) -> tuple[Ids, Floats]:
    """Return the ids that survive min-p, top-k and top-p of x [V], and their weights relative to the likeliest token's.

    Cuts keep the first tokens by falling weight (ties: the lowest id). They keep at most top_k, then those up to and
    including the token that reaches top_p of the mass, summed in that order.
    """
    # Subtract first: with a tiny temperature the quotients overflow to -inf (weight 0), never to inf - inf.
    with np.errstate(over="ignore"):
        weights = np.exp((x - x.max()) / temperature)
    sorts = 0 < top_k < x.size or top_p < 1
    for level in _LEVELS if sorts and x.size > _SHORT else _LEVELS[-1:]:
        least = max(level, min_p)
        ids = np.arange(x.size) if least == 0 else np.flatnonzero(weights >= least)
        # Whether these are all tokens that min-p leaves.
        whole = level <= min_p
        if whole and top_p == 1 and not 0 < top_k < ids.size:
            break
        if not whole and ids.size < top_k:
            continue
        ids = ids[np.argsort(-weights[ids], kind="stable")]
        whole |= 0 < top_k <= ids.size
        ids = ids[:top_k] if top_k > 0 else ids
        if top_p < 1:
            total = None if whole else float(weights[weights >= min_p].sum() if min_p > 0 else weights.sum())
            count = _nucleus(np.cumsum(weights[ids]), top_p, total)
            if count is None:
                continue
            ids = ids[:count]
        elif not whole:
            continue
        break
    return ids, weights[ids]


def _nucleus(mass: Floats, top_p: float, total: float | None) -> int | None:
    """Return the number of tokens that reach top_p of the total mass, from the running sum `mass` over the first ones.

    total: the total mass in another order of summation, or None if `mass` has all tokens. Return None if that order, or
    the other tokens, could change the result.
    """
    if total is None:
        return int(np.searchsorted(mass, top_p * mass[-1])) + 1
    low, high = np.searchsorted(mass, (top_p * total * (1 - _SAME_SUM), top_p * total * (1 + _SAME_SUM)))
    return int(low) + 1 if low == high < mass.size else None


def philox4x32(counter: torch.Tensor, position: int | torch.Tensor, seed: int | torch.Tensor) -> torch.Tensor:
    """Return [N, 4] int64 below 2^32: ten rounds over counters (counter [N] int64, position, 0, 0), keyed by seed.

    position and seed are integers or [N] int64.
    """
    c0, c1 = counter & _LOW, torch.zeros_like(counter) + (position & _LOW)
    c2, c3 = torch.zeros_like(counter), torch.zeros_like(counter)
    k0, k1 = seed & _LOW, seed >> 32 & _LOW
    for _ in range(10):
        # The low 64 bits of a product are the same for signed and unsigned integers.
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (b >> 32 & _LOW) ^ c1 ^ k0, b & _LOW, (a >> 32 & _LOW) ^ c3 ^ k1, a & _LOW
        k0, k1 = k0 + 0x9E3779B9 & _LOW, k1 + 0xBB67AE85 & _LOW
    return torch.stack((c0, c1, c2, c3), dim=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draw:
    """A row whose token is drawn from the remaining tokens, with their weights."""

    row: int
    seed: int
    position: int
    ids: Ids
    weights: Floats

    def blocks(self) -> tuple[torch.Tensor, Ids]:
        """Return the counters of the noise, and the index of each id's noise among their values."""
        last = int(self.ids.max()) >> 2
        if self.ids.size > last:
            # Each block serves four tokens.
            return torch.arange(last + 1), self.ids
        return torch.from_numpy(self.ids >> 2), np.arange(self.ids.size) * 4 + (self.ids & 3)

    def token(self, words: Ids) -> int:
        """The argmax of weight / E, E = -log((word + 0.5) / 2^32): word id % 4 of block id // 4."""
        noise = -np.log((words.astype(np.float64) + 0.5) * 2.0**-32)
        return int(self.ids[np.argmax(self.weights / noise)])


def _draw(draws: Sequence[_Draw], ids: torch.Tensor) -> None:
    """Choose the tokens of these rows, as many rows at a time as fit `_PIECE`."""
    blocks = [draw.blocks() for draw in draws]
    begin = 0
    while begin < len(draws):
        end, size = begin + 1, len(blocks[begin][0])
        while end < len(draws) and size + len(blocks[end][0]) <= _PIECE:
            size += len(blocks[end][0])
            end += 1
        some, counters = draws[begin:end], [counter for counter, _ in blocks[begin:end]]
        if len(some) == 1:
            words = philox4x32(counters[0], some[0].position, some[0].seed)
        else:
            counts = torch.tensor([len(counter) for counter in counters])
            of_rows = torch.tensor([(draw.position, draw.seed) for draw in some]).repeat_interleave(counts, 0)
            words = philox4x32(torch.cat(counters), of_rows[:, 0], of_rows[:, 1])
        rows = words.split([len(counter) for counter in counters])
        for draw, row, (_, where) in zip(some, rows, blocks[begin:end], strict=True):
            ids[draw.row] = draw.token(row.numpy().ravel()[where])
        begin = end


def _log_sum(row: torch.Tensor, top: float) -> float:
    """Return the log of the sum of exp(x - top), or NaN if `top` is not finite."""
    if not math.isfinite(top):
        return math.nan
    shifted = row.double().numpy() - top
    return math.log(np.exp(shifted, out=shifted).sum())


def _likeliest(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Return [B, count], the ids of each row's largest values, falling, ties by the lowest id. A NaN is the largest."""
    values, ids = logits.topk(count)
    # `topk` does not define which of equal values it takes, nor their order.
    last = values[:, -1:]
    clear = ((logits >= last).sum(1) == count) & (values[:, 1:] < values[:, :-1]).all(1)
    for b in (~clear).nonzero().flatten().tolist():
        row = logits[b]
        some = torch.arange(row.numel()) if values[b, 0].isnan() else (row >= last[b]).nonzero().squeeze(1)
        ids[b] = some[row[some].sort(descending=True, stable=True).indices[:count]]
    return ids
