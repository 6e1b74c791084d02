"""Two steps in flight, drafts, slots and aligned chunks: single promises, one by one."""

from dataclasses import replace
from typing import Any

import pytest
from tests.scheduling.scheduler_harness import Harness
from tests.scheduling.test_scheduler import CONFIG, submit

from moeyard_worker.config.engine_config import SchedulerConfig
from moeyard_worker.protocol import Done, Tokens
from moeyard_worker.scheduling.request import Accepted, Reply, accept
from moeyard_worker.scheduling.scheduler import Scheduler
from moeyard_worker.scheduling.step import Chunk, Step

DEEP = replace(CONFIG, max_in_flight=2)


def said(replies: list[Reply]) -> list[Any]:
    """Return tokens as a tuple, and an end as its reason."""
    return [r.message.token_ids if isinstance(r.message, Tokens) else r.message.finish_reason for r in replies]


def row(chunk: Chunk) -> tuple[int, int, tuple[int, ...], int, int | None]:
    return chunk.start, chunk.max_start, chunk.token_ids, chunk.num_sampled, chunk.fed


def one(config: SchedulerConfig, **options: Any) -> Scheduler:
    """Return a scheduler with one request "p" of four prompt tokens and ten output tokens."""
    scheduler = Scheduler(config)
    assert scheduler.add(submit("p", 4, **{"max_tokens": 10, **options}), b"a", now=0.0) is None
    return scheduler


@pytest.mark.parametrize(
    ("drafts", "sampled", "count"),
    [((), (5,), 1), ((5,), (5, 6), 2), ((4,), (5, 6), 1), ((5, 6, 7), (5, 6, 8, 9), 3), ((4, 6, 7), (5, 6, 7, 8), 1)],
)
def test_accept(drafts: tuple[int, ...], sampled: tuple[int, ...], count: int) -> None:
    assert accept(drafts, sampled) == count


def test_rows_after_a_step_in_flight_are_fed() -> None:
    scheduler = Scheduler(DEEP)
    scheduler.add(submit("p", 12, 4), b"a", now=0.0)
    scheduler.add(submit("q", 5, 4), b"a", now=0.0)
    first = scheduler.schedule(now=0.0)
    assert [(c.key[1], c.start, c.num_tokens, c.num_sampled) for c in first.chunks] == [("p", 0, 8, 0), ("q", 0, 5, 1)]
    # The next chunk of a prompt is known; a token that is being sampled is not.
    second = scheduler.schedule(now=0.0)
    assert second.prefill[0].token_ids == submit("p", 12).prompt_token_ids[8:]
    assert (row(second.prefill[0])[:2], second.prefill[0].fed) == ((8, 8), None)
    assert row(second.decode[0]) == (5, 5, (0,), 1, 0)
    assert len(scheduler._flights) == 2
    assert said(scheduler.complete(first, [Accepted((7,))], now=0.0)) == [(7,)]
    third = scheduler.schedule(now=0.0)
    # In the second step p's prompt chunk comes first.
    assert [(c.key[1], *row(c)) for c in third.chunks] == [("p", 12, 12, (0,), 1, 0), ("q", 6, 6, (0,), 1, 1)]
    assert said(scheduler.complete(second, [Accepted((8,)), Accepted((9,))], now=0.0)) == [(8,), (9,)]
    scheduler.complete(third, [Accepted((1,)), Accepted((2,))], now=0.0)
    # Nothing is in flight, so the host knows the tokens again.
    assert [row(c) for c in scheduler.schedule(now=0.0).chunks] == [(13, 13, (1,), 1, None), (7, 7, (2,), 1, None)]
    scheduler.validate()


def test_step_above_the_limit_in_flight_is_refused() -> None:
    scheduler = one(DEEP)
    first, second = scheduler.schedule(now=0.0), scheduler.schedule(now=0.0)
    with pytest.raises(AssertionError, match="not completed"):
        scheduler.schedule(now=0.0)
    with pytest.raises(AssertionError, match="planned before"):
        scheduler.complete(second, [Accepted((1,))], now=0.0)
    with pytest.raises(AssertionError, match="2 tokens of 1 sampled"):
        scheduler.complete(first, [Accepted((1, 2))], now=0.0)


