"""Recorded requests of coding agents (tests/clients/agents.py --record) get answers, whole and streamed."""

import json
from pathlib import Path

import pytest
from tests.router.tool_model import THOUGHT

REQUESTS = Path(__file__).resolve().parents[1] / "clients" / "requests"
# Fields that the server may name as ignored: none of them is for the model.
HARMLESS = {
    "codex": {
        *("client_metadata", "include", "input.id", "input.status", "prompt_cache_key", "reasoning.summary", "store"),
        *("tools.web_search", "input.name"),
    },
    "claude": {
        *("messages.content.cache_control", "messages.content.is_error", "metadata", "system.cache_control"),
    },
    "opencode-anthropic": {"messages.content.cache_control", "system.cache_control"},
}
AGENTS = ("aider", "claude", "cline", "codex", "continue", "opencode", "opencode-anthropic", "qwen")


@pytest.fixture(scope="module")
def tool_service(starter, tool_checkpoint):
    """The fixture of tests/router/conftest.py, with room for the instructions of agents."""
    return starter(1, model_path=tool_checkpoint, model_name="demo", max_model_len=200_000)


def test_each_agent_has_a_record():
    assert sorted(path.stem for path in REQUESTS.glob("*.jsonl")) == sorted(AGENTS)


@pytest.mark.parametrize("agent", AGENTS)
def test_requests_of_an_agent_are_answered(model, agent):
    version, *requests = map(json.loads, (REQUESTS / f"{agent}.jsonl").read_text().splitlines())
    assert version["version"]
    assert requests
    model.worker.chunk = 500  # one event per text
    for request in requests:
        body = request["body"]
        called = body["tools"][0] if body.get("tools") else {"name": "none"}
        name = called.get("function", called)["name"]
        call = f"<tool_call>\n{json.dumps({'name': name, 'arguments': {}})}\n</tool_call>" if body.get("tools") else ""
        model.says(THOUGHT + "Yes." + call)
        for stream in (True, False):
            asked = {key: value for key, value in body.items() if stream or key != "stream_options"}
            answer = model.service.post(request["path"], **{**asked, "stream": stream})
            assert answer.status_code == 200, answer.text[:2000]
            assert "Yes." in answer.text
            assert '"error"' not in answer.text.replace('"error":null', "")
            assert not call or f'"name":"{name}"' in answer.text
            ignored = answer.headers.get("x-moeyard-ignored")
            assert set(ignored.split(", ") if ignored else ()) - HARMLESS.get(agent, set()) == set()
        prompt = model.prompt()
        for tool in body.get("tools", ()):
            if tool.get("type") == "web_search" or tool.get("defer_loading"):
                continue
            members = tool.get("tools") or [tool.get("function", tool)]
            assert all(f'{member["name"]}"' in prompt for member in members)
