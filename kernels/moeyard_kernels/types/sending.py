"""Copies of a step's inputs from host to device, without waiting.

For pageable memory torch waits until the copy ends. That includes all earlier launches, such as a step that waits for
peers, and blocks the host meanwhile. Copies from pinned memory do not wait; torch keeps that memory alive until then.
"""

import torch


def to_device(x: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Return CPU tensor x on `device`. The copy is queued after earlier launches."""
    if torch.device(device).type != "cuda" or not x.numel():
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


def copy_to(target: torch.Tensor, x: torch.Tensor) -> None:
    """Copy CPU tensor x into `target`, queued after earlier launches."""
    target.copy_(x.pin_memory() if target.is_cuda else x, non_blocking=True)
