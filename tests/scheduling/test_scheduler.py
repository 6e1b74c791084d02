"""The scheduler's single promises, one by one; `test_scheduler_properties.py` plays random histories."""

import re
from dataclasses import replace
from typing import Any

import pytest
from tests.scheduling.scheduler_harness import Harness

from moeyard_worker.config.engine_config import SchedulerConfig
from moeyard_worker.protocol import Done, Rejected, SamplingParams, Submit, TokenLogprob, Tokens
from moeyard_worker.scheduling.request import Accepted, Waits
from moeyard_worker.scheduling.scheduler import Scheduler
from moeyard_worker.scheduling.step import Chunk, Step

CONFIG = SchedulerConfig(
    num_pages=16, page_size=4, max_model_len=64, vocab_size=100, max_batch_tokens=16, max_num_seqs=4, prefill_chunk=8
)


def submit(request_id: str, prompt: tuple[int, ...] | int, max_tokens: int = 4, **sampling: Any) -> Submit:
    """Return a request; an int prompt is a length, with tokens that no other length shares."""
    tokens = prompt if isinstance(prompt, tuple) else tuple((prompt * 7 + i) % 100 for i in range(prompt))
    params = SamplingParams(max_tokens=max_tokens, **sampling)
    return Submit(request_id=request_id, prompt_token_ids=tokens, sampling=params)


def shapes(chunks: tuple[Chunk, ...]) -> list[tuple[str, int, int, bool]]:
    """Return (request, start, rows, sampled) of each chunk."""
    return [(c.key[1], c.start, c.num_tokens, c.num_sampled > 0) for c in chunks]


@pytest.mark.parametrize(
    ("request_", "reason", "numbers"),
    [
        (submit("r", ()), "bad_request", "the prompt is empty"),
        (submit("r", (1, 100, 2)), "bad_request", "token id 100 .* vocabulary of 100"),
        (submit("r", (1, -1, 2)), "bad_request", "token id -1 .* vocabulary of 100"),
        (submit("r", (2**70,)), "bad_request", "token id 1180591620717411303424 .* vocabulary of 100"),
        (submit("r", 64, 1), "prompt_too_long", "64 tokens.* limit of 64"),
        (submit("r", 60, 5), "prompt_too_long", "60 prompt tokens .* max_tokens 5 .* limit of 64"),
        (submit("r", 65, 0), "prompt_too_long", "65 tokens.* limit of 64"),
        (submit("r", 3, -1), "bad_request", "max_tokens must be at least 0, got -1"),
        (submit("r", 3, prompt_logprobs=21), "bad_request", r"prompt_logprobs .*\[0, 20\], got 21"),
        (submit("r", 3, 4, min_tokens=5), "bad_request", r"min_tokens .*\[0, max_tokens 4\], got 5"),
        (submit("r", 3, temperature=-0.5), "bad_request", "temperature .*, got -0.5"),
        (submit("r", 3, temperature=float("nan")), "bad_request", "temperature .*, got nan"),
        (submit("r", 3, top_p=0.0), "bad_request", "top_p .*, got 0.0"),
        (submit("r", 3, top_k=-1), "bad_request", "top_k .*, got -1"),
        (submit("r", 3, top_k=2**63), "bad_request", "top_k .*, got 9223372036854775808"),
        (submit("r", 3, stop_token_ids=tuple(range(4001))), "bad_request", "name 4001 tokens, at most 4000"),
        (submit("r", 3, min_p=1.5), "bad_request", "min_p .*, got 1.5"),
        (submit("r", 3, repetition_penalty=0.0), "bad_request", "repetition_penalty .*, got 0.0"),
        (submit("r", 3, presence_penalty=2.5), "bad_request", "presence_penalty .*, got 2.5"),
        (submit("r", 3, frequency_penalty=-3.0), "bad_request", "frequency_penalty .*, got -3.0"),
        (submit("r", 3, logprobs=-1), "bad_request", "logprobs .*, got -1"),
        (submit("r", 3, logit_bias={100: 1.0}), "bad_request", "logit_bias .* 100, .* vocabulary of 100"),
        (submit("r", 3, logit_bias={-1: 1.0}), "bad_request", "logit_bias .* -1, .* vocabulary of 100"),
        (submit("r", 3, repetition_penalty=1e-320), "bad_request", "repetition_penalty .*, got 1e-320"),
        (
            submit("r", 3, min_tokens=1, stop_token_ids=tuple(range(100))),
            "bad_request",
            "min_tokens holds back every stop token",
        ),
        (submit("r", 3, logit_bias={5: float("inf")}), "bad_request", "logit_bias .* 5 .*-100, 100.*got inf"),
    ],
    ids=str,
)
def test_refusals_have_both_numbers(request_: Submit, reason: str, numbers: str) -> None:
    scheduler = Scheduler(CONFIG)
    rejected = scheduler.add(request_, b"a", now=0.0)
    assert isinstance(rejected, Rejected)
    assert (rejected.request_id, rejected.reason) == ("r", reason)
    assert re.search(numbers, rejected.message), rejected.message
    assert not scheduler.has_work()
    scheduler.validate()


