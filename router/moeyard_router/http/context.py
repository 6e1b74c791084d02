"""The request that the code now running works for."""

from contextvars import ContextVar

# Set by the gate, read by whoever formats log lines: everything logged within a request names it.
current_request: ContextVar[str | None] = ContextVar("current_request", default=None)
