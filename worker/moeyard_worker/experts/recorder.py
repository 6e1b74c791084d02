"""Write routing traces: the experts that each step of a rank needed. `offline/trace.py` reads them. Loads no torch.

A trace is one file per rank: FILE when there is one rank, else FILE.rank0, FILE.rank1, ... Each is a stream of msgpack
values. The first is a map, the header: `TraceHeader` plus "format": "moeyard-routing" and "version": 1. Then one array
follows per access of a layer in which the rank had work: [step, layer, ids needed by decode rows, ids that only prompt
rows need], global expert ids ascending. A file cut short by a killed worker is valid up to its last whole value.
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
    """Whose trace it is: rank, its MoE layers and experts [start, stop), and the cache that ran meanwhile."""

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
    """The file of one rank of the trace named `path`."""
    return path if world_size == 1 else path.with_name(f"{path.name}.rank{rank}")


class RoutingRecorder:
    """Appends one rank's accesses to its file, replacing an older file of that name.

    Written to disk once per pass over the layers, so a killed worker loses at most the step it was in.
    Raises OSError when the file cannot be begun. If it cannot be written later (a full disk), recording ends with one
    line in the log, at the last whole record where the file can still be cut there, and serving goes on.

    failed: whether that has happened. dropped: accesses that were not recorded because of it.
    """

    def __init__(self, path: Path, header: TraceHeader) -> None:
        self.path = rank_path(path, rank=header.rank, world_size=header.world_size)
        self._last_layer = header.layers[-1]
        self._step = -1
        self.failed = False
        self.dropped = 0
        self._packer = msgpack.Packer()
        # What is held back is ours to count: a file of its own would try again to write what could not be written.
        self._file = self.path.open("wb", buffering=0)
        self._held: list[bytes] = []
        self._size = 0  # bytes of whole records in the file
        try:
            self._write(self._packer.pack({"format": FORMAT, "version": VERSION, **asdict(header)}))
        except BaseException:
            self._file.close()
            raise

    def record(self, *, step: int, layer: int, decode: Sequence[int], prefill: Sequence[int]) -> None:
        """Note one access. Call it for every layer, also when nothing was needed (which is not written)."""
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
        """Write what is left. Safe to call twice."""
        self._flush()
        try:
            self._file.close()
        except OSError as error:  # some file systems find out now
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
        with contextlib.suppress(OSError):  # boundary: a reader passes over the rest of a record at the end
            self._file.truncate(self._size)

    def __enter__(self) -> "RoutingRecorder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
