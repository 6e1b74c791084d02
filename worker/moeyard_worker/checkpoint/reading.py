"""Bytes of stored tensors, read into memory that is there already."""

import os
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

import torch

from moeyard_worker.checkpoint.index import FileStamp, TensorEntry
from moeyard_worker.config.checkpoint_error import CheckpointError
from moeyard_worker.config.files import open_regular

TORCH_DTYPES = MappingProxyType({"F32": torch.float32, "BF16": torch.bfloat16})


def open_checked(entry: TensorEntry) -> BinaryIO:
    """The file of a tensor, unbuffered. Raises CheckpointError if it is not the one whose header was read."""
    file = open_regular(entry.file)
    try:
        check_unchanged(entry.file, file.fileno(), entry.stamp)
    except BaseException:
        file.close()
        raise
    return file


def check_unchanged(path: Path, fd: int, stamp: FileStamp) -> None:
    """Raise CheckpointError if the open file `fd` was written, cut or replaced since `stamp`. Takes a microsecond."""
    now = FileStamp.of(fd)
    if now != stamp:
        what = f"now has {now.size} bytes instead of {stamp.size}" if now.size != stamp.size else "was written to"
        raise CheckpointError(
            f"{path}: {what} since it was checked; its weights cannot be trusted any more: start again with a file "
            "that stays as it is (put a new one in its place by renaming)"
        )


def read_exactly(fd: int, entry: TensorEntry, key: str, offset: int, out: torch.Tensor) -> None:
    """Fill `out`, contiguous on the CPU, from byte `offset` of a tensor of the open file `fd`.

    Raises CheckpointError naming file and key where the file ends too soon.
    """
    buffer = out.view(torch.uint8).numpy().data
    done = 0
    while done < len(buffer):
        count = os.preadv(fd, [buffer[done:]], entry.start + offset + done)
        if count == 0:
            raise CheckpointError(f"{entry.file}: truncated while reading {key}")
        done += count
