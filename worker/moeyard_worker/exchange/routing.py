"""The index work of a dispatch: which token rows a rank needs, and its pairs grouped by expert. Pure numpy.

A slot is one (token, k) of the tokens of all sources stacked in rank order: slot = token * top_k + k. A pair is a slot
whose expert lives on this rank. Every array here holds a few hundred integers at most in a decode step, where the cost
is the number of numpy calls.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Routing:
    """What a rank has to compute. R rows, P pairs, N sources; all index arrays int64.

    row_tokens: [R] the stacked token of each row, ascending.
    row_bounds: N + 1 offsets; rows of source s are [row_bounds[s], row_bounds[s + 1]).
    row_of_pair: [P] in pair order: by expert, then by slot.
    pair_slots: [P] the slots in ascending order, so grouped by source.
    slot_bounds: N + 1 offsets into `pair_slots`.
    pair_of_slot: [P] where in pair order each entry of `pair_slots` sits.
    counts, decode_counts: pairs per local expert, of all rows and of decode rows.
    """

    row_tokens: np.ndarray
    row_bounds: list[int]
    row_of_pair: np.ndarray
    pair_slots: np.ndarray
    slot_bounds: list[int]
    pair_of_slot: np.ndarray
    counts: tuple[int, ...]
    decode_counts: tuple[int, ...]


def route(topk_ids: np.ndarray, *, token_bounds: Sequence[int], num_prefill: Sequence[int], experts: range) -> Routing:
    """Route topk_ids [S, K] (int64, all sources stacked) to the contiguous local `experts`.

    Source s has the tokens [token_bounds[s], token_bounds[s + 1]), the first num_prefill[s] of them prompt rows.
    """
    num_experts, top_k = len(experts), topk_ids.shape[1]
    local = topk_ids.reshape(-1) - experts.start
    pair_slots = slots_below(local, num_experts)
    local = local[pair_slots]
    tokens = pair_slots // top_k
    first = np.ones(tokens.size, dtype=bool)
    np.not_equal(tokens[1:], tokens[:-1], out=first[1:])
    row_tokens = tokens[first]
    order = local.argsort(kind="stable")
    pair_of_slot = np.empty_like(order)
    pair_of_slot[order] = np.arange(order.size)
    bounds = np.array(token_bounds)
    counts = np.bincount(local, minlength=num_experts)
    decode_counts = counts
    if any(num_prefill):
        prompt = np.zeros(token_bounds[-1], dtype=bool)
        for start, num in zip(token_bounds, num_prefill, strict=False):
            prompt[start : start + num] = True
        decode_counts = np.bincount(local[~prompt[tokens]], minlength=num_experts)
    return Routing(
        row_tokens=row_tokens,
        row_bounds=row_tokens.searchsorted(bounds).tolist(),
        row_of_pair=(first.cumsum() - 1)[order],
        pair_slots=pair_slots,
        slot_bounds=tokens.searchsorted(bounds).tolist(),
        pair_of_slot=pair_of_slot,
        counts=tuple(counts.tolist()),
        decode_counts=tuple(decode_counts.tolist()),
    )


def slots_below(local_ids: np.ndarray, num_experts: int) -> np.ndarray:
    """The positions (ascending) of `local_ids` (int64, contiguous) that lie in [0, num_experts)."""
    return (local_ids.view(np.uint64) < num_experts).nonzero()[0]
