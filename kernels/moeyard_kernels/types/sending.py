"""What the host makes for a step goes to the device without waiting for it."""

import torch


def to_device(x: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """x, of a CPU, on `device`: on its way, behind what was launched before.

    From pageable memory torch waits until it has come, and so for all that was launched before it, as for a step that
    waits for peers: the host would do nothing else meanwhile. From pinned memory, which torch keeps until then, it
    waits for nothing.
    """
    if torch.device(device).type != "cuda" or not x.numel():
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)
