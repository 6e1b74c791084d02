"""Reads routing traces (format: `recorder.py`) for the simulator and the planner. Loads no torch."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgpack

from moeyard_worker.experts.recorder import FORMAT, VERSION, TraceHeader, rank_path


@dataclass(frozen=True, slots=True)
class Access:
    """The experts that one rank needed in one layer of one step, as disjoint ascending global ids."""

    step: int
    layer: int
    decode: tuple[int, ...]
    prefill: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankTrace:
    """One rank's file. Each iteration reads the file."""

    path: Path
    header: TraceHeader

    def __iter__(self) -> Iterator[Access]:
        with self.path.open("rb") as file:
            unpacker = msgpack.Unpacker(file, use_list=False)
            next(unpacker)
            for value in unpacker:
                yield _access(value, self)


def read_trace(path: Path) -> tuple[RankTrace, ...]:
    """Return the traces of all ranks in rank order. `path` may also be a single rank's file.

    Raises FileNotFoundError, and ValueError for a file that is not a trace or if a rank is missing.
    """
    first = rank_path(path, rank=0, world_size=2)
    if path.exists() and first.exists():
        raise ValueError(f"both {path} and {first.name} exist: they come from different runs, remove one")
    if not first.exists():
        return (_open(path),)
    world_size = _open(first).header.world_size
    files = [rank_path(path, rank=rank, world_size=world_size) for rank in range(world_size)]
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise ValueError(f"trace {path} has {world_size} ranks, but {', '.join(missing)} is missing")
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
    """Return one record after checking it, so that a damaged file is an error and not a wrong hit rate."""
    shard = trace.header.experts
    if isinstance(value, tuple) and len(value) == 4 and value[1] in trace.header.layers:
        access = Access(*value)
        if isinstance(access.decode, tuple) and isinstance(access.prefill, tuple):
            needed = access.decode + access.prefill
            if all(expert in shard for expert in needed) and len(set(needed)) == len(needed):
                return access
    raise ValueError(f"{trace.path}: {value!r:.80} is not an access of rank {trace.header.rank}")
