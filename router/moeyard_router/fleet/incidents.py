"""What befell the fleet and how long it took to go on: records for people, the latest first. Pure: times are given."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_KEPT = 100
_REPORTS = 32  # of one incident; a fleet that comes and goes must not fill the memory


@dataclass(slots=True, kw_only=True)
class Incident:
    """From the moment when not all of the fleet was there until it was whole again, or was given up (`failure`).

    `when` is Unix time, `began` monotonic. `reason` is what was heard first, `reports` all that was heard, each with
    the seconds since then; `ranks` are those that were lost. `whole_seconds` lasted until every rank was ready,
    `output_seconds` until one of the sequences in flight got its next token (None if there was none). `carried` counts
    sequences that went on at another rank or connection, `recomputed_tokens` the tokens of their prompts and outputs
    that no cache was thought to hold. `launcher` is what the launcher knows of it. `planned` are the ranks that
    somebody had restarted or sent away, None if anything else befell the fleet; `scales`: it was for another size.
    """

    reason: str
    when: float
    began: float
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
        """One more thing that was heard; `rank` is one that was lost."""
        if rank is not None and rank not in self.ranks:
            self.ranks.append(rank)
            self.planned = self.planned if rank in (self.planned or ()) else None
        if len(self.reports) < _REPORTS:
            self.reports.append((now - self.began, reason))

    def describe(self) -> dict[str, Any]:
        """For people and programs."""
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
    """The latest hundred. `open` is the one that lasts; `silent` one that is over, but nobody got a token since."""

    def __init__(self) -> None:
        self.open: Incident | None = None
        self.silent: Incident | None = None
        self._ring: deque[Incident] = deque(maxlen=_KEPT)

    def begin(self, now: float, when: float, reason: str) -> Incident:
        """A new one; there is none open."""
        assert self.open is None, "one incident at a time"
        self.silent = None
        self.open = Incident(reason=reason, when=when, began=now)
        self._ring.append(self.open)
        return self.open

    def whole(self, now: float, *, expects_output: bool) -> Incident | None:
        """The fleet is whole: the incident that this ends, if one is open."""
        ended, self.open = self.open, None
        if ended is not None:
            ended.whole_seconds = now - ended.began
            self.silent = ended if expects_output else None
        return ended

    def output(self, now: float) -> None:
        """A token came after the last one's end."""
        if self.silent is not None:
            self.silent.output_seconds = now - self.silent.began
            self.silent = None

    def fail(self, reason: str) -> None:
        """The fleet is given up, or has waited too long."""
        if self.open is not None:
            self.open.failure = reason
        self.open = self.silent = None

    def note(self, facts: Mapping[str, Any]) -> None:
        """What the launcher knows of the open one, or of the latest."""
        if self._ring:
            (self.open or self._ring[-1]).launcher = facts

    def latest(self) -> list[dict[str, Any]]:
        """The latest first."""
        return [incident.describe() for incident in reversed(self._ring)]
