"""The index work of a dispatch: which token rows a rank needs, and its pairs grouped by expert. Pure numpy.

A slot is one (token, k) of the tokens of all sources stacked in rank order: slot = token * top_k + k. A pair is a slot
whose expert lives on this rank. In a decode step every array here holds a few dozen integers, so that the cost is the
number of numpy calls, and each counts several times over when its code is cold after a wait.
"""

from bisect import bisect_left
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


def route(
    topk_ids: np.ndarray,
    *,
    token_bounds: Sequence[int],
    num_prefill: Sequence[int],
    experts: range,
    num_experts: int,
) -> Routing:
    """Route topk_ids [S, K] (int64, all sources stacked) to the contiguous local `experts`.

    Source s has the tokens [token_bounds[s], token_bounds[s + 1]), the first num_prefill[s] of them prompt rows. An id
    outside [0, num_experts) is an assertion (a ValueError of numpy's when negative).
    """
    top_k, flat = topk_ids.shape[1], topk_ids.reshape(-1)
    num_slots_per_expert = np.bincount(flat, minlength=num_experts).tolist()
    assert len(num_slots_per_expert) == num_experts, f"expert id {len(num_slots_per_expert) - 1} of {num_experts}"
    counts = tuple(num_slots_per_expert[experts.start : experts.stop])
    first = sum(num_slots_per_expert[: experts.start])
    # All slots by expert, then slot: the local experts' part of it is the pair order.
    slots = flat.argsort(kind="stable")[first : first + sum(counts)]
    tokens = slots // top_k
    needed = np.zeros(token_bounds[-1] + 1, dtype=bool)
    needed[1:][tokens] = True
    rows_before = needed.cumsum()
    pair_of_slot = slots.argsort()
    pair_slots = slots[pair_of_slot]
    return Routing(
        row_tokens=needed[1:].nonzero()[0],
        row_bounds=[int(rows_before[bound]) for bound in token_bounds],
        row_of_pair=rows_before[tokens],
        pair_slots=pair_slots,
        slot_bounds=[bisect_left(pair_slots, bound * top_k) for bound in token_bounds],
        pair_of_slot=pair_of_slot,
        counts=counts,
        decode_counts=_decode_counts(flat[slots] - experts.start, tokens, token_bounds, num_prefill, len(counts))
        if any(num_prefill)
        else counts,
    )


def _decode_counts(
    local: np.ndarray, tokens: np.ndarray, token_bounds: Sequence[int], num_prefill: Sequence[int], num_local: int
) -> tuple[int, ...]:
    prompt = np.zeros(token_bounds[-1], dtype=bool)
    for start, num in zip(token_bounds, num_prefill, strict=False):
        prompt[start : start + num] = True
    return tuple(np.bincount(local[~prompt[tokens]], minlength=num_local).tolist())


def slots_of(flat_ids: np.ndarray, experts: range) -> np.ndarray:
    """The positions (ascending) of `flat_ids` (int64, contiguous) whose expert is one of `experts`."""
    return ((flat_ids >= experts.start) & (flat_ids < experts.stop)).nonzero()[0]