def test_request_that_fits_exactly_runs() -> None:
    """The last output token is never an input: 4 pages of 4 hold 13 + 4 tokens, and 13 + 5 need a fifth."""
    harness = Harness(replace(CONFIG, num_pages=4))
    rejected = harness.submit(submit("large", 13, 5))
    assert rejected is not None
    assert (rejected.reason, rejected.retry_after) == ("never_fits", None)
    assert rejected.message == "the request needs 5 KV pages, this worker has 4"
    assert harness.submit(submit("exact", 13, 4)) is None
    harness.drain()
    assert Scheduler(CONFIG).add(submit("longest", 63, 1), b"a", now=0.0) is None
    assert Scheduler(CONFIG).add(submit("longest", 60, 4), b"a", now=0.0) is None


def test_full_queue_refuses_until_there_is_room() -> None:
    harness = Harness(replace(CONFIG, max_waiting=2, max_num_seqs=1))
    assert harness.submit(submit("o", 5)) is None
    harness.step()
    assert [harness.submit(submit(name, 5)) for name in "pq"] == [None, None]
    rejected = harness.submit(submit("r", 5))
    assert rejected is not None
    assert (rejected.reason, rejected.retry_after) == ("queue_full", 1.0)
    assert rejected.message == "2 requests are waiting"
    harness.drain()
    assert harness.submit(submit("r", 5)) is None
    harness.drain()


def test_only_requests_that_cannot_start_count_as_waiting() -> None:
    """Nothing runs: 4 places and 2 waiting make 6; with pages for 3 prompts, 3 and 2 make 5."""
    harness = Harness(replace(CONFIG, max_waiting=2))
    assert [harness.submit(submit(name, 5)) is None for name in "opqrstu"] == [True] * 6 + [False]
    harness.drain()
    harness = Harness(replace(CONFIG, max_waiting=2, num_pages=6))
    assert [harness.submit(submit(name, 5 + i)) is None for i, name in enumerate("opqrst")] == [True] * 5 + [False]
    harness.drain()


def test_request_that_waits_too_long_is_refused() -> None:
    config = replace(CONFIG, max_num_seqs=1, max_queue_seconds=10.0)
    scheduler = Scheduler(config)
    assert [scheduler.add(submit(name, 5), b"a", now=now) for name, now in (("p", 0.0), ("q", 1.0), ("r", 5.0))] == [
        None,
        None,
        None,
    ]
    scheduler.schedule(now=0.0)
    assert scheduler.expire(now=10.9) == []
    [reply] = scheduler.expire(now=11.0)
    assert reply.client == b"a"
    assert isinstance(reply.message, Rejected)
    assert (reply.message.request_id, reply.message.reason) == ("q", "queue_timeout")
    assert reply.message.message == "the request waited 10.0 s and did not start; the limit is 10 s"
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1), "a running request must not count as waiting"
    scheduler.validate()
    assert Scheduler(CONFIG).expire(now=1e9) == []


def test_request_with_a_compiled_grammar_expires_by_its_arrival() -> None:
    scheduler = Scheduler(replace(CONFIG, max_num_seqs=1, max_queue_seconds=3.0))
    for name, arrived in (("runs", 0.0), ("later", 2.0), ("compiled", 1.0)):
        assert scheduler.add(submit(name, 5), b"a", now=arrived) is None
        scheduler.schedule(now=2.0) if name == "runs" else None
    assert [reply.message.request_id for reply in scheduler.expire(now=4.0)] == ["compiled"]
    assert [reply.message.request_id for reply in scheduler.expire(now=5.0)] == ["later"]


