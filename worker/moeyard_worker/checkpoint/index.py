"""The index of a directory of safetensors files: every tensor's file, dtype, shape and offset. Reads headers only.

The format (github.com/huggingface/safetensors): 8 bytes of little-endian header length, a JSON header with one entry
per tensor, then the tensors without gaps. All of it is checked against the file's size. So an error names a file that
an interrupted download cut short before anything is loaded.
"""

import json
import math
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

from moeyard_worker.config.checkpoint_error import CheckpointError
from moeyard_worker.config.fields import read_json, shown
from moeyard_worker.config.files import open_regular

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
# The format allows 100 MB, and parsing that much JSON can take 4 GB. The largest in use have 15 MB (100,000 tensors).
MAX_HEADER_BYTES = 32_000_000
MAX_KEY = 512  # characters; errors quote keys
MAX_RANK = 8
# Bytes of one element, by safetensors dtype.
_ELEMENT_BYTES = MappingProxyType(
    {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2, "I16": 2, "U16": 2}
    | {"I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}
)


@dataclass(frozen=True, slots=True)
class FileStamp:
    """Fields of `stat` that change when a file is replaced or written."""

    device: int
    inode: int
    size: int
    modified_ns: int

    @staticmethod
    def of(fd: int) -> "FileStamp":
        """Return the present stamp of an open file."""
        stat = os.fstat(fd)
        return FileStamp(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)


def check_unchanged(path: Path, fd: int, stamp: FileStamp) -> None:
    """Raise CheckpointError if the open file `fd` was written, cut or replaced since `stamp`. Takes a microsecond."""
    now = FileStamp.of(fd)
    if now != stamp:
        what = f"now has {now.size} bytes instead of {stamp.size}" if now.size != stamp.size else "was written to"
        raise CheckpointError(
            f"{path}: {what} since it was checked, so its weights cannot be trusted; restart with a file that does "
            "not change (to replace a file, rename a new one onto it)"
        )


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A stored tensor. Its data begin at byte `start` of the file. `stamp` is the file's when its header was read."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int
    stamp: FileStamp


def open_checked(entry: TensorEntry) -> BinaryIO:
    """Open the file of a tensor, unbuffered. Raises CheckpointError if it has changed since its header was read."""
    file = open_regular(entry.file)
    try:
        check_unchanged(entry.file, file.fileno(), entry.stamp)
    except BaseException:
        file.close()
        raise
    return file


@dataclass(frozen=True, slots=True)
class CheckpointIndex:
    """All tensors of a checkpoint by key."""

    directory: Path
    entries: Mapping[str, TensorEntry]


def open_index(directory: Path | str) -> CheckpointIndex:
    """Read the headers of all shards. Raises CheckpointError naming file and key."""
    directory = Path(directory)
    if directory.is_file():
        why = "a file, and a checkpoint is a directory of safetensors files"
        help = "; `moeyard dequantize` writes one from a GGUF file" if directory.suffix.lower() == ".gguf" else ""
        raise CheckpointError(f"{directory}: {why}{help}")
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such directory; a checkpoint is a local Hugging Face directory")
    index_path = directory / INDEX_NAME
    if index_path.exists():
        return CheckpointIndex(directory, _read_shards(directory, index_path))
    if not (directory / SINGLE_NAME).exists():
        raise CheckpointError(f"{directory}: neither {SINGLE_NAME} nor {INDEX_NAME}; only safetensors are read")
    return CheckpointIndex(directory, read_header(directory / SINGLE_NAME))


def join_files(paths: Sequence[str]) -> CheckpointIndex:
    """Read the headers of safetensors files that together hold a checkpoint. Raises CheckpointError."""
    entries: dict[str, TensorEntry] = {}
    for path in paths:
        _add(entries, Path(path))
    return CheckpointIndex(Path(paths[0]).parent, entries)


def _add(entries: dict[str, TensorEntry], file: Path) -> None:
    """Add the tensors of a file. Raises CheckpointError for a key that another file has, too."""
    for key, entry in read_header(file).items():
        if key in entries:
            raise CheckpointError(f"{file}: {key} is also in {entries[key].file.name}")
        entries[key] = entry


def _read_shards(directory: Path, index_path: Path) -> dict[str, TensorEntry]:
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{index_path}: weight_map is missing or not a map of keys to file names")
    entries: dict[str, TensorEntry] = {}
    for name in sorted(set(weight_map.values())):
        file = directory / name
        # The name comes from the checkpoint: it may be too long for the file system, or hold a zero byte.
        if len(name) > 255 or not name.isprintable() or file.parent != directory or not file.exists():
            key = next(key for key, value in weight_map.items() if value == name)
            shown = file if name.isprintable() else repr(name)
            raise CheckpointError(f"{shown!s:.300}: no such file, but {INDEX_NAME} puts {key:.300} there")
        _add(entries, file)
    for key, name in weight_map.items():
        if key not in entries or entries[key].file.name != name:
            raise CheckpointError(f"{directory / name}: no tensor {key:.300}, but {INDEX_NAME} puts it there")
    return entries


def read_header(file: Path) -> dict[str, TensorEntry]:
    """Return the entries of one safetensors file, checked against its size."""
    with open_regular(file) as stream:
        stamp = FileStamp.of(stream.fileno())
        size, prefix = stamp.size, stream.read(8)
        if prefix == b"version ":  # git clone without LFS leaves a text of three lines
            raise CheckpointError(f"{file}: a pointer of Git LFS, not the weights; run `git lfs pull` in {file.parent}")
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
            raise CheckpointError(f"{file}: not a safetensors file, or truncated ({size} bytes, header of {length})")
        raw = stream.read(length)
    try:
        header = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: the header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: the header is not a JSON object")
    header.pop("__metadata__", None)
    entries = {key: _entry(file, stamp, key, value, 8 + length) for key, value in header.items()}
    _check_layout(file, entries, 8 + length, size)
    return entries


def _entry(file: Path, stamp: FileStamp, key: str, value: Any, data_start: int) -> TensorEntry:
    if len(key) > MAX_KEY or not key.isprintable():
        raise CheckpointError(
            f"{file}: {key!r:.80} is not the name of a tensor: {MAX_KEY} characters at most, no controls"
        )
    try:
        dtype, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        numbers = (*shape[: MAX_RANK + 1], begin, end)
        valid = len(shape) <= MAX_RANK and all(type(n) is int and 0 <= n < 1 << 63 for n in numbers) and begin <= end
        valid = valid and math.prod(shape) * _ELEMENT_BYTES[dtype] == end - begin
    except (TypeError, KeyError, ValueError):
        valid = False
    if not valid:
        raise CheckpointError(f"{file}: {key} has a malformed header entry {shown(value)}")
    return TensorEntry(file, dtype, shape, data_start + begin, end - begin, stamp)


def _check_layout(file: Path, entries: Mapping[str, TensorEntry], data_start: int, size: int) -> None:
    position = data_start
    for key, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].num_bytes)):
        if entry.start != position:
            raise CheckpointError(f"{file}: {key} starts at byte {entry.start}, expected {position}")
        position += entry.num_bytes
        if position > size:
            raise CheckpointError(
                f"{file}: truncated: {key} ends at byte {position}, the file has {size}; download it again"
            )
    if position != size:
        raise CheckpointError(f"{file}: {size - position} bytes follow the last tensor")
