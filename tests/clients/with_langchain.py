"""langchain's ChatOpenAI: `python with_langchain.py URL`."""

import asyncio
import importlib.metadata
import sys
from typing import Any, Literal

from asks import MODEL, TOOLS, hold, run
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict, Field

TALK = [SystemMessage("You are a sailor."), HumanMessage("Tell me of the captain.")]


class Port(BaseModel):
    """A harbour."""

    # A schema without `additionalProperties` allows any, and an untrained model writes some.
    model_config = ConfigDict(extra="forbid")
    kind: Literal["sea", "river"]
    berths: int = Field(ge=1, le=9)


class Place(BaseModel):
    """Location."""

    model_config = ConfigDict(extra="forbid")
    place: Literal["north", "south"]


@tool(args_schema=Place)
def depth(place: Literal["north", "south"]) -> str:
    """Depth of the water."""
    return f"4 fathoms {place}"


def model(**more: Any) -> ChatOpenAI:
    """Return a chat model of this server."""
    return ChatOpenAI(
        model=MODEL,
        base_url=f"{sys.argv[1]}/v1",
        api_key="none",
        max_retries=0,
        **{"max_tokens": 32, "seed": 7, **more},
    )


def invoke_and_stream() -> None:
    """A stream equals the whole answer, usage included."""
    whole = model().invoke(TALK)
    assert whole.content
    assert whole.usage_metadata
    chunks = list(model(stream_usage=True).stream(TALK))
    total = chunks[0]
    for chunk in chunks[1:]:
        total = total + chunk
    assert total.content == whole.content
    assert total.usage_metadata
    assert total.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]


def batch_and_async() -> None:
    """Send several requests at once."""
    texts = [m.content for m in model().batch([TALK] * 4)]
    assert len(set(texts)) == 1

    async def streamed() -> str:
        return "".join([str(chunk.content) async for chunk in model().astream(TALK)])

    assert asyncio.run(streamed()) == texts[0]


def bind_tools() -> None:
    """Call langchain's own tools and schemas, streamed too; send the result back."""
    bound = model(max_tokens=300).bind_tools([depth], tool_choice="required", parallel_tool_calls=False, strict=True)
    answer = bound.invoke(TALK)
    assert isinstance(answer, AIMessage)
    (call,) = answer.tool_calls
    assert call["name"] == "depth"
    assert call["args"]["place"] in ("north", "south")
    chunks = list(bound.stream(TALK))
    total = chunks[0]
    for chunk in chunks[1:]:
        total = total + chunk
    assert [(c["name"], c["args"]) for c in total.tool_calls] == [(call["name"], call["args"])]
    result = depth.invoke(call)
    assert isinstance(result, ToolMessage)
    after = model(max_tokens=24).bind_tools([depth]).invoke([*TALK, answer, result])
    assert isinstance(after.content, str)
    (named,) = model(max_tokens=300).bind_tools(TOOLS, tool_choice="weather").invoke(TALK).tool_calls
    hold("weather", named["args"])


def structured_output() -> None:
    """Parse into a class, by schema and by a named call."""
    for method in ("json_schema", "function_calling"):
        port = model(max_tokens=200).with_structured_output(Port, method=method).invoke(TALK)
        assert isinstance(port, Port), port
        assert 1 <= port.berths <= 9


def logprobs() -> None:
    """Read log-probabilities from `response_metadata`."""
    answer = model(temperature=0).bind(logprobs=True, top_logprobs=2).invoke(TALK)
    shown = answer.response_metadata["logprobs"]["content"]
    assert len(shown) == answer.usage_metadata["output_tokens"]


if __name__ == "__main__":
    run(
        f"langchain-openai {importlib.metadata.version('langchain-openai')}, "
        f"langchain-core {importlib.metadata.version('langchain-core')}",
        [invoke_and_stream, batch_and_async, bind_tools, structured_output, logprobs],
    )