def test_stop_is_seen_one_step_late() -> None:
    scheduler = one(DEEP, stop_token_ids=(9,))
    first, second = scheduler.schedule(now=0.0), scheduler.schedule(now=0.0)
    assert said(scheduler.complete(first, [Accepted((9,))], now=0.0)) == [(9,), "stop"]
    assert not scheduler.has_work()
    assert scheduler.schedule(now=0.0) == Step.empty()
    scheduler.validate()
    # Its id is free again; its pages are not.
    assert scheduler.add(submit("p", 4), b"a", now=0.0) is None
    assert scheduler.pool.num_free == DEEP.num_pages - 2
    third = scheduler.schedule(now=0.0)
    assert not set(third.chunks[0].pages) & set(second.chunks[0].pages)
    assert scheduler.complete(second, [Accepted((5,))], now=0.0) == []
    assert scheduler.pool.num_free == DEEP.num_pages - 1
    assert said(scheduler.complete(third, [Accepted((5,))], now=0.0)) == [(5,)]
    scheduler.validate()


def test_request_certain_to_end_is_not_planned_again() -> None:
    scheduler = one(DEEP, max_tokens=2)
    first, second = scheduler.schedule(now=0.0), scheduler.schedule(now=0.0)
    scheduler.complete(first, [Accepted((1,))], now=0.0)
    assert scheduler.has_work()
    assert scheduler.schedule(now=0.0) == Step.empty()
    assert said(scheduler.complete(second, [Accepted((2,))], now=0.0)) == [(2,), "length"]


def test_aborted_request_keeps_pages_of_steps_in_flight() -> None:
    scheduler = one(replace(DEEP, num_state_slots=2))
    first, second = scheduler.schedule(now=0.0), scheduler.schedule(now=0.0)
    done = scheduler.abort(b"a", "p")
    assert isinstance(done, Done)
    assert scheduler.abort(b"a", "p") is None
    for step in (first, second):
        assert scheduler.pool.num_free == DEEP.num_pages - 2
        scheduler.validate()
        assert scheduler.complete(step, [Accepted((1,))], now=0.0) == []
    assert scheduler.pool.num_free == DEEP.num_pages
    scheduler.validate()


def test_pages_are_findable_when_their_step_is_completed() -> None:
    scheduler = Scheduler(DEEP)
    scheduler.add(submit("p", 8, 2), b"a", now=0.0)
    first = scheduler.schedule(now=0.0)
    scheduler.add(submit("q", (*submit("p", 8).prompt_token_ids, 1), 2), b"a", now=0.0)
    second = scheduler.schedule(now=0.0)
    assert [(c.key[1], c.start) for c in second.chunks] == [("q", 0), ("p", 8)]
    scheduler.complete(first, [Accepted((3,))], now=0.0)
    scheduler.add(submit("r", (*submit("p", 8).prompt_token_ids, 2), 2), b"a", now=0.0)
    assert [(c.key[1], c.start) for c in scheduler.schedule(now=0.0).prefill] == [("q", 8), ("r", 8)]


def test_pages_of_a_step_in_flight_are_not_yielded() -> None:
    """p needs a page while q, the later one, is in flight: both wait a step, though q could run, and then q yields."""
    harness = Harness(replace(DEEP, num_pages=4, prefix_caching=False))
    harness.submit(submit("p", 7, 8))
    harness.submit(submit("q", 5, 6))
    planned = []
    for _ in range(5):
        planned.append({c.key[1]: c.start for c in harness.plan().chunks})
        if len(harness.flights) == 2 or not planned[-1]:
            harness.finish_oldest()
    assert planned == [{"p": 0, "q": 0}, {"p": 7, "q": 5}, {}, {"p": 8}, {"p": 9}]
    assert harness.scheduler.stats.num_preemptions == 1
    harness.drain()


def test_no_request_yields_while_pages_are_being_freed() -> None:
    """p waits for the pages of q, which was aborted in flight, and takes none of r, which waits too."""
    harness = Harness(replace(DEEP, num_pages=6, max_batch_tokens=32, prefix_caching=False))
    for name, length in (("p", 7), ("q", 5), ("r", 5)):
        harness.submit(submit(name, length, 8))
    planned = []
    for i in range(6):
        planned.append({c.key[1]: c.start for c in harness.plan().chunks})
        if i:
            harness.finish_oldest()
        if i == 2:
            harness.abort("q")
    assert planned == [
        {"p": 0, "q": 0, "r": 0},
        {"p": 7, "q": 5, "r": 5},
        {"q": 6},
        {"r": 6},
        {"p": 8, "r": 7},
        {"p": 9, "r": 8},
    ]
    assert harness.scheduler.stats.num_preemptions == 0
    harness.drain()


