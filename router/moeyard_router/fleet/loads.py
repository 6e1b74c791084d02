"""Rows per expert, asked of the workers when somebody looks, and at most once a second however many do."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

from moeyard_router.fleet.link import WorkerLink
from moeyard_worker.protocol import ExpertLoads, Inspect, Message

_FRESH_SECONDS = 1.0
_ANSWER_SECONDS = 1.0


class LoadsReader:
    """Collects one `ExpertLoads` per rank. `links` says which ranks can be asked now."""

    def __init__(self, links: Callable[[], Sequence[WorkerLink]]) -> None:
        self._links = links
        self._asked = -_FRESH_SECONDS
        self._expected = 0
        self._answers: dict[int, ExpertLoads] = {}
        self._complete = asyncio.Event()

    def take(self, rank: int, message: Message) -> bool:
        """Take a message of `rank`; False if it is no answer of that rank."""
        if not isinstance(message, ExpertLoads) or message.rank != rank:
            return False
        self._answers[rank] = message
        if len(self._answers) >= self._expected:
            self._complete.set()
        return True

    async def read(self) -> list[ExpertLoads]:
        """The ranks' counts, by rank, at most a second old; a rank that does not answer within a second is left out."""
        now = time.monotonic()
        if now - self._asked >= _FRESH_SECONDS:
            self._asked = now
            self._complete.clear()
            self._answers = {}
            links = self._links()
            self._expected = len(links)
            for link in links:
                link.send(Inspect())
        if self._expected:
            with contextlib.suppress(TimeoutError):  # boundary: a rank in a long step is left out, as promised
                async with asyncio.timeout(_ANSWER_SECONDS):
                    await self._complete.wait()
        return [self._answers[rank] for rank in sorted(self._answers)]
