"""/openapi.json is complete: it lists every route and describes the answers to valid and invalid bodies.

If schemathesis is installed (it is not a dependency, not even for development), two thousand of its cases run:

    pip install schemathesis && pytest tests/router/test_contract.py -k schemathesis
"""

import json
import re
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from tests.router.tool_model import LONG

HELLO = [{"role": "user", "content": "Hello world"}]
KEPT = {"kv_compression": {"method": "snapkv", "budget": 4, "window": 2}}
CHAT = "/v1/chat/completions"
SCHEMATHESIS = shutil.which("schemathesis") or shutil.which("schemathesis", path=str(Path(sys.executable).parent))
CASES = 2000


@pytest.fixture(scope="module")
def document(shared_service) -> dict[str, Any]:
    answer = shared_service.client.get("/openapi.json")
    assert answer.headers["content-type"] == "application/json"
    return answer.json()


def check(document, method, path, answer):
    """Check that the schema describes an answer's status, type and body, and the format of errors."""
    described = document["paths"][path][method]["responses"]
    status = str(answer.status_code)
    assert status in described, f"{method} {path} answered {status}: {answer.text[:300]}"
    kind = answer.headers["content-type"].partition(";")[0]
    assert kind in described[status]["content"], f"{method} {path} answered {status} with {kind}"
    if kind == "application/json":
        schema = described[status]["content"][kind]["schema"]
        Draft202012Validator({**schema, "components": document["components"]}).validate(answer.json())
    if kind == "text/event-stream":
        data = described[status]["content"][kind]["schema"]["properties"]["data"]
        events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
        assert events
        chunks = [event for event in events if event != "[DONE]" and "contentSchema" in data]
        for chunk in chunks:
            schema = {**data["contentSchema"], "components": document["components"]}
            Draft202012Validator(schema).validate(json.loads(chunk))
    return answer


def test_schema_is_valid(document):
    for schema in document["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)
    text = json.dumps(document)
    references = set(re.findall(r'"\$ref": "#/components/schemas/(\w+)"', text))
    assert references <= set(document["components"]["schemas"])
    assert document["openapi"].startswith("3.1")


def test_schema_has_every_route(shared_service, document):
    routes = shared_service.server._server.config.app._paths
    assert {path.replace(":path}", "}") for path in routes} == set(document["paths"])


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"n": 2, "logprobs": 2, "return_token_ids": True},
        {"stop": ["fox"]},
        {"echo": True, "logprobs": 1, "max_tokens": 0},
        {"prompt_logprobs": 1, "stream": False},
        KEPT,
    ],
)
def test_completion_is_as_described(service, document, extra):
    body = {"prompt": "Hello", "max_tokens": 8, **extra}
    assert check(document, "post", "/v1/completions", service.post("/v1/completions", **body)).status_code == 200
    streamed = service.post("/v1/completions", **{"stream": True, **body})
    assert check(document, "post", "/v1/completions", streamed).status_code == 200


@pytest.mark.parametrize(
    "extra",
    [{}, {"n": 2, "logprobs": True, "top_logprobs": 2, "return_token_ids": True, "prompt_logprobs": 0}, KEPT],
)
def test_chat_is_as_described(service, document, extra):
    answer = service.post(CHAT, messages=HELLO, max_tokens=8, **extra)
    assert check(document, "post", CHAT, answer).status_code == 200
    extra = {name: value for name, value in extra.items() if name != "prompt_logprobs"}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    streamed = service.post(CHAT, messages=HELLO, max_tokens=8, **options, **extra)
    assert check(document, "post", CHAT, streamed).status_code == 200


@pytest.mark.parametrize("params", [{}, {"n": 2, "logprobs": 2, "prompt_logprobs": 1}])
def test_generated_ids_are_as_described(service, document, params):
    path, body = "/inference/v1/generate", {"token_ids": [5, 6], "sampling_params": {"max_tokens": 8, **params}}
    assert check(document, "post", path, service.post(path, **body)).status_code == 200
    assert check(document, "post", path, service.post(path, **body, stream=True)).status_code in (200, 400)


@pytest.mark.parametrize(
    "extra", [{}, {"stream": True}, {"metadata": {"a": "b"}, "instructions": "x", "user": "u"}, KEPT]
)
def test_response_is_as_described(service, document, extra):
    answer = service.post("/v1/responses", input="Hello", max_output_tokens=8, **extra)
    assert check(document, "post", "/v1/responses", answer).status_code == 200


@pytest.mark.parametrize("extra", [{}, {"stream": True}, {"stop_sequences": ["fox"]}, KEPT])
def test_message_is_as_described(service, document, extra):
    answer = service.post("/v1/messages", messages=HELLO, max_tokens=8, **extra)
    assert check(document, "post", "/v1/messages", answer).status_code == 200
    count = "/v1/messages/count_tokens"
    assert check(document, "post", count, service.post(count, messages=HELLO)).status_code == 200


def test_every_answer_has_the_fingerprint(starter, document):
    service = starter(1, fingerprint="ab12")
    few = {"messages": HELLO, "max_tokens": 4}
    bodies = {
        "/v1/completions": {"prompt": "Hello", "max_tokens": 4},
        "/v1/chat/completions": few,
        "/v1/responses": {"input": "Hello", "max_output_tokens": 4},
        "/v1/messages": few,
        "/inference/v1/generate": {"token_ids": [5], "sampling_params": {"max_tokens": 4}},
    }
    for path, body in bodies.items():
        whole = check(document, "post", path, service.post(path, **body)).json()
        assert whole["system_fingerprint"] == "fp_ab12"
        events = service.post(path, **body, stream=True).text
        assert '"system_fingerprint":"fp_ab12"' in events.partition("\n\n")[0]
    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 4}}
    assert service.post("/generate", **body).json()["meta_info"]["system_fingerprint"] == "fp_ab12"
    assert check(document, "get", "/version", service.client.get("/version")).status_code == 200


