"""Snapshots of state per sequence: where prompts leave them, which requests use them, and which is evicted first."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.scheduling.scheduler_harness import Harness
from tests.scripts import loaded

from moeyard_worker.config.engine_config import SchedulerConfig
from moeyard_worker.protocol import SamplingParams, Submit
from moeyard_worker.scheduling.scheduler import Scheduler
from moeyard_worker.state.snapshots import SnapshotPool

CONFIG = SchedulerConfig(
    num_pages=64,
    page_size=2,
    max_model_len=96,
    vocab_size=50,
    max_batch_tokens=16,
    max_num_seqs=4,
    prefill_chunk=8,
    num_state_slots=4,
    num_snapshots=8,
    chunk_alignment=4,
)
SHARED = tuple(range(10))


def ask(harness: Harness, name: str, prompt: tuple[int, ...], max_tokens: int = 2) -> list[tuple[int, int, list[int]]]:
    """Run a request to its end; return (start, end, positions of snapshots) of each of its prompt chunks."""
    harness.submit(Submit(request_id=name, prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=max_tokens)))
    found = []
    while harness.live:
        found += [(c.start, c.end, [p for p, _ in c.snapshots]) for c in harness.step().prefill]
    harness.drain()
    return found


@pytest.fixture
def harness() -> Harness:
    return Harness(CONFIG)


def test_conversation_resumes_at_the_last_whole_page(harness: Harness) -> None:
    """It does not resume after the answer: output positions have a state that no prompt would leave."""
    assert ask(harness, "first", SHARED) == [(0, 8, [8]), (8, 10, [])]
    longer = (*SHARED, *range(20, 33))
    assert ask(harness, "second", longer) == [(8, 16, []), (16, 23, [20])]
    assert ask(harness, "third", (*longer, 1, 2)) == [(20, 25, [24])]
    assert harness.scheduler.stats.prefix_hit_tokens == 8 + 20
    assert (harness.scheduler.snapshots.num_taken, harness.scheduler.snapshots.num_used) == (3, 2)


def test_second_request_leaves_a_snapshot_for_the_third(harness: Harness) -> None:
    """The first request cannot know where others will branch off; pages tell the second."""
    ask(harness, "p", (*SHARED, *range(20, 30)))
    assert ask(harness, "q", (*SHARED, *range(30, 39))) == [(0, 8, [8]), (8, 16, [16]), (16, 19, [])]
    assert ask(harness, "r", (*SHARED, *range(40, 49))) == [(8, 16, [16]), (16, 19, [])]
    assert ask(harness, "r again", (*SHARED, *range(40, 49))) == [(16, 19, [])]


def test_prompt_of_whole_pages_is_reused(harness: Harness) -> None:
    prompt = tuple(range(12))
    assert ask(harness, "p", prompt) == [(0, 8, []), (8, 12, [12])]
    assert ask(harness, "longer", (*prompt, 1)) == [(12, 13, [])]
    assert ask(harness, "twin", prompt) == [(0, 8, [8]), (8, 12, [])], "the last position must be computed, from 8 on"
    assert ask(harness, "triplet", prompt) == [(8, 12, [])]


def test_pages_of_a_prompts_last_chunk_are_not_shared(harness: Harness) -> None:
    """Bits of positions 8 and 9, computed alone, may differ from those computed with 10 and 11 (`delta_scores.py`)."""
    ask(harness, "short", SHARED)
    longer, pages = (*SHARED, *range(20, 31)), []
    for name in ("long", "long again"):
        harness.submit(Submit(request_id=name, prompt_token_ids=longer, sampling=SamplingParams(max_tokens=1)))
        chunks = []
        while harness.live:
            chunks += harness.step().prefill
        pages.append((chunks[0].start, chunks[-1].pages[:10]))
    assert [start for start, _ in pages] == [8, 20]
    assert pages[0][1] == pages[1][1]


def test_pages_without_a_snapshot_are_not_reused() -> None:
    harness = Harness(replace(CONFIG, num_snapshots=0))
    assert ask(harness, "p", SHARED) == ask(harness, "q", SHARED) == [(0, 8, []), (8, 10, [])]


def test_least_recently_used_is_evicted_first() -> None:
    harness = Harness(replace(CONFIG, num_snapshots=2))
    first, second = tuple(range(5)), tuple(range(10, 15))
    ask(harness, "p", first)
    ask(harness, "q", second)
    ask(harness, "p again", first)
    ask(harness, "r", tuple(range(20, 25)))
    assert ask(harness, "p once more", first) == [(4, 5, [])]
    assert ask(harness, "q again", second) == [(0, 5, [4])]
    assert harness.scheduler.snapshots.num_evicted == 2


def test_snapshot_is_evicted_with_its_page() -> None:
    harness = Harness(replace(CONFIG, num_pages=8))
    ask(harness, "p", SHARED)
    ask(harness, "all pages", tuple(range(20, 33)))
    assert harness.scheduler.snapshots.num_held == 1
    assert harness.scheduler.snapshots.num_evicted == 0
    assert ask(harness, "p again", SHARED) == [(0, 8, [8]), (8, 10, [])]


@pytest.mark.parametrize("after", [1, 2])
def test_snapshot_of_a_lost_step_is_not_found(harness: Harness, after: int) -> None:
    """A peer is lost while a step that takes a snapshot is in flight; a later step takes it."""
    prompt = (*SHARED, *range(20, 26))
    harness.submit(Submit(request_id="p", prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=2)))
    for _ in range(after - 1):
        harness.step()
    (chunk,) = harness.plan().prefill
    assert bool(chunk.snapshots) == (after == 2)
    harness.roll_back()
    assert harness.scheduler.snapshots.num_held == 0
    harness.drain()
    assert harness.scheduler.snapshots.num_held == 1 + (after == 2), "the pages of the first step must be known"


def test_preempted_request_resumes_from_its_snapshot() -> None:
    """Its prompt is not computed again; its output is, by the output's formula."""
    harness = Harness(replace(CONFIG, num_pages=14))
    for name, prompt in (("p", SHARED), ("q", tuple(range(20, 30)))):
        harness.submit(Submit(request_id=name, prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=8)))
    harness.drain()
    stats = harness.scheduler.stats
    assert stats.num_preemptions > 0
    assert harness.scheduler.snapshots.num_used == stats.num_preemptions
    assert stats.prefill_tokens < 2 * len(SHARED) + stats.num_preemptions * 3


