"""Streamed answers of an OpenAI-compatible server, and a client for a person: the standard library's."""

import http.client
import json
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import orjson

from moeyard.clients.target_config import Target

INFO_SECONDS = 10.0
# A server may think long before its first word, so this is about one that is gone.
SILENCE_SECONDS = 600.0
# Characters shown of an error whose body is no JSON, such as a proxy's page.
MAX_ERROR_TEXT = 200

Show = Callable[[str, bool], None]


def streamed() -> dict[str, Any]:
    """Fields of a request for a stream that ends with the server's counts of tokens."""
    return {"stream": True, "stream_options": {"include_usage": True}}


def connect(target: Target, *, timeout: float) -> http.client.HTTPConnection:
    """A connection that is not open yet; seconds."""
    if target.tls:
        context = ssl.create_default_context()
        return http.client.HTTPSConnection(target.host, target.port, timeout=timeout, context=context)
    return http.client.HTTPConnection(target.host, target.port, timeout=timeout)


def unreachable(target: Target, error: BaseException) -> ValueError:
    """The error to raise when no answer comes."""
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return ValueError(f"no server answers at {target.url}: {reason}; start one with `moeyard serve`, or name its URL")


def ask(
    target: Target, method: str, path: str, body: dict[str, Any] | None = None, *, timeout: float
) -> tuple[int, bytes]:
    """Return status and body of an answer. `timeout` is in seconds. Raises ValueError if no answer comes."""
    connection = connect(target, timeout=timeout)
    try:
        connection.request(method, path, None if body is None else json.dumps(body), target.headers())
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException) as error:
        raise unreachable(target, error) from error
    finally:
        connection.close()


def first_model(target: Target) -> str:
    """Return the first name of /v1/models. Raises ValueError with one line if there is none."""
    status, body = ask(target, "GET", target.path("models"), timeout=INFO_SECONDS)
    if status in (401, 403):
        raise ValueError(f"{target.url} wants a key (HTTP {status}); give one with --api-key")
    try:
        found: Any = json.loads(body)["data"][0]["id"]
    except (ValueError, LookupError, TypeError):
        raise ValueError(
            f"{target.url}/v1/models names no model (HTTP {status}); is it an OpenAI-compatible server?"
        ) from None
    return str(found)


@dataclass(slots=True)
class StreamedAnswer:
    """A streamed answer as its client sees it; times are `time.perf_counter` seconds.

    `times` has one entry per event with output in it, which may be several tokens; tokens are counted by the server's
    `usage`. `status` is HTTP's, 0 where no answer came. `error` is None for a whole answer. `show` gets pieces of text
    as they come, and whether they are thoughts, which `text` leaves out.
    """

    due: float = 0.0
    sent: float = 0.0
    ended: float = 0.0
    status: int = 0
    times: list[float] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    error: str | None = None
    done: bool = False
    finish_reason: str | None = None
    interrupted: bool = False
    show: Show | None = None

    @property
    def text(self) -> str:
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
        if event.get("error"):
            self.error = error_message(event)
        if event.get("usage"):
            self.usage = event["usage"]
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or choice
            thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
            text = delta.get("content") or delta.get("text") or ""
            if text:
                self.pieces.append(text)
            if text or thought or delta.get("tool_calls") or delta.get("token_ids"):
                self.times.append(at)
            if self.show is not None and thought:
                self.show(thought, True)
            if self.show is not None and text:
                self.show(text, False)
            self.finish_reason = choice.get("finish_reason") or self.finish_reason


class EventStream:
    """Server-sent events out of a body that comes in pieces of any size."""

    __slots__ = ("_answer", "_rest")

    def __init__(self, answer: StreamedAnswer) -> None:
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


def refusal(body: bytes) -> str:
    """The message in the body of an error, or the beginning of the body."""
    try:
        return error_message(orjson.loads(body))
    except orjson.JSONDecodeError:
        return body[:MAX_ERROR_TEXT].decode(errors="replace").strip() or "no reason given"


def stream_chat(target: Target, body: dict[str, Any], show: Show) -> StreamedAnswer:
    """POST a chat to be streamed; `show(text, thought)` gets the pieces as they come.

    Ctrl-C ends the answer and not the program. Errors of the server and of the way to it are in `error`, for a reader.
    """
    answer = StreamedAnswer(sent=time.perf_counter(), show=show)
    connection = connect(target, timeout=SILENCE_SECONDS)
    try:
        connection.request(
            "POST", target.path("chat/completions"), json.dumps({**body, **streamed()}), target.headers()
        )
        response = connection.getresponse()
        answer.status = response.status
        if response.status != 200:
            answer.error = f"HTTP {response.status}: {refusal(response.read())}"
            return answer
        events = EventStream(answer)
        for line in response:
            events.feed(line, time.perf_counter())
    except KeyboardInterrupt:
        answer.interrupted = True
    except (OSError, http.client.HTTPException) as error:
        answer.error = f"the answer broke off: {error}" if answer.pieces else str(unreachable(target, error))
    except ValueError as error:
        answer.error = f"the server's answer is not understood: {error}"
    finally:
        # A server stops to decode for a client that has gone.
        connection.close()
    return answer
