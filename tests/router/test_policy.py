"""The choice of a rank: each term of the score, its hysteresis, and traces compared with simpler policies."""

import dataclasses
import random
import statistics
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.scripts import loaded

from moeyard_router.fleet.placement import PrefixMap, PromptPlacement, blocks
from moeyard_router.fleet.policy import RankLoad, choose_rank

IDLE = RankLoad(rank=0, usable=True, sequences=0, pending_tokens=0, page_size=4, kv_pages=100, kv_pages_free=100)


def ranks(*changes):
    return [dataclasses.replace(IDLE, rank=i, **change) for i, change in enumerate(changes)]


def chosen(*changes, prompt_tokens=100, last_rank=None):
    route = choose_rank(ranks(*changes), prompt_tokens=prompt_tokens, last_rank=last_rank)
    return route.rank, route.reason


counts = st.integers(min_value=0, max_value=500)
loads = st.lists(
    st.builds(
        RankLoad,
        rank=st.just(0),
        usable=st.booleans(),
        sequences=counts,
        pending_tokens=counts,
        page_size=st.just(4),
        kv_pages=st.just(600),
        kv_pages_free=counts,
        cached_tokens=counts,
    ),
    max_size=6,
).map(lambda found: [dataclasses.replace(load, rank=i) for i, load in enumerate(found)])


def test_fewest_sequences():
    assert chosen({"sequences": 2}, {"sequences": 1}, {"sequences": 3}) == (1, "load")


def test_fewest_tokens_to_compute():
    assert chosen({"pending_tokens": 5000}, {"sequences": 2}) == (1, "load")


def test_cached_prefix_outweighs_few_sequences_only():
    assert chosen({"sequences": 2}, {"sequences": 4, "cached_tokens": 4000}, prompt_tokens=4400) == (1, "prefix")
    assert chosen({"sequences": 2}, {"sequences": 9, "cached_tokens": 4000}, prompt_tokens=4400) == (0, "load")


def test_full_rank_is_skipped():
    assert chosen({"kv_pages_free": 24}, {"sequences": 3}) == (1, "load")
    assert chosen({"kv_pages_free": 25}, {"sequences": 3}) == (0, "load")


def test_client_stays_until_another_rank_is_clearly_better():
    assert chosen({"pending_tokens": 0}, {"pending_tokens": 5}, last_rank=1) == (1, "client")
    assert chosen({"pending_tokens": 0}, {"pending_tokens": 6}, last_rank=1) == (0, "load")
    assert chosen({"pending_tokens": 5, "cached_tokens": 10}, {}, {"pending_tokens": 3}, last_rank=2) == (0, "prefix")


def test_ties():
    assert chosen({}, {}) == (0, "load")
    assert chosen({"sequences": 1}, {"pending_tokens": 1000}) == (1, "load")


def test_unusable_ranks_are_never_chosen():
    assert chosen({"usable": False}, {"sequences": 9}, last_rank=0) == (1, "only")
    assert choose_rank(ranks({"usable": False}), prompt_tokens=1) is None
    assert choose_rank([], prompt_tokens=1) is None


@given(loads, st.integers(1, 1000), st.none() | st.integers(0, 5), st.randoms())
def test_properties(found, prompt_tokens, last_rank, random):
    route = choose_rank(found, prompt_tokens=prompt_tokens, last_rank=last_rank)
    usable = [load for load in found if load.usable]
    assert (route is None) == (not usable)
    if route is not None:
        assert found[route.rank].usable
        assert route.cached_tokens == found[route.rank].cached_tokens
        assert route.reason != "client" or route.rank == last_rank
    shuffled = list(found)
    random.shuffle(shuffled)
    assert choose_rank(shuffled, prompt_tokens=prompt_tokens, last_rank=last_rank) == route, (
        "the order of the list must not matter"
    )


@given(st.integers(min_value=1, max_value=5), st.integers(min_value=0, max_value=30))
def test_a_burst_is_spread_evenly(size, burst):
    fleet = ranks(*[{} for _ in range(size)])
    for _ in range(burst):
        rank = choose_rank(fleet, prompt_tokens=10).rank
        more = {"sequences": fleet[rank].sequences + 1, "pending_tokens": fleet[rank].pending_tokens + 10}
        fleet[rank] = dataclasses.replace(fleet[rank], **more)
    assert max(load.sequences for load in fleet) - min(load.sequences for load in fleet) <= 1


