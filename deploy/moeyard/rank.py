"""What the launcher knows of ranks, and how it is told that they are lost."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


class FleetError(ValueError):
    """The fleet cannot start, or go on; one line that says what and what to do."""


class FleetLost(FleetError):
    """The same, where another attempt may find it better: a node or a worker went away meanwhile."""

    exit_code = 1


class Unrecoverable(FleetError):
    """Ranks cannot be replaced any more, in this process's life; those that live go on."""

    exit_code = 1


class RanksLost(FleetError):
    """Some ranks have to be replaced before the fleet can go on.

    `exit_code` is the command line's if the fleet cannot even start: 2 when a rank said itself why it cannot, which
    another attempt does not change.
    """

    def __init__(self, ranks: Iterable[int], reason: str, *, exit_code: int = 1) -> None:
        super().__init__(reason)
        self.ranks = frozenset(ranks)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """A rank: where routers and Prometheus reach it, and what it decided while loading.

    With an empty `frontend` it is away: the others serve without it.
    """

    rank: int
    frontend: str
    metrics_url: str
    report: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """A fleet in a new epoch: all its ranks, and what those that survived had told of the loss.

    `seconds` went to each part of the way there, by name, in order.
    """

    ranks: tuple[Rank, ...]
    losses: tuple[dict[str, Any], ...]
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Rank `rank` has ended, for `reason`; or it lives and has lost peers: then `loss` has the fields of its `Loss`.

    `ready`: it was away, has loaded its shard, and may join the others.
    """

    rank: int
    reason: str
    loss: dict[str, Any] | None = None
    ready: bool = False


def parts(seconds: Mapping[str, float]) -> str:
    """Where time went, for people."""
    return ", ".join(f"{name} {each:.1f} s" for name, each in seconds.items())


def named(ranks: Collection[int]) -> str:
    """Ranks, for people."""
    return ", ".join(f"rank {rank}" for rank in sorted(ranks))