def test_queue_time_pauses_while_nothing_runs() -> None:
    """A peer is lost and replaced; requests wait only while there are steps."""
    scheduler = Scheduler(replace(CONFIG, max_num_seqs=1, max_queue_seconds=10.0))
    for name, now in (("p", 0.0), ("q", 1.0)):
        assert scheduler.add(submit(name, 5), b"a", now=now) is None
    scheduler.schedule(now=0.0)
    scheduler.roll_back(now=5.0)
    assert scheduler.add(submit("r", 5), b"a", now=20.0) is None
    assert scheduler.expire(now=50.0) == []
    assert scheduler.schedule(now=60.0).num_tokens
    assert scheduler.expire(now=65.9) == []
    [reply] = scheduler.expire(now=66.0)
    assert isinstance(reply.message, Rejected)
    assert reply.message.message == "the request waited 10.0 s and did not start; the limit is 10 s"
    assert reply.message.request_id == "q"
    assert scheduler.expire(now=69.9) == []
    assert len(scheduler.expire(now=70.0)) == 1
    scheduler.validate()


def test_preempted_request_does_not_expire() -> None:
    harness = Harness(replace(CONFIG, num_pages=4, max_queue_seconds=1.0))
    for name in "pq":
        assert harness.submit(submit(name, (1, 2, 3, 4) if name == "p" else (5, 6, 7, 8), 12)) is None
    while not harness.scheduler.stats.num_preemptions:
        harness.step()
    assert harness.scheduler.num_waiting == 1
    assert harness.scheduler.expire(now=1e9) == []
    harness.drain()


def test_request_preempted_in_its_prompt_does_not_expire() -> None:
    harness = Harness(replace(CONFIG, num_pages=8, max_batch_tokens=2, max_num_seqs=2, max_queue_seconds=1.0))
    for request in (submit("p", 4, 12), submit("q", 24, 1)):
        assert harness.submit(request) is None
    while not harness.scheduler.stats.num_preemptions:
        harness.step()
    [waiting] = harness.scheduler._roster.waiting
    assert (waiting.request_id, waiting.output) == ("q", []), "the preempted request has no output yet"
    assert harness.scheduler.expire(now=1e9) == []
    harness.drain()


def test_ids_are_unique_per_client_while_they_live() -> None:
    harness = Harness(CONFIG)
    assert harness.submit(submit("r", 5), b"a") is None
    rejected = harness.submit(submit("r", 6), b"a")
    assert rejected is not None
    assert rejected.reason == "duplicate"
    assert harness.submit(submit("r", 6), b"b") is None
    harness.step()
    assert harness.submit(submit("r", 5), b"b") is not None
    harness.drain()
    assert harness.submit(submit("r", 5), b"a") is None
    harness.drain()


def test_prompt_chunks_then_single_rows() -> None:
    harness = Harness(CONFIG)
    harness.submit(submit("p", 10, 3))
    assert shapes(harness.step().prefill) == [("p", 0, 8, False)]
    harness.submit(submit("q", 20, 3))
    # 16 rows: the last two of p, then as many of q as a chunk may hold.
    assert shapes(harness.step().prefill) == [("p", 8, 2, True), ("q", 0, 8, False)]
    step = harness.step()
    assert shapes(step.decode) == [("p", 10, 1, True)]
    assert shapes(step.prefill) == [("q", 8, 8, False)]
    assert step.chunks == step.prefill + step.decode
    assert (step.num_prefill_tokens, step.num_tokens) == (8, 9)
    step = harness.step()
    assert shapes(step.chunks) == [("q", 16, 4, True), ("p", 11, 1, True)]
    assert step.sampled == step.chunks
    harness.drain()


def test_a_step_never_exceeds_its_budget() -> None:
    harness = Harness(replace(CONFIG, max_batch_tokens=4, prefill_chunk=3))
    for name in "pqrs":
        harness.submit(submit(name, ord(name) - 105, 6))
    assert shapes(harness.step().chunks) == [("p", 0, 3, False), ("q", 0, 1, False)]
    harness.drain()


