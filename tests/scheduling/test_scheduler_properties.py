"""Random histories of a scheduler: for any interleaving every request gives the tokens that it gives alone."""

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.scheduling.scheduler_harness import Harness

from moeyard_worker.config.engine_config import SchedulerConfig
from moeyard_worker.protocol import KvCompression, SamplingParams, Submit

VOCAB = 11
# Prompts are parts of few texts, so that many share a prefix of whole pages.
TEXTS = tuple(tuple(random.Random(i).choices(range(VOCAB), k=30)) for i in range(2))


@st.composite
def configs(draw: st.DrawFn) -> SchedulerConfig:
    num_drafts = draw(st.sampled_from((0, 0, 1, 3)))
    alignment = draw(st.sampled_from((1, 1, 2, 4)))
    num_state_slots = draw(st.sampled_from((0, 0, 1, 3)))
    max_batch_tokens = max(draw(st.sampled_from((1, 2, 3, 5, 8, 16, 64))), 1 + num_drafts, alignment)
    return SchedulerConfig(
        num_pages=draw(st.integers(1, 16)),
        page_size=draw(st.sampled_from((1, 2, 3, 4, 8))),
        max_model_len=draw(st.sampled_from((12, 24, 40))),
        vocab_size=VOCAB,
        eos_token_ids=draw(st.sampled_from(((), (0,), (0, 5)))),
        max_batch_tokens=max_batch_tokens,
        max_num_seqs=min(max_batch_tokens // (1 + num_drafts), draw(st.integers(1, 5))),
        prefill_chunk=max(draw(st.sampled_from((1, 2, 3, 7, 16, 64))), alignment),
        mixed_prefill_tokens=draw(st.sampled_from((None, alignment, alignment + 3))),
        max_waiting=draw(st.integers(1, 6)),
        prefix_caching=draw(st.booleans()),
        max_in_flight=draw(st.sampled_from((1, 2))),
        num_drafts=num_drafts,
        num_state_slots=num_state_slots,
        num_snapshots=draw(st.sampled_from((0, 1, 2, 5))) if num_state_slots else 0,
        chunk_alignment=alignment,
        routing_bytes=draw(st.sampled_from((0, 1, 3))),
    )


@st.composite
def compressions(draw: st.DrawFn) -> KvCompression | None:
    window = draw(st.integers(1, 4))
    return draw(
        st.none()
        | st.builds(KvCompression, method=st.just("snapkv"), budget=st.integers(window, 20), window=st.just(window))
    )


def forced() -> st.SearchStrategy[dict[str, Any]]:
    """Return the fields of a forced output, many tokens per step. The harness chooses the tokens."""
    traces = st.integers(1, 18).map(lambda count: (0,) * count)
    given = st.fixed_dictionaries({"trace_decode_token_ids": traces, "logprobs": st.sampled_from((0, 1, 3))})
    return st.just({}) | given.map(lambda fields: {**fields, "as_decoded": True})


@st.composite
def submits(draw: st.DrawFn) -> Submit:
    text = draw(st.sampled_from(TEXTS))
    tail = draw(st.lists(st.integers(0, VOCAB - 1), max_size=3) | st.just([VOCAB]))
    max_tokens = draw(st.integers(0, 16))
    sampling = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens)),
        stop_token_ids=draw(st.sampled_from(((), (3,)))),
        ignore_eos=draw(st.booleans()),
        prompt_logprobs=draw(st.sampled_from((None, None, 0, 2))),
        routed_experts_start=draw(st.sampled_from((None, 0, 3))),
        kv_compression=draw(st.none() | compressions()),
        **draw(forced()),
    )
    prompt = (*text[: draw(st.integers(0, 20))], *tail)
    return Submit(request_id=draw(st.sampled_from("pqrstuvw")), prompt_token_ids=prompt, sampling=sampling)


clients = st.sampled_from((b"a", b"b"))
steps = st.tuples(st.just("steps"), st.integers(1, 6))
events = st.one_of(
    st.tuples(st.just("submit"), submits(), clients),
    st.tuples(st.just("submit"), submits(), clients),
    steps,
    steps,
    st.tuples(st.just("finish")),
    st.tuples(st.just("abort"), st.sampled_from("pqrstuvw"), clients),
    st.tuples(st.sampled_from(("carry", "fail")), st.sampled_from("pqrstuvw"), clients),
    st.tuples(st.sampled_from(("abort_client", "lose_peer", "lose_step")), clients),
)


def play(harness: Harness, event: tuple[Any, ...]) -> None:
    match event:
        case ("submit", submit, client):
            harness.submit(submit, client)
        case ("steps", count):
            for _ in range(count):
                harness.step()
        case ("finish",):
            # Nothing is planned after the step in flight, as when a rank is idle for a while.
            harness.finish_oldest()
        case ("abort", request_id, client):
            harness.abort(request_id, client)
        case ("abort_client", client):
            harness.abort_client(client)
        case ("carry", request_id, client):
            harness.carry(request_id, client)
        case ("fail", request_id, client):
            harness.fail(request_id, client)
        case ("lose_peer", _):
            harness.roll_back()
        case ("lose_step", _):
            # The exchange failed in the middle of a step, so the plan is never completed.
            if len(harness.flights) < harness.config.max_in_flight:
                harness.plan()
            harness.roll_back()
        case _:
            raise AssertionError(event)


