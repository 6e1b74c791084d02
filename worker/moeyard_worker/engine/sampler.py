"""Choosing tokens from logits. Every row is treated alone, so its token cannot depend on the batch around it.

Order of the transforms, as vLLM applies them: logit bias, penalties, minimum length, temperature, min-p, top-k, top-p;
then the argmax of p / E with E ~ Exp(1) from the request's own counter (the exponential race, equivalent to
Gumbel-max). Temperature 0 takes the largest logit, ties by the lowest id. Reported log-probabilities are those of the
unmodified logits.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from moeyard_worker.engine.philox import exponential_noise
from moeyard_worker.protocol import SamplingParams, TokenLogprob
from moeyard_worker.scheduling.request import Accepted, Request

LARGEST_LOGIT = 1e300


def sample(logits: torch.Tensor, requests: Sequence[Request], eos_token_ids: tuple[int, ...]) -> list[Accepted]:
    """Next token of each request from logits [>= len(requests), V] fp32, row i for request i."""
    if not requests:
        return []
    rows = logits.numpy()
    greedy = torch.argmax(logits, dim=-1).tolist()
    out = []
    for i, request in enumerate(requests):
        params = request.sampling
        token_id = greedy[i] if _is_plain_greedy(request) else _choose(rows[i], request, eos_token_ids)
        logprobs = () if params.logprobs is None else (token_logprob(rows[i], token_id, params.logprobs),)
        out.append(Accepted((token_id,), logprobs))
    return out


def _is_plain_greedy(request: Request) -> bool:
    p = request.sampling
    return p.temperature == 0 and not _edits_logits(p) and len(request.output) >= p.min_tokens


def _edits_logits(p: SamplingParams) -> bool:
    return bool(p.logit_bias) or p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0


def _choose(row: NDArray[np.float32], request: Request, eos_token_ids: tuple[int, ...]) -> int:
    params = request.sampling
    logits = row.astype(np.float64)
    if _edits_logits(params):
        _edit(logits, params, request.prompt, request.output)
        # Whatever a request asks for, its logits stay finite: inf - inf would leave nothing to choose from.
        np.clip(logits, -LARGEST_LOGIT, LARGEST_LOGIT, out=logits)
    if len(request.output) < params.min_tokens:
        held_back = params.stop_token_ids + (() if params.ignore_eos else eos_token_ids)
        logits[[t for t in held_back if 0 <= t < logits.size]] = -np.inf
    if params.temperature == 0:
        return int(np.argmax(logits))
    ids, probabilities = _candidates(logits, params)
    noise = exponential_noise(params.seed, request.length, ids)
    return int(ids[np.argmax(probabilities / noise)])


def _edit(logits: NDArray[np.float64], params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> None:
    """Logit bias, then repetition (prompt and output), frequency and presence (output) penalties, in place."""
    for token_id, bias in params.logit_bias.items():
        logits[token_id] += bias
    if params.repetition_penalty != 1:
        seen = np.unique(np.array([*prompt, *output], dtype=np.int64))
        values = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = np.where(values > 0, values / penalty, values * penalty)
    if output and (params.presence_penalty != 0 or params.frequency_penalty != 0):
        ids, counts = np.unique(np.array(output, dtype=np.int64), return_counts=True)
        logits[ids] -= params.frequency_penalty * counts + params.presence_penalty


def _candidates(logits: NDArray[np.float64], params: SamplingParams) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Token ids that survive min-p, top-k and top-p, with their probabilities (unnormalised after the cuts)."""
    # The difference first: with a tiny temperature the quotients overflow to -inf (weight 0), never to inf - inf.
    with np.errstate(over="ignore"):
        weights = np.exp((logits - logits.max()) / params.temperature)
    ids = np.arange(weights.size, dtype=np.int64)
    if params.min_p > 0:
        # The likeliest token has weight exactly 1.
        ids = np.flatnonzero(weights >= params.min_p)
    if (0 < params.top_k < ids.size) or params.top_p < 1:
        ids = ids[np.argsort(-weights[ids], kind="stable")]
        if params.top_k > 0:
            ids = ids[: params.top_k]
        if params.top_p < 1:
            mass = np.cumsum(weights[ids])
            # Keep up to and including the token that reaches the mass.
            ids = ids[: int(np.searchsorted(mass, params.top_p * mass[-1])) + 1]
    return ids, weights[ids]


def token_logprob(row: NDArray[np.float32], token_id: int, num_top: int) -> TokenLogprob:
    """Log-probability and rank of `token_id`, and the `num_top` likeliest tokens, from one row of logits [V]."""
    logits = row.astype(np.float64)
    shifted = logits - logits.max()
    logprobs = (shifted - np.log(np.exp(shifted).sum())).astype(np.float32)
    top: tuple[tuple[int, float], ...] = ()
    if num_top > 0:
        count = min(num_top, row.size)
        # Ties at the cut belong to the lowest ids, which a partition alone does not promise.
        ids = np.flatnonzero(row >= np.partition(row, row.size - count)[row.size - count])
        ids = ids[np.argsort(-row[ids], kind="stable")][:count]
        top = tuple((int(i), float(logprobs[i])) for i in ids)
    rank = int((row > row[token_id]).sum()) + 1
    return TokenLogprob(logprob=float(logprobs[token_id]), rank=rank, top=top)
