"""The choice of a rank: least loaded, deterministic, never an unusable one."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from moeyard_router.fleet.policy import RankLoad, choose_rank

IDLE = RankLoad(rank=0, usable=True, reported=0, own_at_snapshot=0, own=0, own_tokens=0, kv_pages_free=100)


def ranks(*changes):
    return [dataclasses.replace(IDLE, rank=i, **change) for i, change in enumerate(changes)]


counts = st.integers(min_value=0, max_value=5)
loads = st.lists(
    st.builds(
        RankLoad, rank=st.just(0), usable=st.booleans(), reported=counts, own_at_snapshot=counts, own=counts,
        own_tokens=counts, kv_pages_free=counts,
    ),
    max_size=6,
).map(lambda found: [dataclasses.replace(load, rank=i) for i, load in enumerate(found)])  # fmt: skip


def test_fewest_sequences():
    assert choose_rank(ranks({"own": 2}, {"own": 1}, {"own": 3})) == 1


def test_sequences_sent_since_the_snapshot_count():
    assert choose_rank(ranks({"own": 2, "reported": 0}, {"own": 1, "own_at_snapshot": 1, "reported": 1})) == 1


def test_sequences_of_other_routers_count():
    assert choose_rank(ranks({"reported": 3}, {"own": 2, "own_at_snapshot": 2, "reported": 2})) == 1


def test_ties():
    assert choose_rank(ranks({}, {})) == 0
    assert choose_rank(ranks({"own_tokens": 9}, {"own_tokens": 8})) == 1
    assert choose_rank(ranks({"kv_pages_free": 1}, {"kv_pages_free": 2})) == 1


def test_unusable_ranks_are_never_chosen():
    assert choose_rank(ranks({"usable": False}, {"own": 9})) == 1
    assert choose_rank(ranks({"usable": False})) is None
    assert choose_rank([]) is None


@given(loads, st.randoms())
def test_properties(found, random):
    chosen = choose_rank(found)
    usable = [load for load in found if load.usable]
    assert (chosen is None) == (not usable)
    if chosen is not None:
        best = found[chosen]
        assert best.usable
        assert all(best.sequences <= load.sequences for load in usable)
    shuffled = list(found)
    random.shuffle(shuffled)
    assert choose_rank(shuffled) == chosen, "the order of the list does not matter"


@given(st.integers(min_value=1, max_value=5), st.integers(min_value=0, max_value=30))
def test_a_burst_is_spread_evenly(size, burst):
    fleet = ranks(*[{} for _ in range(size)])
    for _ in range(burst):
        rank = choose_rank(fleet)
        fleet[rank] = dataclasses.replace(fleet[rank], own=fleet[rank].own + 1)
    assert max(load.own for load in fleet) - min(load.own for load in fleet) <= 1
