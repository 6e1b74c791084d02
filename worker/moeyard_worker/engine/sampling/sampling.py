"""Choose tokens from logits: turn the parameters of a step's requests into arguments of `ops.sample`, and read its
results.

The order of the transforms is vLLM's: grammar, logit bias, penalties, minimum length, temperature, min-p, top-k, top-p,
then an exponential race with noise from the request's own counter. Every row is computed alone, so its token cannot
depend on the batch. The host knows which rows use which transform, so the other rows do not pay for it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from moeyard_kernels.backend import Backend
from moeyard_kernels.types.sampling import LogitEdits, SampledTokens
from moeyard_kernels.types.sending import to_device
from moeyard_worker.protocol import SamplingParams, TokenLogprob
from moeyard_worker.scheduling.request import Accepted, Mask, Request, accept
from moeyard_worker.scheduling.step import Chunk, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRow:
    """One row whose token is wanted. `output` are the tokens before it, including drafts that it depends on.

    `mask` is the mask of its grammar, None without one.
    """

    params: SamplingParams
    prompt: Sequence[int]
    output: Sequence[int]
    mask: Mask | None = None

    @property
    def position(self) -> int:
        """The position of the wanted token, which is also the counter of its noise."""
        return len(self.prompt) + len(self.output)

    @property
    def edits(self) -> bool:
        """Whether biases or penalties change its logits."""
        return edits_logits(self.params)

    @property
    def held(self) -> bool:
        """Whether it is too short to stop. A grammar's mask already includes this."""
        return self.mask is None and len(self.output) < self.params.min_tokens


def penalties_of(p: SamplingParams) -> tuple[float, float, float]:
    """Return the repetition, frequency and presence penalties: a row of `LogitEdits.penalties`."""
    return p.repetition_penalty, p.frequency_penalty, p.presence_penalty


def edits_logits(p: SamplingParams) -> bool:
    """Return whether a request has biases or penalties."""
    return bool(p.logit_bias) or penalties_of(p) != (1, 0, 0)


class Yielded(Protocol):
    """A launched step, as the next step sees it: `results[i]` belongs to its i-th sampled chunk."""

    @property
    def results(self) -> list[Accepted]: ...


def feed(step: Step, before: Yielded | None) -> Step:
    """Return `step` with the results of the step before where it was planned without them. For a backend whose results
    are available at the next launch; other backends feed rows on the device."""
    if before is None or all(chunk.fed is None for chunk in step.decode):
        return step
    return replace(step, decode=tuple(_fed(chunk, before.results) for chunk in step.decode))


def _fed(chunk: Chunk, results: Sequence[Accepted]) -> Chunk:
    if chunk.fed is None:
        return chunk
    before = results[chunk.fed]
    rows = (before.token_ids[-1], *before.drafts)[: chunk.num_tokens]
    rows += (0,) * (chunk.num_tokens - len(rows))
    # The planned start assumes one accepted token.
    start = chunk.start + len(before.token_ids) - 1
    return replace(chunk, start=start, token_ids=rows, slack=0)


def sampled_rows(step: Step, requests: Sequence[Request], before: Yielded | None) -> list[SampledRow]:
    """Return the rows of `step.sample_rows`. `requests[i]` belongs to `step.sampled[i]`; `before` is as in `feed`.
    Waits for masks that are being computed, so call it after the forward pass is launched."""
    found: list[tuple[Request, Sequence[int]]] = []
    for chunk, request in zip(step.sampled, requests, strict=True):
        known = request.known_output
        if chunk.fed is not None:
            assert before is not None, "a fed chunk needs the step before"
            known = [*known, *before.results[chunk.fed].token_ids]
        first = chunk.num_tokens - chunk.num_sampled
        for row in range(first, chunk.num_tokens):
            drafts = chunk.token_ids[first + 1 : row + 1]
            output = [*known, *drafts] if drafts else known
            assert len(request.prompt) + len(output) == chunk.start + row + 1, "a row's tokens are not those before it"
            found.append((request, output))
            if request.constraint is not None:
                # Request all masks before waiting for the first one: each grammar has its own process.
                request.constraint.expect(output)
    return [
        SampledRow(params=request.sampling, prompt=request.prompt, output=output, mask=mask_of(request, output))
        for request, output in found
    ]


def mask_of(request: Request, output: Sequence[int]) -> Mask | None:
    """Return the mask of a request's grammar after `output`, None without a grammar. Waits for the mask."""
    return None if request.constraint is None else request.constraint.mask(output)


