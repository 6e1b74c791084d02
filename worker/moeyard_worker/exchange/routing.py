"""The index work of a dispatch: which token rows a rank needs, and the local expert of each of their pairs. Pure numpy.

A pair is one (token, k) of the tokens of all sources stacked in rank order: pair = token * top_k + k. In a decode step
every array here holds a few dozen integers, so that the cost is the number of numpy calls, and each counts several
times over when its code is cold after a wait.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Routing:
    """What a rank has to compute. R rows, P pairs of its experts, N sources; all index arrays int64.

    row_tokens: [R] the stacked token of each row, ascending.
    row_bounds: N + 1 offsets; rows of source s are [row_bounds[s], row_bounds[s + 1]).
    experts: [R, K] local ids, -1 where the expert is elsewhere.
    pairs: [P] the pairs whose expert is here, ascending, so grouped by source.
    pair_bounds: N + 1 offsets into `pairs`.
    row_pairs: [P] the same as row * K + k.
    """

    row_tokens: np.ndarray
    row_bounds: list[int]
    experts: np.ndarray
    pairs: np.ndarray
    pair_bounds: list[int]
    row_pairs: np.ndarray


@dataclass(frozen=True, slots=True)
class LayerTables:
    """Who computes the E experts of one layer, as one rank looks it up. An id of -1 reads the last entry of both.

    owner: [E + 1] int32 the rank of each expert, -1 at the end. local: [E + 1] int64 its local id on this rank, -1
    where it is elsewhere.
    """

    owner: np.ndarray
    local: np.ndarray

    @staticmethod
    def of(owners: Sequence[int], rank: int) -> "LayerTables":
        """The tables of `rank` in a layer whose expert e is computed by owners[e]; local ids ascend as experts do."""
        owner = np.array([*owners, -1], np.int32)
        here = owner == rank
        return LayerTables(owner, np.where(here, here.cumsum() - 1, -1))


def route(topk_ids: np.ndarray, *, token_bounds: Sequence[int], local: np.ndarray) -> Routing:
    """Route topk_ids [S, K] (int64, all sources stacked; -1 for none) to the experts that have a `local` id.

    Source s has the tokens [token_bounds[s], token_bounds[s + 1]). An id outside [-1, E) is an assertion.
    """
    assert topk_ids.size == 0 or -1 <= topk_ids.min() <= topk_ids.max() < local.size - 1, "an expert id is out of range"
    top_k = topk_ids.shape[1]
    local_ids = local.take(topk_ids)
    here = local_ids >= 0
    row_tokens = here.max(1).nonzero()[0]
    of_rows = here[row_tokens]
    pairs = here.reshape(-1).nonzero()[0]
    return Routing(
        row_tokens=row_tokens,
        row_bounds=[bisect_left(row_tokens, bound) for bound in token_bounds],
        experts=local_ids[row_tokens],
        pairs=pairs,
        pair_bounds=[bisect_left(pairs, bound * top_k) for bound in token_bounds],
        row_pairs=of_rows.reshape(-1).nonzero()[0],
    )


def pairs_of(flat_ids: np.ndarray, owner: np.ndarray, rank: int) -> np.ndarray:
    """The positions (ascending) of `flat_ids` (contiguous) whose expert is `rank`'s by an `owner` table."""
    return (owner.take(flat_ids) == rank).nonzero()[0]
