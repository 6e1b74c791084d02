"""The fleet's latest incidents, requests and refusals, for operators. Pure. Texts of requests are never stored."""

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Change = Literal["restart", "scale", "update", "sleep"]

RECENT = 32  # choices in the ring of recent requests
_MAX_INCIDENTS = 100
_MAX_REPORTS = 32  # per incident, so that an unstable fleet does not fill the memory
_MAX_REFUSALS = 4  # per reason, so that a flood of one reason does not hide the others
# Reasons whose messages have numbers of this program only. Other messages may repeat text of the client.
_EXPLAINED = frozenset(
    (
        *("queue_full", "queue_timeout", "overload", "busy", "too_large", "prompt_too_long", "never_fits"),
        *("intake", "not_ready", "fleet_failed"),
    )
)


@dataclass(slots=True, kw_only=True)
class IncidentRecord:
    """The time from the first missing rank until the fleet was whole again, or failed (`failure`).

    reason, reports: the first report, and all reports with their seconds since `began`.
    began, when: start in monotonic seconds, and in Unix time (set by the owner of a clock).
    ranks: the lost ranks.
    whole_seconds: seconds until every rank was ready.
    output_seconds: seconds until a sequence in flight got its next token. None without such a sequence.
    carried, recomputed_tokens: sequences that continued on another rank or connection, and their tokens that no cache
        was expected to hold.
    planned: the ranks that an operator restarted or removed. None for any other incident.
    change: the kind of a planned incident. "scale" is another number of ranks, "sleep" to fall asleep or to wake up.
    launcher: the launcher's facts.
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
    change: Change = "restart"
    launcher: Mapping[str, Any] | None = None

    def report(self, now: float, reason: str, rank: int | None) -> None:
        """Add a report. `rank`: the rank that was lost, if any."""
        if rank is not None and rank not in self.ranks:
            self.ranks.append(rank)
            self.planned = self.planned if rank in (self.planned or ()) else None
        if len(self.reports) < _MAX_REPORTS:
            self.reports.append((now - self.began, reason))

    def describe(self) -> dict[str, Any]:
        """Return the record as JSON."""
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
    """The latest incidents. `open`: the present one. `silent`: one that ended, but no token has come since."""

    def __init__(self) -> None:
        self.open: IncidentRecord | None = None
        self.silent: IncidentRecord | None = None
        self._ring: deque[IncidentRecord] = deque(maxlen=_MAX_INCIDENTS)

    def begin(self, now: float, reason: str) -> IncidentRecord:
        """Open a new incident."""
        assert self.open is None, "one incident at a time"
        self.silent = None
        self.open = IncidentRecord(reason=reason, began=now)
        self._ring.append(self.open)
        return self.open

    def whole(self, now: float, *, expects_output: bool) -> IncidentRecord | None:
        """End the open incident, because the fleet is whole. Return it, or None."""
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
        """Add the launcher's facts to the open incident, or to the latest one."""
        if self._ring:
            (self.open or self._ring[-1]).launcher = facts

    def latest(self) -> list[dict[str, Any]]:
        """Return all incidents as JSON, the latest first."""
        return [incident.describe() for incident in reversed(self._ring)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """The phases of one choice that has ended, in seconds; None if unknown.

    ended: Unix time.
    queue, prefill: the worker's times, unknown if a stop string or the client ended the sequence.
    lockstep, fetch: within prefill and decode, how long the rank waited for its peers and for expert weights.
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
    lockstep: float | None
    fetch: float | None
    total: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """One refused request. None means unknown: most requests are refused before their bodies are read.

    reason: the label of the metric. `message`: the answer's text, if it cannot repeat text of the client.
    when: Unix time. `path`: the route. `retry_after`: seconds.
    body_bytes: by the header. `prompt_tokens`: of all prompts together. `max_tokens`: the output limit of a choice.
    """

    reason: str
    when: float
    path: str
    status: int
    message: str | None
    retry_after: float | None
    body_bytes: int | None
    prompt_tokens: int | None = None
    choices: int | None = None
    max_tokens: int | None = None


class Refusals:
    """The latest refusals of each reason."""

    def __init__(self) -> None:
        self._latest: dict[str, deque[Refusal]] = {}

    def add(self, *, reason: str, message: str, **known: Any) -> None:
        """Keep a refusal. `known` are further fields of `Refusal`."""
        shown = message if reason in _EXPLAINED else None
        ring = self._latest.setdefault(reason, deque(maxlen=_MAX_REFUSALS))
        ring.append(Refusal(reason=reason, message=shown, **known))

    def latest(self) -> list[dict[str, Any]]:
        """Return all as JSON, the latest first."""
        found = [asdict(refusal) for ring in self._latest.values() for refusal in ring]
        return sorted(found, key=lambda refusal: float(refusal["when"]), reverse=True)
