"""Whose turn it is among those that wait: the key that has had least so far goes first. Pure.

Virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): each key has a counter of
the tokens that it was served, an output token counting twice a prompt token; who waits with the least is served. A key
that comes back after it had nothing waiting starts at the least counter of those that wait, so nobody saves up turns.
How long an answer will be is not known when it starts: the key's recent answers say, and its end puts it right.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

_OUTPUT_WEIGHT = 2.0  # as in the paper, and as output tokens are priced
_FIRST_GUESS = 128.0  # output tokens of a key without a finished answer
_NEW = 0.2  # weight of the latest answer in what a key's answers are thought to be


@dataclass(slots=True, eq=False, kw_only=True)
class Entry:
    """A request that waits, or did: so many sequences that start together.

    `key` is who pays for it, None where nobody is told apart; `since` is monotonic seconds; `excused` are those of its
    seconds since in which nothing ran; `load` is the caller's.
    """

    key: str | None
    since: float
    count: int
    load: Any = None
    excused: float = 0.0


@dataclass(slots=True)
class _Flow:
    """What is known of a key. `waiting` is in order of arrival."""

    served: float = 0.0
    answer: float = _FIRST_GUESS
    running: int = 0  # sequences
    waiting: deque[Entry] = field(default_factory=deque)

    @property
    def sequences(self) -> int:
        return sum(entry.count for entry in self.waiting)


class FairQueue:
    """First come first served within a key, least served first between keys. Keys without anything are forgotten."""

    def __init__(self) -> None:
        self.num_sequences = 0
        self._flows: dict[str | None, _Flow] = {}
        self._floor = 0.0  # the counter of whoever left the queue last

    def __len__(self) -> int:
        return sum(len(flow.waiting) for flow in self._flows.values())

    def __iter__(self) -> Iterator[Entry]:
        return (entry for flow in self._flows.values() for entry in flow.waiting)

    @property
    def num_keys(self) -> int:
        """Keys with something that waits."""
        return sum(1 for flow in self._flows.values() if flow.waiting)

    @property
    def num_running(self) -> int:
        """Sequences that have started and not ended."""
        return sum(flow.running for flow in self._flows.values())

    def share(self, key: str | None) -> tuple[int, int]:
        """Sequences of a key that run, and the number of keys that run or wait, this one among them."""
        flow = self._flows.get(key)
        others = sum(1 for name, each in self._flows.items() if name != key and (each.running or each.waiting))
        return (0 if flow is None else flow.running), others + 1

    def push(self, entry: Entry) -> None:
        """It waits, behind those of its key."""
        flow = self._flow(entry.key)
        if not flow.waiting:
            flow.served = max(flow.served, self._least())
        flow.waiting.append(entry)
        self.num_sequences += entry.count

    def first(self) -> Entry | None:
        """Whose turn it is; None if nobody waits."""
        flows = (flow for flow in self._flows.values() if flow.waiting)
        flow = min(flows, key=lambda flow: (flow.served, flow.waiting[0].since), default=None)
        return None if flow is None else flow.waiting[0]

    def remove(self, entry: Entry) -> None:
        """It waits no more."""
        flow = self._flows[entry.key]
        if entry is flow.waiting[0]:
            flow.waiting.popleft()
        else:
            flow.waiting.remove(entry)
        self.num_sequences -= entry.count
        self._floor = max(self._floor, flow.served)
        self._forget(entry.key)

    def shrink(self, entry: Entry) -> None:
        """One of its sequences waits no more."""
        assert entry.count > 1, "the last one is removed"
        entry.count -= 1
        self.num_sequences -= 1

    def started(self, key: str | None, prompt: int, most: int) -> float:
        """One sequence begins, waited or not; returns the output tokens that it is charged for, for `ended`."""
        flow = self._flow(key)
        expected = min(flow.answer, most)
        flow.served += prompt + _OUTPUT_WEIGHT * expected
        flow.running += 1
        return expected

    def ended(self, key: str | None, expected: float, output: int) -> None:
        """It has ended after `output` tokens."""
        flow = self._flows[key]
        flow.served += _OUTPUT_WEIGHT * (output - expected)
        flow.answer += _NEW * (output - flow.answer)
        flow.running -= 1
        self._forget(key)

    def ahead(self, key: str | None) -> int:
        """Sequences that start before one that `key` would send now: its own, and of every other key as many."""
        flow = self._flows.get(key)
        own = 0 if flow is None else flow.sequences
        others = (flow.sequences for name, flow in self._flows.items() if name != key and flow.waiting)
        return own + sum(min(sequences, own) for sequences in others)

    def displaceable(self, key: str | None) -> Entry | None:
        """The newest of the key that has most waiting, if that is more than `key` has with one more; else None."""
        name, fattest = max(self._flows.items(), key=lambda item: item[1].sequences, default=(None, None))
        if fattest is None or name == key or not fattest.waiting:
            return None
        flow = self._flows.get(key)
        return fattest.waiting[-1] if fattest.sequences > (0 if flow is None else flow.sequences) + 1 else None

    def _flow(self, key: str | None) -> _Flow:
        flow = self._flows.get(key)
        if flow is None:
            # Who was forgotten had nothing here: it starts where the others are.
            flow = self._flows[key] = _Flow(served=self._least())
        return flow

    def _least(self) -> float:
        return min((flow.served for flow in self._flows.values() if flow.waiting), default=self._floor)

    def _forget(self, key: str | None) -> None:
        flow = self._flows[key]
        # What it was served beyond the others counts as long as anybody waits.
        if not flow.waiting and not flow.running and (not self.num_sequences or flow.served <= self._least()):
            del self._flows[key]
