"""The index work of a dispatch: which token rows a rank needs, and the local expert of each of their pairs. Pure numpy.

A pair is one (token, k) of the tokens of all sources stacked in rank order: pair = token * top_k + k. In a decode step
every array here has a few dozen integers, so the number of numpy calls decides the cost. Each call costs several times
as much when its code is cold after a wait.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moeyard_kernels.types.peer_window import ROWS_PER_TURN
from moeyard_worker.config.placement import Placement


@dataclass(frozen=True, slots=True)
class Routing:
    """The rows that a rank computes: R rows, P pairs of its experts, N sources. All index arrays are int64.

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
    """The owners of one layer's E experts as lookup tables of one rank, indexed by `keys`. An id of -1 reads the end.

    owner: [E + 1] int32, the rank of each expert, and -1.
    local: [E + 1] int64, its local id on this rank or -1.

    If experts have copies, both tables are twice as long. The second half is for every second ROWS_PER_TURN rows of a
    source.
    """

    owner: np.ndarray
    local: np.ndarray
    num_experts: int

    @staticmethod
    def of(
        owners: Sequence[int], rank: int, copies: Sequence[tuple[int, int]] = (), *, turns: bool = False
    ) -> "LayerTables":
        """Return the tables of `rank` in a layer whose expert e is computed by owners[e], and by the rank of its copy.

        Local ids ascend with the ids of this rank's experts. `turns`: make both halves even without copies.
        """
        first = np.array([*owners, -1], np.int32)
        halves = [first]
        if copies or turns:
            halves.append(first.copy())
            for expert, other in copies:
                halves[1][expert] = other
        local = np.logical_or.reduce([half == rank for half in halves]).cumsum() - 1
        return LayerTables(
            np.concatenate(halves), np.concatenate([np.where(half == rank, local, -1) for half in halves]), len(owners)
        )

    def keys(self, topk_ids: np.ndarray, token_bounds: Sequence[int]) -> np.ndarray:
        """Return the table index of each (token, k) of topk_ids [S, K].

        Source s has the tokens [token_bounds[s], token_bounds[s + 1]). The row within its source alone decides which of
        two ranks computes a pair, so all ranks agree. Asserts ids in [-1, E).
        """
        ids = topk_ids
        assert ids.size == 0 or -1 <= ids.min() <= ids.max() < self.num_experts, "an expert id is out of range"
        half = self.num_experts + 1
        if self.owner.size == half:
            return ids
        rows = np.arange(len(ids)) - np.repeat(token_bounds[:-1], np.diff(token_bounds))
        return ids + (rows // ROWS_PER_TURN % 2 * half)[:, None]


def check_placement(placement: Placement, num_experts: int, members: Sequence[int]) -> None:
    """Raise ValueError for a placement of another number of experts, or with ranks that are no members."""
    if placement.num_experts != num_experts or not set(placement.ranks) <= set(members):
        raise ValueError(
            f"a placement of {placement.num_experts} experts on ranks {placement.ranks}: there are {num_experts} and "
            f"ranks {members}"
        )


def tables_of(placement: Placement, rank: int, members: Sequence[int] | None = None) -> dict[int, LayerTables]:
    """Return the tables of `rank` in every MoE layer, all with turns or none.

    With `members`, owners are their places among these.
    """

    def name(owner: int) -> int:
        return owner if members is None else members.index(owner)

    made: dict[tuple[object, ...], LayerTables] = {}
    out = {}
    for i, layer in enumerate(placement.layers):
        kind = (placement.owners[i], placement.copies_of(i))
        if kind not in made:
            owners, copies = [name(owner) for owner in kind[0]], [(expert, name(other)) for expert, other in kind[1]]
            made[kind] = LayerTables.of(owners, name(rank), copies, turns=bool(placement.copies))
        out[layer] = made[kind]
    return out


def route(topk_ids: np.ndarray, *, token_bounds: Sequence[int], tables: LayerTables) -> Routing:
    """Route topk_ids [S, K] (int64, all sources stacked; -1 for none) to the experts that this rank's `tables` have.

    Source s has the tokens [token_bounds[s], token_bounds[s + 1]). Asserts ids in [-1, E).
    """
    top_k = topk_ids.shape[1]
    local_ids = tables.local.take(tables.keys(topk_ids, token_bounds))
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


def pairs_of(keys: np.ndarray, owner: np.ndarray, rank: int) -> np.ndarray:
    """Return the positions, ascending, of one source's stacked `keys` that an `owner` table assigns to `rank`."""
    return (owner.take(keys.reshape(-1)) == rank).nonzero()[0]
