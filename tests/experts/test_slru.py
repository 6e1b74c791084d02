"""The default policy against a model of its rules, and what its rules are for."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from tests.experts.accesses import NUM_LAYERS, Need, cycles, hits_of, needs, num_slots

from moeyard_worker.experts.policies import POLICIES, make_policy
from moeyard_worker.experts.policy import Counters, ExpertKey, Placed, ResidencyPolicy, RowKind, Segment
from moeyard_worker.experts.slru import HALF_LIFE, SegmentedLru


@dataclass
class Entry:
    """A resident expert of the model below. `streamed` is 0, or when a prompt brought it; `ranked` when its place in
    the order of victims was last decided."""

    key: ExpertKey
    slot: int
    proved: bool = False
    streamed: int = 0
    ranked: int = 0

    @property
    def segment(self) -> Segment:
        return "protected" if self.proved else "probation"


class PlainSlru:
    """The default policy by its rules alone: one flat list, whole histories, every choice a search."""

    def __init__(self, size: int, cycle: int) -> None:
        self.size, self.now, self.entries = size, 0, list[Entry]()
        self.width = max(1, min(size, max(cycle, size // 5)) // 4)
        self.step, self.layer = 0, -1
        self.uses: dict[ExpertKey, list[int]] = {}  # the steps in which a decode row needed it
        self.visit: dict[int, list[int]] = {}  # what decode rows needed at the layer's last visit

    def access(self, layer: int, decode: list[int], prefill: list[int]) -> list[list[Placed]]:
        if decode:
            self.step += layer <= self.layer
            self.layer = layer
            for e in self.visit.get(layer, []):
                if e not in decode:
                    for idle in (x for x in self.entries if x.key == (layer, e) and not x.streamed):
                        self.rank(idle)
            self.visit[layer] = decode
            for e in decode:
                self.uses.setdefault((layer, e), []).append(self.step)
        out: list[list[Placed]] = [[]]
        needed: list[tuple[int, RowKind]] = [(e, "decode") for e in decode]
        needed += [(e, "prefill") for e in prefill]
        todo = []
        for e, kind in needed:
            entry = next((x for x in self.entries if x.key == (layer, e)), None)
            if entry is None:
                todo.append((e, kind))
                continue
            out[0].append(Placed(expert=e, slot=entry.slot, kind=kind, hit=entry.segment))
            if kind == "decode":
                entry.proved, entry.streamed = True, 0
                self.rank(entry)
        for e, kind in todo:
            slot, victim = len(self.entries), None
            if slot == self.size:
                victim = self.victim(kind, {(layer, p.expert) for p in out[-1]})
                if victim is None:
                    out.append([])
                    victim = self.victim(kind, set())
                assert victim is not None
                self.entries.remove(victim)
                slot = victim.slot
            new = Entry((layer, e), slot)
            self.entries.append(new)
            self.rank(new)
            new.streamed = new.ranked if kind == "prefill" else 0
            evicted, evicted_from = (victim.key, victim.segment) if victim else (None, None)
            out[-1].append(Placed(expert=e, slot=slot, kind=kind, evicted=evicted, evicted_from=evicted_from))
        return out if out[0] else []

    def rank(self, entry: Entry) -> None:
        self.now += 1
        entry.ranked = self.now

    def order(self, entry: Entry) -> tuple[bool, float, int]:
        layer, expert = entry.key
        # The same arithmetic as the policy's, or equal sums would be ordered by their last bits.
        log_uses = -math.inf
        for step in self.uses.get(entry.key, []):
            log_uses = step / HALF_LIFE + math.log2(1 + 2 ** (log_uses - step / HALF_LIFE))
        if expert not in self.visit.get(layer, []):
            return False, log_uses, entry.ranked
        return True, math.floor(2 * (log_uses - self.uses[entry.key][-1] / HALF_LIFE)), -entry.ranked

    def victim(self, kind: str, pinned: set[ExpertKey]) -> Entry | None:
        if pinned and len(pinned) >= self.size // 2:
            return None
        streamed = [x for x in self.entries if x.streamed]
        newest = max((x for x in streamed if x.key not in pinned), key=lambda x: x.streamed, default=None)
        if newest is not None or (kind == "prefill" and len(streamed) >= self.width):
            return newest
        return min((x for x in self.entries if not x.streamed and x.key not in pinned), key=self.order, default=None)


@given(num_slots, cycles, needs())
def test_slru_equals_its_model(slots: int, cycle: int, accesses: list[Need]) -> None:
    compare_with_model(slots, cycle, accesses)


@pytest.mark.parametrize(("slots", "cycle"), [(1, 3), (6, 2), (9, 9), (10, 4), (20, 3), (25, 12), (30, 40)])
def test_slru_equals_its_model_on_long_skewed_runs(slots: int, cycle: int) -> None:
    rng = random.Random(slots)
    accesses = []
    for _ in range(600):
        # Low ids are hot; one access in four has prompt rows too.
        used = {min(int(rng.expovariate(0.3)), 11) for _ in range(rng.randint(1, 6))}
        prompt = {rng.randrange(12) for _ in range(6)} - used if rng.random() < 0.25 else set[int]()
        accesses.append((rng.randrange(NUM_LAYERS), sorted(used), sorted(prompt)))
    compare_with_model(slots, cycle, accesses)


def compare_with_model(slots: int, cycle: int, accesses: list[Need]) -> None:
    policy = make_policy("slru", num_slots=slots, cycle=cycle)
    model = PlainSlru(slots, cycle)
    for layer, decode, prefill in accesses:
        assert policy.access(layer, decode, prefill) == model.access(layer, decode, prefill)
    policy.validate()


def decode_hit_rate(policy: ResidencyPolicy, accesses: Sequence[Need]) -> float:
    counters = Counters()
    for layer, decode, prefill in accesses:
        for wave in policy.access(layer, decode, prefill):
            counters.count(wave)
    hits = sum(count for (_, kind), count in counters.hits.items() if kind == "decode")
    return hits / (hits + counters.misses["decode"])


def passes(rng: random.Random, *, num_passes: int, num_needed: int) -> list[Need]:
    """Steps through 6 layers of 32 experts, of which low ids are needed more often."""
    accesses: list[Need] = []
    for step in range(num_passes * 6):
        used: set[int] = set()
        while len(used) < num_needed:
            used.add(min(int(rng.expovariate(0.12)), 31))
        accesses.append((step % 6, sorted(used), []))
    return accesses


@pytest.mark.parametrize(("slots", "num_needed"), [(8, 4), (16, 4), (8, 12), (16, 12), (48, 12)])
def test_fewer_slots_than_a_step_needs_still_hit(slots: int, num_needed: int) -> None:
    """Recency alone evicts every expert before its layer comes round again, and so does a probation in its order."""
    assert slots < 6 * num_needed
    accesses = passes(random.Random(slots), num_passes=60, num_needed=num_needed)
    rates = {name: decode_hit_rate(make_policy(name, num_slots=slots, cycle=24), accesses) for name in POLICIES}
    assert rates["lru"] < 0.01
    # Experts held at random would be hit as often as they are resident; some slots serve the running layer.
    assert rates["slru"] > 0.7 * slots / (6 * 32)


@pytest.mark.parametrize("slots", [8, 16])
def test_a_loop_hits_what_stays(slots: int) -> None:
    """24 experts in turn, again and again: all slots but those of the running layer can hit, and by recency none."""
    accesses: list[Need] = [(step % 6, [0, 1, 2, 3], []) for step in range(6 * 150)]
    rates = {name: decode_hit_rate(make_policy(name, num_slots=slots, cycle=24), accesses) for name in POLICIES}
    assert rates["lru"] == 0
    assert rates["slru"] > (slots - 4) / 24


def test_the_last_visit_outranks_counts_and_counts_outrank_recency() -> None:
    policy = SegmentedLru(num_slots=3, cycle=2)
    for decode in ([0], [0], [0], [1], [2]):
        policy.access(0, decode, [])
    # 0 was needed three times, 1 once since, 2 at the last visit.
    for expert, evicted in [(3, (0, 1)), (4, (0, 2)), (5, (0, 3))]:
        [[miss]] = policy.access(0, [expert], [])
        assert miss.evicted == evicted
    # Counts decay: when HALF_LIFE x log2(3) steps have gone by, three old uses are worth less than a new one.
    for _ in range(2 * HALF_LIFE):
        policy.access(0, [5], [])
    policy.access(0, [6], [])
    [[miss]] = policy.access(0, [5], [])
    assert miss.hit == "protected"
    [[miss]] = policy.access(0, [7], [])
    assert miss.evicted == (0, 0)


def test_misses_of_a_wave_leave_half_of_the_slots_alone() -> None:
    policy = SegmentedLru(num_slots=8, cycle=8)
    policy.access(0, list(range(8)), [])
    waves = policy.access(1, list(range(10)), [])
    assert [len(wave) for wave in waves] == [4, 4, 2]
    assert len(hits_of(policy, 0, list(range(8)))) == 4


def test_the_decode_hot_set_survives_a_scan_of_decode_misses() -> None:
    slru, lru = make_policy("slru", num_slots=10, cycle=2), make_policy("lru", num_slots=10, cycle=2)
    for policy in (slru, lru):
        for _ in range(2):
            policy.access(0, [0, 1, 2, 3], [])
        for scanned in range(10, 30):
            policy.access(1, [scanned], [])
    assert hits_of(slru, 0, [0, 1, 2, 3]) == [0, 1, 2, 3]
    assert hits_of(lru, 0, [0, 1, 2, 3]) == []


@pytest.mark.parametrize("cycle", [2, 8, 100])
def test_a_long_prompt_streams_and_leaves_the_hot_set(cycle: int) -> None:
    policy = SegmentedLru(num_slots=16, cycle=cycle)
    hot = list(range(12))
    for _ in range(2):
        policy.access(0, hot, [])
    policy.access(1, [0, 1, 2, 3], [])
    for layer in range(2, 10):
        waves = policy.access(layer, [], list(range(40)))
        assert max(map(len, waves)) <= policy.stream_width
        policy.validate()
    # The prompt displaced the first in the order of victims, at most stream_width of them.
    lost = 16 - len(hits_of(policy, 0, hot)) - len(hits_of(policy, 1, [0, 1, 2, 3]))
    assert lost == policy.stream_width
    # A prompt's hits neither promote nor move.
    assert policy.access(9, [], [0, 39]) is not None
    assert all(p.hit != "protected" for wave in policy.access(9, [], list(range(40))) for p in wave)


@given(num_slots, cycles, needs(), needs())
def test_prompts_displace_few_experts_of_decode_rows(
    slots: int, cycle: int, before: list[Need], accesses: list[Need]
) -> None:
    policy = SegmentedLru(num_slots=slots, cycle=cycle)
    resident: set[ExpertKey] = set()  # because of a decode row
    for layer, decode, prefill in before:
        for p in (p for wave in policy.access(layer, decode, prefill) for p in wave):
            resident.discard(p.evicted or (-1, -1))
            if p.kind == "decode":
                resident.add((layer, p.expert))
    lost: set[ExpertKey] = set()
    for layer, decode, prefill in accesses:
        for p in (p for wave in policy.access(layer, [], sorted(decode + prefill)) for p in wave):
            if p.evicted in resident:
                lost.add(p.evicted)
    assert len(lost) <= policy.stream_width


def test_prompts_stream_through_a_quarter_of_a_cycle_or_a_twentieth_of_the_slots() -> None:
    widths = {
        (slots, cycle): SegmentedLru(num_slots=slots, cycle=cycle).stream_width
        for slots, cycle in [(100, 7), (100, 64), (8, 64), (1, 64)]
    }
    assert widths == {(100, 7): 5, (100, 64): 16, (8, 64): 2, (1, 64): 1}