def test_calls_and_reasoning_are_as_described(starter, tool_checkpoint, tool_codec):
    service = starter(1, model_path=tool_checkpoint, max_model_len=4096)
    text = '<think>\nWell.\n</think>\n\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    says = [*tool_codec.encode(text, add_special_tokens=False), 1]
    service.workers[0].script = lambda submit: says
    tools = [{"type": "function", "function": {"name": "now"}}]
    document = service.client.get("/openapi.json").json()
    answer = check(document, "post", CHAT, service.post(CHAT, messages=HELLO, tools=tools)).json()
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    assert {"content", "reasoning_content", "tool_calls"} < set(answer["choices"][0]["message"])
    streamed = check(document, "post", CHAT, service.post(CHAT, messages=HELLO, tools=tools, stream=True))
    assert '"tool_calls":[{"index":0,' in streamed.text


def test_pages_are_as_described(service, document):
    for path, methods in document["paths"].items():
        if "get" in methods:
            answer = check(document, "get", path, service.client.get(path.format(id="tiny", name="index.html")))
            assert answer.status_code == 200, path
    assert check(document, "get", "/v1/models/{id}", service.client.get("/v1/models/other")).status_code == 404


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


def values(schema: Any, schemas: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Generate small values that a schema describes."""
    if schema is True:
        return ANYTHING
    if "$ref" in schema:
        return values(schemas[schema["$ref"].rpartition("/")[2]], schemas)
    if "anyOf" in schema:
        return st.one_of([values(each, schemas) for each in schema["anyOf"]])
    if "const" in schema or "enum" in schema:
        return st.sampled_from(schema.get("enum") or [schema["const"]])
    if "type" not in schema:
        return ANYTHING
    kind = schema["type"]
    if kind == "integer":
        return st.integers(schema.get("minimum"), schema.get("maximum"))
    if kind == "number":
        open_low = "exclusiveMinimum" in schema
        low = schema.get("minimum", schema.get("exclusiveMinimum"))
        return st.floats(low, schema.get("maximum"), exclude_min=open_low, allow_nan=False, allow_infinity=False)
    if kind == "array":
        inner = values(schema["items"], schemas)
        return st.lists(inner, min_size=schema.get("minItems", 0), max_size=3)
    if kind == "object":
        if "properties" not in schema:
            extra = schema.get("additionalProperties", True)
            return st.dictionaries(st.text("0123456789", max_size=3), values(extra, schemas), max_size=2)
        known = {name: values(each, schemas) for name, each in schema["properties"].items()}
        needed = set(schema.get("required", ()))
        return st.fixed_dictionaries(
            {n: s for n, s in known.items() if n in needed},
            optional={n: s for n, s in known.items() if n not in needed},
        )
    return {"string": st.text(min_size=schema.get("minLength", 0), max_size=12), "boolean": st.booleans()}.get(
        kind, st.none()
    )


BODIES = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize", "/detokenize")


@pytest.mark.parametrize("path", BODIES)
def test_random_bodies_get_described_answers(service, document, path):
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    good = values(schema, document["components"]["schemas"])
    # A good body has some optional fields; a bad one has an arbitrary value in one field.
    few = st.tuples(good, st.sets(st.integers(0, 40), max_size=4)).map(
        lambda pair: {n: v for i, (n, v) in enumerate(pair[0].items()) if i < 1 or i in pair[1]}
    )
    known = sorted(document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]["properties"])
    bad = st.tuples(few, st.sampled_from(known), ANYTHING).map(lambda each: {**each[0], each[1]: each[2]})
    seen = set()

    @settings(max_examples=60, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(body=st.one_of(few, bad, good))
    def run(body):
        answer = service.client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
        check(document, "post", path, answer)
        seen.add(answer.status_code)

    run()
    assert {200, 400} <= seen <= {200, 400, 404}


def statuses(report: Path) -> dict[str, Counter[int]]:
    """Return the counts of statuses by operation."""
    found: dict[str, Counter[int]] = defaultdict(Counter)
    for line in report.read_text().splitlines():
        recorder = json.loads(line).get("ScenarioFinished", {}).get("recorder", {})
        for each in recorder.get("interactions", {}).values():
            if each.get("response"):
                found[recorder["label"]][each["response"]["status_code"]] += 1
    return found


@pytest.mark.skipif(SCHEMATHESIS is None, reason="schemathesis is not installed")
def test_schemathesis_finds_nothing(starter, tool_checkpoint, document, tmp_path):
    service = starter(1, model_path=tool_checkpoint, **LONG)  # a model with tools
    service.workers[0].chunk = 64
    report = tmp_path / "report.ndjson"
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    command = [SCHEMATHESIS, "run", f"{service.url}/openapi.json", "--checks", checks, "--max-examples", "100"]
    command += ["--phases", "examples,coverage,fuzzing", "--seed", "7", "--mode", "all", "--continue-on-failure"]
    command += ["--generation-database", ":memory:", "--report-ndjson-path", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=850, check=False)
    assert done.returncode == 0, done.stdout[-6000:]
    cases = int(re.search(r"(\d+) generated", done.stdout)[1])
    assert cases >= CASES, done.stdout
    found = statuses(report)
    print(done.stdout, *(f"{label}: {dict(sorted(of.items()))}" for label, of in sorted(found.items())), sep="\n")
    # If every body is refused, the run says nothing about answers to good ones.
    for path in (path for path, methods in document["paths"].items() if "requestBody" in methods.get("post", {})):
        of = found[f"POST {path}"]
        assert min(of[200], of[400]) >= 20, f"{path}: {of}"
