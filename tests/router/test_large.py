"""Large bodies: an intake process makes the same job as the router, and its exit affects no other request."""

import asyncio
import dataclasses
import json
import signal

import pytest
from tests.limits import HANG_SECONDS

from moeyard_router.api import large
from moeyard_router.api.intake import Intake, formats_of
from moeyard_router.api.large import LARGE_BODY, Bodies
from moeyard_router.api.schema import ChatRequest, CompletionRequest
from moeyard_router.api.validation import parse
from moeyard_router.config import RouterConfig, WorkerAddress
from moeyard_router.errors import ApiError
from moeyard_router.text.tool_formats import JSON_CALLS

COMPLETIONS = "/v1/completions"
TEXT = "The quick brown fox 你好 says 🙂 " * 3000
REQUESTS = {
    "text": {"prompt": TEXT, "echo": True, "n": 2, "seed": 3, "stop": ["END", "🙂"], "temperature": 0.1},
    "ids": {"prompt": [i % 400 for i in range(40_000)], "logit_bias": {"7": -1.5}, "logprobs": 2, "seed": -1},
    "several": {"prompt": [TEXT, TEXT[::-1]], "max_tokens": 7, "stop_token_ids": [3, 3, 4], "seed": 0},
    "chat": {"messages": [{"role": "user", "content": TEXT}] * 2, "seed": 1, "top_k": 5, "ignore_eos": True},
}
SCHEMA = {"type": "object", "properties": {"days": {"type": "integer"}}}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
THINKING = {"role": "assistant", "content": "<think>\nWell, "}
ERRORS = {
    "json": (b"[" * 70_000, 400, None),
    "field": (json.dumps({"prompt": TEXT, "tempreature": 1}).encode(), 400, "tempreature"),
    "model": (json.dumps({"prompt": TEXT, "model": "other"}).encode(), 404, "model"),
    "length": (json.dumps({"prompt": "x" * 10_000_000}).encode(), 400, "prompt"),
}


@pytest.fixture(scope="module")
def config(checkpoint):
    return RouterConfig(
        model_name="tiny",
        model_path=checkpoint,
        workers=(WorkerAddress(rank=0, endpoint="tcp://h:1"),),
        max_model_len=200_000,
        vocab_size=400,
        eos_token_ids=(1,),
        intake_processes=1,
        max_buffered_bytes=1000,
    )


@pytest.fixture(scope="module")
def formats(config, codec):
    return formats_of(config, codec)


@pytest.fixture(scope="module")
def bodies(config, formats):
    bodies = Bodies(config, formats)
    yield bodies
    bodies.close()


@pytest.fixture(scope="module")
def tool_config(config, tool_checkpoint):
    return dataclasses.replace(config, model_path=tool_checkpoint)


@pytest.fixture(scope="module")
def tool_bodies(tool_config, tool_codec):
    bodies = Bodies(tool_config, formats_of(tool_config, tool_codec))
    yield bodies
    bodies.close()


def make(bodies, body, *, chat=False):
    return asyncio.run(bodies.job([body[:100], body[100:]], api="chat" if chat else "completion"))


@pytest.mark.parametrize("name", REQUESTS)
def test_process_makes_the_same_job(bodies, config, codec, name):
    chat, body = name == "chat", json.dumps(REQUESTS[name]).encode()
    assert len(body) > LARGE_BODY
    intake = Intake(config, codec)
    request = parse(body, ChatRequest if chat else CompletionRequest)
    assert make(bodies, body, chat=chat) == asyncio.run(intake.chat(request) if chat else intake.completion(request))


@pytest.mark.parametrize(
    "extra",
    [
        {"tools": [WEATHER]},
        {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False, "include_reasoning": False},
        {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "weather"}}, "stream": True},
        {"response_format": {"type": "json_object"}},
        {"messages": [{"role": "user", "content": TEXT}, THINKING], "continue_final_message": True},
        {"chat_template_kwargs": {"enable_thinking": False}, "prompt_logprobs": 1},
    ],
    ids=["auto", "required", "named", "json", "thinking", "not thinking"],
)
def test_process_makes_the_same_tools_and_reasoning(tool_config, tool_bodies, tool_codec, extra):
    """The parsing setup of an answer survives the process; the seed of call ids is random."""
    body = json.dumps({"messages": [{"role": "user", "content": TEXT}], "seed": 1, **extra}).encode()
    there = make(tool_bodies, body, chat=True)
    here = asyncio.run(Intake(tool_config, tool_codec).chat(parse(body, ChatRequest)))
    assert there.extraction.id_seed
    assert dataclasses.replace(there.extraction, id_seed="") == dataclasses.replace(here.extraction, id_seed="")
    assert dataclasses.replace(there, extraction=None) == dataclasses.replace(here, extraction=None)
    assert (there.extraction.tools is not None) == ("tools" in extra)
    assert there.extraction.inside == ("messages" in extra)


