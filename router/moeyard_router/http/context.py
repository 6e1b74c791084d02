"""The request that the code now running works for."""

from contextvars import ContextVar

# Set by the gate, read by whoever formats log lines: everything logged within a request names it.
current_request: ContextVar[str | None] = ContextVar("current_request", default=None)


def log_context() -> dict[str, str | int]:
    """What a log line says of the request that it belongs to."""
    request_id = current_request.get()
    return {} if request_id is None else {"request_id": request_id}
