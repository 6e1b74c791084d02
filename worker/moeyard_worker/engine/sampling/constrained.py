"""Rows with grammars in a GPU's steps: chosen once more, by masks that the host computes while the step runs.

A mask needs the token before it on the host. With two steps in flight that token is there when the step before is done,
which is when this step begins on the device: the host has as long as the forward pass takes. Nothing is held back for
it, neither a row with a grammar nor its neighbours, which are sampled on the device as ever.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from moeyard_kernels.types.sampled_tokens import SampledTokens
from moeyard_kernels.types.sending import to_device
from moeyard_worker.engine.sampling.device_sampler import DeviceSampler
from moeyard_worker.engine.sampling.sampling import SampledRow, Yielded, ask, errors_of, sampled_rows
from moeyard_worker.protocol import SamplingParams
from moeyard_worker.scheduling.request import Request
from moeyard_worker.scheduling.step import Chunk, Step


def without_grammars(requests: Sequence[Request]) -> Sequence[Request]:
    """The same requests, if none has a grammar; else those that have one ask for nothing that costs."""
    if all(request.constraint is None for request in requests):
        return requests
    return [r if r.constraint is None else replace(r, sampling=least(r.sampling)) for r in requests]


def least(p: SamplingParams) -> SamplingParams:
    """Greedy, with the same alternatives asked for."""
    # Its alternatives are those of the logits, whatever is chosen.
    return SamplingParams(max_tokens=p.max_tokens, temperature=0.0, logprobs=p.logprobs)


def choose_again(
    sampler: DeviceSampler,
    tokens: SampledTokens,
    step: Step,
    requests: Sequence[Request],
    *,
    before: Yielded | None,
    eos_token_ids: tuple[int, ...],
) -> dict[int, str]:
    """Put what grammars let through into `tokens`, which were chosen for `without_grammars(requests)`.

    Waits for the results of `before`. Returns `errors_of` the step's rows.
    """
    assert all(chunk.num_sampled == 1 for chunk in step.sampled), "drafts are proposed by nobody yet"
    places = [i for i, request in enumerate(requests) if request.constraint is not None]
    named = {id(step.sampled[i]) for i in places}

    def some(chunks: tuple[Chunk, ...]) -> tuple[Chunk, ...]:
        return tuple(chunk for chunk in chunks if id(chunk) in named)

    rows = sampled_rows(
        Step(prefill=some(step.prefill), decode=some(step.decode)), [requests[i] for i in places], before
    )
    put_again(sampler, tokens, rows, places, eos_token_ids)
    return {places[i]: error for i, error in errors_of(rows).items()}


def put_again(
    sampler: DeviceSampler, tokens: SampledTokens, rows: Sequence[SampledRow], places: Sequence[int],
    eos_token_ids: tuple[int, ...],
) -> None:  # fmt: skip
    """Choose for `rows`, whose logits are at `places`, and put that into `tokens`; alternatives stay as they are."""
    where = to_device(torch.tensor(places), sampler.logits.device)
    put(sampler, tokens, where, ask(sampler.logits[where], rows, eos_token_ids))


def put(sampler: DeviceSampler, tokens: SampledTokens, where: torch.Tensor, chosen: SampledTokens) -> None:
    """Put what was chosen for the rows `where` into `tokens`; alternatives are those of the logits and stay."""
    tokens.ids[where] = sampler.last_ids[where] = chosen.ids
    if chosen.logprobs is not None:
        assert tokens.logprobs is not None, "they were asked for there too"
        assert tokens.ranks is not None, "they were asked for there too"
        assert chosen.ranks is not None, "they come together"
        tokens.logprobs[where], tokens.ranks[where] = chosen.logprobs, chosen.ranks
