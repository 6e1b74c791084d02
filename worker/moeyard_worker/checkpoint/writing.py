"""Write a checkpoint shard by shard, so that an interrupted run can be continued.

All files are written to the directory OUT.partial, which is renamed to OUT at the end. So a directory OUT is always
complete. A shard gets its name when it is complete, and a second run keeps it.
"""

import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from moeyard_worker.checkpoint.identity import CONFIG_NAME
from moeyard_worker.checkpoint.index import INDEX_NAME
from moeyard_worker.config.checkpoint_error import CheckpointError
from moeyard_worker.config.engine_config import format_size
from moeyard_worker.layers.weights import num_elements

SHARD_BYTES = 5_000_000_000
# A record in OUT.partial of what is written there.
_RECORD = "moeyard-conversion.json"
# Files of a source that are not copied: weights, and quantisation settings outside config.json.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".tmp")
_SETTINGS = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
_MAX_COPIED_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """Tensors that are made together: dtype and shape by key, and the function that makes them."""

    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    make: Callable[[], Mapping[str, torch.Tensor]]

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors."""
        return sum(dtype.itemsize * num_elements(shape) for dtype, shape in self.tensors.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class NewCheckpoint:
    """A checkpoint to be written: its config.json and its tensors, made from the checkpoint `source`.

    `identity` is that of the source (`identity.py`).
    """

    source: Path
    identity: Mapping[str, tuple[str, str]]
    config: Mapping[str, Any]
    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors. The sum of `progress` reaches it."""
        return sum(piece.num_bytes for piece in self.pieces)

    def shards(self) -> list[list[Piece]]:
        """Return the pieces of each file: at most SHARD_BYTES, or one larger piece."""
        found: list[list[Piece]] = []
        size = SHARD_BYTES
        for piece in self.pieces:
            if size + piece.num_bytes > SHARD_BYTES:
                found.append([])
                size = 0
            found[-1].append(piece)
            size += piece.num_bytes
        return found

    def write(self, out: Path, progress: Callable[[int], None]) -> Path:
        """Write the checkpoint to the new directory `out`, and return it. `progress` is called with each piece's bytes.

        Raises ValueError if `out` exists or cannot be written, or if OUT.partial does not belong to a run with the same
        arguments.
        """
        wanted = {"source": self.identity, "config": self.config, "bytes": self.num_bytes}
        with new_directory(out, wanted) as partial:
            _remove_unfinished(partial)
            shards = self.shards()
            names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
            check_space(
                partial,
                sum(p.num_bytes for n, s in zip(names, shards, strict=True) for p in s if not (partial / n).exists()),
            )
            for name, pieces in zip(names, shards, strict=True):
                _write_shard(partial / name, pieces, progress)
            weight_map = {key: n for n, s in zip(names, shards, strict=True) for piece in s for key in piece.tensors}
            index = {"metadata": {"total_size": self.num_bytes}, "weight_map": weight_map}
            _copy_others(self.source, partial)
            _write_json(partial / INDEX_NAME, index)
            _write_json(partial / CONFIG_NAME, self.config)
        return out


@contextmanager
def new_directory(out: Path, wanted: Mapping[str, Any]) -> Iterator[Path]:
    """Yield the directory OUT.partial to write to. It becomes `out` if the caller raises nothing.

    An earlier run's files are in it if that run's `wanted` was equal. Raises ValueError if `out` exists, if
    OUT.partial belongs to another run, or if the operating system refuses to read or write a file.
    """
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"{out}: exists already; name a directory that does not exist")
    partial = out.with_name(f"{out.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    if any(partial.iterdir()) and not (partial / _RECORD).exists():
        raise ValueError(f"{partial}: holds other files; remove it, or name another directory")
    try:
        with (partial / _RECORD).open("a+") as record:
            _claim(partial, record, json.dumps(wanted))
            yield partial
            partial.rename(out)
            (out / _RECORD).unlink()
    except (OSError, SafetensorError) as error:
        # safetensors only has a text.
        found = re.search(r"\(os error (\d+)\)", str(error))
        number = int(found[1]) if found else getattr(error, "errno", None)
        if number is None:
            raise
        # `copyfile` names the file that it reads first.
        file = getattr(error, "filename2", None) or getattr(error, "filename", None)
        where, reason = file or partial, f"{os.strerror(number)}; remove the cause"
        if number == errno.ENOSPC:
            where, reason = partial, "the disk is full; make room"
        raise ValueError(
            f"{where}: {reason} and run the command again, which keeps the files that are whole"
        ) from error


def _claim(partial: Path, record: Any, wanted: str) -> None:
    """Lock the record of `partial`. Write it, or check that it says what is wanted."""
    try:
        fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"{partial}: another process is writing there") from None
    record.seek(0)
    found = record.read()
    if not found:
        record.write(wanted)
        record.flush()
    elif found != wanted:
        raise ValueError(f"{partial}: was begun with another model or form; remove it, or name another directory")


def check_space(directory: Path, needed: int) -> None:
    """Raise ValueError if a directory's disk has fewer bytes left."""
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise ValueError(f"{directory}: {format_size(needed)} are to be written, but {format_size(free)} are free")


def _remove_unfinished(partial: Path) -> None:
    """Remove shards that an earlier run did not finish, whose bytes then count as free space."""
    for file in partial.iterdir():
        # safetensors writes to .tmp?????? before the file gets the name that it is given.
        if file.suffix == ".tmp" or file.name.startswith(".tmp"):
            file.unlink()


def _write_shard(path: Path, pieces: list[Piece], progress: Callable[[int], None]) -> None:
    made: dict[str, torch.Tensor] = {}
    if path.exists():
        progress(sum(piece.num_bytes for piece in pieces))
        return
    for piece in pieces:
        found = piece.make()
        for key, (dtype, shape) in piece.tensors.items():
            assert (found[key].dtype, found[key].shape) == (dtype, shape), f"{key} is not as planned"
        made.update(found)
        progress(piece.num_bytes)
    unfinished = path.with_suffix(".tmp")
    save_file(made, unfinished, metadata={"format": "pt"})
    # safetensors makes files that only their owner may read.
    shutil.copymode(path.with_name(_RECORD), unfinished)
    with unfinished.open("rb") as file:
        os.fsync(file.fileno())
    unfinished.rename(path)


def _copy_others(source: Path, target: Path) -> None:
    """Copy the tokenizer and the other small files. A hub's directory has links to its files."""
    for file in source.iterdir():
        left_out = file.name in (CONFIG_NAME, INDEX_NAME, *_SETTINGS) or file.name.startswith(".")
        if left_out or file.name.endswith(_WEIGHTS) or not file.is_file():
            continue
        if file.stat().st_size > _MAX_COPIED_BYTES:
            raise CheckpointError(f"{file}: is too large to be copied as a part of a model's description")
        shutil.copyfile(file, target / file.name)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")
