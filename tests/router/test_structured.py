"""Structured output at the router: every way to request it becomes one grammar, and invalid requests are a 400."""

import json

import pytest

from moeyard_router.api.large import LARGE_BODY
from moeyard_worker.protocol import MAX_GRAMMAR_BYTES, Grammar, Rejected

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))
JSON_SCHEMA = Grammar(kind="json_schema", text=TEXT)
COMPACT = Grammar(kind="json_schema", text=TEXT[:-1] + ',"x-guidance":{"whitespace_flexible":false}}')


def named(**fields):
    return {"type": "json_schema", "json_schema": {"name": "n", **fields}}


ASKED = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, Grammar(kind="json_object")),
    ({"response_format": named(schema=SCHEMA)}, JSON_SCHEMA),
    ({"response_format": named(schema=SCHEMA, strict=True, description="d")}, JSON_SCHEMA),
    ({"response_format": named(schema=SCHEMA, strict=None, description=None)}, JSON_SCHEMA),
    ({"structured_outputs": {"json": SCHEMA}}, JSON_SCHEMA),
    ({"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}}, JSON_SCHEMA),
    ({"structured_outputs": {"json": True}}, Grammar(kind="json_schema", text="true")),
    ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, COMPACT),
    ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": ""}}, COMPACT),
    ({"structured_outputs": {"regex": "[a-z]+"}}, Grammar(kind="regex", text="[a-z]+")),
    ({"structured_outputs": {"choice": ["a", 'b"', "a"]}}, Grammar(kind="choice", text='["a","b\\""]')),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, Grammar(kind="lark", text='start: "a"')),
    ({"structured_outputs": {"json_object": True}}, Grammar(kind="json_object")),
    ({"structured_outputs": None, "guided_json": None}, None),
    ({"guided_json": SCHEMA}, JSON_SCHEMA),
    ({"guided_json": TEXT, "guided_whitespace_pattern": ""}, COMPACT),
    ({"guided_regex": "x|y"}, Grammar(kind="regex", text="x|y")),
    ({"guided_choice": ["yes", "no"]}, Grammar(kind="choice", text='["yes","no"]')),
    ({"guided_grammar": "root ::= [0-9]"}, Grammar(kind="lark", text="root ::= [0-9]")),
    ({"guided_json_object": True}, Grammar(kind="json_object")),
    ({"guided_json_object": False}, None),
]
DEEP = json.loads('{"not": ' * 300 + "{}" + "}" * 300)
WRONG = [
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": "text"}, "response_format"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": named()}, "response_format.json_schema"),
    ({"response_format": named(schema=[1])}, "response_format.json_schema.schema"),
    ({"response_format": named(schema=DEEP)}, "response_format.json_schema.schema"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": 3}}, "structured_outputs.json"),
    ({"structured_outputs": {"regex": 3}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice.1"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"regex": "a" * (MAX_GRAMMAR_BYTES + 1)}}, "structured_outputs.regex"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
    ({"guided_choice": "yes"}, "guided_choice"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
]


@pytest.mark.parametrize(("fields", "grammar"), ASKED, ids=[json.dumps(fields)[:60] for fields, _ in ASKED])
def test_all_requests_become_one_grammar(service, fields, grammar):
    assert service.post(COMPLETIONS, prompt="x", max_tokens=1, n=2, **fields).status_code == 200
    assert service.post(CHAT, messages=HELLO, max_tokens=1, **fields).status_code == 200
    assert [submit.sampling.grammar for submit in service.submits] == [grammar] * 3


@pytest.mark.parametrize(("fields", "param"), WRONG, ids=[json.dumps(fields)[:60] for fields, _ in WRONG])
def test_invalid_requests_are_named(service, fields, param):
    answer = service.post(COMPLETIONS, prompt="x", max_tokens=1, **fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert f"'{param}'" in error["message"]
    assert service.submits == []


REFUSED = Rejected(request_id="", reason="bad_request", message="the grammar cannot be compiled: no", param="grammar")
SENT = [
    (COMPLETIONS, {"prompt": "x", "guided_regex": "("}, "guided_regex"),
    (COMPLETIONS, {"prompt": "x", "guided_json": {}}, "guided_json"),
    (COMPLETIONS, {"prompt": "x", "guided_grammar": "start"}, "guided_grammar"),
    (COMPLETIONS, {"prompt": "x", "structured_outputs": {"choice": ["a"]}}, "structured_outputs.choice"),
    (CHAT, {"messages": HELLO, "response_format": named(schema={})}, "response_format.json_schema.schema"),
    (
        "/v1/responses",
        {"input": "x", "text": {"format": {"type": "json_schema", "name": "a", "schema": {}}}},
        "text.format.schema",
    ),
    ("/generate", {"text": "x", "sampling_params": {"regex": "("}}, "sampling_params.regex"),
    ("/generate", {"text": "x", "sampling_params": {"ebnf": "start"}}, "sampling_params.ebnf"),
    ("/generate", {"text": "x", "sampling_params": {"json_schema": "{}"}}, "sampling_params.json_schema"),
    (
        "/inference/v1/generate",
        {"token_ids": [1], "sampling_params": {"structured_outputs": {"regex": "("}}},
        "sampling_params.structured_outputs.regex",
    ),
]


@pytest.mark.parametrize(("path", "body", "param"), SENT, ids=[param for _, _, param in SENT])
def test_worker_rejection_of_a_grammar_names_the_field(service, path, body, param):
    for worker in service.workers:
        worker.reject = REFUSED
    answer = service.post(path, **body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert error["message"] == f"'{param}': the grammar cannot be compiled: no"


def test_worker_rejection_of_a_grammar_in_a_large_body_names_the_field(service):
    """Another process reads a large body."""
    for worker in service.workers:
        worker.reject = REFUSED
    answer = service.post(COMPLETIONS, prompt="x", guided_regex="(", user="a" * LARGE_BODY)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "guided_regex")


def test_output_that_a_grammar_ends_names_the_field(service):
    for worker in service.workers:
        worker.failure = "the grammar cannot be followed any further: no token of the vocabulary fits"
    answer = service.post(COMPLETIONS, prompt="x", max_tokens=1, guided_regex="a")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "guided_regex")


def test_end_of_sequence_token_is_never_text(service, codec):
    """The token ends text that a grammar has completed, so it is held back like any other end."""
    for worker in service.workers:
        worker.script = lambda submit: [*codec.encode("yes", add_special_tokens=False), 1]
    (choice,) = service.complete(
        prompt="x", guided_choice=["yes"], ignore_eos=True, max_tokens=9, skip_special_tokens=False
    )["choices"]
    assert choice["text"] == "yes"


def test_server_without_a_tokenizer_refuses_structured_output(start):
    service = start(1, model_path=None, model_name="a-shape")
    answer = service.post(COMPLETIONS, prompt=[1], max_tokens=1, response_format={"type": "json_object"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_format")
    assert "this server has no tokenizer" in answer.json()["error"]["message"]
    answer = service.post(COMPLETIONS, prompt=[1], max_tokens=1, guided_regex="a")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "guided_regex")
