"""What the launcher knows of a started rank."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """A started rank: where routers and Prometheus reach it, and what it decided while loading."""

    rank: int
    frontend: str
    metrics_url: str
    report: dict[str, Any]
