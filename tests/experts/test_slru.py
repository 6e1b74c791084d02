"""The default policy against a model of its rules, and the purpose of the rules."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from tests.experts.accesses import NUM_EXPERTS, NUM_LAYERS, Need, hits_of, needs, num_slots, small

from moeyard_kernels.types.expert_ranks import DECAY, FIRST, HALF_LIFE, UNIT, add_use, now_at
from moeyard_worker.experts.policies import POLICIES
from moeyard_worker.experts.policy import Counters, ExpertKey, Placed, Segment
from moeyard_worker.experts.ranked import RankedPolicy


@dataclass
class Entry:
    """A resident expert of the model below."""

    key: ExpertKey
    slot: int
    proved: bool = False

    @property
    def segment(self) -> Segment:
        return "protected" if self.proved else "probation"


class PlainSlru:
    """The default policy by its rules alone: one flat list, whole histories, every choice by search."""

    def __init__(self, resident: Sequence[ExpertKey]) -> None:
        self.entries = [Entry(key, slot) for slot, key in enumerate(resident)]
        self.half = max(1, len(resident) // 2)
        self.step, self.layer, self.visits = 0, -1, 0
        self.uses: dict[ExpertKey, list[int]] = {}  # steps in which a decode row needed it
        self.visit: dict[int, tuple[int, list[int]]] = {}  # number and needs of the layer's last visit by decode rows

    def access(self, layer: int, decode: list[int]) -> list[list[Placed]]:
        if not decode:
            return []
        self.step += layer <= self.layer
        self.layer = layer
        self.visits += 1
        self.visit[layer] = self.visits, decode
        hits, todo = [], []
        for e in decode:
            self.uses.setdefault((layer, e), []).append(self.step)
            entry = next((x for x in self.entries if x.key == (layer, e)), None)
            if entry is None:
                todo.append(e)
                continue
            hits.append(Placed(expert=e, slot=entry.slot, kind="decode", hit=entry.segment))
            entry.proved = True
        out = [hits]
        for e in todo:
            if len(out[-1]) >= self.half:
                out.append([])
            used = {(layer, p.expert) for p in out[-1]}
            victim = min((x for x in self.entries if x.key not in used), key=self.order)
            self.entries.remove(victim)
            self.entries.append(Entry((layer, e), victim.slot))
            placed = Placed(expert=e, slot=victim.slot, kind="decode", evicted=victim.key, evicted_from=victim.segment)
            out[-1].append(placed)
        return out

    def order(self, entry: Entry) -> tuple[bool, float, int, ExpertKey]:
        layer, expert = entry.key
        # The arithmetic is that of the policy, or rounding would order equal sums differently.
        uses = 0
        for step in self.uses.get(entry.key, []):
            uses = add_use(now_at(step), uses)
        number, needed = self.visit.get(layer, (0, []))
        if expert not in needed:
            return False, uses, 0, entry.key
        half_powers = math.floor(2 * (uses - now_at(self.uses[entry.key][-1])) / UNIT)
        return True, half_powers, -number, entry.key


@given(num_slots, needs())
def test_slru_equals_its_model(slots: int, accesses: list[Need]) -> None:
    compare_with_model(small("slru", slots), accesses)


@pytest.mark.parametrize("slots", [1, 6, 9, 10, 20, 25, 30])
def test_slru_equals_its_model_on_long_skewed_runs(slots: int) -> None:
    rng = random.Random(slots)
    accesses = []
    for _ in range(600):
        # Low ids are hot.
        used = {min(int(rng.expovariate(0.3)), 11) for _ in range(rng.randint(1, 6))}
        accesses.append((rng.randrange(NUM_LAYERS), sorted(used), list[int]()))
    compare_with_model(small("slru", slots, num_experts=12), accesses)


def compare_with_model(policy: RankedPolicy, accesses: list[Need]) -> None:
    model = PlainSlru(policy.resident)
    for layer, decode, prefill in accesses:
        waves = [wave for wave in policy.access(layer, decode, prefill) if wave[0].kind == "decode"]
        assert waves == model.access(layer, decode)
    policy.validate()


def test_integer_scores_are_decayed_sums() -> None:
    """For any history the error is below a hundredth of a power of 2."""
    rng = random.Random(3)
    for _ in range(50):
        steps = sorted(rng.sample(range(400), rng.randint(1, 60)))
        uses = 0
        for step in steps:
            uses = add_use(now_at(step), uses)
        exact = math.log2(sum(2 ** ((step - steps[-1]) / HALF_LIFE) for step in steps))
        assert abs((uses - now_at(steps[-1])) / UNIT - exact) < 0.02
    assert now_at(HALF_LIFE) - FIRST == UNIT == HALF_LIFE * DECAY


def decode_hit_rate(policy: RankedPolicy, accesses: Sequence[Need]) -> float:
    counters = Counters()
    for layer, decode, prefill in accesses:
        for wave in policy.access(layer, decode, prefill):
            counters.count(wave)
    hits = sum(count for (_, kind), count in counters.hits.items() if kind == "decode")
    return hits / (hits + counters.misses["decode"])


def passes(rng: random.Random, *, num_passes: int, num_needed: int) -> list[Need]:
    """Return accesses over 6 layers of 32 experts, where low ids are needed more often."""
    accesses: list[Need] = []
    for step in range(num_passes * 6):
        used: set[int] = set()
        while len(used) < num_needed:
            used.add(min(int(rng.expovariate(0.12)), 31))
        accesses.append((step % 6, sorted(used), []))
    return accesses


@pytest.mark.parametrize(("slots", "num_needed"), [(8, 4), (16, 4), (8, 12), (16, 12), (48, 12)])
def test_fewer_slots_than_a_step_needs_still_hit(slots: int, num_needed: int) -> None:
    """Recency alone evicts every expert before its layer runs again, and so would a probation segment by recency."""
    assert slots < 6 * num_needed
    accesses = passes(random.Random(slots), num_passes=60, num_needed=num_needed)
    rates = {name: decode_hit_rate(small(name, slots, num_layers=6, num_experts=32), accesses) for name in POLICIES}
    assert rates["lru"] < 0.01
    # The hit rate of random residents is their share of all experts. Some slots serve the running layer.
    assert rates["slru"] > 0.7 * slots / (6 * 32)


@pytest.mark.parametrize("slots", [8, 16])
def test_loop_hits_resident_experts(slots: int) -> None:
    """24 experts repeat in turn. All slots except those of the running layer can hit, but none by recency."""
    accesses: list[Need] = [(step % 6, [0, 1, 2, 3], []) for step in range(6 * 150)]
    rates = {name: decode_hit_rate(small(name, slots, num_layers=6, num_experts=32), accesses) for name in POLICIES}
    # In the first pass one or two of the initial experts hit.
    assert rates["lru"] < 0.002
    assert rates["slru"] > (slots - 4) / 24


def test_the_last_visit_outranks_counts_and_counts_outrank_recency() -> None:
    policy = small("slru", 6, num_layers=1, num_experts=20)
    for decode in ([0], [0], [0], [1], [2]):
        policy.access(0, decode, [])
    # 0 was needed three times, 1 once after that, 2 at the last visit, and 3, 4 and 5 never.
    for expert, evicted in [(6, 3), (7, 4), (8, 5), (9, 1), (10, 2), (11, 6), (12, 7)]:
        [[miss]] = policy.access(0, [expert], [])
        assert miss.evicted == (0, evicted), expert
    # Counts decay: after HALF_LIFE x log2(3) steps three old uses are worth less than a new one.
    for _ in range(2 * HALF_LIFE):
        policy.access(0, [12], [])
    for expert in (13, 14, 15, 16, 17):
        [[miss]] = policy.access(0, [expert], [])
    assert (0, 0) not in policy.resident
    assert (0, 12) in policy.resident


def test_experts_of_the_last_visit_stay_until_the_next() -> None:
    """If counts are equal, the experts of the layer that was visited last are evicted."""
    policy = small("slru", 8, num_layers=4, num_experts=9)
    for layer in range(4):
        policy.access(layer, [0, 1], [])
    [[first, second]] = policy.access(0, [5, 6], [])
    # Experts 0 and 1 of layer 0 are no longer needed, so they go first.
    assert [first.evicted, second.evicted] == [(0, 0), (0, 1)]
    [[*_, miss]] = policy.access(1, [0, 1, 5], [])
    assert miss.evicted == (0, 5)


def test_misses_of_a_wave_keep_half_of_the_slots() -> None:
    policy = small("slru", 8, num_layers=2, num_experts=10)
    policy.access(0, list(range(8)), [])
    waves = policy.access(1, list(range(10)), [])
    assert max(map(len, waves)) == 4
    assert len(hits_of(policy, 0, list(range(8)))) >= 4 - 2


def test_decode_hot_set_survives_a_scan() -> None:
    slru, lru = (small(name, 10, num_layers=2, num_experts=30) for name in ("slru", "lru"))
    for policy in (slru, lru):
        for _ in range(2):
            policy.access(0, [0, 1, 2, 3], [])
        for scanned in range(10, 30):
            policy.access(1, [scanned], [])
    assert hits_of(slru, 0, [0, 1, 2, 3]) == [0, 1, 2, 3]
    assert hits_of(lru, 0, [0, 1, 2, 3]) == []


@given(num_slots, needs(), needs())
def test_prompts_change_nothing_for_decode(slots: int, before: list[Need], accesses: list[Need]) -> None:
    with_prompts, without = (small("slru", slots) for _ in range(2))
    for layer, decode, prefill in [*before, *accesses]:
        one = [wave for wave in with_prompts.access(layer, decode, prefill) if wave[0].kind == "decode"]
        assert one == without.access(layer, decode, [])
    for layer in range(NUM_LAYERS):
        every = list(range(NUM_EXPERTS))
        assert hits_of(with_prompts, layer, [], every) == hits_of(without, layer, [], every)
