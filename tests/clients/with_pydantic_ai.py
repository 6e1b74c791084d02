"""pydantic-ai's agents with tools: `python with_pydantic_ai.py URL`."""

import asyncio
import importlib.metadata
import sys
from dataclasses import replace
from typing import Any, Literal

from asks import MODEL, run
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, RunContext, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.tools import ToolDefinition

CHAT = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{sys.argv[1]}/v1", api_key="none"))
ASK = "Tell me of the captain."


class Port(BaseModel):
    """A harbour."""

    kind: Literal["sea", "river"]
    berths: int = Field(ge=1, le=9)


def settings(**more: Any) -> Any:
    """Settings of one run; the seed makes runs equal."""
    return {"max_tokens": 200, "seed": 7, **more}


def text_and_stream() -> None:
    """A stream equals the whole answer."""
    agent = Agent(CHAT, system_prompt="You are a sailor.")
    whole = agent.run_sync(ASK, model_settings=settings(max_tokens=32))
    assert whole.output

    async def streamed() -> str:
        async with agent.run_stream(ASK, model_settings=settings(max_tokens=32)) as result:
            return "".join([part async for part in result.stream_text(delta=True, debounce_by=None)])

    assert asyncio.run(streamed()).strip() == whole.output.strip()


def output_by_a_required_call() -> None:
    """An output type is a tool with `tool_choice` `required`."""
    agent = Agent(CHAT, output_type=ToolOutput(Port), retries=0)
    for seed in range(4):
        port = agent.run_sync(ASK, model_settings=settings(seed=seed)).output
        assert isinstance(port, Port)


def output_by_schema() -> None:
    """The same output by `response_format`."""
    port = Agent(CHAT, output_type=NativeOutput(Port), retries=0).run_sync(ASK, model_settings=settings()).output
    assert isinstance(port, Port)


def tools_then_an_output() -> None:
    """The agent calls a tool, sends its result, and ends with an output; the streamed run is equal."""
    called: list[str] = []
    agent = Agent(CHAT, output_type=ToolOutput(Port), retries=0)

    async def once(context: RunContext[None], definition: ToolDefinition) -> ToolDefinition | None:
        return replace(definition) if context.run_step == 1 else None

    @agent.tool_plain(prepare=once)
    def depth(place: Literal["north", "south"]) -> str:
        """Depth of the water."""
        called.append(place)
        return f"4 fathoms {place}"

    for seed in range(8):
        result = agent.run_sync(ASK, model_settings=settings(seed=seed, parallel_tool_calls=False, temperature=1.0))
        assert isinstance(result.output, Port)
    assert called, "no run of eight chose the tool"


if __name__ == "__main__":
    run(
        f"pydantic-ai {importlib.metadata.version('pydantic-ai-slim')}",
        [text_and_stream, output_by_a_required_call, output_by_schema, tools_then_an_output],
    )