def test_prefix_hits_are_whole_pages_short_of_the_last_position() -> None:
    harness = Harness(CONFIG)
    text = tuple(range(17))
    cached: dict[str, int] = {}
    seen: dict[str, tuple[int | None, ...]] = {}
    for name, prompt in (
        ("miss", text[:16]),
        ("same", text[:16]),
        ("longer", text),
        ("other", (*text[:9], 99, 99, 99, 99)),
        ("tail", text[4:]),
    ):
        harness.submit(submit(name, prompt))
        while harness.live:
            for reply in harness.finish(harness.plan()):
                if isinstance(reply.message, Done):
                    cached[name] = reply.message.cached_tokens
                if isinstance(reply.message, Tokens):
                    seen[name] = (*seen.get(name, ()), reply.message.cached_tokens)
    # Page 4 of "same" holds the position whose logits are needed, so it is computed again.
    assert cached == {"miss": 0, "same": 12, "longer": 16, "other": 8, "tail": 0}
    assert all(seen[name][0] == cached[name] and set(seen[name][1:]) <= {None} for name in cached), "in the first"
    assert harness.scheduler.stats.prefix_hit_tokens == 36
    assert harness.scheduler.stats.prefix_query_tokens == 16 + 16 + 17 + 13 + 13
    assert harness.scheduler.stats.prefill_tokens == 75 - 36


def test_output_pages_are_never_reused() -> None:
    """The output of one request is the next one's prompt: only pages computed as prompt are found."""
    harness = Harness(replace(CONFIG, vocab_size=100))
    harness.submit(submit("p", 6, 12))
    request = harness.live[b"a", "p"]
    harness.drain()
    harness.submit(submit("q", (*request.prompt, *request.output)))
    assert shapes(harness.step().prefill)[0][:2] == ("q", 4)
    harness.drain()


def test_prefix_caching_can_be_off() -> None:
    harness = Harness(replace(CONFIG, prefix_caching=False))
    for _ in range(2):
        harness.submit(submit("p", 16))
        harness.drain()
    assert harness.scheduler.stats.prefix_hit_tokens == 0


def test_latest_request_yields_and_keeps_its_place() -> None:
    """Three sequences of 8 + 12 tokens, 5 pages each at the end, on 9 pages."""
    harness = Harness(replace(CONFIG, num_pages=9, prefix_caching=False))
    for name in "pqr":
        harness.submit(submit(name, tuple(range(ord(name) - 100, ord(name) - 92)), 13))
    harness.submit(submit("s", 3, 1))
    ended: list[str] = []
    preempted: list[str] = []
    while harness.live:
        before = [s.request_id for s in harness.scheduler._roster.running]
        step = harness.plan()
        after = {s.request_id for s in harness.scheduler._roster.running}
        preempted += [name for name in reversed(before) if name not in after]
        ended += [r.message.request_id for r in harness.finish(step) if isinstance(r.message, Done)]
    assert preempted == ["r", "q"], "the latest must yield first, and none twice"
    assert "p" not in preempted
    assert harness.scheduler.stats.num_preemptions == len(preempted) > 0
    assert ended.index("p") < ended.index("q") < ended.index("r")


def test_recompute_runs_outputs_as_outputs_after_other_rows() -> None:
    harness = Harness(replace(CONFIG, num_pages=11, prefix_caching=False, max_batch_tokens=6, prefill_chunk=4))
    harness.submit(submit("p", 4, 28))
    harness.submit(submit("q", 5, 28))
    several = []
    while harness.live:
        step = harness.step()
        several += [c for c in step.decode if c.num_tokens > 1]
        assert all(c.start >= 5 for c in several)
        if len(step.decode) > 1:
            sizes = [c.num_tokens for c in step.decode]
            assert sizes == sorted(sizes), "a recompute must not precede single rows"
    assert harness.scheduler.stats.num_preemptions > 0
    assert several, "nothing was recomputed in chunks"


def test_single_rows_come_before_an_older_recompute() -> None:
    """An older sequence that recomputes 8 outputs must not delay a newer one's next token."""
    scheduler = Scheduler(replace(CONFIG, max_batch_tokens=4, max_num_seqs=2))
    scheduler.add(submit("old", 4, 20), b"a", now=0.0)
    scheduler.add(submit("new", 4, 20), b"a", now=0.0)
    for _ in range(10):
        step = scheduler.schedule(now=0.0)
        scheduler.complete(step, [Accepted((1,))] * len(step.sampled), now=0.0)
    old = scheduler._roster.running[0]
    old.num_computed = len(old.prompt)  # as after a preemption, when the prompt is computed again
    assert shapes(scheduler.schedule(now=0.0).decode) == [("new", old.length - 3, 1, True), ("old", 4, 3, False)]


