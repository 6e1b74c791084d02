"""Grammars on the worker: the tokens that a mask allows, in every state and order in which the engine may ask."""

import json
import os
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from bench.structured import Answer, Bench, fault, random_schema, sampling_for
from tests.checkpoints import make_checkpoint
from tests.limits import HANG_SECONDS

from moeyard_kernels.cpu.backend import CpuBackend
from moeyard_kernels.cuda.backend import CudaBackend
from moeyard_worker.engine.sampling import grammar_client
from moeyard_worker.engine.sampling import grammars as grammars_module
from moeyard_worker.engine.sampling.grammar_client import GrammarError
from moeyard_worker.engine.sampling.grammars import (
    QUEUE_SECONDS,
    WAITING_SHARE,
    GrammarConstraint,
    GrammarQueue,
    Grammars,
    WaitBudget,
)
from moeyard_worker.engine.sampling.sampling import SampledRow, choose, read_tokens
from moeyard_worker.engine.sampling.step_sampler import StepSampler
from moeyard_worker.protocol import Done, Grammar, Rejected, SamplingParams, Submit
from moeyard_worker.scheduling.request import Accepted, Mask, Request
from moeyard_worker.scheduling.step import Chunk, Step

EOS = (1, 6)
BACKEND = CpuBackend(page_size=16)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    """The demo model's worker in this process."""
    made = Bench(streams=8)
    yield made
    made.close()


@pytest.fixture(scope="module")
def grammars(bench: Bench) -> Grammars:
    return bench.grammars


def constrained(grammars: Grammars, grammar: Grammar, **sampling: Any) -> GrammarConstraint:
    params = SamplingParams(**{"max_tokens": 100, "grammar": grammar, **sampling})
    return grammars.constraint(grammars.compile(grammar).result(), params)


def allowed(mask: Mask) -> set[int]:
    assert mask.words is not None, mask
    return set(np.flatnonzero(np.unpackbits(np.frombuffer(mask.words, np.uint8), bitorder="little")).tolist())


def ids(bench: Bench, text: str) -> list[int]:
    return bench.tokenizer.encode(text, add_special_tokens=False).ids


def choice(*texts: str) -> Grammar:
    return Grammar(kind="choice", text=json.dumps(texts))


def test_random_schemas_are_followed(bench: Bench) -> None:
    """Short schemas of bench/structured.py, with two steps in flight."""
    schemas = {seed: random_schema(seed) for seed in (2, 5, 6, 10, 15, 19, 28, 31)}
    answers, _ = bench.run([sampling_for(seed, schema) for seed, schema in schemas.items()], deep=2)
    said = [fault(schema, bench.text(answer)) for schema, answer in zip(schemas.values(), answers, strict=True)]
    assert said == [None] * len(schemas), said
    assert all(answer.end is not None and answer.end.finish_reason == "stop" for answer in answers)


