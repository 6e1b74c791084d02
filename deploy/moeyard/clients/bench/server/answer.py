"""A streamed answer as its client sees it: when its pieces came, what they said, and how it ended."""

from dataclasses import dataclass, field
from typing import Any

import orjson


@dataclass(slots=True)
class Answer:
    """One request's course; times are `time.perf_counter` seconds.

    `times` has one entry per event with output in it, which may be several tokens; tokens are counted by the server's
    `usage`. `status` is HTTP's, 0 where no answer came. `error` is None for a whole answer.
    """

    due: float
    sent: float = 0.0
    ended: float = 0.0
    status: int = 0
    times: list[float] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    error: str | None = None
    done: bool = False

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.pieces)

    @property
    def output_tokens(self) -> int:
        """As the server counted them; 0 where it did not."""
        return int((self.usage or {}).get("completion_tokens") or 0)

    @property
    def prompt_tokens(self) -> int:
        """As the server counted them; 0 where it did not."""
        return int((self.usage or {}).get("prompt_tokens") or 0)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the server took from its prefix cache, where it says so."""
        details = (self.usage or {}).get("prompt_tokens_details") or {}
        return int(details.get("cached_tokens") or 0)

    def event(self, event: dict[str, Any], at: float) -> None:
        """Take in one event of the stream."""
        if event.get("error"):
            self.error = error_message(event)
        if event.get("usage"):
            self.usage = event["usage"]
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or choice
            text = delta.get("content") or delta.get("text") or ""
            if text:
                self.pieces.append(text)
            if text or any(delta.get(name) for name in ("reasoning_content", "reasoning", "tool_calls", "token_ids")):
                self.times.append(at)


class EventStream:
    """Server-sent events out of a body that comes in pieces of any size."""

    __slots__ = ("_answer", "_rest")

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._rest = b""

    def feed(self, data: bytes, at: float) -> None:
        """Take in the next bytes, which came at `at`. Raises orjson.JSONDecodeError for an event that is no JSON.

        Every OpenAI-compatible server writes an event as one line; comments and other fields are passed over.
        """
        *lines, self._rest = (self._rest + data if self._rest else data).split(b"\n")
        for line in lines:
            if line[:5] != b"data:":
                continue
            if line[5:].strip() == b"[DONE]":
                self._answer.done = True
            else:
                self._answer.event(orjson.loads(line[5:]), at)


def error_message(body: Any) -> str:
    """The message in an error's body, as OpenAI's servers, FastAPI's and others write it."""
    if isinstance(body, dict):
        error = body.get("error") or body.get("detail") or body.get("message") or body
        if isinstance(error, dict) and error.get("message"):
            error = error["message"]
        return error if isinstance(error, str) else orjson.dumps(error).decode()
    return str(body)
