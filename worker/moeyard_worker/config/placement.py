"""Placement: the rank that computes each expert of each layer. Every epoch has one. Pure.

Ranks keep their numbers. Absent ranks own no expert, and the others are the placement's `ranks`.
"""

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

MAX_RANKS = 1 << 16  # a frame's tag has 16 bits for its source
# The experts of one layer that a second rank has, too: (expert, rank), by expert.
Copies = tuple[tuple[int, int], ...]


def partition(num_experts: int, world_size: int) -> tuple[range, ...]:
    """Split experts 0..num_experts-1 into one contiguous shard per rank, the larger shards first (16 on 3: 6, 5, 5).

    Raises ValueError when there is no rank, or when a rank would own no expert.
    """
    if world_size < 1:
        raise ValueError(f"expert parallelism needs at least 1 rank, got {world_size}")
    if world_size > num_experts:
        raise ValueError(f"{world_size} ranks for {num_experts} experts per layer: every rank must own at least one")
    share, larger = divmod(num_experts, world_size)
    starts = [rank * share + min(rank, larger) for rank in range(world_size + 1)]
    return tuple(range(start, stop) for start, stop in itertools.pairwise(starts))


@dataclass(frozen=True)
class Placement:
    """`owners[i][e]` is the rank that computes expert e of MoE layer `layers[i]`, a layer number of the model.

    copies: for each layer, the experts that a second rank has, too. The second rank computes half of the rows if there
        are many (`exchange/transports/routing.py`). Empty: no copies in any layer.

    Raises ValueError if layers have no experts or different numbers of them, and for an owner that cannot be a rank. It
    also raises for a copy of an unknown expert, a copy on the owner, and a second copy.
    """

    layers: tuple[int, ...]
    owners: tuple[tuple[int, ...], ...]
    copies: tuple[Copies, ...] = ()

    def __post_init__(self) -> None:
        if not self.layers or len(self.layers) != len(self.owners) or list(self.layers) != sorted({*self.layers}):
            raise ValueError(f"owners of {len(self.owners)} layers for the MoE layers {self.layers}")
        if self.copies and len(self.copies) != len(self.layers):
            raise ValueError(f"copies of {len(self.copies)} layers for the MoE layers {self.layers}")
        counts = {len(row) for row in self.owners}
        if len(counts) != 1 or not min(counts):
            raise ValueError(f"every MoE layer has as many experts, one at least, got {sorted(counts)}")
        if any(not 0 <= owner < MAX_RANKS for row in self.owners for owner in row):
            raise ValueError(f"an expert's owner is a rank in [0, {MAX_RANKS})")
        for layer, row, copies in self._by_layer:
            experts = [expert for expert, _ in copies]
            if experts != sorted({*experts}) or any(not 0 <= expert < len(row) for expert in experts):
                raise ValueError(f"layer {layer}: copies of experts {experts}, each of {len(row)} has one at most")
            if beside := [expert for expert, rank in copies if rank == row[expert] or not 0 <= rank < MAX_RANKS]:
                raise ValueError(f"layer {layer}: a copy of expert {beside[0]} lies on no other rank than its owner")

    @property
    def _by_layer(self) -> Iterator[tuple[int, tuple[int, ...], Copies]]:
        return zip(self.layers, self.owners, self.copies or ((),) * len(self.layers), strict=True)

    @staticmethod
    def of_shards(layers: Iterable[int], shards: Sequence[Collection[int]]) -> "Placement":
        """Return a placement with the same shards in every layer: `shards[r]` are the experts of rank r."""
        owner = {expert: rank for rank, shard in enumerate(shards) for expert in shard}
        count = sum(len(shard) for shard in shards)
        if sorted(owner) != list(range(count)):
            raise ValueError(f"{shards} does not place each of {count} experts once")
        row, layers = tuple(owner[expert] for expert in range(count)), tuple(layers)
        return Placement(layers, (row,) * len(layers))

    @staticmethod
    def parse(text: str, *, layers: Sequence[int], num_experts: int, num_ranks: int) -> "Placement":
        """Parse a placement file: JSON, {"owners": [rank of expert 0, ...]} for all MoE layers, or by layer number.

        "copies" holds {expert: second rank}, in the same form: for all layers, or by layer number. Raises ValueError
        with one line unless every expert of every layer has a rank below `num_ranks`, for invalid copies, and for a
        rank without an expert of its own.
        """
        try:
            whole: Any = json.loads(text)
            found, copied = whole["owners"], whole.get("copies", {})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError('it is not a JSON object with "owners"') from error
        by_layer = {str(layer): found for layer in layers} if isinstance(found, list) else found
        if not isinstance(by_layer, Mapping) or set(by_layer) != {str(layer) for layer in layers}:
            raise ValueError(f"its owners are not those of the MoE layers {layers[0]} to {layers[-1]}")
        for layer, row in by_layer.items():
            sound = isinstance(row, list) and len(row) == num_experts
            if not sound or any(type(owner) is not int or not 0 <= owner < num_ranks for owner in row):
                raise ValueError(
                    f"layer {layer} does not name one of {num_ranks} ranks for each of {num_experts} experts"
                )
        second = {str(layer): copied for layer in layers} if isinstance(found, list) else copied
        copies = _copies(second, layers, num_experts=num_experts, num_ranks=num_ranks)
        placed = Placement(tuple(layers), tuple(tuple(by_layer[str(layer)]) for layer in layers), copies)
        if idle := sorted(set(range(num_ranks)).difference(placed.ranks)):
            raise ValueError(f"rank {idle[0]} owns no expert")
        return placed

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that own an expert, ascending."""
        return tuple(sorted({owner for row in self.owners for owner in row}))

    @property
    def num_experts(self) -> int:
        """Number of experts of each layer."""
        return len(self.owners[0])

    @property
    def fingerprint(self) -> str:
        """A hash of the placement."""
        return hashlib.sha256(json.dumps([self.layers, self.owners, self.copies]).encode()).hexdigest()[:16]

    def copies_of(self, index: int) -> Copies:
        """Return the copies of `layers[index]`."""
        return self.copies[index] if self.copies else ()

    def experts(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """Return a rank's experts in each layer, with copies, ascending. Local ids follow this order."""
        return tuple(
            tuple(sorted([*(e for e, owner in enumerate(row) if owner == rank), *(e for e, r in copies if r == rank)]))
            for _, row, copies in self._by_layer
        )

    def num_owned(self, rank: int) -> int:
        """Return the number of (layer, expert) that a rank has, with copies."""
        return sum(map(len, self.experts(rank)))

    def without(self, away: Collection[int]) -> "Placement":
        """Return a placement without the ranks `away`. Their experts go to the others, each to the one with fewest.

        The others keep their experts. A rank with a copy of a moved expert becomes its owner. Raises ValueError if no
        rank remains.
        """
        left = [rank for rank in self.ranks if rank not in away]
        if not left:
            raise ValueError(f"no rank remains without ranks {sorted(away)}")
        owners, copies = [], []
        for _, row, second in self._by_layer:
            stay = {expert: rank for expert, rank in second if rank in left}
            moved = [stay.pop(expert, owner) if owner not in left else owner for expert, owner in enumerate(row)]
            owners.append(_dealt(moved, left, Counter(stay.values())))
            copies.append(tuple(stay.items()))
        return Placement(self.layers, tuple(owners), tuple(copies) if any(copies) else ())

    def resized(self, num_ranks: int) -> "Placement":
        """Return a placement on ranks 0 to `num_ranks` - 1 that moves as few experts as possible.

        Experts of removed ranks move as in `without`. In each layer, a new rank takes experts from the fullest rank
        until it has as many, or one less. Raises ValueError if a rank would own no expert.
        """
        if num_ranks < 1:
            raise ValueError(f"expert parallelism needs at least 1 rank, got {num_ranks}")
        if num_ranks > self.num_experts:
            raise ValueError(f"{num_ranks} ranks for {self.num_experts} experts per layer: every rank must own one")
        stay = self.without(range(num_ranks, MAX_RANKS)) if max(self.ranks) >= num_ranks else self
        come = range(max(stay.ranks) + 1, num_ranks)
        return Placement(self.layers, tuple(_shared(row, come, num_ranks) for row in stay.owners), stay.copies)


