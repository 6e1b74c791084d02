"""Events of an answer's text (text/events.py) in the words of chat completions: OpenAI's, and `reasoning_content`."""

from collections.abc import Iterable, Sequence
from typing import Any

from moeyard_router.text.events import CallArguments, CallBegin, Content, Reasoning, TextEvent


def chat_deltas(events: Iterable[TextEvent]) -> list[dict[str, Any]]:
    """The deltas of a stream, one for each event that a client is told of; a call's end it sees by what follows."""
    out: list[dict[str, Any]] = []
    for event in events:
        if isinstance(event, Content):
            out.append({"content": event.text})
        elif isinstance(event, Reasoning):
            out.append({"reasoning_content": event.text})
        elif isinstance(event, CallBegin):
            call = {"index": event.index, "id": event.id, "type": "function"}
            out.append({"tool_calls": [{**call, "function": {"name": event.name, "arguments": ""}}]})
        elif isinstance(event, CallArguments):
            out.append({"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]})
    return out


def chat_message(events: Sequence[TextEvent]) -> dict[str, Any]:
    """The whole message. `content` is None where there is none beside reasoning or calls."""
    content = "".join(e.text for e in events if isinstance(e, Content))
    reasoning = "".join(e.text for e in events if isinstance(e, Reasoning))
    calls = [
        {
            "id": begin.id,
            "type": "function",
            "function": {
                "name": begin.name,
                "arguments": "".join(e.text for e in events if isinstance(e, CallArguments) and e.index == begin.index),
            },
        }
        for begin in events
        if isinstance(begin, CallBegin)
    ]
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if reasoning or calls else "")}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message
