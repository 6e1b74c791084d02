"""That all processes of a fleet, those of later too, have the same weights: answers go on where others began."""

from collections.abc import Mapping
from typing import Any

from moeyard.rank import Unrecoverable
from moeyard_worker.checkpoint.identity import difference


class SameWeights:
    """Remembers what the first rank found, and on each node the first one there."""

    def __init__(self) -> None:
        self._first: Mapping[str, tuple[str, str]] | None = None
        self._of_node: dict[str, Mapping[str, tuple[str, str]]] = {}

    def check(self, rank: int, setup: Mapping[str, Any]) -> None:
        """Raise Unrecoverable, with the file's name, for a rank whose checkpoint is another: nobody can load what the
        fleet has begun with any more."""
        found, node = setup["weights"], setup["node"]
        self._first = found if self._first is None else self._first
        name = difference(self._first, found, one_host=False)
        name = name or difference(self._of_node.setdefault(node, found), found, one_host=True)
        if name:
            raise Unrecoverable(
                f"{name} is another for rank {rank} than for the fleet before: it has changed since it was loaded, and "
                "answers cannot go on with other weights; start moeyard serve again"
            )
