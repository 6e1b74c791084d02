"""The `openai` package, sync and async: `python with_openai.py URL`."""

import asyncio
import json
import sys
from typing import Any

import openai
from asks import HELLO, MODEL, NAMED, SCHEMAS, TOOLS, hold, refused, run
from pydantic import BaseModel, Field

URL = sys.argv[1]
CLIENT = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
COMMON: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_completion_tokens": 32}


class Ship(BaseModel):
    """The class that `parse` builds from an answer."""

    name: str = Field(max_length=12)
    masts: int = Field(ge=1, le=5)
    afloat: bool


def models() -> None:
    """List the models."""
    assert [m.id for m in CLIENT.models.list()] == [MODEL]
    assert CLIENT.models.retrieve(MODEL).id == MODEL


def chat_whole_and_streamed() -> None:
    """A stream equals the whole answer, usage included."""
    whole = CLIENT.chat.completions.create(**COMMON, seed=7)
    (choice,) = whole.choices
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert whole.usage
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert choice.finish_reason == "stop" or whole.usage.completion_tokens == COMMON["max_completion_tokens"]
    stream = CLIENT.chat.completions.create(**COMMON, seed=7, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == choice.message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == choice.finish_reason
    assert chunks[-1].usage
    assert not chunks[-1].choices
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def chat_by_the_stream_helper() -> None:
    """`chat.completions.stream` merges the pieces itself."""
    ask: dict[str, Any] = {**COMMON, "max_completion_tokens": 200, "response_format": Ship, "seed": 3}
    with CLIENT.chat.completions.stream(**ask) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.parsed == CLIENT.chat.completions.parse(**ask).choices[0].message.parsed


def completions_whole_and_streamed() -> None:
    """The older endpoint, with several prompts."""
    ask: dict[str, Any] = {"model": MODEL, "prompt": ["The sea", "A ship"], "max_tokens": 12, "seed": 1}
    whole = CLIENT.completions.create(**ask)
    texts = {c.index: c.text for c in whole.choices}
    assert sorted(texts) == [0, 1]
    assert all(texts.values())
    parts = {0: "", 1: ""}
    for chunk in CLIENT.completions.create(**ask, stream=True):
        for choice in chunk.choices:
            parts[choice.index] += choice.text
    assert parts == texts


def several_choices() -> None:
    """The `n` choices differ, and repeat in a second request."""
    whole = CLIENT.chat.completions.create(**COMMON, n=3, seed=5, temperature=1.0)
    texts = {c.index: c.message.content for c in whole.choices}
    assert sorted(texts) == [0, 1, 2]
    assert len(set(texts.values())) == 3
    parts = {0: "", 1: "", 2: ""}
    for chunk in CLIENT.chat.completions.create(**COMMON, n=3, seed=5, temperature=1.0, stream=True):
        for choice in chunk.choices:
            parts[choice.index] += choice.delta.content or ""
    assert parts == texts


def logprobs() -> None:
    """Each token has one entry; with greedy sampling the token is among its alternatives."""
    answer = CLIENT.chat.completions.create(**COMMON, temperature=0, logprobs=True, top_logprobs=3)
    (choice,) = answer.choices
    assert choice.logprobs
    assert choice.logprobs.content
    assert answer.usage
    shown = list(choice.logprobs.content)
    assert len(shown) == answer.usage.completion_tokens
    for token in shown:
        assert len(token.top_logprobs) == 3
        assert token.logprob == token.top_logprobs[0].logprob <= 0
    said = b"".join(bytes(t.bytes or ()) for t in shown).decode(errors="replace")
    assert said.startswith(choice.message.content or "?")


def stop_strings() -> None:
    """A stop string ends the answer and is not part of it."""
    ask: dict[str, Any] = {"model": MODEL, "prompt": "The sea " * 20, "max_tokens": 24, "temperature": 0}
    free = CLIENT.completions.create(**ask).choices[0].text
    word = free.split()[3]
    (ended,) = CLIENT.completions.create(**ask, stop=[word]).choices
    assert (ended.text, ended.finish_reason) == (free[: free.index(word)], "stop")


def usage_of_the_cache() -> None:
    """A second request finds the first one's prompt in the cache and gets the same answer."""
    ask: dict[str, Any] = {"model": MODEL, "prompt": "The captain " * 100, "max_tokens": 8, "temperature": 0}
    first, second = CLIENT.completions.create(**ask), CLIENT.completions.create(**ask)
    details = second.usage and second.usage.prompt_tokens_details
    assert details
    assert details.cached_tokens
    assert details.cached_tokens > 0
    assert first.choices[0].text == second.choices[0].text


def tools_required_and_named() -> None:
    """A required call has a known name and valid arguments; its stream has the same pieces."""
    for seed in range(3):
        for choice, reason in (("required", "tool_calls"), (NAMED, "stop")):
            ask: dict[str, Any] = {
                **COMMON,
                "tools": TOOLS,
                "tool_choice": choice,
                "seed": seed,
                "parallel_tool_calls": False,
                "max_completion_tokens": 300,
            }
            whole = CLIENT.chat.completions.create(**ask).choices[0]
            (call,) = whole.message.tool_calls or ()
            assert whole.finish_reason == reason, whole.finish_reason
            hold(call.function.name, json.loads(call.function.arguments))
            assert choice == "required" or call.function.name == "weather"
            deltas = [
                part
                for chunk in CLIENT.chat.completions.create(**ask, stream=True)
                for part in chunk.choices[0].delta.tool_calls or ()
            ]
            assert deltas[0].id
            assert deltas[0].function
            assert deltas[0].function.name == call.function.name
            pieces = [d.function.arguments or "" for d in deltas if d.function]
            assert "".join(pieces) == call.function.arguments
            assert len(pieces) > 3, "arguments came in one piece"


def tool_results_go_back() -> None:
    """The assistant's message is sent back unchanged with the result of its call."""
    ask: dict[str, Any] = {**COMMON, "tools": TOOLS, "max_completion_tokens": 300}
    first = CLIENT.chat.completions.create(**{**ask, "tool_choice": NAMED}, seed=1).choices[0].message
    (call,) = first.tool_calls or ()
    result = {"role": "tool", "tool_call_id": call.id, "content": "Sunny"}
    second = CLIENT.chat.completions.create(**{**ask, "messages": [*HELLO, first, result]}, tool_choice="none")
    assert second.choices[0].message.content
    assert not second.choices[0].message.tool_calls


def structured() -> None:
    """`response_format` as JSON and by schema, and `parse` into a class."""
    any_object = CLIENT.chat.completions.create(
        **{**COMMON, "max_completion_tokens": 200}, response_format={"type": "json_object"}, temperature=0
    ).choices[0]
    assert any_object.finish_reason == "length" or isinstance(json.loads(any_object.message.content or ""), dict)
    for seed in range(3):
        answer = CLIENT.chat.completions.create(
            **{**COMMON, "max_completion_tokens": 200},
            seed=seed,
            response_format={"type": "json_schema", "json_schema": {"name": "port", "schema": SCHEMAS["harbour"]}},
        ).choices[0]
        assert answer.finish_reason == "stop"
        hold("harbour", json.loads(answer.message.content or ""))
    asked = {**COMMON, "max_completion_tokens": 200, "response_format": Ship, "seed": 2}
    said = CLIENT.chat.completions.parse(**asked).choices[0].message
    asked["messages"] = [*HELLO, said, *HELLO]
    for message in (said, CLIENT.chat.completions.parse(**asked).choices[0].message):
        assert isinstance(message.parsed, Ship)
        assert 1 <= message.parsed.masts <= 5


def errors() -> None:
    """Errors raise the client's exceptions and name the field."""
    for kind, more in (
        (openai.BadRequestError, {"top_p": 9}),
        (openai.BadRequestError, {"functions": [{"name": "f"}]}),
        (openai.NotFoundError, {"model": "gpt-nobody"}),
    ):
        refusal = refused(kind, lambda more=more: CLIENT.chat.completions.create(**{**COMMON, **more}))
        assert refusal.param in more, refusal


def asynchronous() -> None:
    """Sixteen concurrent streams equal single ones; closing one early leaves the others alone."""

    async def one(client: openai.AsyncOpenAI, seed: int) -> str:
        stream = await client.chat.completions.create(**COMMON, seed=seed, stream=True)
        return "".join([c.choices[0].delta.content or "" async for c in stream])

    async def cut(client: openai.AsyncOpenAI) -> None:
        stream = await client.chat.completions.create(**{**COMMON, "max_completion_tokens": 500}, stream=True)
        async for _ in stream:
            break
        await stream.close()

    async def tool(client: openai.AsyncOpenAI) -> None:
        answer = await client.chat.completions.create(
            **{**COMMON, "max_completion_tokens": 300}, tools=TOOLS, tool_choice="required", parallel_tool_calls=False
        )
        (call,) = answer.choices[0].message.tool_calls or ()
        hold(call.function.name, json.loads(call.function.arguments))

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0) as client:
            texts = await asyncio.gather(*(one(client, seed) for seed in range(16)), cut(client), tool(client))
            return [t for t in texts if t is not None]

    texts = asyncio.run(all_of_them())
    for seed in (0, 15):
        alone = CLIENT.chat.completions.create(**COMMON, seed=seed).choices[0].message.content
        assert alone == texts[seed]


if __name__ == "__main__":
    run(
        f"openai {openai.__version__}",
        [
            models,
            chat_whole_and_streamed,
            chat_by_the_stream_helper,
            completions_whole_and_streamed,
            several_choices,
            logprobs,
            stop_strings,
            usage_of_the_cache,
            tools_required_and_named,
            tool_results_go_back,
            structured,
            errors,
            asynchronous,
        ],
    )