def test_request_that_ends_during_a_snapshot_leaves_none(harness: Harness) -> None:
    harness.submit(Submit(request_id="p", prompt_token_ids=SHARED, sampling=SamplingParams(max_tokens=2)))
    harness.plan()
    harness.abort("p")
    harness.finish_oldest()
    harness.drain()
    assert harness.scheduler.snapshots.num_held == 0


def test_concurrent_requests_take_one_snapshot() -> None:
    """With a single slot, a request takes it over, even from the snapshot that it starts from."""
    harness = Harness(replace(CONFIG, num_snapshots=1))
    for name in "pq":
        harness.submit(Submit(request_id=name, prompt_token_ids=SHARED, sampling=SamplingParams(max_tokens=1)))
    assert [len(c.snapshots) for c in harness.step().prefill] == [1, 0]
    harness.drain()
    longer = (*SHARED, 1, 2, 3)
    harness.submit(Submit(request_id="r", prompt_token_ids=longer, sampling=SamplingParams(max_tokens=1)))
    (chunk,) = harness.step().prefill
    assert (chunk.start, chunk.snapshots) == (8, ((12, chunk.restored),))
    harness.drain()


def test_pool_detects_errors() -> None:
    pool = SnapshotPool(range(4, 6))
    assert [pool.reserve(name) for name in (b"a", b"b", b"c")] == [4, 5, None]
    assert pool.reserve(b"a") is None
    pool.keep(b"a")
    pool.validate([b"b"], {b"a": 0}.keys())
    with pytest.raises(AssertionError, match="taken for nobody"):
        pool.validate([], {b"a": 0}.keys())
    with pytest.raises(AssertionError, match="a page that cannot be found"):
        pool.validate([b"b"], {}.keys())
    pool.cancel(b"b")
    assert pool.reach([b"x", b"a", b"y"], 2) == 2
    assert pool.reach([b"x", b"a", b"y"], 3) == 0
    pool.forget(b"a")
    pool.forget(b"a")
    pool.validate([], {}.keys())
    assert (pool.num_held, pool.num_taken, pool.num_evicted) == (0, 1, 0)


def test_numbers_of_slots_are_at_least_zero() -> None:
    with pytest.raises(ValueError, match="num_snapshots must be at least 0, got -1"):
        Scheduler(replace(CONFIG, num_snapshots=-1))


def fill(pool: SnapshotPool, uses: dict[bytes, int]) -> list[bytes]:
    """Keep snapshots in order and use each `uses` times; return those that are left."""
    for name, times in uses.items():
        assert pool.reserve(name) is not None
        pool.keep(name)
        for _ in range(times):
            pool.use(name)
    return [name for name in uses if pool.reach([name], 1)]


def test_often_used_snapshot_stays_until_it_is_old() -> None:
    """Each eviction makes the others worth less: after three, one used four times goes before a new one."""
    uses, pool = {b"liked": 4, b"a": 0, b"b": 0, b"c": 0, b"d": 0}, SnapshotPool(range(2))
    assert fill(pool, uses) == [b"liked", b"d"]
    pool.validate([], dict.fromkeys((b"liked", b"d")).keys())
    assert fill(SnapshotPool(range(2)), {**uses, b"e": 0}) == [b"d", b"e"]


def test_one_use_counts_as_none() -> None:
    """The next turn of a conversation starts from it, and leaves a new one."""
    assert fill(SnapshotPool(range(2)), {b"once": 1, b"a": 0, b"b": 0}) == [b"a", b"b"]
    assert fill(SnapshotPool(range(2)), {b"twice": 2, b"a": 0, b"b": 0}) == [b"twice", b"b"]


@pytest.mark.parametrize(("rule", "left"), [("served", b"liked"), ("lru", b"b")])
def test_bench_compares_two_rules(rule: str, left: bytes) -> None:
    with loaded(Path(__file__).resolve().parents[2] / "bench" / "snapshots.py") as bench:
        assert fill(bench.RULES[rule](range(2)), {b"liked": 2, b"b": 0, b"c": 0}) == [left, b"c"]
        done = bench.run(iter((*range(200), name) for name in range(6)), pages=200, snapshots=2, rule=rule)
        assert type(done.snapshots) is bench.RULES[rule]
        assert done.snapshots.num_used > 0