def test_blocks_are_full_pages_with_their_history():
    found = blocks([1, 2, 3, 4, 5, 6, 7], 2)
    assert [(block.pages, block.end) for block in found] == [(1, 1), (1, 2), (1, 3)]
    assert blocks([1, 2, 3, 4, 9, 9], 2)[:2] == found[:2]
    assert blocks([9, 2, 3, 4], 2)[1].key != found[1].key, "a page after a different page is a different block"
    assert blocks([1], 2) == blocks([], 2) == []


def test_blocks_depend_on_earlier_tokens_only():
    prompt = list(range(131_072))
    found = blocks(prompt, 16)
    assert len(found) == 288
    assert found[-1].end == 8192
    assert sum(block.pages for block in found) == 8192
    assert blocks(prompt[: 16 * 3000], 16) == [block for block in found if block.end <= 3000]


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3), st.integers(0, 80)), max_size=30), st.integers(1, 90))
def test_known_prefixes_are_prefixes(prompts, capacity):
    """The result equals a search block by block. A rank holds its latest prompts up to its capacity, last first."""
    pages = PrefixMap(2)
    texts = [blocks([text] * 80, 1) for text in range(4)]
    for rank, text, length in prompts:
        sent = [block for block in texts[text] if block.end <= length]
        pages.sent(rank, sent, capacity)
        fits = [block.end for block in sent if block.end <= capacity]
        assert pages.known(rank, sent) == max(fits, default=0)
        held = pages._blocks[rank]
        assert sum(held.values()) == pages._held[rank] <= capacity
        for asked in texts:
            unknown = next((i for i, block in enumerate(asked) if block.key not in held), len(asked))
            assert pages.known(rank, asked) == (asked[unknown - 1].end if unknown else 0)


def test_conversation_stays_with_its_prefix():
    placement = PromptPlacement(3, prefix_caching=True)
    said = tuple(range(400))
    assert placement.choose(ranks({"sequences": 1}, {}, {}), said[:200], client=None).rank == 1
    route = placement.choose(ranks({}, {"sequences": 0}, {}), said, client=None)
    assert (route.rank, route.reason, route.cached_tokens) == (1, "prefix", 200)
    placement.forget([0, 2])
    assert placement.choose(ranks({}, {}, {}), said, client=None).rank == 1, "older prefixes must be replaced"
    placement.forget([1])
    assert placement.choose(ranks({}, {}, {}), said, client=None).rank == 0


def test_without_prefix_caching_only_clients_are_remembered():
    placement = PromptPlacement(2, prefix_caching=False)
    said = tuple(range(400))
    assert placement.choose(ranks({"sequences": 1}, {}), said, client="ann").rank == 1
    assert placement.choose(ranks({}, {}), said, client="bob").rank == 0
    assert placement.choose(ranks({}, {}), said, client="ann").reason == "client"


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    """Load bench/policy.py, which is a script."""
    with loaded(Path(__file__).resolve().parents[2] / "bench" / "policy.py") as module:
        yield module


@pytest.mark.slow
def test_traces(bench):
    """The policy is at least as good as round robin and least sequences on every trace, and far better in total."""
    ratios = {"turns": [], "fewest": []}
    for make, rate in bench.TRACES:
        ended = {
            policy: [
                bench.outcome(make(random.Random(seed), 400, rate * num_ranks * 0.8), policy, num_ranks)
                for seed, num_ranks in ((0, 2), (1, 4), (2, 4))
            ]
            for policy in bench.POLICIES
        }
        for other, found in ratios.items():
            pairs = zip(ended["score"], ended[other], strict=True)
            ratio = statistics.geometric_mean(mine.latency / theirs.latency for mine, theirs in pairs)
            assert ratio < 1.03, (make.__name__, other)
            found.append(ratio)
    assert all(statistics.geometric_mean(found) < 0.88 for found in ratios.values()), ratios
