"""Residency policies against independent models, and the wave rules that hold for every policy."""

import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeyard_worker.experts.policies import POLICIES, cycle_length, make_policy, start_policy
from moeyard_worker.experts.policy import Counters, Key, Phase, Placed, ResidencyPolicy, Segment
from moeyard_worker.experts.slru import SegmentedLru

NUM_LAYERS, NUM_EXPERTS = 3, 6

Need = tuple[int, list[int], list[int]]


@st.composite
def needs(draw: st.DrawFn) -> list[Need]:
    """Accesses of (layer, decode ids, prefill ids)."""
    # 0: not needed, 1: a decode row needs it, 2: only prompt rows do.
    use = st.lists(st.sampled_from([0, 0, 0, 1, 1, 2]), min_size=NUM_EXPERTS, max_size=NUM_EXPERTS)
    steps = draw(st.lists(st.tuples(st.integers(0, NUM_LAYERS - 1), use), max_size=40))
    return [
        (layer, [e for e, u in enumerate(uses) if u == 1], [e for e, u in enumerate(uses) if u == 2])
        for layer, uses in steps
    ]


num_slots = st.integers(1, NUM_LAYERS * NUM_EXPERTS + 2)
cycles = st.integers(1, 12)


class Slots:
    """What lies in each slot, followed from the outside, with every promise of `ResidencyPolicy.access` checked."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.slot_of: dict[Key, int] = {}

    def follow(self, waves: Sequence[Sequence[Placed]], *, layer: int, decode: list[int], prefill: list[int]) -> None:
        placed = [p for wave in waves for p in wave]
        assert sorted((p.expert, p.phase) for p in placed) == sorted(
            [(e, "decode") for e in decode] + [(e, "prefill") for e in prefill]
        )
        assert all(waves)
        resident = {p.expert for p in placed if (layer, p.expert) in self.slot_of}
        first_hits = [p.hit is not None for p in waves[0]] if waves else []
        assert first_hits == sorted(first_hits, reverse=True), "a miss stands before a hit"
        assert {p.expert for p in placed if p.hit is not None} == resident
        assert all(p.hit is None for wave in waves[1:] for p in wave)
        for wave in waves:
            assert len({p.slot for p in wave}) == len(wave), "a slot is assigned twice in a wave"
            used = {(layer, p.expert) for p in wave}
            for p in wave:
                assert 0 <= p.slot < self.size
                if p.hit is not None:
                    assert self.slot_of[layer, p.expert] == p.slot
                    assert p.evicted is None
                    assert p.evicted_from is None
                    continue
                if p.evicted is None:
                    assert p.slot not in self.slot_of.values()
                    assert p.evicted_from is None
                else:
                    assert p.evicted not in used, "evicted while its wave needs it"
                    assert self.slot_of.pop(p.evicted) == p.slot
                    assert p.evicted_from is not None
                self.slot_of[layer, p.expert] = p.slot
            assert len(self.slot_of) <= self.size


@given(st.sampled_from(sorted(POLICIES)), num_slots, cycles, needs())
def test_every_policy_keeps_the_wave_rules(name: str, slots: int, cycle: int, accesses: list[Need]) -> None:
    policy = make_policy(name, num_slots=slots, cycle=cycle)
    model = Slots(slots)
    num_evictions = 0
    for layer, decode, prefill in accesses:
        waves = policy.access(layer, decode, prefill)
        model.follow(waves, layer=layer, decode=decode, prefill=prefill)
        policy.validate()
        num_evictions += sum(p.evicted is not None for wave in waves for p in wave)
        if len(model.slot_of) < slots:
            assert num_evictions == 0, "evicted although a slot was free"
    if slots >= NUM_LAYERS * NUM_EXPERTS:
        assert num_evictions == 0


@given(num_slots, needs())
def test_lru_is_an_ordered_dict_when_an_access_fits(slots: int, accesses: list[Need]) -> None:
    policy = make_policy("lru", num_slots=slots, cycle=1)
    recent: OrderedDict[Key, None] = OrderedDict()
    for layer, decode, prefill in accesses:
        experts = sorted(decode + prefill)[:slots]
        waves = policy.access(layer, experts, [])
        assert len(waves) == (1 if experts else 0)
        keys = [(layer, e) for e in experts]
        hits = [key for key in keys if key in recent]
        evicted = []
        for key in hits:
            recent.move_to_end(key)
        for key in [key for key in keys if key not in hits]:
            if len(recent) == slots:
                evicted.append(recent.popitem(last=False)[0])
            recent[key] = None
        placed = [p for wave in waves for p in wave]
        assert [(layer, p.expert) for p in placed if p.hit] == hits
        assert [p.evicted for p in placed if p.evicted] == evicted


@dataclass
class Entry:
    """A resident expert of the model below; a higher stamp is nearer to the recent end of its segment."""

    key: Key
    slot: int
    protected: bool
    streamed: bool
    stamp: int

    @property
    def segment(self) -> Segment:
        return "protected" if self.protected else "probation"


class StampedSlru:
    """Segmented LRU by its rules alone: one flat list of entries with time stamps, every choice a search."""

    def __init__(self, size: int, cycle: int) -> None:
        self.size, self.now, self.entries = size, 0, list[Entry]()
        self.quota = min(size, max(cycle, size // 5))
        self.width = max(1, self.quota // 4)

    def access(self, layer: int, decode: list[int], prefill: list[int]) -> list[list[Placed]]:
        out: list[list[Placed]] = [[]]
        needed: list[tuple[int, Phase]] = [(e, "decode") for e in decode]
        needed += [(e, "prefill") for e in prefill]
        todo = []
        for e, phase in needed:
            entry = next((x for x in self.entries if x.key == (layer, e)), None)
            if entry is None:
                todo.append((e, phase))
                continue
            out[0].append(Placed(expert=e, slot=entry.slot, phase=phase, hit=entry.segment))
            if phase == "decode":
                self.now += 1
                entry.protected, entry.streamed, entry.stamp = True, False, self.now
        for e, phase in todo:
            slot, victim = len(self.entries), None
            if slot == self.size:
                self.shrink_protected()
                victim = self.victim(phase, {(layer, p.expert) for p in out[-1]})
                if victim is None:
                    out.append([])
                    victim = self.victim(phase, set())
                assert victim is not None
                self.entries.remove(victim)
                slot = victim.slot
            self.now += 1
            stamp = self.now if phase == "decode" else -self.now
            self.entries.append(Entry((layer, e), slot, False, phase == "prefill", stamp))
            evicted, evicted_from = (victim.key, victim.segment) if victim else (None, None)
            out[-1].append(Placed(expert=e, slot=slot, phase=phase, evicted=evicted, evicted_from=evicted_from))
        return out if out[0] else []

    def shrink_protected(self) -> None:
        protected = sorted((x for x in self.entries if x.protected), key=lambda x: x.stamp)
        for entry in protected[: max(0, len(protected) - (self.size - self.quota))]:
            self.now += 1
            entry.protected, entry.stamp = False, self.now

    def victim(self, phase: str, pinned: set[Key]) -> Entry | None:
        allowed = [x for x in self.entries if x.key not in pinned]
        if phase == "prefill":
            allowed = [x for x in allowed if not x.protected]
            if sum(x.streamed for x in self.entries) >= self.width:
                allowed = [x for x in allowed if x.streamed]
        return min(allowed, key=lambda x: (x.protected, x.stamp), default=None)


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
    model = StampedSlru(slots, cycle)
    for layer, decode, prefill in accesses:
        assert policy.access(layer, decode, prefill) == model.access(layer, decode, prefill)


@given(st.sampled_from(sorted(POLICIES)), num_slots, cycles, needs())
def test_settled_says_where_hits_are_found_while_nothing_is_evicted(
    name: str, slots: int, cycle: int, accesses: list[Need]
) -> None:
    policy = make_policy(name, num_slots=NUM_LAYERS * NUM_EXPERTS, cycle=cycle)
    used: set[Key] = set()
    for layer, decode, prefill in accesses:
        for p in (p for wave in policy.access(layer, decode, prefill) for p in wave):
            if p.hit is not None:
                assert p.hit == (policy.settled if (layer, p.expert) in used else "probation")
                # A decode miss is no hit yet: only a later decode hit settles it. Filled caches have no misses.
            if p.phase == "decode" and p.hit is not None:
                used.add((layer, p.expert))


def hits_of(policy: ResidencyPolicy, layer: int, decode: Sequence[int], prefill: Sequence[int] = ()) -> list[int]:
    return [p.expert for wave in policy.access(layer, decode, prefill) for p in wave if p.hit]


def test_waves_of_a_single_slot() -> None:
    for name in POLICIES:
        policy = make_policy(name, num_slots=1, cycle=2)
        assert [[p.expert for p in wave] for wave in policy.access(0, [1, 2], [0])] == [[1], [2], [0]]
        waves = policy.access(0, [0, 1], [])
        assert [[(p.expert, p.hit) for p in wave] for wave in waves] == [[(0, "probation")], [(1, None)]]
        policy.validate()


def test_a_hit_is_computed_before_misses_may_take_its_slot() -> None:
    policy = make_policy("lru", num_slots=2, cycle=1)
    policy.access(0, [3, 4], [])
    waves = policy.access(0, [0, 1, 2, 3], [])
    assert [[p.expert for p in wave] for wave in waves] == [[3, 0], [1, 2]]
    assert waves[0][1].evicted == (0, 4)
    assert {p.evicted for p in waves[1]} == {(0, 3), (0, 0)}


def test_probation_lends_its_room_until_a_victim_is_needed() -> None:
    policy = SegmentedLru(num_slots=4, cycle=3)
    for _ in range(2):
        policy.access(0, [0, 1, 2, 3], [])
    # All four are protected, though its target is one: nothing else wanted the room.
    assert {p.hit for p in policy.access(0, [0, 1, 2, 3], [])[0]} == {"protected"}
    [[miss]] = policy.access(1, [0], [])
    assert (miss.evicted, miss.evicted_from) == ((0, 0), "probation")
    assert [p.hit for p in policy.access(0, [1, 3], [])[0]] == ["probation", "protected"]


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
    # The prompt displaced probation's oldest entries, at most stream_width of them.
    lost = 16 - len(hits_of(policy, 0, hot)) - len(hits_of(policy, 1, [0, 1, 2, 3]))
    assert lost == policy.stream_width
    # A prompt's hits neither promote nor move.
    assert policy.access(9, [], [0, 39]) is not None
    assert all(p.hit != "protected" for wave in policy.access(9, [], list(range(40))) for p in wave)


@given(num_slots, cycles, needs(), needs())
def test_prefill_never_evicts_from_protected(slots: int, cycle: int, before: list[Need], accesses: list[Need]) -> None:
    policy = SegmentedLru(num_slots=slots, cycle=cycle)
    for layer, decode, prefill in before:
        policy.access(layer, decode, prefill)
    for layer, decode, prefill in accesses:
        for p in (p for wave in policy.access(layer, [], sorted(decode + prefill)) for p in wave):
            assert p.evicted_from != "protected"


def test_a_cache_that_holds_everything_starts_full() -> None:
    for name in POLICIES:
        policy = start_policy(name, layers=[3, 5], experts=range(4, 7), top_k=2, num_slots=9)
        assert policy.num_slots == 6
        assert [p.slot for p in policy.access(5, [4, 6], [5])[0]] == [3, 5, 4]
        policy.validate()
        partial = start_policy(name, layers=[3, 5], experts=range(4, 7), top_k=2, num_slots=5)
        assert hits_of(partial, 5, [4, 5, 6]) == []


def test_quota_is_a_cycle_but_at_least_a_share_and_at_most_everything() -> None:
    quotas = {
        (slots, cycle): SegmentedLru(num_slots=slots, cycle=cycle).quota
        for slots, cycle in [(100, 7), (100, 64), (8, 64)]
    }
    assert quotas == {(100, 7): 20, (100, 64): 64, (8, 64): 8}
    assert cycle_length(num_layers=8, top_k=4, num_experts=3) == 24
    assert cycle_length(num_layers=8, top_k=4, num_experts=32) == 32


def test_unknown_policies_and_empty_caches_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown expert cache policy 'fifo': choose one of lru, slru"):
        make_policy("fifo", num_slots=1, cycle=1)
    for name in POLICIES:
        with pytest.raises(ValueError, match="at least 1 slot"):
            make_policy(name, num_slots=0, cycle=1)


def test_counters_count_each_expert_once() -> None:
    policy, counters = make_policy("slru", num_slots=2, cycle=2), Counters()
    assert counters.hit_rate is None
    for layer, decode, prefill in [(0, [1], [2]), (0, [1], [2, 3]), (1, [0], [])]:
        for wave in policy.access(layer, decode, prefill):
            counters.count(wave)
    assert {k: v for k, v in counters.hits.items() if v} == {("probation", "decode"): 1, ("probation", "prefill"): 1}
    assert counters.misses == {"decode": 2, "prefill": 2}
    assert (counters.num_hits, counters.num_misses, counters.num_evictions) == (2, 4, 2)
    both = Counters()
    both.add(counters)
    both.add(counters)
    assert (both.num_hits, both.num_misses, both.num_evictions, both.hit_rate) == (4, 8, 4, 1 / 3)
