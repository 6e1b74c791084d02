"""The router's view of each rank: its connection, its latest snapshot, and the load sent there. Pure."""

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from moeyard_router.config import RouterConfig, WorkerAddress
from moeyard_router.fleet.counters import Counters
from moeyard_router.fleet.policy import RankLoad
from moeyard_worker.protocol import Snapshot


@dataclass(slots=True)
class Rank:
    """State of one rank.

    draining: whether it takes no new sequences.
    lost: whether its worker does not come back.
    leaving: whether it is about to be replaced on request.
    counters: the totals of all its workers, lost ones included.
    sequences: number of this router's sequences there.
    pending: their tokens that are not computed yet.
    snapshot: the latest one. `own_at_snapshot`, `pending_at_snapshot`: the two counts at that time.
    broke: time at which its connection broke, in monotonic seconds. `epoch`: the epoch that its worker must still have
        afterwards. `stopped`: whether the worker was about to exit.
    """

    number: int
    endpoint: str
    draining: bool
    lost: bool
    counters: Counters
    sequences: int = 0
    pending: int = 0
    connected: bool = False
    snapshot: Snapshot | None = None
    own_at_snapshot: int = 0
    pending_at_snapshot: int = 0
    broke: float = -math.inf
    epoch: int | None = None
    stopped: bool = False
    leaving: bool = False

    @classmethod
    def at(cls, address: WorkerAddress, counters: Counters) -> "Rank":
        """Return a rank without a connection."""
        return cls(address.rank, address.endpoint, draining=address.draining, lost=address.away, counters=counters)

    @property
    def away(self) -> bool:
        """Whether the other ranks serve without this one."""
        return not self.endpoint

    @property
    def state(self) -> str:
        """One of connecting, ready, recovering, failed, stopping and away."""
        if self.lost:
            return "away" if self.away else "failed"
        return self.snapshot.state if self.connected and self.snapshot is not None else "connecting"

    @property
    def usable(self) -> bool:
        """Whether it takes requests. They wait there while it recovers."""
        return self.state in ("ready", "recovering")

    @property
    def shown(self) -> str:
        """The state in metrics. A ready rank that drains is draining. A lost one that leaves on request is stopping."""
        if self.leaving and self.state == "failed":
            return "stopping"
        return "draining" if self.draining and self.state == "ready" else self.state

    @property
    def open(self) -> bool:
        """Whether it takes new sequences."""
        return self.usable and not self.draining

    def take(self, snapshot: Snapshot) -> None:
        """Store the latest snapshot, and this router's load at that time."""
        self.counters.take(snapshot, first=self.snapshot is None)
        self.snapshot = snapshot
        self.own_at_snapshot, self.pending_at_snapshot = self.sequences, self.pending

    def reconnect(self, now: float) -> None:
        """Reset the connection, and expect the same worker again."""
        self.stopped = self.state == "stopping"
        self.epoch = None if self.snapshot is None else self.snapshot.epoch
        self.broke, self.connected, self.snapshot = now, False, None
        self.own_at_snapshot = self.pending_at_snapshot = 0

    def total_sequences(self, snapshot: Snapshot) -> int:
        """Return the rank's sequences: exact for this router, as of the snapshot for other routers."""
        return self.sequences + max(0, snapshot.num_running + snapshot.num_waiting - self.own_at_snapshot)

    def has_room(self, places: int | None) -> bool:
        """Return whether it takes a queued sequence: it holds fewer than `places`, and has pages for those it holds.

        Sequences that wait at the worker for pages mean that it is full. Sequences that wait for a step do not.
        """
        s = self.snapshot
        if s is None or self.state != "ready" or self.draining:
            return False
        if places is None:
            return True
        lacks_pages = s.num_waiting > 0 and s.kv_pages_free * s.page_size < s.num_waiting_tokens
        return self.total_sequences(s) < places and not (lacks_pages and self.own_at_snapshot)

    def describe(self) -> dict[str, Any]:
        """Return the rank's state as JSON."""
        entry: dict[str, Any] = {
            "rank": self.number,
            "endpoint": self.endpoint,
            "connected": self.connected,
            "state": self.state,
            "draining": self.draining,
            "router_inflight": self.sequences,
        }
        if self.snapshot is not None:
            entry["snapshot"] = {f.name: getattr(self.snapshot, f.name) for f in fields(Snapshot) if f.name != "rank"}
        return entry


