"""The host's side of a cache of experts on a GPU: one blob per expert, pinned, as its slot will hold it."""

import torch

from moeyard_kernels.host_memory import HostMemory


class HostExperts:
    """`blobs` [experts, gate_up's values + down's]: a slot's bytes in two parts, read by kernels and copy engines.

    `shared`: other processes of the host may map it. Raises ValueError when the memory cannot be pinned.
    """

    def __init__(
        self, *, num_experts: int, hidden: int, intermediate: int, dtype: torch.dtype, device: torch.device,
        shared: bool = False,
    ) -> None:  # fmt: skip
        size = 3 * hidden * intermediate
        self.memory = HostMemory(num_experts * size * dtype.itemsize, device, shared=shared)
        self.blobs = self.memory.bytes.view(dtype).view(num_experts, size)
        self._intermediate, self._split = intermediate, 2 * hidden * intermediate

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
