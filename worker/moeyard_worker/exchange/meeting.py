"""What ranks tell each other once over a mesh, before its first step: one word of each to all, in rounds.

`MeshStore` lends that to torch, whose ranks find each other's memory through a store: a round for every key that each
sets. Its own stores want a port or a file and wait for minutes; and torch numbers its keys by what a process has met
before, so that a rank that took another's place would wait for keys that nobody sets.

`RelayStore` and `relay` do the same for torch's process groups, which set any keys from any thread: a table of its own
on each rank, of which the ranks tell each other what is new until all are through.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from time import perf_counter, sleep
from typing import Any

import msgpack
from torch.distributed import Store

from moeyard_worker.exchange.base import ExchangeError
from moeyard_worker.exchange.frames import NO_LAYER, TAG_BYTES, Phase, pack_tag
from moeyard_worker.exchange.mesh import Mesh

# Between two rounds in which nobody had anything new.
_PAUSE_S = 2e-3


def gather(mesh: Mesh, word: bytes) -> list[bytes]:
    """Every rank's word, by rank; all call it alike. Returns when all have.

    Raises ExchangeError naming a peer that is lost, silent for too long, or somewhere else.
    """
    begun, frame = perf_counter(), pack_tag(mesh.epoch, mesh.step, NO_LAYER, Phase.MEETING, mesh.rank) + word
    for peer in mesh.peers:
        mesh.send(peer, frame)
    words = [bytes(theirs[TAG_BYTES:]) for theirs in mesh.recv_all(Phase.MEETING, layer=None, since=begun)]
    words[mesh.rank] = word
    return words


class MeshStore(Store):
    """A store in which every rank sets keys that end in "/" and its number, and reads the others' of the same round.

    Whoever gives it to torch keeps it.
    """

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self._mesh = mesh
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        """Waits until every rank has set its own of this round."""
        name, _, rank = key.rpartition("/")
        assert rank == str(self._mesh.rank), f"rank {self._mesh.rank} sets {key}"
        words = gather(self._mesh, value.encode() if isinstance(value, str) else bytes(value))
        self._values.update({f"{name}/{peer}": word for peer, word in enumerate(words)})

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        """What a round has brought is there; nothing else comes."""
        missing = [key for key in keys if key not in self._values]
        assert not missing, f"{missing} were never set"

    def get(self, key: str) -> bytes:
        """See `torch.distributed.Store`."""
        return self._values[key]


class RelayStore(Store):
    """A table of which every rank has one; any thread may use it, and it never touches the mesh.

    Whoever gives it to torch keeps it.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds
        self._changed = threading.Condition()
        self._values: dict[str, bytes] = {}
        self._news: dict[str, bytes] = {}

    def take_news(self) -> dict[str, bytes]:
        """What was set here since the last call."""
        with self._changed:
            news, self._news = self._news, {}
            return news

    def hear(self, news: dict[str, bytes]) -> None:
        """Take what another rank has set."""
        with self._changed:
            self._values.update(news)
            self._changed.notify_all()

    def set(self, key: str, value: Any) -> None:
        """See `torch.distributed.Store`."""
        word = value.encode() if isinstance(value, str) else bytes(value)
        with self._changed:
            self._values[key] = self._news[key] = word
            self._changed.notify_all()

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        """Until all are there. Raises TimeoutError."""
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else self._seconds
        with self._changed:
            if not self._changed.wait_for(lambda: all(key in self._values for key in keys), seconds):
                missing = [key for key in keys if key not in self._values]
                raise TimeoutError(f"nobody has set {missing} within {seconds:.1f} s")

    def get(self, key: str) -> bytes:
        """Waits until it is there. Raises TimeoutError."""
        self.wait([key])
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        """See `torch.distributed.Store`."""
        with self._changed:
            return all(key in self._values for key in keys)


@dataclass(frozen=True, slots=True)
class Through:
    """How a rank's part of a meeting has ended: `error` says why in vain, or is empty."""

    error: str = ""


def relay(mesh: Mesh, store: RelayStore, ended: Callable[[], Through | None], *, seconds: float) -> None:
    """Make the stores of all ranks one until all have `ended`; every rank calls it.

    Raises ExchangeError, the same on all ranks: a rank that is lost, one whose part ended in vain, or, after `seconds`,
    one whose part has not ended.
    """
    limit = perf_counter() + seconds
    while True:
        # Asked before the news are taken: what was set by then is among them.
        through = ended()
        late = through is None and perf_counter() > limit
        own = "" if through is None else through.error
        own = f"no connection within {seconds:.0f} s" if late else own
        news = store.take_news()
        words = gather(mesh, msgpack.packb([through is not None, own, news]))
        found = {rank: msgpack.unpackb(words[rank]) for rank in mesh.members}
        for rank, (_, error, _) in found.items():
            if error:
                reason = f"rank {rank} did not meet the others: {error}"
                raise ExchangeError(mesh.fail(reason, ranks=[rank]))
        for rank, (_, _, theirs) in found.items():
            if rank != mesh.rank:
                store.hear(theirs)
        if all(is_through for is_through, _, _ in found.values()):
            return
        if not any(theirs for _, _, theirs in found.values()):
            sleep(_PAUSE_S)
