"""The entries of a request's ASGI scope that `http/` and `api/` share: its log record and a direct path for chunks."""

from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from moeyard_router.api.spans import RequestTrace

SCOPE_KEY = "moeyard.record"  # its value is a `RequestRecord`
EXTENSION = "moeyard.direct"  # its value is a `Direct`
# Set by the gate and read by log formatters, so that every log line of a request has its id.
current_request: ContextVar[str | None] = ContextVar("current_request", default=None)


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """One request's fields of the access log. Times are monotonic seconds. None means not known yet.

    `reply_id` is the answer's id, `failure` the status of an error after the answer began, `cut` the reason why the
    server closed the connection. `trace` is there with --otlp-traces-endpoint.
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
    trace: "RequestTrace | None" = None


class Direct(Protocol):
    """A path for the chunks of one streamed body that bypasses ASGI. The first and last chunk go by `send`."""

    def ready(self) -> bool:
        """Return whether a chunk may be written now. If not, use `send`, which waits for the client."""

    def write(self, data: bytes) -> None:
        """Queue a chunk, not empty, after `ready`. It leaves soon, together with chunks of other answers."""

    def flush(self) -> None:
        """Send all queued chunks. Call it before `send`, which would overtake them."""


def log_context() -> dict[str, str | int]:
    """Return the fields that every log line of the current request carries."""
    request_id = current_request.get()
    return {} if request_id is None else {"request_id": request_id}
