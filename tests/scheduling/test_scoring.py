"""Log-probabilities of prompts, and requests without output: scores, messages, and reuse of pages."""

import math
from dataclasses import replace

from tests.scheduling.scheduler_harness import Harness

from moeyard_worker.config.engine_config import SchedulerConfig
from moeyard_worker.protocol import MAX_PROMPT_LOGPROBS, Done, PromptLogprobs, SamplingParams, Submit, Tokens
from moeyard_worker.scheduling.request import Reply
from moeyard_worker.scheduling.step import Scoring

CONFIG = SchedulerConfig(
    num_pages=128,
    page_size=4,
    max_model_len=400,
    vocab_size=100,
    max_batch_tokens=300,
    max_num_seqs=4,
    prefill_chunk=300,
)


def submit(request_id: str, length: int, max_tokens: int, prompt_logprobs: int | None = 2) -> Submit:
    sampling = SamplingParams(max_tokens=max_tokens, prompt_logprobs=prompt_logprobs)
    return Submit(request_id=request_id, prompt_token_ids=tuple(i * 7 % 100 for i in range(length)), sampling=sampling)


def run(harness: Harness) -> list[object]:
    """Plan and finish one step; return its messages."""
    replies: list[Reply] = harness.finish(harness.plan())
    return [reply.message for reply in replies]


def test_scores_come_in_messages_of_bounded_size_before_the_first_token() -> None:
    harness = Harness(CONFIG)
    harness.submit(submit("r", 270, 1))
    *scores, tokens, done = run(harness)
    assert all(isinstance(m, PromptLogprobs) for m in scores)
    sizes = [(m.start, len(m.logprobs)) for m in scores if isinstance(m, PromptLogprobs)]
    assert sizes == [(i, MAX_PROMPT_LOGPROBS) for i in range(1, 257, MAX_PROMPT_LOGPROBS)] + [(257, 13)]
    assert isinstance(tokens, Tokens)
    assert isinstance(done, Done)


def test_request_without_output() -> None:
    """The prompt is computed whole, may be as long as the model, and ends its request."""
    harness = Harness(CONFIG)
    harness.submit(submit("r", 400, 0))
    first = harness.plan()
    assert (first.prefill[0].num_tokens, first.sampled, len(harness.finish(first))) == (
        300,
        (),
        math.ceil(300 / MAX_PROMPT_LOGPROBS),
    )
    step = harness.plan()
    assert step.prefill[0].scoring == Scoring(first=0, targets=tuple(i * 7 % 100 for i in range(301, 400)), num_top=2)
    assert step.sampled == ()
    *_, done = (reply.message for reply in harness.finish(step))
    assert isinstance(done, Done)
    assert (done.finish_reason, done.prompt_tokens, done.completion_tokens) == ("length", 400, 0)
    # Without any score to report, other requests can still reuse the prompt's pages.
    harness.submit(submit("warm", 41, 0, None))
    assert [type(m) for m in run(harness)] == [Done]
    harness.submit(submit("one", 1, 0))
    assert [type(m) for m in run(harness)] == [Done], "the first token has no log-probability"


def test_reuse_skips_only_reported_scores() -> None:
    """Others reuse a scored prompt's pages; it reuses none itself, unless it was preempted after scores were sent."""
    harness = Harness(CONFIG)
    harness.submit(submit("first", 41, 1, None))
    harness.step()
    harness.submit(submit("scored", 41, 8))
    assert harness.plan().prefill[0].start == 0
    harness.finish_oldest()
    (request,) = harness.scheduler._roster.running
    assert request.num_scored == 40
    harness.scheduler._preempt(request, None)
    live = harness.live[b"a", "scored"]
    live.computed, live.pages = None, ()
    step = harness.plan()
    assert (step.prefill[0].start, step.prefill[0].scoring) == (40, None)
    harness.finish(step)
    harness.drain()


def test_forced_outputs_share_the_budget_of_prompts() -> None:
    """Beside a request that decodes, a forced output gets as many rows as a prompt would. Messages are bounded."""
    harness = Harness(replace(CONFIG, mixed_prefill_tokens=40))
    harness.submit(submit("stream", 5, 20, None))
    harness.step()
    sampling = SamplingParams(max_tokens=91, trace_decode_token_ids=(0,) * 91, as_decoded=True, logprobs=1)
    harness.submit(Submit(request_id="forced", prompt_token_ids=(1, 2, 3), sampling=sampling))
    rows, counts = [], []
    while (b"a", "forced") in harness.live:
        step = harness.plan()
        rows += [(c.num_tokens, c.prompt, c.num_sampled) for c in step.chunks if c.key[1] == "forced"]
        messages = [reply.message for reply in harness.finish(step)]
        counts += [len(m.token_ids) for m in messages if isinstance(m, Tokens) and m.request_id == "forced"]
    assert rows == [(3, True, 0), (40, False, 0), (40, False, 0), (10, False, 0)]
    assert counts == [1, MAX_PROMPT_LOGPROBS, 8, MAX_PROMPT_LOGPROBS, 8, 10]