LARGE_NUMBER = 123456789012345678901
LIMITED = {"type": "object", "properties": {"wei": {"type": "integer", "maximum": LARGE_NUMBER}}}


def test_calls_of_a_model_without_a_format_and_integers_above_64_bits(tool_config, tool_codec):
    """Required calls then have vLLM's format, and a schema keeps its digits through the process."""
    config = dataclasses.replace(tool_config, tool_call_parser="none")
    bodies = Bodies(config, formats_of(config, tool_codec))
    tool = {"type": "function", "function": {"name": "pay", "parameters": LIMITED}}
    named = {"type": "function", "function": {"name": "pay"}}
    call = {"id": "c", "type": "function", "function": {"name": "pay", "arguments": f'{{"wei": {LARGE_NUMBER}}}'}}
    messages = [{"role": "user", "content": TEXT}, {"role": "assistant", "tool_calls": [call]}]
    try:
        for choice in ("required", named):
            body = json.dumps({"messages": messages, "tools": [tool], "tool_choice": choice, "seed": 1}).encode()
            there = make(bodies, body, chat=True)
            here = asyncio.run(Intake(config, tool_codec).chat(parse(body, ChatRequest)))
            assert dataclasses.replace(there.extraction, id_seed="") == dataclasses.replace(here.extraction, id_seed="")
            assert (there.extraction.tools is JSON_CALLS) == (choice == "required")
            assert (there.extraction.named == "pay") == (choice == named)
            assert str(LARGE_NUMBER) in there.continuations[0].sampling.grammar.text
            assert str(LARGE_NUMBER) in tool_codec.decode(there.prompts[0].token_ids[-200:])
        flat = {"type": "function", "name": "pay", "parameters": LIMITED}
        body = json.dumps({"input": TEXT, "tools": [flat], "tool_choice": "none"}).encode()
        assert asyncio.run(bodies.job([body], api="response")).repeated["tools"][0]["parameters"] == LIMITED
    finally:
        bodies.close()


def test_types_of_bare_arguments(tool_config, tool_codec):
    """This format's parser reads value types from the schemas."""
    config = dataclasses.replace(tool_config, tool_call_parser="qwen3_coder")
    bodies = Bodies(config, formats_of(config, tool_codec))
    body = json.dumps({"messages": [{"role": "user", "content": TEXT}], "tools": [WEATHER]}).encode()
    try:
        assert make(bodies, body, chat=True).extraction.schemas == {"weather": SCHEMA}
    finally:
        bodies.close()


@pytest.mark.parametrize("name", ERRORS)
def test_process_gives_the_same_errors(bodies, config, codec, name):
    body, status, param = ERRORS[name]
    with pytest.raises(ApiError) as here:
        asyncio.run(Intake(config, codec).completion(parse(body, CompletionRequest)))
    with pytest.raises(ApiError) as there:
        make(bodies, body)
    assert vars(here.value) == vars(there.value)
    assert (there.value.status, there.value.param) == (status, param)
    assert len(bodies._idle) == 1, "a client error must not end a process"


def test_first_body_finds_a_started_process(config, formats):
    bodies = Bodies(config, formats)
    bodies.start()
    started = list(bodies._idle)
    assert len(started) == config.intake_processes
    make(bodies, json.dumps(REQUESTS["text"]).encode())
    assert bodies._idle == started
    bodies.close()


def test_killed_process_fails_one_request(bodies):
    body = json.dumps(REQUESTS["several"]).encode()
    make(bodies, body)
    [process] = bodies._idle
    process._process.kill()
    process._process.wait()
    with pytest.raises(ApiError, match="the process that read this request has ended") as caught:
        make(bodies, body)
    assert (caught.value.status, caught.value.reason) == (503, "intake")
    assert make(bodies, body).continuations
    assert bodies._idle != [process]


