"""Rules that every residency policy keeps, and LRU against an independent model."""

from collections import OrderedDict
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.experts.accesses import NUM_EXPERTS, NUM_LAYERS, Need, hits_of, needs, num_slots, small

from moeyard_kernels.types.expert_ranks import max_waves
from moeyard_worker.experts.policies import POLICIES, start_policy
from moeyard_worker.experts.policy import Counters, ExpertKey, Placed


class Slots:
    """A model of the slots that checks every promise of `RankedPolicy.access`."""

    def __init__(self, resident: Sequence[ExpertKey]) -> None:
        self.size = len(resident)
        self.slot_of = {key: slot for slot, key in enumerate(resident)}

    def follow(self, waves: Sequence[Sequence[Placed]], *, layer: int, decode: list[int], prefill: list[int]) -> None:
        placed = [p for wave in waves for p in wave]
        assert sorted((p.expert, p.kind) for p in placed) == sorted(
            [(e, "decode") for e in decode] + [(e, "prefill") for e in prefill]
        )
        assert all(waves)
        kinds = [p.kind for p in placed]
        assert kinds == sorted(kinds), "decode experts come first"
        decoding = [wave for wave in waves if wave[0].kind == "decode"]
        assert len(decoding) <= max_waves(len(decode), self.size)
        found = {p.expert for p in placed if p.kind == "decode" and p.hit is not None}
        assert found == {e for e in decode if (layer, e) in self.slot_of}
        assert all(p.hit is None for wave in decoding[1:] for p in wave)
        for wave in waves:
            assert len({p.slot for p in wave}) == len(wave), "a slot is assigned twice in a wave"
            assert len({p.kind for p in wave}) == 1
            hits = [p.hit is not None for p in wave]
            assert hits == sorted(hits, reverse=True), "a miss comes before a hit"
            for p in wave:
                self._follow(p, layer, {(layer, q.expert) for q in wave})

    def _follow(self, p: Placed, layer: int, used: set[ExpertKey]) -> None:
        if p.hit is not None:
            assert self.slot_of[layer, p.expert] == p.slot
        elif p.kind == "prefill":
            assert (layer, p.expert) not in self.slot_of
            assert p.slot >= self.size, "a prompt takes a slot from decode"
        else:
            assert p.evicted is not None
            assert p.evicted_from is not None
            assert p.evicted not in used, "evicted while its wave needs it"
            assert self.slot_of.pop(p.evicted) == p.slot
            self.slot_of[layer, p.expert] = p.slot
            return
        assert p.evicted is None
        assert p.evicted_from is None


@given(st.sampled_from(sorted(POLICIES)), num_slots, st.integers(1, 4), needs())
def test_every_policy_keeps_the_wave_rules(name: str, slots: int, streams: int, accesses: list[Need]) -> None:
    policy = start_policy(
        name, layers=range(NUM_LAYERS), experts=range(NUM_EXPERTS), num_slots=slots, num_streams=streams
    )
    model = Slots(policy.resident)
    assert model.size == min(slots, NUM_LAYERS * NUM_EXPERTS)
    for layer, decode, prefill in accesses:
        waves = policy.access(layer, decode, prefill)
        model.follow(waves, layer=layer, decode=decode, prefill=prefill)
        assert all(p.slot < model.size + streams for wave in waves for p in wave)
        policy.validate()
        assert {key: slot for slot, key in enumerate(policy.resident)} == model.slot_of


@given(num_slots, needs())
def test_lru_equals_an_ordered_dict(slots: int, accesses: list[Need]) -> None:
    """The waves may differ, but the evicted experts are those of one list by recency."""
    policy = small("lru", slots)
    recent: OrderedDict[ExpertKey, None] = OrderedDict.fromkeys(sorted(policy.resident))
    for layer, decode, prefill in accesses:
        waves = policy.access(layer, decode, prefill)
        keys = [(layer, e) for e in decode]
        hits = [key for key in keys if key in recent]
        evicted = []
        for key in hits:
            recent.move_to_end(key)
        for key in [key for key in keys if key not in hits]:
            evicted.append(recent.popitem(last=False)[0])
            recent[key] = None
        placed = [p for wave in waves for p in wave]
        assert [(layer, p.expert) for p in placed if p.hit and p.kind == "decode"] == hits
        assert [p.evicted for p in placed if p.evicted] == evicted


