"""Fair queue between API keys: the key that was served least goes first. Pure.

It uses virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024). Each key counts
the tokens it was served, and an output token counts as two prompt tokens. The waiting key with the lowest counter is
next. A key that returns with an empty queue starts at the lowest waiting counter, so that no key saves up credit.
The length of an answer is unknown at its start. The key's recent answers give an estimate, corrected at the end.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

_OUTPUT_WEIGHT = 2.0  # as in the paper, and as output tokens are priced
_FIRST_GUESS = 128.0  # output tokens of a key without a finished answer
_NEW = 0.2  # weight of the latest answer in the estimate of a key's answer length


@dataclass(slots=True, eq=False, kw_only=True)
class Entry:
    """A request that waits or waited: `count` sequences that start together.

    `key` identifies the client, or is None if clients are not distinguished. `since` is in monotonic seconds.
    `excused` is the part of its wait, in seconds, during which nothing ran. `load` is the caller's data.
    """

    key: str | None
    since: float
    count: int
    load: Any = None
    excused: float = 0.0


@dataclass(slots=True)
class _Flow:
    """State of one key. `waiting` is in order of arrival."""

    served: float = 0.0
    answer: float = _FIRST_GUESS
    running: int = 0  # sequences
    waiting: deque[Entry] = field(default_factory=deque)

    @property
    def sequences(self) -> int:
        return sum(entry.count for entry in self.waiting)


class FairQueue:
    """First come first served within a key, least served first between keys. Idle keys are removed."""

    def __init__(self) -> None:
        self.num_sequences = 0
        self._flows: dict[str | None, _Flow] = {}
        self._floor = 0.0  # highest counter of a key when an entry of it left the queue

    def __len__(self) -> int:
        return sum(len(flow.waiting) for flow in self._flows.values())

    def __iter__(self) -> Iterator[Entry]:
        return (entry for flow in self._flows.values() for entry in flow.waiting)

    @property
    def num_keys(self) -> int:
        """Number of keys with a waiting request."""
        return sum(1 for flow in self._flows.values() if flow.waiting)

    @property
    def num_running(self) -> int:
        """Number of sequences that have started and not ended."""
        return sum(flow.running for flow in self._flows.values())

    def share(self, key: str | None) -> tuple[int, int]:
        """Return a key's running sequences, and the number of keys that run or wait, including this one."""
        flow = self._flows.get(key)
        others = sum(1 for name, each in self._flows.items() if name != key and (each.running or each.waiting))
        return (0 if flow is None else flow.running), others + 1

    def push(self, entry: Entry) -> None:
        """Append an entry to the queue of its key."""
        flow = self._flow(entry.key)
        if not flow.waiting:
            flow.served = max(flow.served, self._least())
        flow.waiting.append(entry)
        self.num_sequences += entry.count

    def first(self) -> Entry | None:
        """Return the next entry to start, or None if the queue is empty."""
        flows = (flow for flow in self._flows.values() if flow.waiting)
        flow = min(flows, key=lambda flow: (flow.served, flow.waiting[0].since), default=None)
        return None if flow is None else flow.waiting[0]

    def remove(self, entry: Entry) -> None:
        """Remove an entry from the queue."""
        flow = self._flows[entry.key]
        if entry is flow.waiting[0]:
            flow.waiting.popleft()
        else:
            flow.waiting.remove(entry)
        self.num_sequences -= entry.count
        self._floor = max(self._floor, flow.served)
        self._forget(entry.key)

    def shrink(self, entry: Entry) -> None:
        """Remove one sequence from an entry that has several."""
        assert entry.count > 1, "remove() takes the last sequence"
        entry.count -= 1
        self.num_sequences -= 1

    def started(self, key: str | None, prompt: int, most: int) -> float:
        """Charge a key for a sequence that starts. Return the output tokens charged, which `ended` takes."""
        flow = self._flow(key)
        expected = min(flow.answer, most)
        flow.served += prompt + _OUTPUT_WEIGHT * expected
        flow.running += 1
        return expected

    def ended(self, key: str | None, expected: float, output: int) -> None:
        """Correct the charge of a sequence that ended after `output` tokens."""
        flow = self._flows[key]
        flow.served += _OUTPUT_WEIGHT * (output - expected)
        flow.answer += _NEW * (output - flow.answer)
        flow.running -= 1
        self._forget(key)

    def ahead(self, key: str | None) -> int:
        """Return the sequences ahead of a new one of `key`: its own, and at most as many of each other key."""
        flow = self._flows.get(key)
        own = 0 if flow is None else flow.sequences
        others = (flow.sequences for name, flow in self._flows.items() if name != key and flow.waiting)
        return own + sum(min(sequences, own) for sequences in others)

    def displaceable(self, key: str | None) -> Entry | None:
        """Return the newest entry of the longest queue if that is longer than `key`'s plus one, else None."""
        name, fattest = max(self._flows.items(), key=lambda item: item[1].sequences, default=(None, None))
        if fattest is None or name == key or not fattest.waiting:
            return None
        flow = self._flows.get(key)
        return fattest.waiting[-1] if fattest.sequences > (0 if flow is None else flow.sequences) + 1 else None

    def _flow(self, key: str | None) -> _Flow:
        flow = self._flows.get(key)
        if flow is None:
            # A removed key had no requests here: it starts at the lowest waiting counter.
            flow = self._flows[key] = _Flow(served=self._least())
        return flow

    def _least(self) -> float:
        return min((flow.served for flow in self._flows.values() if flow.waiting), default=self._floor)

    def _forget(self, key: str | None) -> None:
        flow = self._flows[key]
        # Keep a counter above the others' while any request waits.
        if not flow.waiting and not flow.running and (not self.num_sequences or flow.served <= self._least()):
            del self._flows[key]
