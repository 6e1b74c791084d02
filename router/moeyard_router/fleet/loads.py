"""Rows per expert. The router queries the workers on demand, at most once a second for all callers.

A CPU rank reports the rows that its experts computed. A GPU rank reports the experts that its rows chose.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import compress, repeat, zip_longest

from moeyard_router.fleet.link import WorkerLink
from moeyard_worker.protocol import ExpertLoads, Inspect

_FRESH_SECONDS = 1.0
_ANSWER_SECONDS = 1.0


# Rows of one rank as [layer][expert], in the order of the layers and experts that it names.
LayerRows = list[list[int]]


def rows_of_ranks(answers: Sequence[ExpertLoads]) -> list[LayerRows]:
    """Return the rows that each rank's experts computed, in the order of `answers`; empty for a rank without counts.

    Choices are summed over ranks and credited to the rank that holds the expert. Replicas of an expert share its rows
    equally, and the first replicas get the remainder: the workers do not count how replicas shared the rows.
    """
    telling = [each for each in answers if each.chosen]
    # A fleet has one model, so all counts have the same length.
    left = [sum(column) for column in zip_longest(*(each.chosen for each in telling), fillvalue=0)]
    places = {each.rank: _places(each) for each in telling}
    holders = Counter[int]()
    for each in telling:
        holders.update(compress(places[each.rank], each.held or repeat(1)))
    alone = all(count == 1 for count in holders.values()) and not any(each.held for each in telling)
    found = []
    for each in answers:
        rows = list(each.rows)
        if each.chosen and alone:
            rows = [left[place] for place in places[each.rank]]
        elif each.chosen:
            for place, held in zip(places[each.rank], each.held or repeat(1), strict=False):
                rows.append(-(-left[place] // holders[place]) if held else 0)
                left[place] -= rows[-1]
                holders[place] -= held
        size = max(1, len(each.experts))
        found.append([rows[start : start + size] for start in range(0, len(rows), size)])
    return found


def _places(loads: ExpertLoads) -> list[int]:
    """Return the index in `chosen` of each [layer, expert], layer by layer."""
    width = len(loads.chosen) // len(loads.layers)
    return [start + expert for start in range(0, len(loads.chosen), width) for expert in loads.experts]


class LoadsReader:
    """Collects one `ExpertLoads` per rank. `links` returns the ranks that can be queried now."""

    def __init__(self, links: Callable[[], Sequence[WorkerLink]]) -> None:
        self._links = links
        self._asked = -_FRESH_SECONDS
        self._expected = 0
        self._answers: dict[int, ExpertLoads] = {}
        self._complete = asyncio.Event()

    def take(self, answer: ExpertLoads) -> None:
        """Store a rank's answer."""
        self._answers[answer.rank] = answer
        if len(self._answers) >= self._expected:
            self._complete.set()

    async def read(self) -> list[ExpertLoads]:
        """Return counts by rank, at most a second old. A rank that does not answer within a second is left out."""
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
            with contextlib.suppress(TimeoutError):  # boundary: a rank in a long step is left out
                async with asyncio.timeout(_ANSWER_SECONDS):
                    await self._complete.wait()
        return [self._answers[rank] for rank in sorted(self._answers)]
