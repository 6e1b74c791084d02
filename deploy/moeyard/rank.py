"""What the launcher knows of ranks, and how it is told that they are lost."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


class FleetError(ValueError):
    """The fleet cannot start, or go on; one line that says what and what to do."""


class RanksLost(FleetError):
    """Some ranks have to be replaced before the fleet can go on."""

    def __init__(self, ranks: Iterable[int], reason: str) -> None:
        super().__init__(reason)
        self.ranks = frozenset(ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """A started rank: where routers and Prometheus reach it, and what it decided while loading."""

    rank: int
    frontend: str
    metrics_url: str
    report: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """A fleet in a new epoch: all its ranks, and what those that survived had told of the loss."""

    ranks: tuple[Rank, ...]
    losses: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Rank `rank` has ended, for `reason`; or it lives and has lost peers: then `loss` has the fields of its `Loss`."""

    rank: int
    reason: str
    loss: dict[str, Any] | None = None
