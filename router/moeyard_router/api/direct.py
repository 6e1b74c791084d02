"""A shorter way for the pieces of a streamed answer: straight to its connection, past the layers of ASGI.

Those layers are coroutines within coroutines, and a task has to run for each piece: two thirds of what a token cost.
They still see an answer's beginning and its end; only the pieces between go this way. A server that has it offers it
as the ASGI extension `EXTENSION`; without one everything goes by `send`.
"""

from typing import Protocol

from starlette.types import Scope

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
    """What the server offers for the answer to this request."""
    offered: Direct | None = scope.get("extensions", {}).get(EXTENSION)
    return offered
