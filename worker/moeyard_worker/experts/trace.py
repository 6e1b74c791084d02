"""Routing traces: which experts every step needed, written by the engine and read by the simulator. Torch-free.

A trace is one file per rank: FILE when there is one rank, else FILE.rank0, FILE.rank1, ... Each is a stream of msgpack
values: first a map, the header (`TraceHeader` plus "format": "moeyard-routing" and "version": 1), then one array per
access of a layer in which the rank had work: [step, layer, ids needed by decode rows, ids that only prompt rows need],
global expert ids ascending. A file cut short by a killed worker is valid up to its last whole value.
"""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any

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


@dataclass(frozen=True, slots=True)
class Access:
    """One rank's need in one layer of one step. `decode` and `prefill` are disjoint ascending global expert ids."""

    step: int
    layer: int
    decode: tuple[int, ...]
    prefill: tuple[int, ...]


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


@dataclass(frozen=True, slots=True)
class RankTrace:
    """One rank's file. Iterating reads it anew."""

    path: Path
    header: TraceHeader

    def __iter__(self) -> Iterator[Access]:
        with self.path.open("rb") as file:
            unpacker = msgpack.Unpacker(file, use_list=False)
            next(unpacker)
            for value in unpacker:
                yield _access(value, self)


def read_trace(path: Path) -> tuple[RankTrace, ...]:
    """The traces of all ranks, in rank order, of the trace named `path` (a single rank's file is also accepted).

    Raises FileNotFoundError when there is none, ValueError for a file that is not a trace or when a rank is missing.
    """
    first = rank_path(path, rank=0, world_size=2)
    if path.exists() and first.exists():
        raise ValueError(f"both {path} and {first.name} exist: they are of different runs, remove one")
    if not first.exists():
        return (_open(path),)
    world_size = _open(first).header.world_size
    files = [rank_path(path, rank=rank, world_size=world_size) for rank in range(world_size)]
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise ValueError(f"trace {path} is of {world_size} ranks, but {', '.join(missing)} is missing")
    traces = tuple(_open(file) for file in files)
    for rank, trace in enumerate(traces):
        found = trace.header
        if (found.rank, found.world_size) != (rank, world_size):
            raise ValueError(
                f"{trace.path} was written by rank {found.rank} of {found.world_size}, "
                f"not by rank {rank} of {world_size}"
            )
    return traces


def _open(path: Path) -> RankTrace:
    with path.open("rb") as file:
        try:
            header = next(msgpack.Unpacker(file, use_list=False), None)
        except (ValueError, msgpack.UnpackException) as error:
            raise ValueError(f"{path} is not a routing trace: {error}") from error
    if not isinstance(header, dict) or header.pop("format", None) != FORMAT:
        raise ValueError(f"{path} is not a routing trace")
    version = header.pop("version", None)
    if version != VERSION:
        raise ValueError(f"{path}: routing trace version {version!r}, this program reads {VERSION}")
    names = {f.name for f in fields(TraceHeader)}
    if set(header) != names:
        raise ValueError(f"{path}: header fields {sorted(header)} are not {sorted(names)}")
    return RankTrace(path, TraceHeader(**header))


def _access(value: Any, trace: RankTrace) -> Access:
    """Check one record, so that a damaged file is one clear error and not a wrong hit rate."""
    shard = trace.header.experts
    if isinstance(value, tuple) and len(value) == 4 and value[1] in trace.header.layers:
        access = Access(*value)
        if isinstance(access.decode, tuple) and isinstance(access.prefill, tuple):
            needed = access.decode + access.prefill
            if all(expert in shard for expert in needed) and len(set(needed)) == len(needed):
                return access
    raise ValueError(f"{trace.path}: {value!r:.80} is not an access of rank {trace.header.rank}")
