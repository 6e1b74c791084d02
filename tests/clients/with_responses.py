"""The `openai` package's Responses API, text, tools and streams: `python with_responses.py URL`."""

import json
import sys
from typing import Any

import openai
from asks import MODEL, SCHEMAS, hold, run

CLIENT = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
ASK: dict[str, Any] = {
    "model": MODEL,
    "input": "Tell me of the captain.",
    "max_output_tokens": 32,
    "temperature": 0,
    "store": False,
}
TOOLS: list[Any] = [
    {"type": "function", "name": name, "parameters": schema, "strict": True} for name, schema in SCHEMAS.items()
]
CALLING: dict[str, Any] = {**ASK, "tools": TOOLS, "max_output_tokens": 300, "parallel_tool_calls": False}


def text_and_stream() -> None:
    """A stream's deltas and its last event equal the whole answer."""
    whole = CLIENT.responses.create(**ASK)
    assert whole.output_text
    assert whole.usage
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    with CLIENT.responses.stream(**ASK) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == whole.output_text
    assert final.usage
    assert final.usage.output_tokens == whole.usage.output_tokens


def required_call_and_its_result() -> None:
    """A required call follows its schema, streamed too, and its result is sent back."""
    whole = CLIENT.responses.create(**CALLING, tool_choice="required")
    (call,) = [item for item in whole.output if item.type == "function_call"]
    hold(call.name, json.loads(call.arguments))
    pieces = [
        event.delta
        for event in CLIENT.responses.create(**CALLING, tool_choice="required", stream=True)
        if event.type == "response.function_call_arguments.delta"
    ]
    assert "".join(pieces) == call.arguments
    assert len(pieces) > 3, "arguments came in one piece"
    said = {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny"}
    asked = {"role": "user", "content": ASK["input"]}
    after = CLIENT.responses.create(**{**CALLING, "input": [asked, said, result], "max_output_tokens": 24})
    assert after.output


def structured() -> None:
    """`text.format` by schema."""
    form: Any = {"type": "json_schema", "name": "port", "schema": SCHEMAS["harbour"], "strict": True}
    answer = CLIENT.responses.create(**{**ASK, "max_output_tokens": 200}, text={"format": form})
    hold("harbour", json.loads(answer.output_text))


if __name__ == "__main__":
    run(f"openai {openai.__version__} (responses)", [text_and_stream, required_call_and_its_result, structured])