@given(st.sampled_from(sorted(POLICIES)), needs())
def test_settled_is_the_segment_of_hits_without_evictions(name: str, accesses: list[Need]) -> None:
    policy = small(name, NUM_LAYERS * NUM_EXPERTS)
    used: set[ExpertKey] = set()
    for layer, decode, prefill in accesses:
        for p in (p for wave in policy.access(layer, decode, prefill) for p in wave):
            assert p.hit == (policy.settled if (layer, p.expert) in used else "probation")
            if p.kind == "decode":
                used.add((layer, p.expert))


def test_waves_of_a_single_slot() -> None:
    for name in POLICIES:
        policy = small(name, 1)
        assert [[p.expert for p in wave] for wave in policy.access(0, [1, 2], [0])] == [[1], [2], [0]]
        waves = policy.access(0, [1, 2], [])
        assert [[(p.expert, p.hit) for p in wave] for wave in waves] == [[(2, "probation")], [(1, None)]]
        policy.validate()


def test_hits_run_before_misses_take_their_slots() -> None:
    for name in POLICIES:
        policy = small(name, 4, num_layers=1, num_experts=9)
        waves = policy.access(0, [0, 1, 4, 5, 6, 7], [])
        assert [[p.expert for p in wave] for wave in waves] == [[0, 1], [4, 5], [6, 7]]
        assert [p.evicted for p in waves[1]] == [(0, 2), (0, 3)]
        assert [p.evicted for p in waves[2]] == [(0, 0), (0, 1)]


def test_prompts_evict_no_decode_expert() -> None:
    for name in POLICIES:
        policy = start_policy(name, layers=range(3), experts=range(7), num_slots=5, num_streams=2)
        policy.access(1, [3, 4], [])
        before = policy.resident
        waves = policy.access(1, [], list(range(7)))
        # Resident experts come first, then the others through two slots beyond the policy's.
        assert [[p.expert for p in wave] for wave in waves] == [[0, 1, 3, 4], [2, 5], [6]]
        assert [[p.slot for p in wave] for wave in waves[1:]] == [[5, 6], [5]]
        assert policy.resident == before


def test_cache_starts_full() -> None:
    for name in POLICIES:
        policy = start_policy(name, layers=[3, 5], experts=range(4, 7), num_slots=9)
        assert policy.num_slots == 6
        assert [p.slot for wave in policy.access(5, [4, 6], [5]) for p in wave] == [3, 5, 4]
        policy.validate()
        partial = start_policy(name, layers=[3, 5], experts=range(4, 7), num_slots=5)
        assert partial.resident == [(3, 4), (3, 5), (3, 6), (5, 4), (5, 5)]
        assert hits_of(partial, 5, [4, 5, 6]) == [4, 5]


def test_unknown_policies_and_empty_caches_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown expert cache policy 'fifo': choose one of lru, slru"):
        small("fifo", 1)
    for name in POLICIES:
        with pytest.raises(ValueError, match="at least 1 slot"):
            small(name, 0)


def test_counters_count_each_expert_once() -> None:
    policy, counters = small("slru", 2, num_layers=2), Counters()
    assert counters.hit_rate is None
    # The slots start with (0, 0) and (1, 0).
    for layer, decode, prefill in [(0, [1], [2]), (0, [1], [1, 3]), (1, [0], [])]:
        for wave in policy.access(layer, decode, [e for e in prefill if e not in decode]):
            counters.count(wave)
    assert {k: v for k, v in counters.hits.items() if v} == {("probation", "decode"): 2}
    assert counters.misses == {"decode": 1, "prefill": 2}
    assert (counters.num_hits, counters.num_misses, counters.num_evictions) == (2, 3, 1)
    both = Counters()
    both.add(counters)
    both.add(counters)
    assert (both.num_hits, both.num_misses, both.num_evictions, both.hit_rate) == (4, 6, 2, 2 / 5)
