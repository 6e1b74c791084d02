"""The expert cache of one rank: store -> slots -> grouped compute, rows that hit first, then rows that missed.

Hits and misses go through the same kernel on the same kind of slot, so residency cannot change a bit of the output.
Where the backend decides residency itself (`ExpertResidency`), this is what fills and counts it; elsewhere the policy
is asked here, layer by layer. Both decide alike.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import add
from typing import Any

import torch

from moeyard_kernels.backend import Backend, ExpertResidency, ExpertRun
from moeyard_kernels.types.expert_residency import ResidencyCounts
from moeyard_worker.exchange.base import Dispatched
from moeyard_worker.experts.base import ExpertSource
from moeyard_worker.experts.policies import start_policy
from moeyard_worker.experts.policy import SEGMENTS, Counters, Placed
from moeyard_worker.experts.store import HostStore
from moeyard_worker.experts.trace import RoutingRecorder
from moeyard_worker.protocol import ExpertLoads

# Seconds between two looks at what a device has counted.
_LOOK_SECONDS = 0.2


@dataclass(slots=True)
class CacheStats:
    """Running totals that the metrics read.

    `bytes_copied` counts bytes written into slots, the start's filling included. `stall_seconds` holds, per access with
    misses since the last drain, the wall time spent waiting for copies (where the host waits), `copy_seconds` all of it
    (on a GPU the time of gathering what decode rows missed, beside rows that hit). `load_imbalance` maps a
    layer to the rows of its busiest local expert over the mean of all local experts, at the layer's last access with
    rows (where the host knows them), and `expert_rows` to the rows that each local expert has computed in all.
    `records_dropped` counts accesses that could not be recorded, None where nothing is recorded.
    """

    counters: Counters = field(default_factory=Counters)
    bytes_copied: int = 0
    copy_seconds: float = 0.0
    stall_seconds: list[float] = field(default_factory=list)
    load_imbalance: dict[int, float] = field(default_factory=dict)
    expert_rows: dict[int, list[int]] = field(default_factory=dict)
    records_dropped: int | None = None


class ExpertCache:
    """Keeps up to `num_slots` of a rank's experts in the backend's memory and computes dispatched rows with them.

    `layers` are the MoE layers in order and `experts` the global ids this rank owns in each of them; `dtype` is the
    served one (the source's tensors are rounded to it). Slots beyond the number of experts are not allocated; if there
    are fewer, the backend's `stream_slots` come on top. `preload` must be called before the first `run`.

    Raises ValueError for fewer than 1 slot or an unknown policy. Not thread-safe.
    """

    def __init__(
        self,
        *,
        backend: Backend,
        source: ExpertSource,
        layers: Sequence[int],
        experts: range,
        hidden: int,
        intermediate: int,
        dtype: torch.dtype,
        num_slots: int,
        policy: str = "slru",
        recorder: RoutingRecorder | None = None,
    ) -> None:
        assert experts, "a rank owns at least one expert per layer"
        assert experts.step == 1, f"a shard is contiguous, got {experts}"
        assert len(set(layers)) == len(layers) > 0, f"layers must be distinct, got {layers}"
        self.stats = CacheStats()
        self._layers = tuple(layers)
        self._index = {layer: i for i, layer in enumerate(layers)}
        self._experts = experts
        self._policy = start_policy(
            policy, layers=layers, experts=experts, num_slots=num_slots, num_streams=backend.stream_slots
        )
        self._recorder = recorder
        self._step = 0
        # Sees each layer's rows before they are computed, for measurements; not what a captured graph replays.
        self.observer: Callable[[int, Dispatched], None] | None = None
        self._store = HostStore(source, hidden=hidden, intermediate=intermediate)
        self._loaded = False
        self._slots = backend.expert_slots(
            num_slots=self.num_slots + (0 if self.all_resident else backend.stream_slots),
            hidden=hidden,
            intermediate=intermediate,
            dtype=dtype,
        )
        self._residency: ExpertResidency | None = None
        if not self.all_resident:
            self._residency = backend.expert_residency(
                self._slots,
                policy=policy,
                num_layers=len(layers),
                num_experts=len(experts),
                num_slots=self.num_slots,
            )
        self._looked = 0.0
        self._slot_bytes = 0
        # With everything resident the policy is not asked. Experts sit in the order of `start_policy`, and what the
        # policy would count follows from whether a decode row has used it: _unsettled[L] are the local ids that none
        # has.
        self._tables = (
            {
                layer: self._slots.slot_table(range(i * len(experts), (i + 1) * len(experts)))
                for i, layer in enumerate(layers)
            }
            if self.all_resident
            else {}
        )
        self._unsettled = {layer: set(range(len(experts))) for layer in layers}

    @property
    def num_slots(self) -> int:
        """Slots of the policy."""
        return self._policy.num_slots

    @property
    def num_experts(self) -> int:
        """Experts of this rank over all layers."""
        return len(self._layers) * len(self._experts)

    @property
    def all_resident(self) -> bool:
        """Whether every expert has its slot for good."""
        return self.num_slots == self.num_experts

    @property
    def captures_prompts(self) -> bool:
        """Whether a step with prompt rows asks nothing of the host, so that a graph can hold it."""
        return self.all_resident

    @property
    def num_preloaded(self) -> int:
        """Experts that `preload` reads."""
        return self.num_slots if self._residency is None else self.num_experts

    def preload(self, progress: Callable[[int], None] | None = None) -> None:
        """Copy the experts that slots start with into them; if the backend decides, all into the host's memory first.

        Does nothing the second time. `progress` is called after each expert with the bytes written for it.
        """
        if self._loaded:
            return
        done = progress or (lambda written: None)
        if self._residency is None:
            for slot, (layer, expert) in enumerate(self._policy.resident):
                written = self._fill(slot, layer, expert)
                self.stats.bytes_copied += written
                done(written)
        else:
            for i, layer in enumerate(self._layers):
                for local, expert in enumerate(self._experts):
                    done(self._residency.put(i, local, *self._store.read(layer, expert)))
            self.stats.bytes_copied += self._residency.start()
            self._slot_bytes = self.stats.bytes_copied // self.num_slots
        self._loaded = True

    def begin_step(self, step: int) -> None:
        """Name the step that the next accesses belong to; only the recorder uses it."""
        self._step = step

    def run(self, layer: int, dispatched: Dispatched) -> torch.Tensor:
        """The experts' outputs of one layer, [R, K, H], one row per (row, k) whose expert is here, holes elsewhere.

        With everything resident nothing is decided on the host; it counts where it knows the counts anyway.
        """
        assert self._loaded, "call preload() before the first run"
        if self.observer is not None:
            self.observer(layer, dispatched)
        run = self._slots.begin(
            dispatched.rows, dispatched.experts, num_experts=len(self._experts), prompt=dispatched.prompt
        )
        if self._recorder is not None:
            decode, prefill = _needed(run)
            self._recorder.record(
                step=self._step, layer=layer, decode=self._global(decode), prefill=self._global(prefill)
            )
        if self.all_resident:
            if run.known_counts is not None:
                self._count_resident(layer, run)
            run.compute(self._tables[layer])
        elif self._residency is not None:
            self._residency.run(self._index[layer], run)
        else:
            self._run_waves(layer, run)
        return run.result()

    def look(self, *, wait: bool = False) -> CacheStats:
        """The totals; what a device counts is as of the last look but one, or with `wait` as of now."""
        now = time.monotonic()
        if self._recorder is not None:
            self.stats.records_dropped = self._recorder.dropped
        if self._residency is not None and (wait or now >= self._looked + _LOOK_SECONDS):
            self._looked = now
            self._take(self._residency.counts(wait=wait))
        return self.stats

    def _take(self, counts: ResidencyCounts) -> None:
        counters = self.stats.counters
        for i, segment in enumerate(SEGMENTS):
            counters.hits[segment, "decode"] = counts.decode_hits[i]
            counters.hits[segment, "prefill"] = counts.prompt_hits[i]
            counters.evictions[segment, "decode"] = counts.evictions[i]
        counters.misses["decode"] = counts.decode_misses
        counters.misses["prefill"] = counts.prompt_misses
        self.stats.copy_seconds = counts.gather_seconds
        self.stats.bytes_copied = (self.num_slots + counters.num_misses) * self._slot_bytes

    def loads(self, rank: int) -> ExpertLoads:
        """The rows that this rank's experts have computed; none where the host has not learned of any."""
        known, nothing = self.stats.expert_rows, [0] * len(self._experts)
        return ExpertLoads(
            rank=rank,
            layers=self._layers,
            first_expert=self._experts.start,
            num_experts=len(self._experts),
            rows=tuple(chain.from_iterable(known.get(layer, nothing) for layer in self._layers)) if known else (),
        )

    def validate(self) -> None:
        """Assert every invariant, of the policy too."""
        self._policy.validate()
        if self._residency is not None:
            self._residency.validate()
        if self.all_resident:
            assert self.stats.counters.num_misses == self.stats.counters.num_evictions == 0

    def _run_waves(self, layer: int, run: ExpertRun) -> None:
        decode, prefill = _needed(run)
        self._observe_load(layer, run.counts)
        stalls: list[float] = []
        for wave in self._policy.access(layer, self._global(decode), self._global(prefill)):
            self.stats.counters.count(wave)
            hits = [placed for placed in wave if placed.hit is not None]
            misses = [placed for placed in wave if placed.hit is None]
            if hits:
                run.compute(self._table(hits))
            if misses:
                begun = time.perf_counter()
                for placed in misses:
                    self.stats.bytes_copied += self._fill(placed.slot, layer, placed.expert)
                stalls.append(time.perf_counter() - begun)
                run.compute(self._table(misses))
        if stalls:
            self.stats.stall_seconds.append(sum(stalls))
            self.stats.copy_seconds += sum(stalls)

    def _fill(self, slot: int, layer: int, expert: int) -> int:
        """Copy an expert into a slot; returns the bytes written."""
        written = self._slots.write(slot, *self._store.read(layer, expert))
        self._store.check(layer, expert)
        return written

    def _table(self, wave: list[Placed]) -> Any:
        """The slots of these experts, -1 for all others."""
        slots = [-1] * len(self._experts)
        for placed in wave:
            slots[placed.expert - self._experts.start] = placed.slot
        return self._slots.slot_table(slots)

    def _observe_load(self, layer: int, counts: Sequence[int]) -> None:
        total = sum(counts)
        if total:
            self.stats.load_imbalance[layer] = max(counts) * len(counts) / total
            before = self.stats.expert_rows.get(layer)
            self.stats.expert_rows[layer] = list(counts) if before is None else list(map(add, before, counts))

    def _global(self, local: list[int]) -> list[int]:
        first = self._experts.start
        return [first + i for i in local]

    def _count_resident(self, layer: int, run: ExpertRun) -> None:
        """Count what the policy would: all hits, settled ones where decode rows have used the expert before."""
        self._observe_load(layer, run.counts)
        decode, prefill = _needed(run)
        hits = self.stats.counters.hits
        settled = self._policy.settled
        unsettled = self._unsettled[layer]
        if unsettled:
            fresh = unsettled.intersection(decode)
            unsettled -= fresh
            hits["probation", "decode"] += len(fresh)
            hits[settled, "decode"] += len(decode) - len(fresh)
            num_unsettled = len(unsettled.intersection(prefill))
            hits["probation", "prefill"] += num_unsettled
            hits[settled, "prefill"] += len(prefill) - num_unsettled
        else:
            hits[settled, "decode"] += len(decode)
            hits[settled, "prefill"] += len(prefill)


def _needed(run: ExpertRun) -> tuple[list[int], list[int]]:
    """Local ids of the experts that a decode row needs, and of those that only prompt rows need, ascending."""
    decode: list[int] = []
    prefill: list[int] = []
    for local, (count, num_decode) in enumerate(zip(run.counts, run.decode_counts, strict=True)):
        if count:
            (decode if num_decode else prefill).append(local)
    return decode, prefill
