"""litellm as a library, through its `openai/` provider: `python with_litellm.py URL`."""

import asyncio
import importlib.metadata
import json
import sys
from typing import Any

import litellm
from asks import HELLO, MODEL, NAMED, SCHEMAS, TOOLS, hold, refused, run

ASK: dict[str, Any] = {
    "model": f"openai/{MODEL}",
    "api_base": f"{sys.argv[1]}/v1",
    "api_key": "none",
    "messages": HELLO,
    "max_tokens": 32,
    "num_retries": 0,
}
CALLING: dict[str, Any] = {**ASK, "tools": TOOLS, "max_tokens": 300, "parallel_tool_calls": False}


def completion_and_stream() -> None:
    """A stream equals the whole answer."""
    whole = litellm.completion(**ASK, seed=7)
    text = whole.choices[0].message.content
    assert text
    assert whole.usage.completion_tokens > 0
    chunks = list(litellm.completion(**ASK, seed=7, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    built = litellm.stream_chunk_builder(chunks, messages=HELLO)
    assert built.choices[0].message.content == text
    assert built.usage.completion_tokens == whole.usage.completion_tokens


def text_completion() -> None:
    """The older endpoint."""
    ask: dict[str, Any] = {**ASK, "model": f"text-completion-openai/{MODEL}", "prompt": "The sea", "seed": 1}
    del ask["messages"]
    text = litellm.text_completion(**ask).choices[0].text
    assert text
    assert "".join(c.choices[0].text or "" for c in litellm.text_completion(**ask, stream=True)) == text


def asynchronous() -> None:
    """Send eight requests at once."""

    async def all_of_them() -> list[str]:
        answers = await asyncio.gather(*(litellm.acompletion(**ASK, seed=seed) for seed in range(8)))
        return [a.choices[0].message.content for a in answers]

    texts = asyncio.run(all_of_them())
    assert texts[3] == litellm.completion(**ASK, seed=3).choices[0].message.content


def tools() -> None:
    """Required and named calls, whole and streamed; the message is sent back."""
    for seed in range(2):
        for choice in ("required", NAMED):
            message = litellm.completion(**CALLING, tool_choice=choice, seed=seed).choices[0].message
            (call,) = message.tool_calls
            hold(call.function.name, json.loads(call.function.arguments))
            chunks = list(litellm.completion(**CALLING, tool_choice=choice, seed=seed, stream=True))
            (same,) = litellm.stream_chunk_builder(chunks, messages=HELLO).choices[0].message.tool_calls
            assert (same.function.name, same.function.arguments) == (call.function.name, call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": "Sunny"}
    second = litellm.completion(**{**CALLING, "messages": [*HELLO, message, result], "max_tokens": 24})
    assert second.choices[0].message.content


def structured() -> None:
    """`response_format` by schema."""
    form = {"type": "json_schema", "json_schema": {"name": "port", "schema": SCHEMAS["harbour"], "strict": True}}
    answer = litellm.completion(**{**ASK, "max_tokens": 200}, response_format=form, seed=2)
    hold("harbour", json.loads(answer.choices[0].message.content))


def refusals() -> None:
    """A bad value raises litellm's own exception."""
    refusal = refused(litellm.BadRequestError, lambda: litellm.completion(**ASK, top_p=9))
    assert "top_p" in str(refusal)


if __name__ == "__main__":
    run(
        f"litellm {importlib.metadata.version('litellm')}",
        [completion_and_stream, text_completion, asynchronous, tools, structured, refusals],
    )
