"""Bytes of stored tensors, read into memory that is there already."""

import os
from types import MappingProxyType

import torch

from moeyard_worker.checkpoint.index import TensorEntry
from moeyard_worker.config.checkpoint_error import CheckpointError

TORCH_DTYPES = MappingProxyType({"F32": torch.float32, "BF16": torch.bfloat16})


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
