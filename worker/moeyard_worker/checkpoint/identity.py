"""What tells that two processes, now or later, on one host or several, load the same weights.

Reading all of a checkpoint for that would take as long as loading it. Two files of weights that were trained apart, or
on from each other, differ nearly everywhere: so a few places of each file are read. What an edit in place leaves alone
there tells the time of its last change, which means something on one host only: copies elsewhere have others.
"""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from moeyard_worker.checkpoint.index import CheckpointIndex, TensorEntry, open_checked
from moeyard_worker.config.files import read_text

CONFIG_NAME = "config.json"
# Of each file at most so many tensors, evenly apart in it, and of the middle of each so many bytes.
TENSORS, BYTES = 8, 4096


def identity(index: CheckpointIndex) -> dict[str, tuple[str, str]]:
    """By file name: a digest of what is in it, as far as it is looked at, and its size and time of change.

    Raises CheckpointError for a file that has changed since its header was read.
    """
    files: dict[Path, list[tuple[str, TensorEntry]]] = {}
    for key, entry in index.entries.items():
        files.setdefault(entry.file, []).append((key, entry))
    found = {file.name: _of_file(entries) for file, entries in sorted(files.items())}
    config = index.directory / CONFIG_NAME
    if config.exists():
        # Written anew by many tools with the same content.
        found[CONFIG_NAME] = (hashlib.sha256(read_text(config).encode()).hexdigest(), "")
    return found


def _of_file(entries: list[tuple[str, TensorEntry]]) -> tuple[str, str]:
    digest, stamp = hashlib.sha256(), entries[0][1].stamp
    entries = sorted(entries, key=lambda each: each[1].start)
    for key, entry in entries:
        digest.update(f"{key} {entry.dtype} {entry.shape} {entry.start}\n".encode())
    with open_checked(entries[0][1]) as opened:
        for _, entry in entries[:: -(-len(entries) // TENSORS)]:
            middle = entry.start + max(0, entry.num_bytes - BYTES) // 2
            digest.update(os.pread(opened.fileno(), min(BYTES, entry.num_bytes), middle))
    return digest.hexdigest(), f"{stamp.size} {stamp.modified_ns}"


def difference(one: Mapping[str, tuple[str, str]], other: Mapping[str, tuple[str, str]], *, one_host: bool) -> str:
    """The name of a file in which two identities differ, "" if there is none. On one host times count, too."""
    for name in sorted({*one, *other}):
        if name not in one or name not in other or one[name][0] != other[name][0]:
            return name
        if one_host and one[name] != other[name]:
            return name
    return ""