@settings(max_examples=400, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(configs(), st.booleans(), st.lists(events, min_size=3, max_size=25))
def test_any_history_of_a_scheduler(config: SchedulerConfig, eager: bool, life: list[tuple[Any, ...]]) -> None:
    harness = Harness(config, eager=eager)
    for event in life:
        play(harness, event)
    harness.drain()


def random_run(
    rng: random.Random, *, max_in_flight: int, num_drafts: int, compressed: bool = False, num_snapshots: int = 0
) -> Harness:
    """A busy history on a pool that holds about two of the requests; it runs to the end."""
    page_size = rng.choice((1, 2, 4))
    # After an aligned position a window has less room.
    windows = int(compressed and num_snapshots > 0)
    config = SchedulerConfig(
        num_pages=(40 if compressed else 48) // page_size,
        page_size=page_size,
        max_model_len=40,
        vocab_size=VOCAB,
        eos_token_ids=rng.choice(((), (0,))),
        max_batch_tokens=rng.choice((16, 32)) if num_drafts else rng.choice((4, 8, 32)[windows:]),
        max_num_seqs=4,
        prefill_chunk=rng.choice((2, 5, 32)[windows:]),
        max_in_flight=max_in_flight,
        num_drafts=num_drafts,
        num_state_slots=4 if num_snapshots else 0,
        num_snapshots=num_snapshots,
        chunk_alignment=2 if num_snapshots else 1,
        routing_bytes=2,
    )
    harness = Harness(config, eager=rng.random() < 0.5)
    for i in range(12):
        prompt = rng.choice(TEXTS)[: rng.randint(1, 12 if compressed else 20)]
        sampling = SamplingParams(
            # Prompts free pages, so outputs must make pages scarce.
            max_tokens=rng.randint(14, 24) if compressed else rng.randint(5, 20),
            prompt_logprobs=rng.choice((None, None, 1)),
            routed_experts_start=rng.choice((None, 0)),
            kv_compression=KvCompression(method="snapkv", budget=rng.randint(2, 9), window=2) if compressed else None,
        )
        if rng.random() < 0.2:
            trace = (0,) * rng.randint(1, sampling.max_tokens + 2)
            sampling = replace(sampling, as_decoded=True, trace_decode_token_ids=trace, logprobs=rng.choice((0, 2)))
        harness.submit(Submit(request_id=f"r{i}", prompt_token_ids=prompt, sampling=sampling))
        for _ in range(rng.randint(0, 4)):
            harness.step()
    harness.drain()
    return harness


@pytest.mark.sampled(0)
@pytest.mark.parametrize("num_drafts", [0, 1, 3])
@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("compressed", [False, True])
def test_busy_histories_preempt_and_reuse(seed: int, compressed: bool, max_in_flight: int, num_drafts: int) -> None:
    """Histories must have full pools, reused prompts, late ends, and both right and wrong drafts."""
    lives = [
        random_run(random.Random(seed + i), max_in_flight=max_in_flight, num_drafts=num_drafts, compressed=compressed)
        for i in range(25)
    ]
    stats = [harness.scheduler.stats for harness in lives]
    assert sum(1 for s in stats if s.num_preemptions > 0) > 12
    assert sum(1 for s in stats if s.prefix_hit_tokens > 0) > 12
    assert (sum(harness.num_late_ends for harness in lives) > 12) == (max_in_flight == 2)
    for j in range(num_drafts):
        verified, accepted = sum(s.drafts[j] for s in stats), sum(s.accepted[j] for s in stats)
        assert 0.05 * verified < accepted < 0.95 * verified, f"draft {j}: {accepted} of {verified} are right"


@pytest.mark.sampled(0)
@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize(("num_snapshots", "compressed"), [(1, False), (3, False), (12, False), (12, True)])
def test_busy_histories_with_state_per_sequence(
    seed: int, num_snapshots: int, compressed: bool, max_in_flight: int
) -> None:
    """A prefix is reused only after a snapshot, and there are few."""
    kind = {"max_in_flight": max_in_flight, "num_snapshots": num_snapshots, "compressed": compressed}
    lives = [random_run(random.Random(seed + i), num_drafts=0, **kind) for i in range(25)]
    stats = [harness.scheduler.stats for harness in lives]
    snapshots = [harness.scheduler.snapshots for harness in lives]
    assert sum(1 for s in stats if s.num_preemptions > 0) > 12
    assert sum(1 for s in snapshots if s.num_used > 0) > 6
    assert all((s.num_used > 0) == (t.prefix_hit_tokens > 0) for s, t in zip(snapshots, stats, strict=True))
    assert num_snapshots > 3 or sum(1 for s in snapshots if s.num_evicted > 0) > 12