def test_abort_frees_pages_at_once() -> None:
    harness = Harness(CONFIG)
    harness.submit(submit("running", 30, 8))
    harness.submit(submit("waiting", 60, 4))
    for _ in range(2):
        harness.step()
    assert (harness.scheduler.num_running, harness.scheduler.num_waiting) == (1, 1)
    assert harness.scheduler.num_waiting_tokens == 60
    assert harness.scheduler.pool.num_free == CONFIG.num_pages - 8
    done = harness.abort("waiting")
    assert done is not None
    assert (done.completion_tokens, done.queue_seconds, done.prefill_seconds) == (0, 0.0, 0.0)
    assert harness.abort("running") is not None
    assert harness.scheduler.pool.num_free == CONFIG.num_pages
    assert not harness.scheduler.has_work()
    assert harness.abort("running") is None
    assert harness.abort("unknown") is None


def test_abort_of_one_holder_leaves_the_shared_pages_to_the_other() -> None:
    harness = Harness(CONFIG)
    harness.submit(submit("p", 20, 8))
    for _ in range(3):
        harness.step()
    harness.submit(submit("q", 20, 8))
    harness.step()
    assert harness.scheduler.pool.num_free == CONFIG.num_pages - 6 - 1
    harness.abort("p")
    assert harness.scheduler.pool.num_free == CONFIG.num_pages - 5
    harness.drain()


def test_lost_step_costs_only_time() -> None:
    harness = Harness(CONFIG)
    for name in "pqrstu":
        harness.submit(submit(name, ord(name) - 100))
    harness.step()
    step = harness.plan()
    harness.roll_back()
    assert harness.scheduler.num_running, "running requests must continue"
    again = harness.plan()
    assert [(c.key, c.start, c.token_ids, c.pages) for c in again.chunks] == [
        (c.key, c.start, c.token_ids, c.pages) for c in step.chunks
    ]
    harness.finish_oldest()
    harness.drain()


def test_lost_client_ends_only_its_own_requests() -> None:
    harness = Harness(CONFIG)
    for client in (b"a", b"b"):
        for name in "pqr":
            harness.submit(submit(name, 9), client)
    harness.step()
    harness.abort_client(b"a")
    assert {client for client, _ in harness.live} == {b"b"}
    harness.drain()


def run_tokens(request: Submit, tokens: list[int], eos: tuple[int, ...] = ()) -> Done:
    """Run `tokens` through a request alone until it ends."""
    scheduler = Scheduler(replace(CONFIG, eos_token_ids=eos))
    assert scheduler.add(request, b"a", now=0.0) is None
    for token_id in tokens:
        step = scheduler.schedule(now=0.0)
        for reply in scheduler.complete(step, [Accepted((token_id,))], now=0.0):
            if isinstance(reply.message, Done):
                return reply.message
    raise AssertionError("the request did not end")


@pytest.mark.parametrize(
    ("sampling", "tokens", "reason", "stop", "count"),
    [
        ({}, [5, 6, 7, 8], "length", None, 4),
        ({}, [5, 2, 7, 8], "stop", 2, 2),
        ({}, [5, 6, 7, 2], "stop", 2, 4),
        ({"ignore_eos": True}, [5, 2, 7, 8], "length", None, 4),
        ({"ignore_eos": True, "stop_token_ids": (2, 7)}, [5, 6, 7, 8], "stop", 7, 3),
        ({"ignore_eos": True, "stop_token_ids": (2,)}, [2, 6, 7, 8], "stop", 2, 1),
        ({"min_tokens": 3, "stop_token_ids": (7,)}, [2, 7, 7, 8], "stop", 7, 3),
        ({"min_tokens": 4}, [2, 2, 2, 2], "stop", 2, 4),
    ],
)
def test_ends(sampling: dict[str, Any], tokens: list[int], reason: str, stop: int | None, count: int) -> None:
    done = run_tokens(submit("r", 3, 4, **sampling), tokens, eos=(2,))
    assert (done.finish_reason, done.stop_token_id, done.completion_tokens) == (reason, stop, count)


