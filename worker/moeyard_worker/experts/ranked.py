"""The common part of all policies: slots with eviction ranks, waves, and stream slots for prompts. Pure.

A policy defines how an expert's eviction rank changes (`moeyard_kernels.types.expert_ranks`). Among the experts that a
wave does not need, the one with the smallest rank loses its slot. The order is total and uses integers only, so that a
GPU makes the same decisions (`moeyard_kernels.experts.cache_access`).

The misses of a wave take at most half of the slots (`wave_limit`). A layer that needs more runs in several waves, so
that it does not evict the experts of all other layers. Slots are always full.

Prompts visit most experts of a layer once and say little about the next token. So their uses are not counted, and their
misses use `num_streams` separate slots, which are free again after the wave. A long prompt does not evict the experts
that decoding uses.
"""

import heapq
from collections.abc import Sequence
from typing import ClassVar

from moeyard_kernels.types.expert_ranks import KEY_BITS, slots_of_layers, wave_limit
from moeyard_worker.experts.policy import ExpertKey, Placed, Segment


class RankedPolicy:
    """Decides which experts have which slots: one instance per rank, for all layers.

    resident: the first expert of each slot. None: the first experts of every layer. Keys number layers and experts from
    0.
    """

    # The segment of an expert after a decode row has hit it, while nothing is evicted. All other experts are in
    # "probation". A cache that holds everything counts by it without asking the policy.
    settled: ClassVar[Segment]

    def __init__(
        self,
        *,
        layers: Sequence[int],
        experts: range,
        num_slots: int,
        num_streams: int,
        resident: Sequence[ExpertKey] | None = None,
    ) -> None:
        if num_slots < 1 or num_streams < 1:
            raise ValueError(
                f"an expert cache needs at least 1 slot and 1 for prompts, got {num_slots} and {num_streams}"
            )
        assert len(layers) * len(experts) <= 1 << KEY_BITS, (
            f"{len(layers)} x {len(experts)} experts exceed a rank's key"
        )
        self._layers, self._first, self._width = tuple(layers), experts.start, len(experts)
        self._index = {layer: i for i, layer in enumerate(layers)}
        self.num_slots = min(num_slots, len(layers) * len(experts))
        self._num_streams = num_streams
        self._limit = wave_limit(self.num_slots)
        if resident is None:
            counts = slots_of_layers(self.num_slots, len(layers))
            self._keys = [i * self._width + expert for i, count in enumerate(counts) for expert in range(count)]
        else:
            assert len(resident) == num_slots, (len(resident), num_slots)
            self._keys = [self._key(layer, expert) for layer, expert in resident]
        self._slot_of = [-1] * (len(layers) * self._width)
        for slot, key in enumerate(self._keys):
            self._slot_of[key] = slot
        self._protected = [False] * self.num_slots
        # Decayed counts of uses, for policies that need them.
        self._uses = [0] * (len(layers) * self._width)
        self._step = 0
        self._visit = 0
        self._layer = -1
        self._ranks = [self._first_rank(key) for key in self._keys]
        # It also holds outdated ranks. They are dropped when popped, or all at once when there are many.
        self._heap = sorted(zip(self._ranks, range(self.num_slots), strict=True))

    @property
    def resident(self) -> list[ExpertKey]:
        """The expert in each slot."""
        return [self._name(key) for key in self._keys]

    def access(self, layer: int, decode: Sequence[int], prefill: Sequence[int]) -> list[list[Placed]]:
        """Assign slots to the needed experts of one layer. Return waves, which are computed one after the other.

        `decode` and `prefill` are disjoint ascending expert ids: those that a decode row needs, and those that only
        prompt rows need. Every expert is in exactly one wave. Experts of decode rows come first, hits before misses.
        Misses evict experts that the wave does not need. Then follow the resident experts of prompts in one wave, and
        their misses in stream slots. A slot keeps its expert within a wave.
        """
        waves = self._visited(layer, decode) if decode else []
        hits, misses = [], list[int]()
        for expert in prefill:
            slot = self._slot_of[self._key(layer, expert)]
            if slot < 0:
                misses.append(expert)
            else:
                hits.append(Placed(expert=expert, slot=slot, kind="prefill", hit=self._segment(slot)))
        if hits:
            waves.append(hits)
        for begin in range(0, len(misses), self._num_streams):
            streamed = enumerate(misses[begin : begin + self._num_streams], self.num_slots)
            waves.append([Placed(expert=expert, slot=slot, kind="prefill") for slot, expert in streamed])
        return waves

    def _visited(self, layer: int, needed: Sequence[int]) -> list[list[Placed]]:
        index = self._index[layer]
        self._step += index <= self._layer
        self._layer = index
        self._visit += 1
        keys = [self._key(layer, expert) for expert in needed]
        self._note(keys)
        hits, misses = [], list[int]()
        for expert, key in zip(needed, keys, strict=True):
            slot = self._slot_of[key]
            if slot < 0:
                misses.append(expert)
                continue
            hits.append(Placed(expert=expert, slot=slot, kind="decode", hit=self._segment(slot)))
            self._protected[slot] = self.settled == "protected"
            self._rank(slot, self._used_rank(key, missed=False))
        self._left(range(index * self._width, (index + 1) * self._width), set(keys))
        if len(self._heap) > 4 * self.num_slots:
            self._heap = sorted(zip(self._ranks, range(self.num_slots), strict=True))
        room = max(self._limit - len(hits), 0)
        waves = [[*hits, *self._admitted(layer, misses[:room], {placed.slot for placed in hits})]]
        for begin in range(room, len(misses), self._limit):
            waves.append(self._admitted(layer, misses[begin : begin + self._limit], set()))
        return waves

    def _admitted(self, layer: int, misses: Sequence[int], pinned: set[int]) -> list[Placed]:
        """Assign slots to misses by evicting others. Slots in `pinned` belong to the wave's hits."""
        out, kept = [], []
        for expert in misses:
            while True:
                rank, slot = heapq.heappop(self._heap)
                if self._ranks[slot] == rank:
                    if slot not in pinned:
                        break
                    kept.append((rank, slot))
            pinned.add(slot)
            found, old, key = self._segment(slot), self._keys[slot], self._key(layer, expert)
            self._slot_of[old], self._slot_of[key], self._keys[slot] = -1, slot, key
            self._protected[slot] = False
            self._ranks[slot] = self._used_rank(key, missed=True)
            kept.append((self._ranks[slot], slot))
            out.append(Placed(expert=expert, slot=slot, kind="decode", evicted=self._name(old), evicted_from=found))
        for entry in kept:
            heapq.heappush(self._heap, entry)
        return out

    def _rank(self, slot: int, rank: int) -> None:
        self._ranks[slot] = rank
        heapq.heappush(self._heap, (rank, slot))

    def _first_rank(self, key: int) -> int:
        """Return the rank of an expert that has not been needed yet."""
        raise NotImplementedError

    def _note(self, keys: Sequence[int]) -> None:
        """Note that these experts are needed now."""
        raise NotImplementedError

    def _used_rank(self, key: int, *, missed: bool) -> int:
        """Return the rank of an expert that was just noted."""
        raise NotImplementedError

    def _left(self, layer: range, needed: set[int]) -> None:
        """Update the ranks of a layer's experts that its visit does not need."""

    def _key(self, layer: int, expert: int) -> int:
        return self._index[layer] * self._width + expert - self._first

    def _name(self, key: int) -> ExpertKey:
        index, local = divmod(key, self._width)
        return self._layers[index], self._first + local

    def _segment(self, slot: int) -> Segment:
        return "protected" if self._protected[slot] else "probation"

    def validate(self) -> None:
        """Assert every invariant of the data structure."""
        assert len(set(self._keys)) == len(self._keys) == self.num_slots, "an expert has two slots"
        slots = {key: slot for key, slot in enumerate(self._slot_of) if slot >= 0}
        assert slots == {key: slot for slot, key in enumerate(self._keys)}, "slots and experts disagree"
        assert len(set(self._ranks)) == self.num_slots, "two experts rank alike"
        assert all(0 <= rank < 1 << 63 for rank in self._ranks), "a rank exceeds 63 bits"
        assert set(zip(self._ranks, range(self.num_slots), strict=True)) <= set(self._heap), "a rank is missing"