def _shared(row: tuple[int, ...], come: Iterable[int], num_ranks: int) -> tuple[int, ...]:
    held, out = [row.count(rank) for rank in range(num_ranks)], list(row)
    for _ in row:
        poorest = min(come, key=lambda rank: held[rank], default=None)
        richest = max(range(num_ranks), key=lambda rank: held[rank])
        if poorest is None or held[richest] - held[poorest] < 2:
            break
        # Its last expert, which keeps shards contiguous.
        expert = max(expert for expert, owner in enumerate(out) if owner == richest)
        out[expert] = poorest
        held[richest] -= 1
        held[poorest] += 1
    return tuple(out)


def _dealt(row: Sequence[int], left: list[int], copies: Mapping[int, int]) -> tuple[int, ...]:
    """Return `row` with the experts of absent ranks given to `left`. `copies`: number of copies on each rank."""
    held, out = {rank: row.count(rank) + copies.get(rank, 0) for rank in left}, []
    for owner in row:
        rank = owner if owner in held else min(left, key=lambda each: (held[each], each))
        held[rank] += rank != owner
        out.append(rank)
    return tuple(out)


def _copies(found: Any, layers: Sequence[int], *, num_experts: int, num_ranks: int) -> tuple[Copies, ...]:
    """Return the copies of a placement file, by layer. Raises ValueError for an invalid one."""
    if not isinstance(found, Mapping) or not set(found) <= {str(layer) for layer in layers}:
        raise ValueError(f"its copies are not of the MoE layers {layers[0]} to {layers[-1]}")
    out = []
    for layer in map(str, layers):
        each = found.get(layer, {})
        named = isinstance(each, Mapping) and set(each) <= {str(expert) for expert in range(num_experts)}
        if not named or any(type(rank) is not int or not 0 <= rank < num_ranks for rank in each.values()):
            raise ValueError(f"layer {layer}: copies are one of {num_ranks} ranks by one of {num_experts} experts")
        out.append(tuple(sorted((int(expert), rank) for expert, rank in each.items())))
    return tuple(out) if any(out) else ()
