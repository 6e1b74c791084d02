"""One streamed chat completion for somebody who watches it: the standard library's client, which Ctrl-C can stop."""

import http.client
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from moeyard.clients.server_info import connect, unreachable
from moeyard.clients.target import Target

# A server may think long before its first word, so this is about one that is gone.
SILENCE_SECONDS = 600.0
MAX_PAGE = 200

Show = Callable[[str, bool], None]


@dataclass(slots=True, kw_only=True)
class Reply:
    """How an answer went. `text` is without what the model thought first; `num_tokens` is the server's count."""

    pieces: list[str] = field(default_factory=list)
    num_tokens: int | None = None
    finish_reason: str | None = None
    seconds_to_first: float | None = None
    seconds_after_first: float = 0.0
    interrupted: bool = False
    error: str | None = None

    @property
    def text(self) -> str:
        """All that was said."""
        return "".join(self.pieces)


def stream_chat(target: Target, body: dict[str, Any], show: Show) -> Reply:
    """POST to /v1/chat/completions; `show(text, thought)` gets the pieces as they come.

    Ctrl-C ends the answer and not the program. Errors of the server and of the way to it are in `error`, for a reader.
    """
    reply = Reply()
    connection = connect(target, timeout=SILENCE_SECONDS)
    begun = time.perf_counter()
    try:
        connection.request("POST", target.path("chat/completions"), json.dumps(body), target.headers())
        response = connection.getresponse()
        if response.status != 200:
            reply.error = f"HTTP {response.status}: {said(response.read())}"
            return reply
        for event in events(response):
            _take(reply, event, show, time.perf_counter() - begun)
    except KeyboardInterrupt:
        reply.interrupted = True
    except (OSError, http.client.HTTPException) as error:
        reply.error = str(unreachable(target, error)) if not reply.pieces else f"the answer broke off: {error}"
    except ValueError as error:
        reply.error = f"the server's answer is not understood: {error}"
    finally:
        # A server stops to decode for a client that has gone.
        connection.close()
    return reply


def events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events."""
    for line in response:
        if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
            yield json.loads(data)


def said(page: bytes) -> str:
    """The message in the body of an error, or the beginning of the body."""
    try:
        error = json.loads(page)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, LookupError, TypeError):
        return page[:MAX_PAGE].decode(errors="replace") or "no reason given"


def _take(reply: Reply, event: dict[str, Any], show: Show, at: float) -> None:
    if event.get("error"):
        reply.error = said(json.dumps(event).encode())
    if event.get("usage"):
        reply.num_tokens = event["usage"].get("completion_tokens")
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
        text = delta.get("content") or ""
        if thought or text:
            if reply.seconds_to_first is None:
                reply.seconds_to_first = at
            reply.seconds_after_first = at - reply.seconds_to_first
        if thought:
            show(thought, True)
        if text:
            reply.pieces.append(text)
            show(text, False)
        reply.finish_reason = choice.get("finish_reason") or reply.finish_reason
