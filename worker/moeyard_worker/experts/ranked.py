"""What every policy does alike: slots ordered by a rank each, waves, and prompts that stream past them. Pure.

A policy says how an expert's rank changes (`moeyard_kernels.types.expert_ranks`); of those that a wave does not need,
the one with the smallest rank loses its slot. The order is total and of integers alone, so that a GPU decides the same
(`moeyard_kernels.experts.cache_access`).

A wave has at most half of the slots (`wave_limit`; its hits may be more): a layer that needs more experts than that
runs in more waves instead of evicting what all other layers keep. Slots are full from the start and stay so.

Prompts visit most experts of a layer once and say little about the next token. Their uses are not counted, and their
misses pass through `num_streams` slots of their own, which are free again once computed. So decode's hot set stays,
however long a prompt is.
"""

import heapq
from collections.abc import Sequence
from typing import ClassVar

from moeyard_kernels.types.expert_ranks import KEY_BITS, slots_of_layers, wave_limit
from moeyard_worker.experts.policy import ExpertKey, Placed, Segment


class RankedPolicy:
    """Decides which experts sit in which slots: one instance per rank, for all layers. Its slots are always full.

    `resident` are the first experts of every layer at the start, unless it is told others. Layers and experts are
    numbered from 0 inside.
    """

    # The segment in which an expert that a decode row has hit is found as long as nothing is evicted. Before that, and
    # for experts that only prompts hit, it is "probation". A cache that holds everything counts by it without asking.
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
        # Decayed counts, for a policy that keeps such.
        self._uses = [0] * (len(layers) * self._width)
        self._step = 0
        self._visit = 0
        self._layer = -1
        self._ranks = [self._first_rank(key) for key in self._keys]
        # Also holds ranks that are no longer true: dropped when they surface, or all at once when they are many.
        self._heap = sorted(zip(self._ranks, range(self.num_slots), strict=True))

    @property
    def resident(self) -> list[ExpertKey]:
        """The expert in each slot."""
        return [self._name(key) for key in self._keys]

    def access(self, layer: int, decode: Sequence[int], prefill: Sequence[int]) -> list[list[Placed]]:
        """Give the needed experts of one layer slots, in waves that are computed one after the other.

        `decode` and `prefill` are disjoint ascending expert ids: those that a decode row needs, and those that only
        prompt rows need. Every expert appears in exactly one wave. Experts of decode rows come first, hits before
        misses, which take slots of experts that the wave does not need. Experts of prompts follow: the resident ones
        in one wave, the others through the stream's slots, which keep nothing. A slot is never reassigned inside the
        wave that uses it.
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
        """Misses in the slots of others; those in `pinned` are of the wave's hits."""
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
        """Of an expert that nobody has needed yet."""
        raise NotImplementedError

    def _note(self, keys: Sequence[int]) -> None:
        """These are needed now."""
        raise NotImplementedError

    def _used_rank(self, key: int, *, missed: bool) -> int:
        """Of one of those just noted."""
        raise NotImplementedError

    def _left(self, layer: range, needed: set[int]) -> None:
        """The keys of a layer whose visit needs no others than these."""

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
