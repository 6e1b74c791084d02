"""What the scope of one request carries between `http/` and `api/`: its record, and a direct way for its answer."""

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.types import Scope

SCOPE_KEY = "moeyard.record"


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """One request, for the access log. Times are monotonic seconds; None is not known yet.

    `reply_id` is the answer's id, `failure` the status of an error after the answer began, `cut` why the connection
    ended.
    """

    request_id: str
    key_name: str | None
    began: float
    reply_id: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    first_token: float | None = None
    failure: int | None = None
    client_left: bool = False
    cut: str | None = None


def record_of(scope: Any) -> RequestRecord:
    """The record that the gate put into an ASGI scope."""
    record = scope[SCOPE_KEY]
    assert isinstance(record, RequestRecord)
    return record


EXTENSION = "moeyard.direct"


class Direct(Protocol):
    """The body of one answer, between its first piece and its last, which go by `send`."""

    def ready(self) -> bool:
        """Whether a piece may be written now: the client is there and has read enough. If not, `send` it, and wait."""

    def write(self, data: bytes) -> None:
        """Take a piece, not empty, after `ready`; it leaves soon, together with those of other answers."""

    def flush(self) -> None:
        """Let all pieces leave now, before what `send` is given next."""


def direct_of(scope: Scope) -> Direct | None:
    offered: Direct | None = scope.get("extensions", {}).get(EXTENSION)
    return offered


# Set by the gate, read by whoever formats log lines: everything logged within a request names it.
current_request: ContextVar[str | None] = ContextVar("current_request", default=None)


def log_context() -> dict[str, str | int]:
    request_id = current_request.get()
    return {} if request_id is None else {"request_id": request_id}
