"""A numpy sampler, one row at a time in float64, to compare the product's sampler with.

It was the engine's sampler before kernels and references served both devices, and remains as their reference.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from moeyard_worker.protocol import SamplingParams, TokenLogprob
from moeyard_worker.scheduling.request import Accepted, Request

LARGEST_LOGIT = 1e300
_ROUND_A, _ROUND_B = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85
_LOW, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)


def philox4x32(counter: tuple[NDArray[np.uint64], int, int, int], key: tuple[int, int]) -> NDArray[np.uint32]:
    """Apply ten rounds to counters (c0 [N], c1, c2, c3) with a 2 x 32 bit key. Return [N, 4] uint32."""
    c0 = counter[0]
    c1, c2, c3 = (np.full_like(c0, c & 0xFFFFFFFF) for c in counter[1:])
    k0, k1 = key
    for _ in range(10):
        product_a, product_b = _ROUND_A * c0, _ROUND_B * c2
        c0 = (product_b >> _SHIFT) ^ c1 ^ np.uint64(k0)
        c1 = product_b & _LOW
        c2 = (product_a >> _SHIFT) ^ c3 ^ np.uint64(k1)
        c3 = product_a & _LOW
        k0, k1 = (k0 + _KEY_A) & 0xFFFFFFFF, (k1 + _KEY_B) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def exponential_noise(seed: int, position: int, token_ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return one Exp(1) variate per token id [N] for the token at `position` of a request with `seed` (modulo 2^64).

    Token id v uses word v % 4 of block v // 4. Uniforms are (word + 0.5) / 2^32, so the logarithm is finite.
    """
    key = (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)
    blocks, index = np.unique(token_ids >> 2, return_inverse=True)
    words = philox4x32((blocks.astype(np.uint64), position, 0, 0), key)
    uniform = (words[index, token_ids & 3].astype(np.float64) + 0.5) * 2.0**-32
    noise: NDArray[np.float64] = -np.log(uniform)
    return noise


def sample(logits: torch.Tensor, requests: Sequence[Request], eos_token_ids: tuple[int, ...]) -> list[Accepted]:
    """Return the next token of each request from logits [>= len(requests), V] fp32, row i for request i."""
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
    return p.temperature == 0 and not edits_logits(p) and len(request.output) >= p.min_tokens


def edits_logits(p: SamplingParams) -> bool:
    return bool(p.logit_bias) or p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0


def _choose(row: NDArray[np.float32], request: Request, eos_token_ids: tuple[int, ...]) -> int:
    params = request.sampling
    logits = row.astype(np.float64)
    if edits_logits(params):
        _edit(logits, params, request.prompt, request.output)
        # Logits stay finite for every request, because inf - inf would leave no token to choose.
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
    """Apply logit bias, then repetition (prompt and output), frequency and presence (output) penalties, in place."""
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
    """Return token ids that survive min-p, top-k and top-p, and their probabilities (unnormalised after the cuts)."""
    # Subtract first: with a tiny temperature the quotients overflow to -inf (weight 0), never to inf - inf.
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
    """Return log-probability and rank of `token_id`, and the `num_top` likeliest tokens, from one row of logits [V]."""
    logits = row.astype(np.float64)
    shifted = logits - logits.max()
    logprobs = (shifted - np.log(np.exp(shifted).sum())).astype(np.float32)
    top: tuple[tuple[int, float], ...] = ()
    if num_top > 0:
        count = min(num_top, row.size)
        # Ties at the cut go to the lowest ids, which a partition alone does not ensure.
        ids = np.flatnonzero(row >= np.partition(row, row.size - count)[row.size - count])
        ids = ids[np.argsort(-row[ids], kind="stable")][:count]
        top = tuple((int(i), float(logprobs[i])) for i in ids)
    rank = int((row > row[token_id]).sum()) + 1
    return TokenLogprob(logprob=float(logprobs[token_id]), rank=rank, top=top)
