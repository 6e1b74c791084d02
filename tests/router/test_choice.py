"""A choice's text, ids and end do not depend on how its tokens were cut into messages."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from moeyard_router.api.choice import Choice, Delta
from moeyard_router.api.intake import Continuation, Job, Prompt
from moeyard_router.api.replies import ReplyWriter
from moeyard_router.text.detokenizer import Detokenizer, TokenBytes
from moeyard_worker.protocol import Done, SamplingParams, TokenLogprob, Tokens

LETTERS = ["a", "b", "c", "Ġ", "ð", "Ł", "Ļ", "Ĥ", "ab", "bc"]  # four of them are the bytes of one emoji
TOKENIZER = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(LETTERS)}, merges=[]))
TOKENIZER.decoder = decoders.ByteLevel()
TOKENIZER.add_special_tokens(["<eos>"])
EOS = len(LETTERS)
TOKENS = TokenBytes(TOKENIZER)
JOB = Job(
    chat=False,
    prompts=(Prompt(token_ids=(0,)),),
    continuations=(),
    stops=(),
    include_stop=False,
    skip_special_tokens=True,
    stop_ids=frozenset((EOS,)),
    stream=True,
    include_usage=False,
    continuous_usage=False,
    return_token_ids=True,
    echo=False,
    logprobs=0,
)

ids_lists = st.lists(st.integers(min_value=0, max_value=EOS), min_size=1, max_size=25)
stops = st.lists(st.text("abc 🙂�", min_size=1, max_size=3), max_size=3)
cuts = st.lists(st.integers(min_value=1, max_value=6), min_size=25, max_size=25)


def run(job, output, sizes, shorter=()):
    """Feed a worker's messages until the choice ends; return the complete output.

    If `shorter[i]`, message i goes to `plain_text` first, which returns text only.
    """
    sampling = job.continuations[0].sampling
    choice = Choice(job, index=0, tokens=TOKENS)
    ends = {EOS, *sampling.stop_token_ids}
    length = next((i + 1 for i, t in enumerate(output) if t in ends and i >= sampling.min_tokens), None)
    reason, output = ("length", output) if length is None else ("stop", output[:length])
    deltas, start, num_plain = [], 0, 0
    for i, size in enumerate(sizes):
        ids = tuple(output[start : start + size])
        if not ids or choice.finish_reason is not None:
            break
        logprobs = tuple(TokenLogprob(logprob=float(-i), rank=1) for i in ids)
        message = Tokens(request_id="r", start=start, token_ids=ids, logprobs=logprobs)
        start += size
        text = choice.plain_text(message) if i < len(shorter) and shorter[i] else None
        num_plain += 0 if text is None else len(ids)
        deltas.append(choice.tokens(message) if text is None else Delta(text))
    if choice.finish_reason is None:
        stop_id = output[-1] if reason == "stop" else None
        deltas.append(
            choice.done(
                Done(
                    request_id="r",
                    finish_reason=reason,
                    prompt_tokens=1,
                    cached_tokens=0,
                    completion_tokens=len(output),
                    stop_token_id=stop_id,
                )
            )
        )
    assert choice.finish_reason == deltas[-1].finish_reason
    assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)
    total = Delta()
    for delta in deltas:
        total.extend(delta)
    assert choice.num_tokens == len(total.token_ids) + num_plain
    assert len(total.token_ids) == len(total.logprobs)
    assert [-i for i in total.token_ids] == [lp.logprob for lp in total.logprobs]
    return total


def job_with(*, stop_strings=(), include=False, skip=True, stop_token_ids=(), min_tokens=0):
    sampling = SamplingParams(max_tokens=100, stop_token_ids=tuple(stop_token_ids), min_tokens=min_tokens)
    return dataclasses.replace(
        JOB,
        continuations=(Continuation(index=0, prompt=0, sampling=sampling),),
        stops=tuple(stop_strings),
        include_stop=include,
        skip_special_tokens=skip,
        stop_ids=JOB.stop_ids | set(stop_token_ids),
    )


@given(
    ids_lists,
    stops,
    cuts,
    st.booleans(),
    st.booleans(),
    st.lists(st.integers(0, EOS - 1), max_size=2),
    st.integers(min_value=0, max_value=4),
)
def test_message_boundaries_change_nothing(output, stop_strings, sizes, include, skip, stop_token_ids, min_tokens):
    job = job_with(
        stop_strings=stop_strings, include=include, skip=skip, stop_token_ids=stop_token_ids, min_tokens=min_tokens
    )
    assert run(job, output, sizes) == run(job, output, [100]) == run(job, output, [1] * 100)


@given(
    ids_lists,
    st.just([]) | stops,
    cuts,
    st.lists(st.booleans(), max_size=25),
    st.booleans(),
    st.lists(st.integers(0, EOS - 1), max_size=2),
    st.integers(min_value=0, max_value=4),
)
def test_plain_text_shortcut_changes_nothing(output, stop_strings, sizes, shorter, include, stop_token_ids, min_tokens):
    job = job_with(stop_strings=stop_strings, include=include, stop_token_ids=stop_token_ids, min_tokens=min_tokens)
    whole, short = run(job, output, sizes), run(job, output, sizes, shorter)
    assert (short.text, short.finish_reason, short.stop_reason) == (whole.text, whole.finish_reason, whole.stop_reason)


@given(ids_lists, cuts)
def test_without_stops_the_text_is_the_decoding(output, sizes):
    total = run(job_with(), output, sizes)
    assert total.text == TOKENIZER.decode(total.token_ids)
    assert total.finish_reason == ("stop" if EOS in output else "length")
    assert total.stop_reason is None


@given(ids_lists, stops, cuts, st.booleans())
def test_the_stop_string_ends_text_and_tokens(output, stop_strings, sizes, include):
    total = run(job_with(stop_strings=stop_strings, include=include), output, sizes)
    shown = TOKENIZER.decode(total.token_ids)
    if total.stop_reason is None:
        assert total.text == shown
        assert not any(s in shown for s in stop_strings)
    else:
        at = shown.index(total.text + ("" if include else total.stop_reason))
        assert at == 0
        before = TOKENIZER.decode(total.token_ids[:-1]).removesuffix("�")
        assert not any(s in before for s in stop_strings), "no token may follow the completed stop string"


def test_the_first_min_tokens_are_not_searched():
    a, b, c = 0, 1, 2
    total = run(job_with(stop_strings=["a"], min_tokens=1), [a, b, a, c], [1] * 4)
    assert (total.text, total.stop_reason, total.token_ids) == ("ab", "a", [a, b, a])
    total = run(job_with(stop_strings=["a"], min_tokens=0), [a, b, a, c], [1] * 4)
    assert (total.text, total.stop_reason, total.token_ids) == ("", "a", [a])


@given(ids_lists, stops, cuts, st.booleans(), st.integers(min_value=0, max_value=6))
def test_stop_string_ends_after_min_tokens_and_may_begin_within(output, stop_strings, sizes, include, min_tokens):
    """The first stop string completed after the text of the first min_tokens tokens wins, then the longest (vLLM)."""
    total = run(job_with(stop_strings=stop_strings, include=include, min_tokens=min_tokens), output, sizes)
    end = next((i for i, t in enumerate(output) if t == EOS and i >= min_tokens), len(output))
    detokenizer, text, searched = Detokenizer(TOKENS), "", 0
    for i, token_id in enumerate(output[:end]):
        text += detokenizer.push((token_id,))
        searched = len(text) if i < min_tokens else searched
    text += detokenizer.finish()
    searched = len(text) if end <= min_tokens else searched
    found = [(i, s) for i in range(searched + 1, len(text) + 1) for s in stop_strings if text[:i].endswith(s)]
    if found:
        at, stop = min(found, key=lambda each: (each[0], -len(each[1])))
        assert (total.text, total.stop_reason) == (text[: at if include else at - len(stop)], stop)
    else:
        assert (total.text, total.stop_reason) == (text, None)


def test_stop_string_across_the_min_tokens_boundary():
    a, b, c, ab, bc = (LETTERS.index(t) for t in ("a", "b", "c", "ab", "bc"))
    for sizes in ([1] * 4, [4]):
        total = run(job_with(stop_strings=["bcab"], min_tokens=2), [a, bc, ab, c], sizes)
        assert (total.text, total.stop_reason, total.token_ids) == ("a", "bcab", [a, bc, ab])
        # A stop string that completes within min_tokens is skipped, and another may begin inside it.
        total = run(job_with(stop_strings=["abab"], min_tokens=3), [ab, a, b, ab], sizes)
        assert (total.text, total.stop_reason, total.token_ids) == ("ab", "abab", [ab, a, b, ab])


@pytest.mark.parametrize("chosen", [0, 1, 2])
def test_likeliest_of_tokens_with_the_same_text_is_reported(chosen):
    """Byte fallback has `<0x30>` and `0`. The chosen token keeps its own log-probability."""
    model = models.BPE(vocab={"0": 0, "<0x30>": 1, "1": 2}, merges=[], byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.ByteFallback()
    ranked = ((1, -0.5), (2, -1.0), (0, -2.5))
    score = TokenLogprob(logprob=dict(ranked)[chosen], rank=1, top=ranked)
    job = dataclasses.replace(job_with(), logprobs=3)
    tokens = TokenBytes(tokenizer)
    writer = ReplyWriter(job, reply_id="x", served=lambda: {"model": "m"}, created=0, tokens=tokens)
    choice = Choice(job, index=0, tokens=tokens)
    delta = choice.tokens(Tokens(request_id="r", start=0, token_ids=(chosen,), logprobs=(score,)))
    reported = json.loads(b"".join(writer.body([delta], [choice])))["choices"][0]["logprobs"]
    assert reported["top_logprobs"] == [{"0": -0.5, "1": -1.0}]
    assert reported["token_logprobs"] == [score.logprob]
    # The chosen token appears if the other one is not in the list.
    reported = writer._top(0, TokenLogprob(logprob=-9.0, rank=9, top=((2, -1.0),)))
    assert reported == {"1": -1.0, "0": -9.0}


def test_cached_tokens_come_from_the_first_rank():
    """A moved sequence has its whole prompt in the second rank's cache, which saves nothing."""
    score = TokenLogprob(logprob=0.0, rank=1)
    begun = Tokens(request_id="x", start=0, token_ids=(0,), logprobs=(score,), cached_tokens=0)

    def cached(*messages):
        choice = Choice(job_with(), index=0, tokens=TOKENS)
        for message in messages:
            choice.tokens(message)
        choice.done(
            Done(
                request_id="x",
                finish_reason="length",
                prompt_tokens=5000,
                cached_tokens=4992,
                completion_tokens=len(messages),
            )
        )
        return choice.cached_tokens

    assert cached(begun) == 0
    assert cached() == 4992


