"""What ranks tell each other once over a mesh, before its first step: one word of each to all, in rounds.

`MeshStore` lends that to torch, whose ranks find each other's memory through a store: a round for every key that each
sets. Its own stores want a port or a file and wait for minutes; and torch numbers its keys by what a process has met
before, so that a rank that took another's place would wait for keys that nobody sets.
"""

from time import perf_counter
from typing import Any

from torch.distributed import Store

from moeyard_worker.exchange.frames import NO_LAYER, TAG_BYTES, Phase, pack_tag
from moeyard_worker.exchange.mesh import Mesh


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
