"""Clients that do not take what they asked for: each is given some time, then cut off.

While a client does not read, its stream waits (uvicorn's `send` waits above 64 KiB of unsent bytes), but its sequence
goes on at the worker, which cannot pause one: what it yields is kept, so a slow reader costs the memory of as many
tokens as come in `send_timeout`, and its place. So there is an end to it, as nginx's `send_timeout`: who lets the
unsent bytes stand above 16 KiB for that long, or does not take the last of an answer in that time, loses the
connection. Its end then ends the sequence, like any client's who leaves.
"""

import asyncio
from collections.abc import Callable


class SlowReader:
    """Watches one connection's unsent bytes. `cut` is called once, before the connection is aborted."""

    __slots__ = ("_answers", "_cut", "_loop", "_seconds", "_timer", "_transport")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        transport: asyncio.Transport,
        *,
        seconds: float,
        cut: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._transport = transport
        self._seconds = seconds
        self._cut = cut
        self._timer: asyncio.TimerHandle | None = None
        self._answers = 0

    def paused(self) -> None:
        """The client has fallen behind: more is unsent than the transport takes."""
        self._unset()
        self._timer = self._loop.call_later(self._seconds, self._late)

    def resumed(self) -> None:
        """It has caught up, or is gone."""
        self._unset()

    def answered(self) -> None:
        """An answer is complete. What is unsent of it is too little to pause for, and may keep a closed socket open."""
        self._answers += 1
        if self._timer is None and self._transport.get_write_buffer_size():
            self._loop.call_later(self._seconds, self._late_at_end, self._answers)

    def _late_at_end(self, answers: int) -> None:
        # With another answer behind it the bytes may be that one's, which has its own time.
        if answers == self._answers and self._timer is None and self._transport.get_write_buffer_size():
            self._late()

    def _late(self) -> None:
        self._timer = None
        self._cut()
        self._transport.abort()

    def _unset(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