def span(version, start, end):
    return {"version": version, "start": start, "end": end}


def choice_with(**fields):
    sampling = SamplingParams(max_tokens=100)
    return Choice(
        dataclasses.replace(JOB, continuations=(Continuation(index=0, prompt=0, sampling=sampling),), **fields),
        index=0,
        tokens=TOKENS,
    )


def tokens_of(start, count, version=None):
    scores = (TokenLogprob(logprob=0.0, rank=1),) * count
    return Tokens(request_id="r", start=start, token_ids=(0,) * count, logprobs=scores, weight_version=version)


def ended(version):
    return Done(
        request_id="r",
        finish_reason="length",
        prompt_tokens=1,
        cached_tokens=0,
        completion_tokens=0,
        weight_version=version,
    )


def test_versions_of_an_answer_without_output():
    """An answer that nothing has computed has no span. A prompt alone has one, which is empty."""
    choice = choice_with()
    choice.aborted()
    assert (choice.versions, choice.weight_version) == ({"weight_versions": []}, None)
    choice = choice_with()
    choice.done(ended("b"))
    assert (choice.versions, choice.weight_version) == ({"weight_versions": [span("b", 0, 0)]}, "b")


@pytest.mark.parametrize("size", [1, 2, 5, 6], ids="{} in a message".format)
def test_versions_of_a_scored_output(size):
    """Six tokens belong to the prompt for the client. Its weights are named though messages split anywhere."""
    choice = choice_with(prompts=(Prompt(token_ids=(0,) * 8),), output_start=2)
    for start in range(0, 8, size):
        message = tokens_of(start, min(size, 8 - start), "a" if start == 0 else None)
        _, own = choice.forced(message)
        if own is not None:
            choice.tokens(own)
    choice.done(ended("a"))
    assert choice.versions == {"weight_versions": [span("a", 0, 2)]}


@pytest.mark.parametrize("sampled", [0, 2])
def test_versions_of_an_output_whose_weights_change_while_it_is_scored(sampled):
    choice = choice_with(prompts=(Prompt(token_ids=(0,) * 8),), output_start=2)
    for message in (tokens_of(0, 4, "a"), tokens_of(4, 2, "b")):
        assert choice.forced(message) == (message, None)
    if sampled:
        choice.tokens(tokens_of(6, sampled))
    choice.done(ended("b"))
    assert choice.versions == {"weight_versions": [span("a", 0, 0), span("b", 0, sampled)]}
    assert choice.weight_version == "b"


def test_versions_of_sampled_tokens():
    choice = choice_with()
    for message in (tokens_of(0, 3, "a"), tokens_of(3, 1), tokens_of(4, 2, "b")):
        choice.tokens(message)
    choice.done(ended("b"))
    assert choice.versions == {"weight_versions": [span("a", 0, 4), span("b", 4, 6)]}