def errors_of(rows: Sequence[SampledRow]) -> dict[int, str]:
    """Return, by row index, why no token satisfies the row's grammar."""
    return {i: row.mask.error for i, row in enumerate(rows) if row.mask is not None and row.mask.error is not None}


def accepted(
    step: Step, chosen: Sequence[tuple[int, TokenLogprob | None]], errors: Mapping[int, str] | None = None
) -> list[Accepted]:
    """Return the results of `step.sampled`, given the tokens of all sampled rows; `errors` as from `errors_of`."""
    results, begin = [], 0
    for chunk in step.sampled:
        mine = chosen[begin : begin + chunk.num_sampled]
        first, begin = begin, begin + chunk.num_sampled
        drafts = chunk.token_ids[chunk.num_tokens - chunk.num_sampled + 1 :]
        mine = mine[: accept(drafts, [token_id for token_id, _ in mine])]
        logprobs = tuple(logprob for _, logprob in mine if logprob is not None)
        error = next((errors[i] for i in range(first, first + len(mine)) if i in errors), None) if errors else None
        results.append(Accepted(tuple(token_id for token_id, _ in mine), logprobs, error=error))
    return results


def chosen_logits(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return [B], the logit of each row's token in logits [>= B, V]. It is not finite if the row's largest logit is
    not. The sampler takes the lowest NaN of a row that has one, and the largest of a row where that is infinite."""
    return logits[: len(ids)].gather(1, ids.unsqueeze(1)).squeeze(1)


def unsound(step: Step, requests: Sequence[Request], logits: torch.Tensor) -> tuple[str, ...]:
    """Return the requests whose chosen tokens have non-finite logits (on the CPU, in order of `step.sample_rows`)."""
    finite = iter(torch.isfinite(logits).tolist())
    rows = [
        (request, [next(finite) for _ in range(c.num_sampled)])
        for c, request in zip(step.sampled, requests, strict=True)
    ]
    return tuple(request.request_id for request, found in rows if not all(found))


def choose(
    backend: Backend, logits: torch.Tensor, rows: Sequence[SampledRow], eos_token_ids: tuple[int, ...]
) -> list[tuple[int, TokenLogprob | None]]:
    """Return the token of each row of logits [>= len(rows), V], and its log-probabilities if the request wants them."""
    if not rows:
        return []
    return read_tokens(sample_logits(backend, logits, rows, eos_token_ids), [row.params.logprobs for row in rows])


def sample_logits(
    backend: Backend, logits: torch.Tensor, rows: Sequence[SampledRow], eos_token_ids: tuple[int, ...]
) -> SampledTokens:
    """Launch the sampling of `choose` on the device of the logits, without waiting for it."""
    logits = logits[: len(rows)]
    num_top = max((row.params.logprobs for row in rows if row.params.logprobs is not None), default=None)
    edits = _edits(logits, rows, eos_token_ids)
    return backend.sample(logits, edits=edits, logprobs=num_top, **_arguments(logits, rows))


def read_tokens(done: SampledTokens, num_alternatives: Sequence[int | None]) -> list[tuple[int, TokenLogprob | None]]:
    """Read sampled tokens, each with as many alternatives as its request wants."""
    token_ids = done.ids.tolist()
    if done.logprobs is None or done.ranks is None:
        return [(token_id, None) for token_id in token_ids]
    logprobs, ranks = done.logprobs.tolist(), done.ranks.tolist()
    top: list[list[tuple[int, float]]] = [[]] * len(num_alternatives)
    if done.top_ids is not None and done.top_logprobs is not None:
        pairs = zip(done.top_ids.tolist(), done.top_logprobs.tolist(), strict=True)
        top = [list(zip(ids, values, strict=True)) for ids, values in pairs]
    answers: list[tuple[int, TokenLogprob | None]] = []
    for i, count in enumerate(num_alternatives):
        entry = None
        if count is not None:
            entry = TokenLogprob(logprob=logprobs[i], rank=ranks[i], top=tuple(top[i][:count]))
        answers.append((token_ids[i], entry))
    return answers


def _arguments(logits: torch.Tensor, rows: Sequence[SampledRow]) -> dict[str, torch.Tensor]:
    """Return the arguments of `ops.sample` that some row needs; none when all rows are greedy."""
    params = [row.params for row in rows]
    if all(p.temperature == 0 for p in params):
        return {}

    def column(values: list[float] | list[int], dtype: torch.dtype) -> torch.Tensor:
        return to_device(torch.tensor(values, dtype=dtype), logits.device)

    found = {
        "temperature": column([p.temperature for p in params], torch.float64),
        "seeds": column([seed_bits(p.seed) for p in params], torch.int64),
        "positions": column([row.position for row in rows], torch.int64),
    }
    if any(p.top_k > 0 for p in params):
        found["top_k"] = column([p.top_k for p in params], torch.int64)
    if any(p.top_p < 1 for p in params):
        found["top_p"] = column([p.top_p for p in params], torch.float64)
    if any(p.min_p > 0 for p in params):
        found["min_p"] = column([p.min_p for p in params], torch.float64)
    return found


def seed_bits(seed: int) -> int:
    """Return a seed as a signed 64-bit integer, which is torch's form of the generator's key."""
    return (seed + 2**63) % 2**64 - 2**63


def _edits(logits: torch.Tensor, rows: Sequence[SampledRow], eos_token_ids: tuple[int, ...]) -> LogitEdits | None:
    """Return the biases, penalties and held-back tokens of the rows that have any."""
    vocab = logits.shape[1]
    biases = [bias_of(row.params, held=row.held, eos_token_ids=eos_token_ids, vocab=vocab) for row in rows]
    edited = [i for i, row in enumerate(rows) if row.edits or biases[i] or row.mask is not None]
    if not edited:
        return None
    device = logits.device
    slots = torch.full((len(rows),), -1)
    words = torch.zeros(len(edited), vocab, dtype=torch.int32)
    bias = torch.zeros(len(edited), max(len(biases[i]) for i in edited), dtype=torch.float64)
    penalties = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64).repeat(len(rows), 1)
    for slot, i in enumerate(edited):
        p, slots[i] = rows[i].params, slot
        if rows[i].edits or biases[i]:
            words[slot] = edit_words(p, biases[i], rows[i].prompt, rows[i].output, vocab)
        bias[slot, : len(biases[i])] = torch.tensor(list(biases[i].values()), dtype=torch.float64)
        if rows[i].edits:
            # Use fp64, as a GPU's sampler does: torch's default dtype would round them and break ties differently.
            penalties[i] = torch.tensor(penalties_of(p), dtype=torch.float64)
    allowed = _allowed([rows[i].mask for i in edited], vocab)
    return LogitEdits(
        words=to_device(words, device),
        bias=to_device(bias, device),
        slots=to_device(slots, device),
        penalties=to_device(penalties, device),
        allowed=None if allowed is None else to_device(allowed, device),
    )


def _allowed(masks: Sequence[Mask | None], vocab: int) -> torch.Tensor | None:
    """Return `LogitEdits.allowed` of these slots; None if no mask excludes a token."""
    if all(mask is None or mask.words is None for mask in masks):
        return None
    allowed = torch.full((len(masks), -(-vocab // 32)), -1, dtype=torch.int32)
    for row, mask in zip(allowed, masks, strict=True):
        if mask is not None and mask.words is not None:
            row.copy_(torch.frombuffer(bytearray(mask.words), dtype=torch.int32))
    return allowed


def edit_words(
    p: SamplingParams, biased: Collection[int], prompt: Sequence[int], output: Sequence[int], vocab: int
) -> torch.Tensor:
    """Return a request's row of `LogitEdits.words` [V]; bias i - 1 belongs to the i-th of the `biased` tokens."""
    words = torch.zeros(vocab, dtype=torch.int32)
    words[list(biased)] = torch.arange(1, len(biased) + 1, dtype=torch.int32)
    if edits_logits(p):
        words[torch.tensor(prompt, dtype=torch.int64).unique()] += LogitEdits.IN_PROMPT
        ids, counts = torch.tensor(output, dtype=torch.int64).unique(return_counts=True)
        words[ids] += counts.int() * LogitEdits.ONCE
    return words


def bias_of(p: SamplingParams, *, held: bool, eos_token_ids: tuple[int, ...], vocab: int) -> dict[int, float]:
    """Return the biases of tokens: the request's own, and minus infinity for stop tokens while it is `held` (too
    short)."""
    if not held:
        return p.logit_bias
    back = p.stop_token_ids + (() if p.ignore_eos else eos_token_ids)
    return {**p.logit_bias, **{t: float("-inf") for t in back if 0 <= t < vocab}}
