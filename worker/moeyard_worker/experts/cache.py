"""The expert cache of one rank: store, slots, grouped products; rows that hit first, then rows that missed.

Hits and misses use the same kernel on the same kind of slot, so residency cannot change a bit of the output. A backend
may decide residency itself (`ExpertResidency`). Then this class only fills it and reads its counts. Otherwise it asks
the policy in each layer. Both make the same decisions.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from moeyard_kernels.backend import Backend, ExpertResidency, ExpertRun, MovableSlots
from moeyard_kernels.types.matrix import ExpertViews, Fill
from moeyard_kernels.types.peer_shape import LentMemory
from moeyard_kernels.types.weight_form import ExpertForm
from moeyard_worker.config.engine_config import ExpertHostStore
from moeyard_worker.exchange.base import Dispatched
from moeyard_worker.experts.owned import Change, Owned, first_residents, of_layers
from moeyard_worker.experts.policies import start_policy
from moeyard_worker.experts.policy import ExpertKey, Placed
from moeyard_worker.experts.ranked import RankedPolicy
from moeyard_worker.experts.recorder import RoutingRecorder
from moeyard_worker.experts.stats import CacheStats, Counting, needed
from moeyard_worker.protocol import ExpertLoads

_LOOK_SECONDS = 0.2  # between two reads of a device's counters


class ExpertSource(Protocol):
    """The weights of experts, read on demand."""

    def expect(self, experts: Iterable[ExpertKey]) -> None:
        """Announce the next calls of `fill`, (layer, global id) in order, so that their files may be read ahead."""
        ...

    def fill(self, layer: int, expert: int, out: ExpertViews) -> None:
        """Write global expert `expert` of layer `layer` into `out`. May be called in any thread.

        Raises CheckpointError if a file has changed since it was checked.
        """
        ...


class StagedExperts(NamedTuple):
    """The source of new weights, and experts that were read from it: (layer, global id) -> packed."""

    source: ExpertSource
    packed: dict[ExpertKey, Any]


class ExpertCache:
    """Keeps up to `num_slots` of a rank's experts in the backend's memory and computes dispatched rows with them.

    layers: the MoE layers in order.
    experts: global ids that this rank owns in each layer; a range means the same ids in all layers. Policy and kernels
        use local ids.
    form: the layout of an expert in a slot.
    num_slots: at most the number of experts. If it is less, the backend's `stream_slots` are added for prompts.
    host_store: which experts are in the host memory of a GPU: "all", "missing" (those without a slot) or "none".
    shared: whether other ranks may read the host memory that the backend keeps experts in (`lent`).
    captured: whether steps may be captured, in a fleet of one rank. Replayed steps do not call `run`, so the caller
        records them (`record`).

    Call `preload` before the first `run`. If `movable`, the experts may change between steps (`prepare`, then `adopt`).
    Raises ValueError for fewer than 1 slot and for an unknown policy. If the backend decides residency, it also raises
    for layers with different numbers of experts. Only `prepare` may be called in another thread.
    """

    def __init__(
        self,
        *,
        backend: Backend,
        source: ExpertSource,
        layers: Sequence[int],
        experts: range | Owned,
        form: ExpertForm,
        num_slots: int,
        policy: str = "slru",
        recorder: RoutingRecorder | None = None,
        host_store: ExpertHostStore = "missing",
        shared: bool = False,
        captured: bool = False,
    ) -> None:
        assert len(set(layers)) == len(layers) > 0, f"layers must be distinct, got {layers}"
        self._layers = tuple(layers)
        self._index = {layer: i for i, layer in enumerate(layers)}
        self._owned = of_layers(experts, len(layers))
        self._counting = Counting(self._layers, self._owned)
        self.stats = self._counting.stats
        self._policy_name, self._num_streams, self._choices = policy, backend.stream_slots, backend.choices
        self._policy = self._start_policy(num_slots, None)
        self._change: Change | None = None
        self._recorder, self._step, self._captured = recorder, 0, captured
        # Called with each layer's rows before they are computed, but not by a replayed graph.
        self.observer: Callable[[int, Dispatched], None] | None = None
        self._form, self._source, self._all_on_host = form, source, host_store == "all"
        self._loaded = False
        self._slots = backend.expert_slots(num_slots=self.num_slots + self._num_passing, form=form)
        self._residency: ExpertResidency | None = None
        if not self.all_resident and host_store != "none":
            self._residency = backend.expert_residency(
                self._slots,
                policy=policy,
                num_layers=len(layers),
                num_experts=self._width,
                num_slots=self.num_slots,
                all_on_host=self._all_on_host,
                shared=shared,
            )
        if self._residency is not None and len({len(each) for each in self._owned}) > 1:
            raise ValueError("this device caches experts only where a rank owns as many in every layer")
        # Misses and evictions before the last change of experts.
        self._looked, self._slot_bytes, self._missed = 0.0, 0, (0, 0)
        # If every expert has a slot, the tables replace the policy.
        self._tables = self._resident_tables()

    def _start_policy(self, num_slots: int, resident: list[ExpertKey] | None) -> RankedPolicy:
        """Return the policy over local ids. Without `resident`, slots hold the first experts of each layer."""
        even = len({len(each) for each in self._owned}) == 1
        if resident is None and not even and num_slots > 0:
            num_slots = min(num_slots, self.num_experts)
            resident = first_residents(self._layers, self._owned, num_slots)
        return start_policy(
            self._policy_name,
            layers=self._layers,
            experts=range(self._width),
            num_slots=num_slots,
            num_streams=self._num_streams,
            resident=resident,
        )

    def _resident_tables(self) -> dict[int, Any]:
        """Return each layer's table of slots, or nothing if not all experts have slots."""
        if not self.all_resident:
            return {}
        slot_of = {key: slot for slot, key in enumerate(self._policy.resident)}
        return {
            layer: self._slots.slot_table([slot_of[layer, i] for i in range(len(each))])
            for layer, each in zip(self._layers, self._owned, strict=True)
        }

    @property
    def num_slots(self) -> int:
        """Number of slots of the policy."""
        return self._policy.num_slots

    @property
    def num_experts(self) -> int:
        """Number of this rank's experts over all layers."""
        return sum(map(len, self._owned))

    @property
    def _width(self) -> int:
        """Number of this rank's experts in the layer where it has most."""
        return max(map(len, self._owned))

    @property
    def _num_passing(self) -> int:
        """Number of slots for misses of prompts."""
        return 0 if self.all_resident else self._num_streams

    @property
    def movable(self) -> bool:
        """Whether `prepare` and `adopt` may be called."""
        return self._residency is None and isinstance(self._slots, MovableSlots)

    @property
    def all_resident(self) -> bool:
        """Whether every expert has a permanent slot."""
        return self.num_slots == self.num_experts

    @property
    def defers_choices(self) -> bool:
        """Whether the kernels may choose a single row's experts, because nothing here needs their ids."""
        return self.all_resident and (self._recorder is None or self._captured) and self.observer is None

    @property
    def joins_shared(self) -> bool:
        """Whether a kernel that chooses may also compute a shared expert. Those over codes may not."""
        return not self._form.gate_up.tiled

    @property
    def wants_choices(self) -> bool:
        """Whether the caller must `record` each step."""
        return self._recorder is not None and self._captured

    @property
    def lent(self) -> LentMemory | None:
        """The handle by which other ranks of the host read this rank's experts; None if they may not."""
        return None if self._residency is None else self._residency.lent

    @property
    def num_preloaded(self) -> int:
        """Number of experts that `preload` reads."""
        return self.num_slots if self._residency is None else self.num_experts

    def preload(self, progress: Callable[[int], None] | None = None) -> None:
        """Fill the slots. If the backend decides residency, read all experts into host memory first.

        Later calls do nothing. `progress` is called after each expert with the bytes written for it.
        """
        if self._loaded:
            return
        done = progress or (lambda written: None)
        keys = self._residents() if self._residency is None else self.owned_keys()
        self._source.expect(keys)
        if self._residency is None:
            for slot, (layer, expert) in enumerate(keys):
                self._fill(slot, layer, expert)
                done(self._form.blob_bytes)
        else:
            for i, layer in enumerate(self._layers):
                for local, expert in enumerate(self._owned[i]):
                    self._residency.put(i, local, self._filling(layer, expert))
                    done(self._form.blob_bytes)
            self.stats.bytes_copied += self._residency.start()
            self._slot_bytes = self._form.blob_bytes
        self._loaded = True

    def begin_step(self, step: int) -> None:
        """Set the step of the next accesses, for the recorder."""
        self._step = step

    def run(self, layer: int, dispatched: Dispatched) -> torch.Tensor | None:
        """Return the experts' outputs of one layer, [R, K, H].

        Only rows of pairs whose expert is on this rank are written. The result is None if the kernels wrote it to
        `Dispatched.result_window`. If all experts are resident, the host decides nothing and counts only what it knows.
        """
        assert self._loaded, "call preload() before the first run"
        if self.observer is not None:
            self.observer(layer, dispatched)
        owned = self._owned[self._index[layer]]
        run = self._slots.begin(dispatched, num_experts=len(owned))
        if self._recorder is not None and not self._captured:
            decode, prefill = needed(run)
            self._recorder.record(
                step=self._step, layer=layer, decode=[owned[i] for i in decode], prefill=[owned[i] for i in prefill]
            )
        if self.all_resident:
            if run.known_counts is not None:
                self._counting.count_resident(layer, run, self._policy.settled)
            run.compute(self._tables[layer])
        elif self._residency is not None:
            self._residency.run(self._index[layer], run, dispatched.expert_fetch)
        else:
            self._run_waves(layer, run)
        return run.result()

    def record(self, step: int, choices: bytes, *, num_rows: int, num_prompt: int) -> None:
        """Record the accesses of a step from the experts that its rows chose, as `StepRouting` has them. The first
        `num_prompt` of `num_rows` rows belong to prompts."""
        assert self._recorder is not None, "nothing is recorded"
        if not num_rows:
            return
        # `ModelConfig.expert_id_bytes` of the model, whose experts are all here.
        dtype = torch.uint8 if self._width <= 256 else torch.int16
        ids = torch.frombuffer(bytearray(choices), dtype=dtype).view(num_rows, len(self._layers), -1)
        for layer, rows in zip(self._layers, ids.unbind(1), strict=True):
            prompt, decode = (set(part.flatten().tolist()) for part in (rows[:num_prompt], rows[num_prompt:]))
            self._recorder.record(step=step, layer=layer, decode=sorted(decode), prefill=sorted(prompt - decode))

    def look(self, *, wait: bool = False) -> CacheStats:
        """Return the totals. Counts of a device are those of the last read but one, or current ones with `wait`."""
        now = time.monotonic()
        if self._recorder is not None:
            self.stats.records_dropped = self._recorder.dropped
        if self._residency is not None and (wait or now >= self._looked + _LOOK_SECONDS):
            self._looked = now
            counts, size = self._residency.counts(wait=wait), self._slot_bytes
            self.stats.take(counts, num_slots=self.num_slots, slot_bytes=size, all_on_host=self._all_on_host)
        return self.stats

    @property
    def fetch_seconds(self) -> float | None:
        """Total time for which the host waited for expert weights. None if a device fetches them."""
        return self.stats.copy_seconds if self._residency is None else None

    def loads(self, rank: int) -> ExpertLoads | None:
        """Return the rows that experts computed, or None while the counts of a device are being copied."""
        chosen = () if self._choices is None else self._choices.read()
        return None if chosen is None else self._counting.loads(rank, chosen)

    def prepare(self, experts: range | Owned, *, room: int = 0) -> int:
        """Read the new experts for `adopt` while steps run. Return the bytes read. The last call counts.

        A cache that holds all experts may grow by `room` slots. Experts without a slot are read on demand.
        """
        slots, owned = self._slots, of_layers(experts, len(self._layers))
        assert isinstance(slots, MovableSlots), "the experts of this backend cannot move"
        change = Change(owned, min(sum(map(len, owned)), self.num_slots + (room if self.all_resident else 0)))
        written = 0
        if self.all_resident and owned != self._owned:
            for layer, expert in change.missing(self._residents(), self._layers):
                change.packed[layer, expert] = slots.pack(self._filling(layer, expert))
                written += self._form.blob_bytes
        self._change = change
        return written

    def adopt(self, owned: Owned) -> None:
        """Own these experts from now on. Call this between steps. Reads experts that `prepare` did not read.

        The counts of uses start again.
        """
        change, self._change, slots = self._change, None, self._slots
        if owned == self._owned:
            return
        assert isinstance(slots, MovableSlots), "the experts of this backend cannot move"
        if change is None or change.owned != owned:
            change = Change(owned, min(sum(map(len, owned)), self.num_slots))
        places = {key: slot for slot, key in enumerate(self._residents())}
        missing = change.missing(places, self._layers)
        stay = {(layer, e) for layer, each in zip(self._layers, owned, strict=True) for e in each}
        resident = [key for key in places if key in stay][: change.num_slots]
        order: list[Any] = [places[key] for key in resident]
        for key in missing:
            order.append(change.packed.get(key) or slots.pack(self._filling(*key)))
        self.stats.bytes_copied += len(missing) * self._form.blob_bytes
        self._owned = owned
        index = [{expert: i for i, expert in enumerate(each)} for each in owned]
        local = [(layer, index[self._index[layer]][expert]) for layer, expert in (*resident, *missing)]
        self._policy = self._start_policy(len(local), local)
        slots.rearrange([*order, *[None] * self._num_passing])
        self._tables = self._resident_tables()
        self._counting.change(owned)
        self._missed = (self.stats.counters.num_misses, self.stats.counters.num_evictions)

    def stage(self, source: ExpertSource) -> StagedExperts:
        """Read the experts of new weights for `replace` while steps run. Any thread.

        Only slots that hold all experts and can move are read now. Other caches read the experts in `replace`.
        """
        staged = StagedExperts(source, {})
        if self.all_resident and self._residency is None and isinstance(slots := self._slots, MovableSlots):
            for layer, expert in self._residents():
                staged.packed[layer, expert] = slots.pack(partial(source.fill, layer, expert))
        return staged

    def replace(self, staged: StagedExperts) -> None:
        """Use experts of other weights from now on. Call this between steps. Slots on a GPU keep their addresses."""
        self._source, self._change, slots = staged.source, None, self._slots
        if self._residency is not None or not isinstance(slots, MovableSlots):
            self._loaded = False
            self.preload()
            return
        order = [staged.packed.get(key) or slots.pack(self._filling(*key)) for key in self._residents()]
        slots.rearrange([*order, *[None] * self._num_passing])

    @property
    def regions(self) -> tuple[torch.Tensor, ...]:
        """The tensors of all slots. Empty if each slot has memory of its own, which `give_back` frees."""
        return self._slots.regions

    def give_back(self) -> int:
        """Free the memory of all slots until `refill` or `replace_from`. Return its bytes."""
        slots = self._slots
        assert isinstance(slots, MovableSlots), "the slots of this backend are its `regions`"
        slots.rearrange([None] * (self.num_slots + self._num_passing))
        return self.num_slots * self._form.blob_bytes

    def refill(self) -> None:
        """Fill the slots with the experts that they had, from the store. Tensors of all experts were kept outside.

        Host memory without copies of the experts in slots is no store. Without a store the source is read again.
        """
        if self._residency is not None and self._all_on_host:
            self.stats.bytes_copied += self._residency.start()
        elif not self.all_resident or isinstance(self._slots, MovableSlots):
            self.replace_from(self._source)

    def replace_from(self, source: ExpertSource) -> None:
        """Fill the slots from a source, which may be of other weights. Call this between steps."""
        self.replace(StagedExperts(source, {}))

    def stored(self) -> Iterator[tuple[ExpertKey, tuple[torch.Tensor, ...]]]:
        """Yield (layer, global id) and the memory of each expert that this rank holds for good.

        Without slots for all experts and without host memory for the others, the files are the store. Raises ValueError
        if steps may move the experts while they are read.
        """
        if self._residency is not None and not self._all_on_host:
            raise ValueError("experts change places between slots and host memory; use --expert-host-store all")
        if self._residency is not None:
            for i, layer in enumerate(self._layers):
                for local, expert in enumerate(self._owned[i]):
                    yield (layer, expert), (self._residency.stored(i, local),)
        elif self.all_resident:
            for slot, key in enumerate(self._residents()):
                yield key, self._slots.contents(slot)

    def owned_keys(self) -> list[ExpertKey]:
        """Return (layer, global id) of all experts of this rank."""
        return [(layer, expert) for layer, each in zip(self._layers, self._owned, strict=True) for expert in each]

    def _residents(self) -> list[ExpertKey]:
        """Return (layer, global id) of each slot's expert."""
        return [(layer, self._owned[self._index[layer]][i]) for layer, i in self._policy.resident]

    def validate(self) -> None:
        """Assert every invariant, with those of the policy."""
        self._policy.validate()
        if self._residency is not None:
            self._residency.validate()
        if self.all_resident:
            assert (self.stats.counters.num_misses, self.stats.counters.num_evictions) == self._missed

    def _run_waves(self, layer: int, run: ExpertRun) -> None:
        decode, prefill = needed(run)
        self._counting.observe_load(layer, run.counts)
        stalls: list[float] = []
        owned = self._owned[self._index[layer]]
        for wave in self._policy.access(layer, decode, prefill):
            self.stats.counters.count(wave)
            hits = [placed for placed in wave if placed.hit is not None]
            misses = [placed for placed in wave if placed.hit is None]
            if hits:
                run.compute(self._table(hits, len(owned)))
            if misses:
                begun = time.perf_counter()
                for placed in misses:
                    self._fill(placed.slot, layer, owned[placed.expert])
                stalls.append(time.perf_counter() - begun)
                run.compute(self._table(misses, len(owned)))
        if stalls:
            self.stats.stall_seconds.append(sum(stalls))
            self.stats.copy_seconds += sum(stalls)

    def _filling(self, layer: int, expert: int) -> Fill:
        """Return the function that writes a global expert into given views."""
        return partial(self._source.fill, layer, expert)

    def _fill(self, slot: int, layer: int, expert: int) -> None:
        """Copy a global expert into a slot."""
        self._slots.write(slot, self._filling(layer, expert))
        self.stats.bytes_copied += self._form.blob_bytes

    def _table(self, wave: list[Placed], num_experts: int) -> Any:
        """Return the table of these experts' slots, -1 for all others of the layer."""
        slots = [-1] * num_experts
        for placed in wave:
            slots[placed.expert] = placed.slot
        return self._slots.slot_table(slots)
