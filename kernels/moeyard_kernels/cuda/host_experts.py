"""The host's side of a cache of experts on a GPU: one blob per expert, pinned, as its slot will hold it."""

import mmap
import weakref
from typing import Any

import torch


class HostExperts:
    """`blobs` [experts, gate_up's values + down's]: a slot's bytes in two parts, read by kernels and copy engines.

    The memory is registered with CUDA as it is (torch's own pinned memory comes in powers of 2). Raises ValueError
    when that fails.
    """

    def __init__(
        self, *, num_experts: int, hidden: int, intermediate: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        size = 3 * hidden * intermediate
        memory = mmap.mmap(-1, num_experts * size * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.blobs = torch.frombuffer(memory, dtype=dtype).view(num_experts, size)
        self._intermediate, self._split = intermediate, 2 * hidden * intermediate
        if device.type == "cuda":
            _register(self, self.blobs)

    def put(self, index: int, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> int:
        """Take an expert, rounded to the served dtype; its bytes."""
        gate_up, last = self.parts(index)
        rows = gate_up.view(2 * self._intermediate, -1)
        rows[: self._intermediate].copy_(gate)
        rows[self._intermediate :].copy_(up)
        last.view_as(down).copy_(down)
        return self.blobs[index].nbytes

    def parts(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """gate_up's values and down's."""
        blob = self.blobs[index]
        return blob[: self._split], blob[self._split :]


def _register(owner: object, memory: torch.Tensor) -> None:
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    # 1: for all contexts.
    error = int(cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 1))
    if error:
        raise ValueError(
            f"{memory.nbytes >> 20} MiB of host memory for experts cannot be pinned (CUDA error {error}); raise the "
            "limit of locked memory (ulimit -l), or give this host's workers more memory or fewer experts"
        )
    weakref.finalize(owner, cudart.cudaHostUnregister, memory.data_ptr())
