"""A client of an OpenAI-compatible server for somebody who watches: the standard library's, which Ctrl-C can stop."""

import http.client
import json
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from moeyard.clients.target_config import Target

INFO_SECONDS = 10.0
# A server may think long before its first word, so this is about one that is gone.
SILENCE_SECONDS = 600.0
MAX_PAGE = 200

Show = Callable[[str, bool], None]


def connect(target: Target, *, timeout: float) -> http.client.HTTPConnection:
    """A connection that is not open yet; seconds."""
    if target.tls:
        context = ssl.create_default_context()
        return http.client.HTTPSConnection(target.host, target.port, timeout=timeout, context=context)
    return http.client.HTTPConnection(target.host, target.port, timeout=timeout)


def unreachable(target: Target, error: BaseException) -> ValueError:
    """What is said when no answer comes."""
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return ValueError(f"no server answers at {target.url}: {reason}; start one with `moeyard serve`, or name its URL")


def first_model(target: Target) -> str:
    """The first name of /v1/models. Raises ValueError with one line when there is none to be had."""
    connection = connect(target, timeout=INFO_SECONDS)
    try:
        connection.request("GET", target.path("models"), headers=target.headers())
        response = connection.getresponse()
        body = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise unreachable(target, error) from error
    finally:
        connection.close()
    if response.status in (401, 403):
        raise ValueError(f"{target.url} wants a key (HTTP {response.status}); give one with --api-key")
    try:
        found: Any = json.loads(body)["data"][0]["id"]
    except (ValueError, LookupError, TypeError):
        raise ValueError(
            f"{target.url}/v1/models names no model (HTTP {response.status}); is it an OpenAI-compatible server?"
        ) from None
    return str(found)


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