def test_times_are_from_arrival_to_start_to_first_token() -> None:
    scheduler = Scheduler(replace(CONFIG, max_num_seqs=1, prefill_chunk=4))
    scheduler.add(submit("p", 3, 1), b"a", now=1.0)
    scheduler.add(submit("q", 8, 2), b"a", now=2.0)
    times, dones = iter(range(10, 100, 10)), []
    while scheduler.has_work():
        now = next(times)
        step = scheduler.schedule(now=float(now))
        replies = scheduler.complete(step, [Accepted((1,))] * len(step.sampled), now=now + 5.0)
        dones += [r.message for r in replies if isinstance(r.message, Done)]
    # p runs in the step [10, 15]; q in [20, 25], [30, 35] (first token) and [40, 45].
    assert [(d.queue_seconds, d.prefill_seconds) for d in dones] == [(9.0, 5.0), (18.0, 15.0)]
    assert scheduler.stats.queue_seconds == [9.0, 18.0]
    assert scheduler.stats.prefill_seconds == [5.0, 15.0]
    assert scheduler.stats.token_seconds == [10.0], "p has one token and no time between tokens"
    assert (scheduler.stats.prefill_tokens, scheduler.stats.generation_tokens) == (11, 3)


def test_waits_are_those_between_start_and_end() -> None:
    scheduler = Scheduler(replace(CONFIG, max_num_seqs=1))
    scheduler.add(submit("p", 3, 1), b"a", now=1.0)
    scheduler.add(submit("q", 3, 2), b"a", now=2.0)
    # The rank's totals after each step. The first steps have one token each.
    totals, dones = iter([Waits(1.0, 8.0), Waits(3.0, 16.0), Waits(7.0, 64.0)]), []
    while scheduler.has_work():
        step = scheduler.schedule(now=3.0)
        scheduler.stats.waits = next(totals)
        replies = scheduler.complete(step, [Accepted((1,))] * len(step.sampled), now=4.0)
        dones += [r.message for r in replies if isinstance(r.message, Done)]
    p, q = dones
    assert (p.lockstep_seconds, p.fetch_seconds) == (1.0, None), "no fetch was known at its start"
    assert (q.lockstep_seconds, q.fetch_seconds) == (6.0, 56.0)
    scheduler.add(submit("r", 3, 1), b"a", now=5.0)
    done = scheduler.abort(b"a", "r")
    assert done is not None
    assert (done.lockstep_seconds, done.fetch_seconds) == (None, None), "it never started"


def test_logprobs_travel_with_their_token() -> None:
    scheduler = Scheduler(CONFIG)
    scheduler.add(submit("p", 3, 2, logprobs=1), b"client", now=0.0)
    logprob = TokenLogprob(logprob=-0.5, rank=1, top=((7, -0.5),))
    step = scheduler.schedule(now=0.0)
    assert [r.request_id for r in scheduler.requests(step)] == ["p"]
    (reply,) = scheduler.complete(step, [Accepted((7,), (logprob,))], now=0.0)
    assert reply.client == b"client"
    assert reply.message == Tokens(request_id="p", start=0, token_ids=(7,), logprobs=(logprob,), cached_tokens=0)


def test_an_idle_scheduler_plans_nothing() -> None:
    scheduler = Scheduler(CONFIG)
    assert scheduler.schedule(now=0.0) == Step.empty()
    assert scheduler.complete(Step.empty(), [], now=0.0) == []


def test_a_step_must_be_completed_before_the_next() -> None:
    scheduler = Scheduler(CONFIG)
    scheduler.add(submit("p", 3), b"a", now=0.0)
    step = scheduler.schedule(now=0.0)
    with pytest.raises(AssertionError, match="not completed"):
        scheduler.schedule(now=0.0)
    with pytest.raises(AssertionError, match="0 results for 1 sampled chunks"):
        scheduler.complete(step, [], now=0.0)


def test_prompts_with_output_take_few_rows() -> None:
    """Alone they fill the step; with output rows they share `mixed_prefill_tokens`."""
    harness = Harness(replace(CONFIG, mixed_prefill_tokens=5))
    for name, length in (("a", 7), ("b", 9)):
        harness.submit(submit(name, length))
    step = harness.step()
    assert shapes(step.prefill) == [("a", 0, 7, True), ("b", 0, 8, False)]
    harness.submit(submit("c", 11))
    step = harness.step()
    assert shapes(step.prefill) == [("b", 8, 1, True), ("c", 0, 4, False)]
    assert shapes(step.decode) == [("a", 7, 1, True)]


def test_prompts_with_output_of_other_ranks_take_few_rows() -> None:
    scheduler = Scheduler(replace(CONFIG, mixed_prefill_tokens=5))
    scheduler.add(submit("a", 9), b"a", 0.0)
    assert shapes(scheduler.schedule(0.0, beside_output=True).prefill) == [("a", 0, 5, False)]
