"""The latest requests and how long each of their phases took, for people who look. Never their text."""

from collections import deque
from dataclasses import dataclass

RECENT = 32  # choices that are remembered


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """One choice that has ended. Times are seconds; None where nobody has told them.

    `ended` is Unix time. `queue` and `prefill` are the worker's (it does not tell them of a sequence that a stop string
    or its client ended); `ttft` is arrival to first token, `decode` first to last token, `total` arrival to end, as the
    router saw them.
    """

    id: str
    index: int
    kind: str
    rank: int | None
    ended: float
    reason: str
    prompt_tokens: int
    cached_tokens: int | None
    output_tokens: int
    queue: float | None
    prefill: float | None
    ttft: float | None
    decode: float | None
    total: float


class RecentRequests:
    """A ring of the last choices that ended; memory does not grow with traffic."""

    def __init__(self) -> None:
        self._ring: deque[Phases] = deque(maxlen=RECENT)

    def add(self, phases: Phases) -> None:
        """Take one more, in place of the oldest."""
        self._ring.append(phases)

    def latest(self) -> list[Phases]:
        """The latest first."""
        return list(reversed(self._ring))
