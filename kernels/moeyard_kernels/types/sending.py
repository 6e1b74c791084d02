"""What the host makes for a step goes to the device without waiting for it.

From pageable memory torch waits until it has come, and so for all that was launched before, as for a step that waits
for peers: the host would do nothing else meanwhile. From pinned memory, which torch keeps until then, for nothing.
"""

import torch


def to_device(x: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """x, of a CPU, on `device`: on its way, behind what was launched before."""
    if torch.device(device).type != "cuda" or not x.numel():
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


def copy_to(target: torch.Tensor, x: torch.Tensor) -> None:
    """The same into `target`."""
    target.copy_(x.pin_memory() if target.is_cuda else x, non_blocking=True)
