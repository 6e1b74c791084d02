"""Anthropic's package on /v1/messages: `python with_anthropic.py URL`."""

import sys
from typing import Any

import anthropic
from asks import MODEL, SCHEMAS, hold, run

CLIENT = anthropic.Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0)
ASK: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 32,
    "messages": [{"role": "user", "content": "Tell me of the captain."}],
    "extra_body": {"temperature": 0},  # the package no longer has an argument for it
}
TOOLS: list[Any] = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
CHOICE: Any = {"type": "any", "disable_parallel_tool_use": True}


def text_and_stream() -> None:
    """A stream equals the whole answer."""
    whole = CLIENT.messages.create(**ASK, system="You are a sailor.")
    (block,) = whole.content
    assert block.type == "text"
    assert block.text
    assert whole.stop_reason in ("max_tokens", "end_turn")
    with CLIENT.messages.stream(**ASK, system="You are a sailor.") as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == block.text
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert final.stop_reason == whole.stop_reason


def tools() -> None:
    """A required call follows its schema, streamed too, and its result is sent back."""
    ask = {**ASK, "max_tokens": 300, "tools": TOOLS}
    whole = CLIENT.messages.create(**ask, tool_choice=CHOICE)
    (call,) = [block for block in whole.content if block.type == "tool_use"]
    hold(call.name, call.input)
    assert whole.stop_reason == "tool_use"
    with CLIENT.messages.stream(**ask, tool_choice=CHOICE) as stream:
        final = stream.get_final_message()
    assert [b.input for b in final.content if b.type == "tool_use"] == [call.input]
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "Sunny"}
    turns = [*ASK["messages"], {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    assert CLIENT.messages.create(**{**ask, "messages": turns, "max_tokens": 24}).content


def counting() -> None:
    """`count_tokens` equals the count that a message is charged."""
    counted = CLIENT.messages.count_tokens(model=MODEL, messages=ASK["messages"])
    assert counted.input_tokens == CLIENT.messages.create(**ASK).usage.input_tokens


if __name__ == "__main__":
    run(f"anthropic {anthropic.__version__}", [text_and_stream, tools, counting])
