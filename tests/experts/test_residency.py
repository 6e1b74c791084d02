"""The rules that hold for every residency policy, and LRU against an independent model."""

from collections import OrderedDict
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.experts.accesses import NUM_EXPERTS, NUM_LAYERS, Need, cycles, hits_of, needs, num_slots

from moeyard_worker.experts.policies import POLICIES, cycle_length, make_policy, start_policy
from moeyard_worker.experts.policy import Counters, ExpertKey, Placed


class Slots:
    """What lies in each slot, followed from the outside, with every promise of `ResidencyPolicy.access` checked."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.slot_of: dict[ExpertKey, int] = {}

    def follow(self, waves: Sequence[Sequence[Placed]], *, layer: int, decode: list[int], prefill: list[int]) -> None:
        placed = [p for wave in waves for p in wave]
        assert sorted((p.expert, p.kind) for p in placed) == sorted(
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
    recent: OrderedDict[ExpertKey, None] = OrderedDict()
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


@given(st.sampled_from(sorted(POLICIES)), num_slots, cycles, needs())
def test_settled_says_where_hits_are_found_while_nothing_is_evicted(
    name: str, slots: int, cycle: int, accesses: list[Need]
) -> None:
    policy = make_policy(name, num_slots=NUM_LAYERS * NUM_EXPERTS, cycle=cycle)
    used: set[ExpertKey] = set()
    for layer, decode, prefill in accesses:
        for p in (p for wave in policy.access(layer, decode, prefill) for p in wave):
            if p.hit is not None:
                assert p.hit == (policy.settled if (layer, p.expert) in used else "probation")
                # A decode miss is no hit yet: only a later decode hit settles it. Filled caches have no misses.
            if p.kind == "decode" and p.hit is not None:
                used.add((layer, p.expert))


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


def test_a_cache_that_holds_everything_starts_full() -> None:
    for name in POLICIES:
        policy = start_policy(name, layers=[3, 5], experts=range(4, 7), top_k=2, num_slots=9)
        assert policy.num_slots == 6
        assert [p.slot for p in policy.access(5, [4, 6], [5])[0]] == [3, 5, 4]
        policy.validate()
        partial = start_policy(name, layers=[3, 5], experts=range(4, 7), top_k=2, num_slots=5)
        assert hits_of(partial, 5, [4, 5, 6]) == []


def test_a_cycle_is_what_one_token_visits_of_a_shard() -> None:
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
