"""Write routing traces: the experts that each step of a rank needed. `offline/trace.py` reads them. Loads no torch.

A trace is one file per rank: FILE when there is one rank, else FILE.rank0, FILE.rank1, ... Each is a stream of msgpack
values. The first is a map, the header: `TraceHeader` plus "format": "moeyard-routing" and "version": 1. Then follow
arrays, one per access of a layer in which the rank had work: [step, layer, decode ids, prefill ids]. Ids are global and
ascending; prefill ids are those that only prompt rows need. A file that a killed worker left is valid up to its last
complete value.
"""

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

import msgpack

log = logging.getLogger(__name__)

FORMAT = "moeyard-routing"
VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceHeader:
    """The rank of a trace, its MoE layers, its experts [start, stop), and the cache that ran."""

    rank: int
    world_size: int
    layers: tuple[int, ...]
    experts_start: int
    experts_stop: int
    top_k: int
    num_slots: int
    policy: str

    @property
    def experts(self) -> range:
        return range(self.experts_start, self.experts_stop)


def rank_path(path: Path, *, rank: int, world_size: int) -> Path:
    """Return the file of one rank of the trace `path`."""
    return path if world_size == 1 else path.with_name(f"{path.name}.rank{rank}")


class RoutingRecorder:
    """Appends one rank's accesses to its file, replacing an older file of that name.

    It writes once per pass over the layers, so a killed worker loses at most one step. Raises OSError if the file
    cannot be created. If a later write fails (a full disk), recording ends with one log line and serving continues. The
    file is then cut after its last complete record, if possible.

    failed: whether recording ended that way. `dropped`: number of accesses not recorded after that.
    """

    def __init__(self, path: Path, header: TraceHeader) -> None:
        self.path = rank_path(path, rank=header.rank, world_size=header.world_size)
        self._last_layer = header.layers[-1]
        self._step = -1
        self.failed = False
        self.dropped = 0
        self._packer = msgpack.Packer()
        # Unbuffered, because a buffered file would retry failed writes and hide the number of lost records.
        self._file = self.path.open("wb", buffering=0)
        self._held: list[bytes] = []
        self._size = 0  # bytes of complete records in the file
        try:
            self._write(self._packer.pack({"format": FORMAT, "version": VERSION, **asdict(header)}))
        except BaseException:
            self._file.close()
            raise

    def record(self, *, step: int, layer: int, decode: Sequence[int], prefill: Sequence[int]) -> None:
        """Record one access. Call it for every layer. Accesses that need no expert are not written."""
        if self.failed:
            self.dropped += bool(decode or prefill)
            return
        if step != self._step:
            self._flush()
            self._step = step
        if decode or prefill:
            self._held.append(self._packer.pack((step, layer, decode, prefill)))
        if layer == self._last_layer:
            self._flush()

    def close(self) -> None:
        """Write the remaining records. Safe to call twice."""
        self._flush()
        try:
            self._file.close()
        except OSError as error:  # some file systems report write errors only here
            self._fail(error)

    def _flush(self) -> None:
        held, self._held = self._held, []
        if not held:
            return
        try:
            self._write(b"".join(held))
        except OSError as error:
            self.dropped += len(held)
            self._fail(error)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]
        self._size += len(data)

    def _fail(self, error: OSError) -> None:
        self.failed = True
        log.warning("%s: %s; recording of routing ends here, serving goes on", self.path, error.strerror or error)
        with contextlib.suppress(OSError):  # boundary: readers skip an incomplete record at the end
            self._file.truncate(self._size)

    def __enter__(self) -> "RoutingRecorder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