def test_slow_process_is_killed(config, formats, monkeypatch):
    bodies = Bodies(config, formats)
    make(bodies, json.dumps(REQUESTS["text"]).encode())
    [process] = bodies._idle
    process._process.send_signal(signal.SIGSTOP)  # it never finishes
    monkeypatch.setattr(large, "_SECONDS", 0.0)
    with pytest.raises(ApiError, match="has ended"):
        make(bodies, json.dumps(REQUESTS["text"]).encode())
    bodies.close()


def test_process_with_much_memory_exits_after_its_answer(config, formats, monkeypatch):
    """The limit is 0 here, so a process exits after every answer, and no request is lost."""
    start = large._START.replace("import main; main()", "import main; main.__globals__['_MAX_MEMORY'] = 0; main()")
    monkeypatch.setattr(large, "_START", start)
    bodies = Bodies(config, formats)
    for _ in range(2):
        assert make(bodies, json.dumps(REQUESTS["several"]).encode()).continuations
        assert bodies._idle == []
    with pytest.raises(ApiError, match="'tempreature'"):
        make(bodies, ERRORS["field"][0])
    assert bodies._idle == []
    bodies.close()


def test_close_ends_processes_and_their_requests(config, formats):
    """One body is in the process, one waits for it, one arrives later: each gets a 503."""
    bodies = Bodies(config, formats)
    body = [json.dumps({"prompt": TEXT * 8}).encode()]

    async def close():
        asked = [asyncio.create_task(bodies.job(body, api="completion")) for _ in range(2)]
        while not bodies._busy:
            await asyncio.sleep(0)
        [process] = bodies._busy
        bodies.close()
        errors = await asyncio.gather(*asked, bodies.job(body, api="completion"), return_exceptions=True)
        return errors, process._process.returncode

    errors, returncode = asyncio.run(asyncio.wait_for(close(), HANG_SECONDS))
    assert [(type(error), error.status) for error in errors] == [(ApiError, 503)] * 3
    assert [error.reason for error in errors] == ["intake", "not_ready", "not_ready"]
    assert returncode is not None


def test_buffered_bodies_have_a_limit(bodies):
    with bodies.buffer() as first, bodies.buffer() as second:
        first(600)
        second(400)
        with pytest.raises(ApiError, match="requests of 1000 bytes are being read, 1000 are allowed") as caught:
            second(1)
        assert (caught.value.status, caught.value.retry_after) == (503, 1.0)
    with bodies.buffer() as take:
        take(1000)


def test_a_large_request_over_http(start):
    """The whole path with a real router; the worker's script ignores the prompt."""
    service = start(1, max_model_len=200_000)
    answer = service.complete(prompt=[5] * 60_000, max_tokens=2, return_token_ids=True)
    assert answer["choices"][0]["prompt_token_ids"] == [5] * 60_000
    assert service.submits[0].prompt_token_ids == (5,) * 60_000
    refused = service.post(COMPLETIONS, prompt="x" * 9_000_000)
    assert refused.status_code == 400
    assert "the model's limit is 200000 tokens" in refused.json()["error"]["message"]
    service.wait_idle()


def test_tokenize_and_detokenize_of_large_bodies(start):
    """A process handles these bodies too, and they count towards the buffered bytes."""
    service = start(1, max_model_len=60_000, max_buffered_bytes=400_000)
    ids = [5 + i % 300 for i in range(30_000)]
    text = service.post("/detokenize", tokens=ids).json()["prompt"]
    parts = [service.post("/detokenize", tokens=ids[i : i + 1000]).json()["prompt"] for i in range(0, 30_000, 1000)]
    assert text == "".join(parts)
    words = "one two three " * 6000
    found = service.post("/tokenize", prompt=words, return_token_strs=True).json()
    assert len(found["token_strs"]) == found["count"] > 6000
    short = service.post("/tokenize", prompt="one two three " * 10, return_token_strs=True).json()
    assert found["token_strs"][:30] == short["token_strs"][:30]
    refused = service.post("/tokenize", prompt="x" * 500_000)
    assert refused.status_code == 503
    assert "requests of" in refused.json()["error"]["message"]
    assert service.post("/tokenize", prompt="x" * 300_000).status_code == 200, "its buffer space must be free again"
