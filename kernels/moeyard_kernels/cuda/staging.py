"""Numbers that the host writes while the device still reads those of the step before."""

from collections.abc import Mapping

import numpy as np
import torch

# Alignment in bytes that compiled kernels assume.
_ALIGNED = 16


class Staging:
    """Named tensors in one block of device memory, and pinned copies of it on the host: one copy sends them all.

    fields: dtype and shape by name. stages: the number of host blocks; one is filled while earlier ones are still being
    copied. With several stages, entries that a step does not write in `begin`'s arrays hold values of an earlier step.
    """

    def __init__(
        self, fields: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], device: torch.device, *, stages: int = 2
    ) -> None:
        places, size = {}, 0
        for name, (dtype, shape) in fields.items():
            places[name] = size
            size += -(-torch.Size(shape).numel() * dtype.itemsize // _ALIGNED) * _ALIGNED

        def views(block: torch.Tensor) -> dict[str, torch.Tensor]:
            found = {}
            for name, (dtype, shape) in fields.items():
                end = places[name] + torch.Size(shape).numel() * dtype.itemsize
                found[name] = block[places[name] : end].view(dtype).view(shape)
            return found

        pinned = device.type == "cuda"
        self._block = torch.zeros(size, dtype=torch.uint8, device=device)
        self._stages = [torch.zeros(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(stages)]
        self._host = [{name: view.numpy() for name, view in views(stage).items()} for stage in self._stages]
        self._copied = [torch.cuda.Event() for _ in range(stages)] if pinned else None
        self._turn = 0
        self.on_device = views(self._block)

    def begin(self) -> dict[str, np.ndarray]:
        """Return the host's next arrays, once nothing reads them."""
        self._turn = (self._turn + 1) % len(self._stages)
        if self._copied is not None:
            self._copied[self._turn].synchronize()
        return self._host[self._turn]

    def send(self) -> None:
        """Copy them to the device, after earlier launches."""
        self._block.copy_(self._stages[self._turn], non_blocking=True)
        if self._copied is not None:
            self._copied[self._turn].record()
