"""What is known of one HTTP request beside its answer: filled in on the way, read by the access log."""

from dataclasses import dataclass
from typing import Any

SCOPE_KEY = "moeyard.record"


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """One request, from the door on.

    `request_id` is the client's X-Request-Id or one made here; `key_name` the name of the API key that opened the door,
    None where none is asked for. `began` is monotonic seconds. The rest is None until known: `reply_id` (the answer's
    `id`, under which the workers know it), prompt and output tokens over all choices, `first_token` in monotonic
    seconds, and `failure`, the status of an error that came after the answer had begun, and `cut`, why its connection
    was ended here.
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
