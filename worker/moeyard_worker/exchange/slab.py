"""The memory that ranks of one host share: a file in /dev/shm that has a name only until both sides have mapped it.

Every rank owns one slab with three regions. It writes its token ids and rows into the first two, where its peers read
them; the third, `home`, has one row per (token, k), and the owner of an expert writes the expert's output straight to
its place there. One copy of each region is enough, because the chain of a layer orders every access:

- a rank rewrites its ids and rows in the dispatch of the next layer, which it reaches only after every peer has sent
  its combine frame for this layer, and a peer sends that only when it has read them;
- a peer writes into `home` in the combine of the next layer, after it has our dispatch frame for that layer, which we
  send only when what `combine` returned for this layer has been used (it feeds that dispatch).
"""

import errno
import mmap
import os
from pathlib import Path

import numpy as np
import torch

from moeyard_worker.exchange.leftovers import SHARED_DIRECTORY, make_file
from moeyard_worker.exchange.shape import ExchangeShape


class Slab:
    """Views of one slab: `ids` [max_tokens, top_k] int64; `rows` [max_tokens] and `home` [max_tokens * top_k], whose
    items are whole rows of raw bytes (numpy moves those with one memcpy each, whatever the dtype).
    """

    __slots__ = ("buffer", "home", "ids", "rows")

    def __init__(self, shape: ExchangeShape, buffer: "mmap.mmap | bytearray") -> None:
        assert len(buffer) >= shape.slab_bytes, (len(buffer), shape)
        row, num_pairs = f"V{shape.row_bytes}", shape.max_tokens * shape.top_k
        self.buffer = buffer
        self.ids: np.ndarray = np.ndarray((shape.max_tokens, shape.top_k), np.int64, buffer)
        self.rows: np.ndarray = np.ndarray((shape.max_tokens,), row, buffer, shape.rows_offset)
        self.home: np.ndarray = np.ndarray((num_pairs,), row, buffer, shape.home_offset)

    def home_tensor(self, shape: ExchangeShape) -> torch.Tensor:
        """`home` as a tensor [max_tokens * top_k, hidden] on the same memory."""
        count = shape.max_tokens * shape.top_k * shape.hidden
        dtype = getattr(torch, shape.dtype)
        flat = torch.frombuffer(self.buffer, dtype=dtype, count=count, offset=shape.home_offset)
        return flat.view(-1, shape.hidden)


class SharedFile:
    """Memory that other processes of this user and host can map by `path`, until `unlink`."""

    __slots__ = ("memory", "path")

    def __init__(self, path: str, memory: mmap.mmap) -> None:
        self.path = path
        self.memory = memory

    @staticmethod
    def create(size: int) -> "SharedFile":
        """Reserve `size` bytes under an unpredictable name, mode 0600. Raises OSError naming the room there is.

        The pages are reserved now: a file of holes would kill the process with SIGBUS when the file system is full. As
        long as they are mapped here the name is held (`leftovers`): a mapping keeps a descriptor of its own.
        """
        path, fd = make_file(SHARED_DIRECTORY)
        try:
            os.posix_fallocate(fd, 0, size)
            return SharedFile(path, mmap.mmap(fd, size))
        except OSError as error:
            os.unlink(path)
            if error.errno != errno.ENOSPC:
                raise
            stat = os.statvfs(SHARED_DIRECTORY)
            free = stat.f_bavail * stat.f_frsize
            raise OSError(
                errno.ENOSPC,
                f"no room for {size >> 10} KiB in {SHARED_DIRECTORY} ({free >> 10} KiB free): enlarge it "
                "(containers: shm_size), lower the tokens per step, or exchange over TCP",
            ) from error
        finally:
            os.close(fd)

    @staticmethod
    def open(path: str, size: int) -> "SharedFile":
        """Map a file that a peer created; raises OSError when it is not ours or not of that size."""
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            stat = os.fstat(fd)
            if stat.st_uid != os.getuid() or stat.st_size != size:
                raise OSError(errno.EPERM, f"{path}: {stat.st_size} bytes of user {stat.st_uid}, expected {size} bytes")
            return SharedFile(path, mmap.mmap(fd, size))
        finally:
            os.close(fd)

    def unlink(self) -> None:
        """Take the name away; the memory lives until the last process unmaps it. Safe to call twice."""
        Path(self.path).unlink(missing_ok=True)