KINDS = {
    "object": Grammar(kind="json_object"),
    "schema": Grammar(kind="json_schema", text=json.dumps(SCHEMA)),
    "regex": Grammar(kind="regex", text=r"[0-9]{3}-[a-z]{4}"),
    "choice": choice("yes", "no", 'a "third"'),
    "lark": Grammar(kind="lark", text='start: "ship " /[a-z]{3}/ " " %json {"type": "boolean"}'),
    "gbnf": Grammar(kind="lark", text='root ::= "x" ("yz" | [0-9])+ "!"'),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """A small random model with bytes as tokens."""
    made = Bench(
        make_checkpoint(tmp_path_factory.mktemp("tiny") / "model", "qwen3_moe", tokenizer=True), max_model_len=256
    )
    yield made
    made.close()


def test_one_answer(tiny: Bench) -> None:
    """Tokens are the same alone, in a mixed batch, and with two steps in flight. Free requests stay the same too."""
    bench = tiny
    asked = [
        SamplingParams(max_tokens=16, temperature=t, seed=5, grammar=grammar, logprobs=2, top_p=0.9, presence_penalty=t)
        for t in (0.0, 0.8)
        for grammar in (None, *KINDS.values())
    ]

    def outcomes(answers: list[Answer]) -> list[Any]:
        return [(a.token_ids, a.end.finish_reason if a.end else None) for a in answers]

    alone = [outcomes(bench.run([params])[0])[0] for params in asked]
    assert outcomes(bench.run(asked)[0]) == alone
    assert outcomes(bench.run(asked, deep=2)[0]) == alone
    free = [params for params in asked if params.grammar is None]
    assert outcomes(bench.run(free)[0]) == [alone[0], alone[len(KINDS) + 1]]


def test_only_an_end_follows_a_complete_answer(bench: Bench, grammars: Grammars) -> None:
    constraint = constrained(grammars, choice("yes", "no"))
    start = allowed(constraint.mask([]))
    assert not start & set(EOS)
    assert set(ids(bench, "yes")[:1]) <= start
    assert allowed(constraint.mask(ids(bench, "yes"))) == set(EOS)


@pytest.mark.parametrize(
    ("own", "spaces", "breaks"),
    [({}, True, True), ({"whitespace_flexible": False}, False, False), ({"whitespace_pattern": " "}, True, False)],
    ids=["default", "none", "own"],
)
def test_whitespace_in_json(bench: Bench, grammars: Grammars, own: dict[str, Any], spaces: bool, breaks: bool) -> None:
    grammar = Grammar(kind="json_schema", text=json.dumps({**SCHEMA, "x-guidance": own}))

    def fits(text: str) -> bool:
        return constrained(grammars, grammar).mask(ids(bench, text)).words is not None

    assert fits('{"a":1}')
    assert fits('{"a": 1}') is spaces
    assert fits('{\n  "a":1}') is breaks
    assert not fits('{"a":\n\n1}')
    assert not fits('{"a":' + " " * 9 + "1}")


def test_bounds_above_64_bits(bench: Bench, grammars: Grammars) -> None:
    schema = {**SCHEMA, "properties": {"a": {"type": "integer", "maximum": 2**64, "default": 2**70}}}
    constraint = constrained(grammars, Grammar(kind="json_schema", text=json.dumps(schema)))
    assert constraint.mask(ids(bench, '{"a": 1}')).words is not None
    assert constraint.mask(ids(bench, '{"a": "')).words is None


def test_request_may_end_only_where_the_grammar_may(bench: Bench, grammars: Grammars) -> None:
    (stop,) = ids(bench, "z")
    digits = Grammar(kind="regex", text="[0-9]+")
    one = ids(bench, "7")
    assert not allowed(constrained(grammars, digits, stop_token_ids=(stop,)).mask([])) & {stop, *EOS}
    assert {stop, *EOS} <= allowed(constrained(grammars, digits, stop_token_ids=(stop,)).mask(one))
    short = allowed(constrained(grammars, digits, stop_token_ids=(stop,), min_tokens=2).mask(one))
    assert short
    assert not short & {stop, *EOS}
    # Generation continues while it can, and ends when it cannot.
    going_on = allowed(constrained(grammars, digits, ignore_eos=True).mask(one))
    assert going_on
    assert not going_on & set(EOS)
    word = ids(bench, "yes")
    for sampling in ({"ignore_eos": True}, {"min_tokens": 50}, {"min_tokens": 50, "stop_token_ids": (stop,)}):
        assert allowed(constrained(grammars, choice("yes"), **sampling).mask(word)) == set(EOS)


@pytest.mark.parametrize("sampling", [{"ignore_eos": True}, {"min_tokens": 9}], ids=str)
def test_complete_answer_stops_despite_sampling_options(bench: Bench, sampling: dict[str, Any]) -> None:
    ((answer,), _) = bench.run([SamplingParams(max_tokens=20, temperature=0.0, grammar=choice("yes"), **sampling)])
    assert bench.text(answer) == "yes"
    assert answer.end is not None
    assert (answer.end.finish_reason, answer.end.stop_token_id in EOS) == ("stop", True)


def test_max_tokens_truncates_the_answer(bench: Bench) -> None:
    ((answer,), _) = bench.run([SamplingParams(max_tokens=3, temperature=0.0, grammar=KINDS["regex"])])
    assert answer.end is not None
    assert answer.end.finish_reason == "length"


def test_drafts_are_rolled_back(bench: Bench, grammars: Grammars) -> None:
    constraint = constrained(grammars, KINDS["regex"])
    known = ids(bench, "1")
    wanted = constrained(grammars, KINDS["regex"]).mask(known)
    letter, digit = ids(bench, "q"), ids(bench, "2")
    assert constraint.mask(known) == wanted
    # The sampler refuses a draft that the grammar forbids, so the mask after it may be anything.
    assert constraint.mask([*known, *letter]) == Mask()
    assert constraint.mask([*known, *digit]).words is not None
    assert constraint.mask(known) == wanted
    # After a preemption the engine asks for every mask again.
    assert constraint.mask([]) == constrained(grammars, KINDS["regex"]).mask([])
    assert constraint.mask(known) == wanted


@pytest.mark.parametrize("rule", ["max_tokens=3", 'stop="!"'])
def test_rules_that_count_or_stop_roll_back_drafts(bench: Bench, grammars: Grammars, rule: str) -> None:
    """llguidance cannot roll back lexemes with `max_tokens=` or `stop=`."""
    grammar = Grammar(kind="lark", text=f"start: number\nnumber[{rule}]: /[0-9]*/")
    constraint, other = constrained(grammars, grammar), constrained(grammars, grammar)
    output = ids(bench, "12")
    for kept in (len(output), 1, 0):
        constraint.mask([*output, *ids(bench, "3")])
        taken_back = constraint.mask(output[:kept])
        assert taken_back.error is None
        assert taken_back == constrained(grammars, grammar).mask(output[:kept])
    for length in range(len(output) + 1):
        assert constraint.mask(output[:length]) == other.mask(output[:length])


def test_expect_changes_no_mask(bench: Bench, grammars: Grammars) -> None:
    constraint, other = constrained(grammars, KINDS["schema"]), constrained(grammars, KINDS["schema"])
    output = ids(bench, '{"a": 12}')
    for length in range(len(output) + 1):
        constraint.expect(output[:length])
        assert constraint.mask(output[:length]) == other.mask(output[:length])


MANY = {
    "type": "object",
    "properties": {f"p{i}": {"type": "integer"} for i in range(1000)},
    "additionalProperties": False,
}
BAD = [
    (Grammar(kind="json_schema", text='{"type": "strange"}'), "strange"),
    (Grammar(kind="json_schema", text='{"$ref": "http://example.com/schema"}'), "does not fetch resources"),
    (Grammar(kind="json_schema", text="false"), "no answer can satisfy false"),
    (Grammar(kind="json_schema", text="[1]"), "a schema is an object"),
    (Grammar(kind="json_schema", text='{"$ref": "#"}'), "nothing satisfies it"),
    (Grammar(kind="json_schema", text='{"anyOf": [{"$ref": "#"}]}'), "nothing satisfies it"),
    (Grammar(kind="json_schema", text="{"), "property name"),
    (Grammar(kind="json_schema", text='{"type": "array", "uniqueItems": true}'), "uniqueItems"),
    (Grammar(kind="json_schema", text='{"type": "integer", "multipleOf": 1000003}'), "multipleOf 1000003"),
    (
        Grammar(kind="json_schema", text='{"type": "number", "multiple\\u004ff": 1e-9, "multipleOf": 1.00001}'),
        "1.00001",
    ),
    (Grammar(kind="lark", text='start: %json {"multipleOf": 1e9}'), "multipleOf 1e9"),
    (Grammar(kind="json_schema", text=json.dumps(MANY)), "max is 2000"),
    (Grammar(kind="lark", text="start: " + " | ".join(f'"v{i}"' for i in range(3000))), "max is 2000"),
    (Grammar(kind="regex", text="("), "unclosed group"),
    (Grammar(kind="choice", text="[]"), "list of strings"),
    (Grammar(kind="choice", text="{"), "property name"),
    (Grammar(kind="lark", text="start: missing"), "missing"),
    (Grammar(kind="lark", text="start: start"), "nothing satisfies it"),
    (Grammar(kind="lark", text="nonsense ((("), "Expected ::="),
]


@pytest.mark.parametrize(("grammar", "said"), BAD, ids=[grammar.text[:40] for grammar, _ in BAD])
def test_compile_errors_give_the_reason(grammars: Grammars, grammar: Grammar, said: str) -> None:
    with pytest.raises(GrammarError, match=re.escape(said)) as refused:
        grammars.compile(grammar).result()
    assert len(str(refused.value)) < 600
    assert "\n" not in str(refused.value)


def test_dead_end_ends_only_its_request(bench: Bench) -> None:
    """A terminal that matches nothing compiles, but no token may follow the rule before it."""
    grammar = Grammar(kind="lark", text='start: "{" NONE\nNONE: /x+/ & /y+/')
    free = SamplingParams(max_tokens=8, temperature=0.0)
    for deep in (1, 2):
        (spoilt, sound), _ = bench.run(
            [SamplingParams(max_tokens=8, temperature=0.0, grammar=grammar), free], deep=deep
        )
        assert spoilt.end is not None
        assert (spoilt.end.finish_reason, spoilt.end.retryable) == ("error", False)
        assert spoilt.end.error == "the grammar cannot be followed any further: no token of the vocabulary fits"
        assert spoilt.token_ids == ids(bench, "{")
        assert sound.end is not None
        assert sound.end.finish_reason == "length"


AMBIGUOUS = Grammar(kind="lark", text='start: e\ne: e e | "a" | e e e')
ENDED = "its masks take more time or memory than a request may use"


def test_compilation_is_bounded(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each limit alone stops a compilation that needs a tenth of a second and 20 MiB."""
    values = json.dumps({"enum": [f"value {i}" for i in range(20_000)]})
    for blanks, (seconds, memory) in enumerate(((0.001, 1 << 30), (HANG_SECONDS, 4 << 20))):
        monkeypatch.setattr(grammar_client, "COMPILE_SECONDS", seconds)
        monkeypatch.setattr(grammar_client, "MEMORY_BYTES", memory)
        with pytest.raises(GrammarError, match=f"it takes more than {seconds:g} s .* or {memory >> 20} MiB"):
            grammars.compile(Grammar(kind="json_schema", text=values + " " * blanks)).result(timeout=HANG_SECONDS)
    monkeypatch.undo()
    assert constrained(grammars, Grammar(kind="json_schema", text=values + "  ")).mask([]).words is not None


@pytest.mark.slow
@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(
            kind="json_schema",
            text='{"allOf": [{"type": "integer", "multipleOf": 9973}, {"type": "integer", "multipleOf": 9967}]}',
        ),
        Grammar(
            kind="lark", text="start: A\nA: " + " & ".join(f"/(aa{{{n}}})*/" for n in (30, 36, 40, 42, 46)) + " & /a+/"
        ),
        Grammar(kind="regex", text="[ab]*a[ab]{400}"),
    ],
    ids=["allOf of multipleOf", "products in Lark", "a counter after a choice"],
)
def test_exploding_compilations_end(grammars: Grammars, grammar: Grammar) -> None:
    """llguidance's own limits do not stop the first one. The last one compiles."""
    error = grammars.compile(grammar).exception(timeout=HANG_SECONDS)
    assert isinstance(error, GrammarError) == (grammar.kind != "regex"), error


def test_mask_is_bounded(bench: Bench, grammars: Grammars) -> None:
    """A slow call ends its process and its request. Other requests of the grammar continue with another process."""
    (letter,) = ids(bench, "a")
    greedy, other = constrained(grammars, AMBIGUOUS), constrained(grammars, AMBIGUOUS)
    greedy.expect([letter] * 400)
    other.expect([letter])
    assert ENDED in str(greedy.mask([letter] * 400).error)
    assert ENDED in str(greedy.mask([]).error)
    assert other.mask([letter]) == constrained(grammars, AMBIGUOUS).mask([letter])
    assert other.mask([letter] * 2).words is not None


def test_sum_of_masks_is_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """No single call is slow here: their sum ends the request, and no other."""
    none = replace(bench.grammars.limits, seconds=1e-5, seconds_per_token=0.0)
    monkeypatch.setattr(bench.grammars, "limits", none)
    monkeypatch.setattr(grammars_module, "_GRACE_SECONDS", HANG_SECONDS)
    asked = [SamplingParams(max_tokens=20, temperature=0.0, grammar=g) for g in (AMBIGUOUS, None)]
    (spoilt, sound), _ = bench.run(asked)
    assert spoilt.end is not None
    assert (spoilt.end.finish_reason, spoilt.end.retryable) == ("error", False)
    assert ENDED in str(spoilt.end.error)
    assert sound.end is not None
    assert sound.end.finish_reason == "length"


def test_steps_wait_a_bounded_time_for_costly_masks(
    bench: Bench, grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A costly request ends when no time is left, which gives time to the others. A cheap one always continues."""
    now = 1000.0
    monkeypatch.setattr(grammars_module.time, "monotonic", lambda: now)
    waiting = WaitBudget()
    assert not waiting.is_over()
    waiting.charge(0.06)
    assert waiting.is_over()
    assert not waiting.is_over()
    waiting.charge(1.0)
    now += 0.9 / WAITING_SHARE
    assert waiting.is_over()
    monkeypatch.undo()
    (letter,) = ids(bench, "a")
    monkeypatch.setattr(grammars.waiting, "_left", -HANG_SECONDS)
    cheap, costly = constrained(grammars, AMBIGUOUS), constrained(grammars, AMBIGUOUS)
    costly._waited = HANG_SECONDS
    assert cheap.mask([letter]).words is not None
    assert ENDED in str(costly.mask([letter]).error)


def test_killed_processes_are_replaced(bench: Bench, grammars: Grammars) -> None:
    """A kill from outside costs no answer, whether it hits a grammar's process or the process that forks it."""
    digit, grammar = ids(bench, "1"), Grammar(kind="regex", text="[0-9]{3}-[a-z]{4}-[0-9]")
    wanted = constrained(grammars, grammar).mask(digit)
    constraint = constrained(grammars, grammar)
    compiled = constraint._compiled
    os.kill(compiled._pid, signal.SIGKILL)
    assert compiled._poll(select.POLLIN, HANG_SECONDS), "the connection is still open"
    assert constraint.mask(digit) == wanted
    assert grammars._forks is not None
    grammars._forks._process.kill()
    grammars._forks._process.wait()
    assert constraint.mask([*digit, *digit]).words is not None
    assert constrained(grammars, Grammar(kind="regex", text="[0-9]{3}-[a-z]{4}-[0-9]{2}")).mask(digit).words is not None


def test_grammars_fit_in_memory(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle grammars are evicted. A request is refused if running requests need the memory."""
    running = constrained(grammars, KINDS["schema"])
    monkeypatch.setattr(grammars_module, "MAX_BYTES", 0)
    queue = GrammarQueue(grammars, lambda: None)
    assert queue.add(b"a", submit("new", Grammar(kind="regex", text="x{7}")), 0.0) is None
    (waiting,) = queue.waiting.values()
    waiting.compiled.exception(timeout=HANG_SECONDS)
    ((_, refused),) = queue.ready(0.0)
    assert isinstance(refused, Rejected)
    assert (refused.reason, refused.retry_after) == ("queue_full", 1.0)
    del running
    assert constrained(grammars, Grammar(kind="regex", text="x{8}")).mask([]).words is not None


def test_long_choice_is_served(bench: Bench) -> None:
    """llguidance allows 2,000 alternatives of a rule. The strings of a choice are one terminal."""
    texts = [f"value {i} of many" for i in range(3000)]
    ((answer,), _) = bench.run([SamplingParams(max_tokens=40, temperature=1.0, seed=3, grammar=choice(*texts))])
    assert bench.text(answer) in texts


CLOSED = {
    "the same name": ({"a": {"type": "integer"}}, {"^a$": {"minimum": 3}}),
    "some names": ({"a": {"type": "integer"}, "b": {"type": "integer"}}, {"^(a|b)$": {"minimum": 3}}),
    "an unsatisfiable pattern": ({"a": {"type": "integer", "minimum": 3}}, {"^b": False}),
    "only required": ({}, {"^a$": {"type": "integer", "minimum": 3}}),
}


@pytest.mark.parametrize("name", CLOSED)
def test_patterns_that_match_no_other_name(bench: Bench, grammars: Grammars, name: str) -> None:
    """No comma is allowed after the last property, since no name could follow. Both schemas of a name apply."""
    properties, patterns = CLOSED[name]
    inner = {"type": "object", "properties": properties, "patternProperties": patterns, "required": ["a"]}
    inner |= {"additionalProperties": False, "x-guidance": {"whitespace_flexible": False}}
    nested = {"$defs": {"inner": inner}, "anyOf": [{"$ref": "#/$defs/inner"}], "x-guidance": inner["x-guidance"]}
    for kind, text in (
        ("json_schema", json.dumps(inner)),
        ("json_schema", json.dumps(nested)),
        ("lark", f'start: "%json" | x | %json {json.dumps(inner)}\nx: %json {{"const": null}}'),
    ):
        grammar = Grammar(kind=kind, text=text)

        def fits(text: str, grammar: Grammar = grammar) -> bool:
            return constrained(grammars, grammar).mask(ids(bench, text)).words is not None

        assert fits('{"a":7')
        assert fits('{"a":7}')
        assert not fits('{"a":2}'), "the schema of the pattern applies too"
        assert fits('{"a":7,') is ("b" in properties)


def test_patterns_that_match_other_names_apply(bench: Bench, grammars: Grammars) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "patternProperties": {"^[ab]$": {"minimum": 3}},
    }
    schema |= {"required": ["a"], "additionalProperties": False, "x-guidance": {"whitespace_flexible": False}}
    grammar = Grammar(kind="json_schema", text=json.dumps(schema))
    assert constrained(grammars, grammar).mask(ids(bench, '{"a":7,"b":8}')).words is not None
    assert constrained(grammars, grammar).mask(ids(bench, '{"a":7,"c"')).words is None


def test_refusal_gives_the_reason() -> None:
    some = {"vocab_size": 300, "eos_token_ids": (1,)}
    assert "no tokenizer" in str(Grammars(None, **some).refusal)
    assert "llguidance cannot read the tokenizer" in str(Grammars("{}", **some).refusal)
    assert "no end-of-sequence token" in str(Grammars("{}", vocab_size=300, eos_token_ids=()).refusal)
    assert "no tokenizer" in str(Grammars.of_directory(None, **some).refusal)


def submit(name: str, grammar: Grammar) -> Submit:
    sampling = SamplingParams(max_tokens=4, grammar=grammar)
    return Submit(request_id=name, prompt_token_ids=(1, 2, 3), sampling=sampling)


def test_requests_wait_for_their_grammar(grammars: Grammars) -> None:
    woken = threading.Semaphore(0)
    waiting = GrammarQueue(grammars, woken.release)
    fresh = Grammar(kind="regex", text="[a-c]{2,7}")
    assert waiting.add(b"a", submit("good", fresh), 1.0) is None
    assert waiting.add(b"a", submit("bad", Grammar(kind="regex", text="[")), 2.0) is None
    again = waiting.add(b"a", submit("good", fresh), 3.0)
    assert isinstance(again, Rejected)
    assert again.reason == "duplicate"
    assert (len(waiting.waiting), waiting.num_tokens) == (2, 6)
    for _ in range(2):
        assert woken.acquire(timeout=HANG_SECONDS)
    (good, made), (bad, refused) = waiting.ready(4.0)
    assert (good.submit.request_id, good.arrived, bad.submit.request_id) == ("good", 1.0, "bad")
    assert isinstance(made, GrammarConstraint)
    assert made.mask([]).words is not None
    assert isinstance(refused, Rejected)
    assert (refused.reason, refused.param) == ("bad_request", "grammar")
    assert "the grammar cannot be compiled: " in refused.message
    assert "unclosed character class" in refused.message
    assert len(waiting.waiting) == 0


def test_wait_ends_by_abort_or_timeout(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, begun = threading.Event(), threading.Semaphore(0)
    slow, compile_one = Grammar(kind="regex", text="slow[0-9]"), grammars._compile

    def compile_slowly(grammar: Grammar) -> Any:
        begun.release()
        assert go_on.wait(HANG_SECONDS)
        return compile_one(grammar)

    monkeypatch.setattr(grammars, "_compile", compile_slowly)
    waiting = GrammarQueue(grammars, lambda: None)
    try:
        for name in ("aborted", "late", "failed"):
            assert waiting.add(b"a", submit(name, slow), 0.0) is None
        assert begun.acquire(timeout=HANG_SECONDS)
        assert waiting.add(b"gone", submit("unreachable", slow), 0.0) is None
        aborted = waiting.abort(b"a", "aborted")
        assert isinstance(aborted, Done)
        assert aborted.finish_reason == "abort"
        assert waiting.abort(b"a", "aborted") is None
        waiting.abort_client(b"gone")
        assert waiting.add(b"a", submit("new", slow), QUEUE_SECONDS) is None
        late = list(waiting.ready(QUEUE_SECONDS + 1))
        assert [each.submit.request_id for each, _ in late] == ["late", "failed"]
        assert all(isinstance(made, Rejected) and "within 10 s" in made.message for _, made in late)
        assert waiting.abort(b"a", "new") is not None
        assert len(waiting.waiting) == 0
    finally:
        go_on.set()
    assert waiting.add(b"a", submit("later", slow), 0.0) is None


def test_requests_of_a_disconnected_client_end_together(grammars: Grammars) -> None:
    """The first refusal shows that the client is gone. Its other requests end in the same turn of the loop."""
    woken = threading.Semaphore(0)
    waiting = GrammarQueue(grammars, woken.release)
    bad = Grammar(kind="regex", text="[")
    for client, name in ((b"gone", "first"), (b"gone", "second"), (b"here", "third")):
        assert waiting.add(client, submit(name, bad), 0.0) is None
    for _ in range(3):
        assert woken.acquire(timeout=HANG_SECONDS)
    outcomes = []
    for each, _ in waiting.ready(1.0):
        outcomes.append(each.submit.request_id)
        if each.client == b"gone":
            waiting.abort_client(b"gone")
    assert outcomes == ["first", "third"]
    assert len(waiting.waiting) == 0


def test_grammars_without_a_request_are_not_compiled(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a flood of slow grammars whose requests ended, the next grammar compiles at once, even one of theirs."""
    go_on, begun, compile_one = threading.Event(), list[str](), grammars._compile
    started = threading.Semaphore(0)

    def compile_slowly(grammar: Grammar) -> Any:
        begun.append(grammar.text)
        started.release()
        assert go_on.wait(HANG_SECONDS)
        return compile_one(grammar)

    monkeypatch.setattr(grammars, "_compile", compile_slowly)
    waiting = GrammarQueue(grammars, lambda: None)
    flood = [Grammar(kind="regex", text=f"flood{number}[0-9]") for number in range(12)]
    try:
        for number, grammar in enumerate(flood):
            client = b"gone" if number % 3 == 0 else b"a"
            assert waiting.add(client, submit(f"f{number}", grammar), 0.0) is None
        assert waiting.add(b"b", submit("shares", flood[5]), 9.0) is None
        for _ in range(2):  # there are two threads
            assert started.acquire(timeout=HANG_SECONDS)
        waiting.abort_client(b"gone")
        for number in range(1, 12, 3):
            assert waiting.abort(b"a", f"f{number}") is not None
        late = [made for _, made in waiting.ready(QUEUE_SECONDS + 1)]
        assert len(late) == 4, "the remaining requests of client a time out"
        # Only its own grammar can fail a request: flood[5] is compiling, and the others wait behind it.
        assert all(isinstance(made, Rejected) and made.reason == "queue_full" for made in late[1:])
        assert len(waiting.waiting) == 1
        assert waiting.add(b"b", submit("again", flood[7]), 11.0) is None
    finally:
        go_on.set()
    results = {}
    for each in list(waiting.waiting.values()):
        each.compiled.result(timeout=HANG_SECONDS)
    for each, made in waiting.ready(12.0):
        results[each.submit.request_id] = made
    assert {name: type(made) for name, made in results.items()} == {
        "shares": GrammarConstraint,
        "again": GrammarConstraint,
    }
    assert set(begun) == {flood[0].text, flood[1].text, flood[5].text, flood[7].text}


@pytest.mark.parametrize("deep", [False, True], ids=["1deep", "2deep"])
def test_gpu_rows_with_grammars_equal_choose(grammars: Grammars, bench: Bench, deep: bool) -> None:
    """Rows with a grammar among others: tokens and log-probabilities equal those of `choose`, fed or not."""
    vocab, eos = grammars.vocab_size, grammars.eos_token_ids
    backend = CudaBackend(page_size=16, device=torch.device("cpu"))
    sampler = StepSampler(backend, max_rows=8, max_requests=8, vocab=vocab, eos_token_ids=eos)
    kinds: dict[str, dict[str, Any]] = {
        "free": {"temperature": 0.0},
        "held": {"temperature": 0.0, "grammar": KINDS["regex"], "logprobs": 2},
        "counted": {"seed": 4, "repetition_penalty": 1.3},
        "both": {"seed": 5, "grammar": KINDS["schema"], "repetition_penalty": 1.2, "logit_bias": {7: 3.0}},
    }
    requests = [
        Request(
            client=b"c",
            request_id=name,
            prompt=(3, 4),
            sampling=SamplingParams(max_tokens=50, **some),
            arrived=0.0,
            hashes=[],
            constraint=constrained(grammars, **some) if "grammar" in some else None,
        )
        for name, some in kinds.items()
    ]
    known: list[list[int]] = [[] for _ in requests]
    before: Any = None
    with torch.inference_mode():
        for turn in range(5):
            logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(turn))
            fed = deep and turn > 0
            chunks, rows = [], []
            for i, request in enumerate(requests):
                request.output[:] = known[i][:-1] if fed else known[i]
                position = 1 + len(known[i])
                chunks.append(
                    Chunk(
                        key=request.key,
                        start=position,
                        token_ids=(0,),
                        pages=(0,),
                        prompt=False,
                        num_sampled=1,
                        fed=i if fed else None,
                    )
                )
                mask = None
                if request.constraint is not None:
                    mask = constrained(grammars, **kinds[request.request_id]).mask(known[i])
                rows.append(SampledRow(params=request.sampling, prompt=(3, 4), output=list(known[i]), mask=mask))
            wanted = choose(BACKEND, logits, rows, eos)
            sampler.logits[:4] = logits
            tokens, errors = sampler.choose(Step(decode=tuple(chunks)), requests, before=before, greedy=False)
            asked = [r.sampling.logprobs for r in requests]
            assert errors == {}
            got = read_tokens(tokens, asked)
            assert got == [(t, p if a is not None else None) for (t, p), a in zip(wanted, asked, strict=True)]
            assert sampler.last_ids[:4].tolist() == [t for t, _ in wanted]
            for i, (token, _) in enumerate(wanted):
                known[i].append(token)
            before = SimpleNamespace(results=[Accepted((t,)) for t, _ in wanted])
    assert bench.tokenizer.decode(known[1])[:3].isdigit()


def test_compiling_releases_the_gil(grammars: Grammars) -> None:
    """llguidance releases the GIL: other threads run many times while a large enum compiles.

    Each enum takes a tenth of a second, in which a busy machine may not schedule this thread.
    """

    def turns_beside(number: int) -> int:
        enum = [f"value {i} of many, {number}" for i in range(20_000)]
        compiled, turns = grammars.compile(Grammar(kind="json_schema", text=json.dumps({"enum": enum}))), 0
        while not compiled.done():
            turns += 1
            time.sleep(0)
        assert compiled.exception() is None
        return turns

    assert any(turns_beside(number) > 3 for number in range(5))


def test_tokenizer_comes_from_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json: "):
        Grammars.of_directory(str(tmp_path), vocab_size=10, eos_token_ids=(1,))
    made = Grammars("{}", vocab_size=10, eos_token_ids=(1,))
    assert "cannot read the tokenizer" in str(made.refusal)


def test_memory_is_counted_while_a_thread_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads add grammars to the set that `Grammars.compile` sums."""
    made = Grammars(None, vocab_size=64, eos_token_ids=(1,))
    made.refusal, made._forks = None, SimpleNamespace(close=lambda: None)  # type: ignore[assignment]
    monkeypatch.setattr(grammars_module, "CompiledGrammar", lambda *_: type("Held", (), {"num_bytes": 1})())
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        futures = [made._compiling.submit(lambda: [made._compile(choice("a")) for _ in range(2000)])]
        while not futures[0].done():
            assert made._num_bytes >= 0
        assert made._num_bytes == len(futures[0].result())
    finally:
        sys.setswitchinterval(interval)
        made.close()
