"""Records for people: the fleet's incidents, and the latest requests. Pure; text of requests is never kept."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_KEPT = 100
_REPORTS = 32  # per incident; a fleet that comes and goes must not fill the memory


@dataclass(slots=True, kw_only=True)
class IncidentRecord:
    """The time from the first missing rank until the fleet was whole again, or was given up (`failure`).

    `began` is monotonic; `when` is Unix time, set by the owner of a clock. `reason` is the first report, `reports` are
    all, each with the seconds since `began`; `ranks` are those that were lost. `whole_seconds` lasted until every rank
    was ready, `output_seconds` until a sequence in flight got its next token (None without any). `carried` counts
    sequences that went on at another rank or connection, `recomputed_tokens` their tokens that no cache was expected
    to hold. `launcher` holds the launcher's facts. `planned` are the ranks that a person restarted or removed, None for
    any other incident; `scales`: it was for another number of ranks.
    """

    reason: str
    began: float
    when: float = 0.0
    ranks: list[int] = field(default_factory=list)
    reports: list[tuple[float, str]] = field(default_factory=list)
    whole_seconds: float | None = None
    output_seconds: float | None = None
    carried: int = 0
    recomputed_tokens: int = 0
    failure: str | None = None
    planned: frozenset[int] | None = None
    scales: bool = False
    launcher: Mapping[str, Any] | None = None

    def say(self, now: float, reason: str, rank: int | None) -> None:
        """Add a report; `rank` is a rank that was lost."""
        if rank is not None and rank not in self.ranks:
            self.ranks.append(rank)
            self.planned = self.planned if rank in (self.planned or ()) else None
        if len(self.reports) < _REPORTS:
            self.reports.append((now - self.began, reason))

    def describe(self) -> dict[str, Any]:
        """Return the record for people and programs."""
        over = "failed" if self.failure is not None else "recovered"
        return {
            "state": "recovering" if self.whole_seconds is None and self.failure is None else over,
            "planned": self.planned is not None,
            "when": self.when,
            "reason": self.reason,
            "ranks": sorted(self.ranks),
            "reports": [{"seconds": round(seconds, 3), "reason": reason} for seconds, reason in self.reports],
            "seconds_until_whole": self.whole_seconds,
            "seconds_until_output": self.output_seconds,
            "requests_carried": self.carried,
            "tokens_recomputed": self.recomputed_tokens,
            "failure": self.failure,
            "launcher": None if self.launcher is None else dict(self.launcher),
        }


class Incidents:
    """The latest hundred. `open` is the present one; `silent` has ended, but no token has come since."""

    def __init__(self) -> None:
        self.open: IncidentRecord | None = None
        self.silent: IncidentRecord | None = None
        self._ring: deque[IncidentRecord] = deque(maxlen=_KEPT)

    def begin(self, now: float, reason: str) -> IncidentRecord:
        """Open a new one; none is open."""
        assert self.open is None, "one incident at a time"
        self.silent = None
        self.open = IncidentRecord(reason=reason, began=now)
        self._ring.append(self.open)
        return self.open

    def whole(self, now: float, *, expects_output: bool) -> IncidentRecord | None:
        """Return the incident that ends because the fleet is whole, if one is open."""
        ended, self.open = self.open, None
        if ended is not None:
            ended.whole_seconds = now - ended.began
            self.silent = ended if expects_output else None
        return ended

    def output(self, now: float) -> None:
        """Note the first token after an incident."""
        if self.silent is not None:
            self.silent.output_seconds = now - self.silent.began
            self.silent = None

    def fail(self, reason: str) -> None:
        """End the open incident as failed."""
        if self.open is not None:
            self.open.failure = reason
        self.open = self.silent = None

    def note(self, facts: Mapping[str, Any]) -> None:
        """Add the launcher's facts to the open one, or to the latest."""
        if self._ring:
            (self.open or self._ring[-1]).launcher = facts

    def latest(self) -> list[dict[str, Any]]:
        """Return all of them, the latest first."""
        return [incident.describe() for incident in reversed(self._ring)]


RECENT = 32  # choices that are remembered


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """The phases of one choice that has ended, in seconds; None if unknown.

    ended: Unix time.
    queue, prefill: the worker's times, unknown if a stop string or the client ended the sequence.
    ttft: arrival to first token. `decode`: first to last token. `total`: arrival to end. The router measures these.
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
    """A ring of the last choices that ended."""

    def __init__(self) -> None:
        self._ring: deque[Phases] = deque(maxlen=RECENT)

    def add(self, phases: Phases) -> None:
        """Add one in place of the oldest."""
        self._ring.append(phases)

    def latest(self) -> list[Phases]:
        """Return all of them, the latest first."""
        return list(reversed(self._ring))
