"""What the router knows of one worker."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from moeyard_router.fleet.flights import Held
from moeyard_router.fleet.link import WorkerLink
from moeyard_router.fleet.policy import RankLoad
from moeyard_worker.protocol import Snapshot


@dataclass(slots=True)
class WorkerState:
    """Connection, latest snapshot, and what this router has sent there (`held`).

    `lost` is one that is not coming back. One whose connection broke, and may, is a new one: `broke` is when (monotonic
    seconds), `epoch` what it must answer with, `stopped` whether it was about to end anyway. A `draining` one takes no
    new sequences; one that is `leaving` is about to be replaced, because somebody asked for it.
    """

    link: WorkerLink
    held: Held
    connected: bool = False
    lost: bool = False
    snapshot: Snapshot | None = None
    own_at_snapshot: int = 0
    pending_at_snapshot: int = 0
    broke: float = -math.inf
    epoch: int | None = None
    stopped: bool = False
    draining: bool = False
    leaving: bool = False

    @property
    def state(self) -> str:
        """connecting, ready, recovering, failed, stopping or away."""
        if self.lost:
            return "away" if self.away else "failed"
        return self.snapshot.state if self.connected and self.snapshot is not None else "connecting"

    @property
    def away(self) -> bool:
        """Whether the others serve without it."""
        return not self.link.endpoint

    @property
    def usable(self) -> bool:
        """Whether it takes requests; while it recovers they wait there."""
        return self.state in ("ready", "recovering")

    @property
    def shown(self) -> str:
        """The state for people who count: a ready one that drains is draining."""
        return "draining" if self.draining and self.state == "ready" else self.state

    @property
    def open(self) -> bool:
        """Whether it takes new sequences, too."""
        return self.usable and not self.draining

    def take(self, snapshot: Snapshot) -> None:
        """Keep the latest word of the worker beside what was unanswered when it came."""
        self.snapshot, self.own_at_snapshot, self.pending_at_snapshot = (
            snapshot,
            self.held.sequences,
            self.held.pending,
        )

    def describe(self) -> dict[str, Any]:
        """For people and dashboards."""
        entry: dict[str, Any] = {
            "rank": self.link.rank,
            "endpoint": self.link.endpoint,
            "connected": self.connected,
            "state": self.state,
            "draining": self.draining,
            "router_inflight": self.held.sequences,
        }
        if self.snapshot is not None:
            entry["snapshot"] = {f.name: getattr(self.snapshot, f.name) for f in fields(Snapshot) if f.name != "rank"}
        return entry


def has_room(worker: WorkerState, places: int | None) -> bool:
    """Whether a worker takes a sequence that waits: it holds fewer than `places`, and pages for them.

    Sequences that wait there for pages are as good as a full house; for a step's end only, they are not.
    """
    s = worker.snapshot
    if s is None or worker.state != "ready" or worker.draining:
        return False
    if places is None:
        return True
    lacks_pages = s.num_waiting > 0 and s.kv_pages_free * s.page_size < s.num_waiting_tokens
    return _sequences(worker, s) < places and not (lacks_pages and worker.own_at_snapshot)


def loads(workers: Iterable[WorkerState], places: int | None = None) -> list[RankLoad]:
    """What the policy is told of the workers that have spoken. Those without room are unusable if another has some.

    One that drains is usable where all do: then what is asked for here has run before, and has to go on.
    """
    spoken = [(worker, s, has_room(worker, places)) for worker in workers if (s := worker.snapshot) is not None]
    any_room = any(room for _, _, room in spoken)
    any_open = any(worker.open for worker, _, _ in spoken)
    return [
        RankLoad(
            rank=worker.link.rank,
            usable=room if any_room else worker.open if any_open else worker.usable,
            sequences=_sequences(worker, s),
            pending_tokens=worker.held.pending + max(0, s.num_waiting_tokens - worker.pending_at_snapshot),
            page_size=s.page_size,
            kv_pages=s.kv_pages_total,
            kv_pages_free=s.kv_pages_free,
        )
        for worker, s, room in spoken
    ]


def _sequences(worker: WorkerState, snapshot: Snapshot) -> int:
    """This router's exactly, and those of other routers as of the snapshot."""
    return worker.held.sequences + max(0, snapshot.num_running + snapshot.num_waiting - worker.own_at_snapshot)
