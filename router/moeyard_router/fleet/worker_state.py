"""What the router knows of one worker."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from moeyard_router.config import RouterConfig
from moeyard_router.fleet.link import WorkerLink
from moeyard_router.fleet.policy import RankLoad
from moeyard_worker.protocol import Snapshot


@dataclass(slots=True)
class WorkerState:
    """Connection, latest snapshot, and what this router has sent: `own` sequences without an end yet.

    `pending` counts the prompt tokens of those without an output yet that no cache was thought to hold.
    """

    link: WorkerLink
    connected: bool = False
    lost: bool = False
    snapshot: Snapshot | None = None
    own: int = 0
    pending: int = 0
    own_at_snapshot: int = 0
    pending_at_snapshot: int = 0

    @property
    def state(self) -> str:
        """connecting, ready, failed or stopping."""
        if self.lost:
            return "failed"
        return self.snapshot.state if self.connected and self.snapshot is not None else "connecting"

    def take(self, snapshot: Snapshot) -> None:
        """Keep the latest word of the worker beside what was unanswered when it came."""
        self.snapshot, self.own_at_snapshot, self.pending_at_snapshot = snapshot, self.own, self.pending

    def describe(self) -> dict[str, Any]:
        """For people and dashboards."""
        entry: dict[str, Any] = {
            "rank": self.link.rank,
            "endpoint": self.link.endpoint,
            "connected": self.connected,
            "state": self.state,
            "router_inflight": self.own,
        }
        if self.snapshot is not None:
            entry["snapshot"] = {f.name: getattr(self.snapshot, f.name) for f in fields(Snapshot) if f.name != "rank"}
        return entry


def has_room(worker: WorkerState, places: int | None) -> bool:
    """Whether a worker takes a sequence that waits: it holds fewer than `places`, and pages for them.

    Sequences that wait there for pages are as good as a full house; for a step's end only, they are not.
    """
    s = worker.snapshot
    if s is None or worker.state != "ready":
        return False
    if places is None:
        return True
    lacks_pages = s.num_waiting > 0 and s.kv_pages_free * s.page_size < s.num_waiting_tokens
    return _sequences(worker, s) < places and not (lacks_pages and worker.own_at_snapshot)


def any_room(workers: Sequence[WorkerState], places: int | None) -> bool:
    """Whether a sequence that waits can go now: all ranks take part in every step, and one of them has room."""
    return all(w.state == "ready" for w in workers) and any(has_room(w, places) for w in workers)


def _sequences(worker: WorkerState, snapshot: Snapshot) -> int:
    """This router's exactly, and those of other routers as of the snapshot."""
    return worker.own + max(0, snapshot.num_running + snapshot.num_waiting - worker.own_at_snapshot)


def loads(workers: Iterable[WorkerState], places: int | None = None) -> list[RankLoad]:
    """What the policy is told of the workers that have spoken. Those without room are unusable if another has some."""
    workers = list(workers)
    roomy = [has_room(worker, places) for worker in workers]
    return [
        RankLoad(
            rank=worker.link.rank,
            usable=room or (worker.state == "ready" and not any(roomy)),
            sequences=_sequences(worker, s),
            pending_tokens=worker.pending + max(0, s.num_waiting_tokens - worker.pending_at_snapshot),
            page_size=s.page_size,
            kv_pages=s.kv_pages_total,
            kv_pages_free=s.kv_pages_free,
        )
        for worker, room in zip(workers, roomy, strict=True)
        if (s := worker.snapshot) is not None
    ]


def fault_of(snapshot: Snapshot, link: WorkerLink, world_size: int, config: RouterConfig) -> str | None:
    """Why the fleet cannot go on with a worker that says this of itself; None if it can."""
    s, rank = snapshot, link.rank
    if (s.rank, s.world_size, s.vocab_size) != (rank, world_size, config.vocab_size):
        return (
            f"the worker at {link.endpoint} is rank {s.rank} of {s.world_size} with {s.vocab_size} token ids; "
            f"expected rank {rank} of {world_size} with {config.vocab_size}"
        )
    if s.max_model_len < config.max_model_len:
        return f"worker {rank} takes sequences of {s.max_model_len} tokens, the router promises {config.max_model_len}"
    return f"worker {rank} failed: {s.failure}" if s.state == "failed" else None
