"""Shared experts that lie in slots beside the routed ones, so that a step may have each as one more of its rows' K."""

from collections.abc import Sequence

import torch

from moeyard_kernels.backend import ExpertSlots, JoinableSlots


class JoinedExperts:
    """The slots from `first` on, one for the shared expert of each of `layers`, of a cache that holds all its experts.

    There it is expert E of its layer, E being the number of the routed ones.
    """

    def __init__(self, slots: ExpertSlots, layers: Sequence[int], first: int) -> None:
        self._slots = slots if isinstance(slots, JoinableSlots) else None
        assert not layers or self._slots is not None, "slots of this backend hold no shared experts"
        self._slot_of = {layer: first + i for i, layer in enumerate(layers)}

    def slots(self, layer: int) -> list[int]:
        """That of a layer's shared expert, if it has one."""
        return [self._slot_of[layer]] if layer in self._slot_of else []

    def join(self, layer: int, gate_up: torch.Tensor, down: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Copy gate_up [2I, H] and down [H, I] into the layer's slot; what lies there now, None where it has none."""
        if self._slots is None or layer not in self._slot_of:
            return None
        return self._slots.join(self._slot_of[layer], gate_up, down)

    def joins(self, num_pairs: int) -> bool:
        """Whether a step of so many (row, k), the shared expert's among them, is to have it among them."""
        return self._slots is not None and self._slots.joins(num_pairs)
