"""Bytes of stored tensors, read into memory that is there already."""

import os
from types import MappingProxyType
from typing import BinaryIO

import torch

from moeyard_worker.checkpoint.index import TensorEntry, check_unchanged
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
