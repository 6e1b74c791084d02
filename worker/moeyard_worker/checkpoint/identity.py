"""The identity of a checkpoint: it shows whether two processes, on any hosts, load the same weights.

Reading the whole checkpoint would take as long as loading it. Nearly all its tensors are experts, and a training that
changes experts at all changes many. So one expert per layer, kind of tensor and file is sampled, and every other tensor
is. DeepSeek-V3 has 90,000 tensors in 160 files, and 2,612 of them are sampled, in 0.14 s when the files are in memory.

An edit in place may miss these samples, but it changes the file's time of modification. Times are compared on one host
only, because copies on other hosts have other times.
"""

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

from moeyard_worker.checkpoint.index import CheckpointIndex, TensorEntry, open_checked
from moeyard_worker.config.files import read_text

CONFIG_NAME = "config.json"
# A digest covers the middle `BYTES` of each sampled tensor.
BYTES = 4096
# The number of an expert in a key.
_EXPERT = re.compile(r"\.experts\.\d+\.")


def identity(index: CheckpointIndex) -> dict[str, tuple[str, str]]:
    """Return (digest of the sampled content, size and time of modification) by file name.

    Raises CheckpointError for a file that has changed since its header was read.
    """
    files: dict[Path, list[tuple[str, TensorEntry]]] = {}
    for key, entry in index.entries.items():
        files.setdefault(entry.file, []).append((key, entry))
    found = {file.name: _of_file(entries) for file, entries in sorted(files.items())}
    config = index.directory / CONFIG_NAME
    if config.exists():
        # No time: many tools rewrite this file with the same content.
        found[CONFIG_NAME] = (hashlib.sha256(read_text(config).encode()).hexdigest(), "")
    return found


def _of_file(entries: list[tuple[str, TensorEntry]]) -> tuple[str, str]:
    digest, stamp = hashlib.sha256(), entries[0][1].stamp
    entries = sorted(entries, key=lambda each: each[1].start)
    # The first tensor by its key without the expert.
    sampled: dict[str, TensorEntry] = {}
    for key, entry in entries:
        digest.update(f"{key} {entry.dtype} {entry.shape} {entry.start}\n".encode())
        sampled.setdefault(_EXPERT.sub(".experts.", key), entry)
    with open_checked(entries[0][1]) as opened:
        for entry in sampled.values():
            middle = entry.start + max(0, entry.num_bytes - BYTES) // 2
            digest.update(os.pread(opened.fileno(), min(BYTES, entry.num_bytes), middle))
    return digest.hexdigest(), f"{stamp.size} {stamp.modified_ns}"


def content(found: Mapping[str, tuple[str, str]]) -> str:
    """Return a digest of an identity without its times, 16 hexadecimal digits."""
    return hashlib.sha256(repr(sorted((name, each) for name, (each, _) in found.items())).encode()).hexdigest()[:16]


def difference(one: Mapping[str, tuple[str, str]], other: Mapping[str, tuple[str, str]], *, one_host: bool) -> str:
    """Return the name of a file in which two identities differ, or "". Times count if both are on one host."""
    compared = 2 if one_host else 1
    for name in sorted({*one, *other}):
        if name not in one or name not in other or one[name][:compared] != other[name][:compared]:
            return name
    return ""
