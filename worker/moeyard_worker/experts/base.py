"""Contract of the expert store's source: where expert weights come from. The residency contracts are in policy.py."""

from typing import Protocol

import torch


class ExpertSource(Protocol):
    """The checkpoint's side of the expert store: zero-copy views of one expert's weights (memory-mapped on a CPU)."""

    def tensors(self, layer: int, expert: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(gate [I, H], up [I, H], down [H, I]) of global expert `expert` of layer `layer`, uncast."""
        ...

    def check(self, layer: int, expert: int) -> None:
        """Raise if what `tensors` last gave of it may have changed since: after it was copied, before it is used."""
        ...