class Ranks:
    """All ranks by number.

    pausing: why nothing runs until `replace`, if ranks are about to be replaced.
    counters: by number, also of ranks that have left.
    """

    def __init__(self, config: RouterConfig) -> None:
        self.addresses = config.workers
        self.pausing: str | None = None
        self._config = config
        self._replaced = False
        self.counters: defaultdict[int, Counters] = defaultdict(Counters)
        self._all = [Rank.at(address, self.counters[address.rank]) for address in self.addresses]

    def __getitem__(self, number: int) -> Rank:
        return self._all[number]

    def __iter__(self) -> Iterator[Rank]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def changed_by(self, addresses: Sequence[WorkerAddress]) -> list[int]:
        """Return the ranks that have another worker in `addresses`, that are lost, or that go away."""
        changed = []
        for address in addresses:
            rank = self._all[address.rank] if address.rank < len(self) else None
            if rank is None or rank.endpoint != address.endpoint or (rank.lost and not address.away):
                changed.append(address.rank)
        return changed

    def replace(self, addresses: tuple[WorkerAddress, ...], new: Collection[int]) -> None:
        """Use `addresses`. The ranks in `new` have another worker. Ranks that left must hold nothing."""
        kept = self._all[: len(addresses)]
        assert not any(rank.sequences for rank in self._all[len(addresses) :]), "a rank left with its sequences"
        for number in new:
            self.counters[number].begin()
        self._all = [Rank.at(a, self.counters[a.rank]) if a.rank in new else kept[a.rank] for a in addresses]
        self.addresses, self._replaced, self.pausing = addresses, True, None
        for rank, address in zip(self._all, addresses, strict=True):
            rank.draining, rank.leaving = address.draining, False

    def drain(self, numbers: Collection[int]) -> None:
        """Let exactly these ranks take no new sequences."""
        self.addresses = tuple(replace(a, draining=a.rank in numbers) for a in self.addresses)
        for rank in self._all:
            rank.draining = rank.number in numbers

    def any_usable(self) -> bool:
        """Return whether any rank takes requests."""
        return any(rank.usable for rank in self._all)

    def any_open(self) -> bool:
        """Return whether any rank takes new sequences."""
        return any(rank.open for rank in self._all)

    def unready(self) -> str | None:
        """Return why the fleet is not whole, or None. Every rank must be ready, in the same epoch and world."""
        if self.pausing is not None:
            return self.pausing
        there = [rank for rank in self._all if not rank.away]
        for rank in there:
            if rank.state != "ready":
                what = "is not connected yet" if rank.state == "connecting" else f"is {rank.state}"
                return f"worker {rank.number} at {rank.endpoint} {what}"
        # Survivors reach a new epoch with other ranks before the launcher informs this router.
        states = sorted({(r.snapshot.epoch, r.snapshot.world_size) for r in there if r.snapshot is not None})
        if {world for _, world in states} != {len(there)}:
            return f"the workers count {', '.join(str(world) for _, world in states)} ranks, not {len(there)}"
        if len(states) > 1:
            return f"the workers are of epochs {', '.join(str(epoch) for epoch, _ in states)}"
        return None

    def mismatch(self, rank: Rank, snapshot: Snapshot) -> str | None:
        """Return why a snapshot is not from the worker that this router expects, or None.

        The number of ranks may change. A fleet with recovery may have changed it before this router started.
        """
        config = self._config
        known = rank.snapshot is not None or self._replaced or config.recovery_timeout > 0
        world = snapshot.world_size if known else sum(not each.away for each in self._all)
        if (snapshot.rank, snapshot.world_size, snapshot.vocab_size) != (rank.number, world, config.vocab_size):
            return (
                f"the worker at {rank.endpoint} is rank {snapshot.rank} of {snapshot.world_size} with "
                f"{snapshot.vocab_size} token ids; expected rank {rank.number} of {len(self)} with {config.vocab_size}"
            )
        if snapshot.max_model_len < config.max_model_len:
            return (
                f"worker {rank.number} takes sequences of {snapshot.max_model_len} tokens, the router promises "
                f"{config.max_model_len}"
            )
        return None

    def has_room(self, places: int | None) -> bool:
        """Return whether any rank takes one more queued sequence."""
        return any(rank.has_room(places) for rank in self._all)

    def loads(self, places: int | None = None) -> list[RankLoad]:
        """Return the loads of all ranks with a snapshot. If any rank has room, those without room are unusable.

        A draining rank is usable if all ranks drain. Sequences that are placed then have run before and must continue.
        """
        known = [(rank, s, rank.has_room(places)) for rank in self._all if (s := rank.snapshot) is not None]
        any_room = any(room for _, _, room in known)
        any_open = any(rank.open for rank, _, _ in known)
        return [
            RankLoad(
                rank=rank.number,
                usable=room if any_room else rank.open if any_open else rank.usable,
                sequences=rank.total_sequences(s),
                pending_tokens=rank.pending + max(0, s.num_waiting_tokens - rank.pending_at_snapshot),
                page_size=s.page_size,
                kv_pages=s.kv_pages_total,
                kv_pages_free=s.kv_pages_free,
            )
            for rank, s, room in known
        ]
