"""A layer's experts when not all have slots: the GPU decides and copies.

Steps of decode rows need nothing from the host, so they can be captured. A kernel decides. Hits are computed while a
few programs copy the misses from pinned memory; then the misses are computed. A layer that needs more than half of the
slots does this in several waves, whose number depends on shapes only. Peers that share their links make the first
copies together (`types/fetch_window.py`).

In a step with prompt rows the host waits once per layer to learn which experts they need besides those of decode rows.
Experts with a slot are computed at once, for all rows. The others stream through two halves of a few extra slots: the
copy engine fills one half while the other is computed. Rows that need nearly all experts of one layer will need those
of the next, so its missing experts are copied during its attention. Decode's slots do not change.

Host memory holds the experts without a slot. A miss of decode rows exchanges two experts: the missed one takes the
slot, and the evicted one takes its place in host memory. With `all_on_host` host memory also holds copies of the
experts in slots, and a miss only reads. Peers that read this memory need that, because their reads may be late.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, cast

import torch

from moeyard_kernels import ops
from moeyard_kernels.cuda.experts import CudaExpertRun, CudaExpertSlots
from moeyard_kernels.cuda.host_experts import HostExperts
from moeyard_kernels.types.expert_residency import (
    BY_PEERS,
    EVICTED_PROBATION,
    EVICTED_PROTECTED,
    FOR_PEERS,
    GATHER_NANOSECONDS,
    HITS_PROBATION,
    HITS_PROTECTED,
    MISSES,
    PolicyName,
    ResidencyCounts,
    start_residency,
)
from moeyard_kernels.types.fetch_window import FetchWindow
from moeyard_kernels.types.matrix import Fill
from moeyard_kernels.types.sending import to_device

# If a step needs at least this share of a layer's experts, the next layer's are prefetched. Where that was wrong,
# prompts took 1.6 times as long (routing collapsed to 36 of 128 experts, H200, 2026-11-22).
_NEARLY_ALL = 0.9


class _Experts(NamedTuple):
    """The experts of one layer, a list each.

    needed, decode: whether any row needs the expert, and whether a decode row does. slots, protected: its slot and its
    segment. places: its row of host memory. next_slots and next_places are those of the next layer.
    """

    needed: Sequence[int]
    decode: Sequence[int]
    slots: Sequence[int]
    protected: Sequence[int]
    places: Sequence[int]
    next_slots: Sequence[int]
    next_places: Sequence[int]


class CudaResidency:
    """The experts of L layers, E each, in the first `num_slots` of `slots`; the other slots stream.

    Layers and experts count from 0. `policy` decides. all_on_host: see the module. `lent`: the handle by which other
    processes of the host map the experts in its memory, if they may.
    """

    def __init__(
        self,
        slots: CudaExpertSlots,
        *,
        policy: str,
        num_layers: int,
        num_experts: int,
        num_slots: int,
        all_on_host: bool = True,
        shared: bool = False,
    ) -> None:
        assert all_on_host or not shared, "peers read experts that stay where they are"
        self._slots, self._num_slots = slots, num_slots
        self._num_layers, self._num_experts = num_layers, num_experts
        self._half = (slots.num_slots - num_slots) // 2
        assert self._half > 0, f"{slots.num_slots} slots, of which {num_slots} are not the stream's"
        device = slots.device
        on_host = num_layers * num_experts - (0 if all_on_host else num_slots)
        self._host = HostExperts(num_experts=on_host, form=slots.form, device=device, shared=shared)
        self.lent = self._host.memory.lent
        # The kernels copy words of 2 or 4 bytes.
        word = torch.int32 if slots.gate_up.data.itemsize == 4 else torch.int16
        self._blobs = self._host.blobs.view(word)
        self._words = [region.view(word).unsqueeze(1) for region in slots.regions]
        self._state = start_residency(
            cast("PolicyName", policy),
            num_layers=num_layers,
            num_experts=num_experts,
            num_slots=num_slots,
            device=device,
            one_copy=not all_on_host,
        )
        self._side = _SideStream(device)
        self._copier = _SideStream(device)
        self._turn = 0
        # The prefetched layer, and the slots of its experts in each half that holds some, in turn.
        self._ahead: tuple[int, list[dict[int, int]]] = (-1, [])
        # The layer of the last `put`, and where its experts are.
        self._putting: tuple[int, Sequence[Sequence[int]]] = (-1, ())
        # Two events for each half: recorded after its last reader is launched, and after its copies are.
        self._free, self._ready = ([self._side.event() for _ in range(2)] for _ in range(2))
        self._prompt_hits = [0, 0]
        self._prompt_misses = 0
        self._counted = torch.zeros_like(self._state.counts, device="cpu", pin_memory=device.type == "cuda")
        self._copied = self._side.event()

    def put(self, layer: int, expert: int, fill: Fill) -> None:
        """Store one expert in host memory, or in its slot if host memory holds no copy of it. Copies may still run on
        return, until `start` has returned."""
        if self._putting[0] != layer:
            # Experts stay where they are until `start`, and the host waits for the device once per layer.
            self._putting = layer, self._layer_places(layer)
            # The slots that stream are free now, but copies for the last prompt may still run.
            self._copier.join()
        place, slot = self._putting[1][expert]
        if place < 0:
            self._slots.write(slot, fill)
            return
        # The device decodes codes and puts them in tiles, because a CPU takes a hundred times as long.
        slot = self._num_slots
        self._slots.write(slot, fill)
        for target, source in zip(self._host.regions(place), self._slots.contents(slot), strict=True):
            target.copy_(source, non_blocking=True)

    def stored(self, layer: int, expert: int) -> torch.Tensor:
        """Return the bytes of an expert."""
        place, slot = self._layer_places(layer)[expert]
        return self._host.blobs[place] if place >= 0 else torch.cat(self._slots.contents(slot))

    def _layer_places(self, layer: int) -> Sequence[Sequence[int]]:
        """Return for each expert its row of host memory, or -1 and its slot. Waits for the device if experts move."""
        places, first = self._state.place_of, layer * self._num_experts
        if places is None:
            return [(row, -1) for row in range(first, first + self._num_experts)]
        found: list[list[int]] = torch.stack([places[layer], self._state.slot_of[layer]], 1).tolist()
        return found

    def start(self) -> int:
        """Fill the slots by the policy once all experts are stored, also again; return the bytes of the slots."""
        self._ahead, self._putting = (-1, []), (-1, ())
        if self._state.place_of is None:
            for slot, key in enumerate(self._state.keys.tolist()):
                self._copy(key, slot)
        self._side.synchronize()
        return self._num_slots * self._slots.form.blob_bytes

    def run(self, layer: int, run: Any, fetch: FetchWindow | None = None) -> None:
        """Compute a whole run of the slots. Without prompt rows nothing waits for the device. Ranks with a `fetch`
        window, all of a host or none, read their misses together."""
        if not run.experts.numel():
            self._await_ahead()
            return
        if run.prompt is None:
            self._decode(layer, run, run.experts, fetch=fetch)
            return
        decode = run.experts.masked_fill(run.prompt[:, None], -1)
        found = self._look(layer, run.experts, decode)
        if any(found.decode):
            self._await_ahead()
            self._decode(layer, run, decode, num_needed=sum(found.decode))
            found = self._look(layer, run.experts, decode)
        needed = [e for e in range(self._num_experts) if found.needed[e] and not found.decode[e]]
        hits = [e for e in needed if found.slots[e] >= 0]
        for e in hits:
            self._prompt_hits[found.protected[e]] += 1
        missing = {e: found.places[e] for e in needed if found.slots[e] < 0}
        self._stream(run, {e: found.slots[e] for e in hits}, missing, layer)
        if layer + 1 < self._num_layers and sum(found.needed) >= _NEARLY_ALL * self._num_experts:
            left = {e: place for e, place in enumerate(found.next_places) if found.next_slots[e] < 0}
            self._fetch_ahead(layer + 1, left)

    def counts(self, *, wait: bool) -> ResidencyCounts:
        """Return the current counts after waiting for the device, or else those of the call before the last."""
        live = self._state.counts
        if wait or not live.is_cuda:
            self._counted.copy_(live)
        elif self._copied.query():
            seen = self._counted.tolist()
            self._counted.copy_(live, non_blocking=True)
            self._copied.record()
            return self._totals(seen)
        return self._totals(self._counted.tolist())

    def validate(self) -> None:
        """Assert every invariant; waits for the device."""
        self._state.validate()

    def _totals(self, counts: Sequence[int]) -> ResidencyCounts:
        return ResidencyCounts(
            decode_hits=(counts[HITS_PROBATION], counts[HITS_PROTECTED]),
            decode_misses=counts[MISSES],
            evictions=(counts[EVICTED_PROBATION], counts[EVICTED_PROTECTED]),
            prompt_hits=(self._prompt_hits[0], self._prompt_hits[1]),
            prompt_misses=self._prompt_misses,
            gather_seconds=counts[GATHER_NANOSECONDS] * 1e-9,
            bytes_for_peers=counts[FOR_PEERS],
            bytes_by_peers=counts[BY_PEERS],
        )

    def _decode(
        self,
        layer: int,
        run: CudaExpertRun,
        ids: torch.Tensor,
        *,
        num_needed: int | None = None,
        fetch: FetchWindow | None = None,
    ) -> None:
        tables = ops.cache_access(ids, self._state, layer=layer, num_needed=num_needed)
        waves: Sequence[torch.Tensor] = tables[1:].unbind()
        places: Sequence[torch.Tensor | None] = [None] * len(waves)
        if self._state.place_of is not None:
            waves, places = waves[: len(waves) // 2], waves[len(waves) // 2 :]
        with self._side.behind_caller():
            self._gather(layer, waves[0], places[0], fetch)
        run.compute(tables[0])
        self._side.join()
        run.compute(waves[0])
        for table, of_wave in zip(waves[1:], places[1:], strict=True):
            # Its slots may be those of the wave before. Ranks may have different numbers of waves, so each copies alone
            # here.
            self._gather(layer, table, of_wave)
            run.compute(table)

    def _gather(
        self, layer: int, table: torch.Tensor, places: torch.Tensor | None, fetch: FetchWindow | None = None
    ) -> None:
        gate_up, down = self._words
        if fetch is None:
            ops.gather_experts(self._blobs, table, gate_up, down, layer=layer, counts=self._state.counts, places=places)
        else:
            ops.fetch_experts(self._blobs, table, gate_up, down, fetch, layer=layer, counts=self._state.counts)

    def _await_ahead(self) -> None:
        """Let later launches wait for copies of prefetched experts if they may overwrite host memory."""
        if self._state.place_of is not None and self._ahead[1]:
            for event in self._ready:
                event.wait()

    def _look(self, layer: int, ids: torch.Tensor, decode: torch.Tensor) -> _Experts:
        """Return what the host must know of a layer. It waits for the device."""
        marks = torch.zeros(2, self._num_experts + 1, dtype=torch.int32, device=ids.device)
        for mark, of in zip(marks, (ids, decode), strict=True):
            mark.index_fill_(0, (of + 1).flatten().long(), 1)
        state, following = self._state, min(layer + 1, self._num_layers - 1)
        slots = state.slot_of[layer]
        parts = [*marks[:, 1:], slots, state.protected[slots.clamp(min=0)], state.slot_of[following]]
        if state.place_of is not None:
            parts += [state.place_of[layer], state.place_of[following]]
        needed, of_decode, here, protected, after, *places = torch.stack(parts).tolist()
        places = places or [range(i * len(here), (i + 1) * len(here)) for i in (layer, following)]
        return _Experts(needed, of_decode, here, protected, places[0], after, places[1])

    def _stream(self, run: CudaExpertRun, resident: dict[int, int], missing: Mapping[int, int], layer: int) -> None:
        """Compute the resident experts, then the missing ones (their places), half by half."""
        of_layer, ahead = self._ahead
        # Ignore prefetched experts that are not missing.
        placed = [
            {expert: slot for expert, slot in half.items() if expert in missing}
            for half in (ahead if of_layer == layer else ())
        ]
        self._ahead = (-1, [])
        fetched = len(placed)
        left = sorted(missing.keys() - set[int]().union(*placed))
        for begin in range(0, len(left), self._half):
            placed.append(self._places(left[begin : begin + self._half], self._turn + len(placed)))
        tables = self._tables([resident, *placed])
        for g in range(fetched, min(2, len(placed))):
            self._fetch(placed[g], missing, self._turn + g)
        if resident:
            run.compute(tables[0])
        for g, group in enumerate(placed):
            half = (self._turn + g) % 2
            self._ready[half].wait()
            if group:
                run.compute(tables[1 + g])
            self._free[half].record()
            if g + 2 < len(placed):
                self._fetch(placed[g + 2], missing, self._turn + g + 2)
        self._turn += len(placed)
        self._prompt_misses += len(missing)

    def _fetch_ahead(self, layer: int, missing: Mapping[int, int]) -> None:
        """Copy the first missing experts of the next layer (their places), as many as both halves hold."""
        first = list(missing)[: 2 * self._half]
        groups = [first[: self._half], first[self._half :]]
        placed = [self._places(group, self._turn + g) for g, group in enumerate(groups) if group]
        for g, group in enumerate(placed):
            self._fetch(group, missing, self._turn + g)
        self._ahead = (layer, placed)

    def _places(self, experts: Sequence[int], turn: int) -> dict[int, int]:
        """Return slots of the half whose turn it is."""
        return {expert: self._num_slots + turn % 2 * self._half + i for i, expert in enumerate(experts)}

    def _fetch(self, group: Mapping[int, int], places: Mapping[int, int], turn: int) -> None:
        """Begin to copy experts (their slots) into a half, after its last read."""
        with self._copier.following(self._free[turn % 2]):
            for expert, slot in group.items():
                self._copy(places[expert], slot)
            self._ready[turn % 2].record()

    def _copy(self, place: int, slot: int) -> None:
        for region, found in zip(self._slots.regions, self._host.regions(place), strict=True):
            region[slot].copy_(found, non_blocking=True)

    def _tables(self, slots: Sequence[dict[int, int]]) -> torch.Tensor:
        device = self._slots.device
        rows = [[of.get(expert, -1) for expert in range(self._num_experts)] for of in slots]
        return to_device(torch.tensor(rows, dtype=torch.int32), device)


class _NoEvent:
    """The event of a CPU, where every call has finished when it returns."""

    def record(self) -> None:
        pass

    def wait(self) -> None:
        pass

    def query(self) -> bool:
        return True


class _SideStream:
    """A second stream; on a CPU the caller's own order."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._begun, self._done = self.event(), self.event()

    def event(self) -> "torch.cuda.Event | _NoEvent":
        return _NoEvent() if self._stream is None else torch.cuda.Event()

    def following(self, event: "torch.cuda.Event | _NoEvent") -> AbstractContextManager[object]:
        """Run launches of the block here after `event` (at once if it was never recorded)."""
        if self._stream is None:
            return nullcontext()
        assert isinstance(event, torch.cuda.Event)
        self._stream.wait_event(event)
        return torch.cuda.stream(self._stream)

    def behind_caller(self) -> AbstractContextManager[object]:
        """Run launches of the block here, after the caller's launches so far."""
        self._begun.record()
        return self.following(self._begun)

    def join(self) -> None:
        """Make the caller's next launches wait for the launches here."""
        if self._stream is not None:
            assert isinstance(self._done, torch.cuda.Event)
            self._done.record(self._stream)
            self._done.wait()

    def synchronize(self) -> None:
        if self._stream is not None:
            torch.cuda.synchronize()
