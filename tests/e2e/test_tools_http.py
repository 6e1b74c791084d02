"""Required and named tool calls over HTTP from a real rank: with random weights only the grammar guides the output."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tests.checkpoints import make_checkpoint
from tests.e2e.http_fleet import HttpFleet, engine_config, events, serve_http, wait_until_idle
from tests.fleet import ProcessPool

TEMPLATE = "{% if tools %}<tool_call>{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {"unit": {"enum": ["C", "F"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["unit", "days"],
        "additionalProperties": False,
    },
    "now": {
        "type": "object",
        "properties": {"zones": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}},
        "required": ["zones"],
        "additionalProperties": False,
    },
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": s}} for name, s in SCHEMAS.items()]
BODY = {"messages": [{"role": "user", "content": "Hello"}], "tools": TOOLS, "max_tokens": 400}
NOW = {"type": "function", "function": {"name": "now"}}


@pytest.fixture(scope="module")
def fleet(processes: ProcessPool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpFleet]:
    """One rank with a template that accepts tools."""
    directory = make_checkpoint(tmp_path_factory.mktemp("tools"), "qwen3_moe", seed=4, tokenizer=True)
    template = Path(directory) / "tools.jinja"
    template.write_text(TEMPLATE)
    with serve_http(processes, engine_config(directory, num_workers=1), chat_template=template) as http:
        yield http
        wait_until_idle(http)


def calls_of(http: HttpFleet, **body: Any) -> tuple[list[tuple[str, Any]], str]:
    """Return names and arguments of an answer's calls, and its finish reason. The answer has no other content."""
    answer = http.client.post("/v1/chat/completions", json={**BODY, **body})
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert choice["message"]["content"] is None
    calls = [call["function"] for call in choice["message"]["tool_calls"]]
    return [(call["name"], json.loads(call["arguments"])) for call in calls], choice["finish_reason"]


@pytest.mark.parametrize("seed", range(2))
def test_required_and_named_calls_match_their_schemas(fleet: HttpFleet, seed: int) -> None:
    for choice, reason in (("required", "tool_calls"), (NOW, "stop")):
        calls, ended = calls_of(fleet, seed=seed, tool_choice=choice, parallel_tool_calls=False)
        assert (len(calls), ended) == (1, reason)
        for name, arguments in calls:
            jsonschema.validate(arguments, SCHEMAS[name])
            assert choice == "required" or name == "now"


def test_stream_equals_the_whole_answer(fleet: HttpFleet) -> None:
    body = {"tool_choice": "required", "temperature": 0, "parallel_tool_calls": False}
    (whole,), _ = calls_of(fleet, **body)
    with fleet.client.stream("POST", "/v1/chat/completions", json={**BODY, **body, "stream": True}) as answer:
        deltas = [e["choices"][0]["delta"] for e in events(answer)]
    parts = [call["function"] for delta in deltas for call in delta.get("tool_calls") or ()]
    assert parts[0]["name"] == whole[0]
    assert json.loads("".join(part["arguments"] for part in parts)) == whole[1]
    assert len(parts) > 3