@pytest.mark.parametrize(("p", "x", "later", "max_tokens"), [(20, 24, "yz", 20), (3, 17, "y", 12)])
def test_first_preempted_request_keeps_its_place(p: int, x: int, later: str, max_tokens: int) -> None:
    """x, whose prompt gets no rows next to others with drafts, is the only one that can yield its pages to p.

    Then others yield too and queue behind it, or it starts again before they end.
    """
    config = replace(DEEP, num_drafts=1, chunk_alignment=8, prefix_caching=False)
    num_pages, num_rows = 1 + -(-x // 4) + len(later), 10 + len(later)
    harness = Harness(replace(config, num_pages=num_pages, max_batch_tokens=num_rows))
    harness.submit(submit("p", 2, p))
    harness.submit(submit("x", x, 4))
    for name in later:
        harness.submit(submit(name, 1, max_tokens))
    planned = []
    for _ in range(3):
        planned.append("".join(c.key[1] for c in harness.plan().chunks))
        if len(harness.flights) == 2:
            harness.finish_oldest()
    assert planned == [f"px{later}", f"p{later}", f"p{later}"]
    assert harness.scheduler.stats.num_preemptions == 1
    # The harness checks that both queues stay in order of arrival, and that all requests end.
    harness.drain()


def test_drafts_are_verified_and_rolled_back_by_length() -> None:
    scheduler = one(replace(CONFIG, num_drafts=3))
    first = scheduler.schedule(now=0.0)
    scheduler.complete(first, [Accepted((1,), drafts=(2, 3, 4))], now=0.0)
    step = scheduler.schedule(now=0.0)
    assert [row(c) for c in step.chunks] == [(4, 4, (1, 2, 3, 4), 4, None)]
    assert step.sample_rows == (0, 1, 2, 3)
    # All but the first of the next three drafts are read by separate rows, at positions 8 and 9.
    assert len(step.chunks[0].pages) == 3
    # d_1 is right: t_0 and t_1 come in one message, and position 6 is written again.
    assert said(scheduler.complete(step, [Accepted((2, 7), drafts=(8,))], now=0.0)) == [(2, 7)]
    step = scheduler.schedule(now=0.0)
    assert [row(c) for c in step.chunks] == [(6, 6, (7, 8), 2, None)]
    scheduler.complete(step, [Accepted((8, 9))], now=0.0)
    assert [row(c) for c in scheduler.schedule(now=0.0).chunks] == [(8, 8, (9,), 1, None)]
    assert (scheduler.stats.drafts, scheduler.stats.accepted) == ([2, 1, 1], [2, 0, 0])
    assert scheduler.stats.generation_tokens == 5


def test_pages_for_refused_drafts_are_freed() -> None:
    scheduler = one(replace(CONFIG, num_drafts=3, page_size=2))
    scheduler.complete(scheduler.schedule(now=0.0), [Accepted((1,), drafts=(2, 3, 4))], now=0.0)
    step = scheduler.schedule(now=0.0)
    assert scheduler.pool.num_free == CONFIG.num_pages - 5
    scheduler.complete(step, [Accepted((5,))], now=0.0)
    assert scheduler.pool.num_free == CONFIG.num_pages - 3
    scheduler.validate()


def test_drafts_end_with_the_request() -> None:
    scheduler = one(replace(CONFIG, num_drafts=3), max_tokens=3)
    scheduler.complete(scheduler.schedule(now=0.0), [Accepted((1,), drafts=(2, 3, 4))], now=0.0)
    step = scheduler.schedule(now=0.0)
    assert step.chunks[0].token_ids == (1, 2)
    assert said(scheduler.complete(step, [Accepted((2, 3))], now=0.0)) == [(2, 3), "length"]


@pytest.mark.parametrize(("min_tokens", "kept"), [(0, [(2, 9), "stop"]), (4, [(2, 9, 9), "stop"]), (6, [(2, 9, 9, 9)])])
def test_stop_among_accepted_tokens_truncates_them(min_tokens: int, kept: list[Any]) -> None:
    scheduler = one(replace(CONFIG, num_drafts=3), stop_token_ids=(9,), min_tokens=min_tokens)
    scheduler.complete(scheduler.schedule(now=0.0), [Accepted((1,), drafts=(2, 9, 9))], now=0.0)
    assert said(scheduler.complete(scheduler.schedule(now=0.0), [Accepted((2, 9, 9, 9))], now=0.0)) == kept


def test_draft_takes_no_page_from_another_request() -> None:
    """Two requests fill the pool: with drafts they would need another page."""
    config = replace(CONFIG, num_pages=4, num_drafts=3, prefix_caching=False)
    scheduler = Scheduler(config)
    for name, length in (("p", 6), ("q", 7)):
        assert scheduler.add(submit(name, length, 3), b"a", now=0.0) is None
    step = scheduler.schedule(now=0.0)
    scheduler.complete(step, [Accepted((1,), drafts=(2, 3))] * 2, now=0.0)
    assert [c.token_ids for c in scheduler.schedule(now=0.0).decode] == [(1, 2), (1,)]
    assert scheduler.stats.num_preemptions == 0


def test_start_of_fed_drafts_is_a_range() -> None:
    scheduler = one(replace(DEEP, num_drafts=2))
    first = scheduler.schedule(now=0.0)
    second = scheduler.schedule(now=0.0)
    # A step with a prompt drafts one token, and the next step verifies as many.
    assert first.num_drafts == 1
    assert row(second.chunks[0]) == (4, 4, (0, 0), 2, 0)
    scheduler.complete(first, [Accepted((1,), drafts=(2,))], now=0.0)
    third = scheduler.schedule(now=0.0)
    assert row(third.chunks[0]) == (5, 6, (0, 0, 0), 3, 0)
    assert len(third.chunks[0].pages) * DEEP.page_size >= 10
    scheduler.complete(second, [Accepted((2, 3), drafts=(7, 7))], now=0.0)
    # Seven tokens are known; the chunk in flight starts at 6 and yields one to three.
    assert row(scheduler.schedule(now=0.0).chunks[0]) == (7, 9, (0, 0, 0), 3, 0)
    scheduler.validate()


def test_fed_drafts_stay_within_the_request() -> None:
    """All 4 + 5 tokens may be known after the second step; then the third has one row, whose token is dropped."""
    scheduler = one(replace(DEEP, num_drafts=3), max_tokens=5)
    scheduler.complete(scheduler.schedule(now=0.0), [Accepted((1,), drafts=(2, 3, 4))], now=0.0)
    second = scheduler.schedule(now=0.0)
    assert second.chunks[0].num_tokens == 4
    third = scheduler.schedule(now=0.0)
    assert row(third.chunks[0]) == (5, 8, (0,), 1, 0)
    assert said(scheduler.complete(second, [Accepted((2, 3, 4, 5))], now=0.0)) == [(2, 3, 4, 5), "length"]
    assert scheduler.complete(third, [Accepted((6,))], now=0.0) == []
    scheduler.validate()


def test_request_waits_for_a_slot() -> None:
    harness = Harness(replace(CONFIG, num_state_slots=1, prefix_caching=False))
    harness.submit(submit("p", 3, 2))
    harness.submit(submit("q", 3, 2))
    assert [(c.key[1], c.state_slot) for c in harness.step().chunks] == [("p", 0)]
    assert [(c.key[1], c.state_slot) for c in harness.step().chunks] == [("p", 0)]
    assert [(c.key[1], c.state_slot) for c in harness.step().chunks] == [("q", 0)]
    harness.drain()


def test_prompt_chunks_end_at_multiples_of_the_alignment() -> None:
    harness = Harness(replace(CONFIG, chunk_alignment=4, prefill_chunk=7, max_batch_tokens=10, prefix_caching=False))
    harness.submit(submit("p", 10, 4))
    harness.submit(submit("q", 9, 4))
    shapes = [[(c.key[1], c.start, c.end) for c in harness.step().prefill] for _ in range(4)]
    assert shapes == [[("p", 0, 4), ("q", 0, 4)], [("p", 4, 10), ("q", 4, 8)], [("q", 8, 9)], []]
    harness.drain()


def test_prompt_that_needs_more_rows_is_not_overtaken() -> None:
    """r would fit into the three rows left by p, but then q might never get its four."""
    harness = Harness(replace(CONFIG, chunk_alignment=4, prefill_chunk=4, max_batch_tokens=4, prefix_caching=False))
    harness.submit(submit("p", 3, 3))
    harness.submit(submit("q", 9, 2))
    harness.submit(submit("r", 2, 2))
    assert [[c.key[1] for c in harness.step().chunks] for _ in range(4)] == [["p"], ["p"], ["p"], ["q"]]
    harness.drain()


def test_running_prompt_that_needs_more_rows_is_not_overtaken() -> None:
    """p with its draft leaves seven rows: x waits for eight, so r must not take rows as well."""
    harness = Harness(replace(CONFIG, chunk_alignment=8, max_batch_tokens=9, num_drafts=1, prefix_caching=False))
    harness.submit(submit("p", 1, 8))
    harness.submit(submit("x", 20, 2))
    planned = ["".join(c.key[1] for c in harness.step().chunks)]
    harness.submit(submit("r", 2, 2))
    planned += ["".join(c.key[1] for c in harness.step().chunks) for _ in range(3)]
    assert planned == ["px", "p", "p", "p"]
    harness.drain()


def test_prefix_hits_end_at_multiples_of_the_alignment() -> None:
    harness = Harness(replace(CONFIG, chunk_alignment=8))
    text = tuple(range(21))
    harness.submit(submit("p", text))
    harness.drain()
    harness.submit(submit("q", text))
    assert harness.step().prefill[0].start == 16
    harness.drain()
