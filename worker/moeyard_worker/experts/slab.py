"""Device memory of the expert cache: equal slots, each of which holds one expert in the form its kernel wants."""

import torch

from moeyard_kernels.cpu.linear import pack_weight


class Slab:
    """S slots. `gate_up[s]` [2I, H] (gate rows first) and `down[s]` [H, I] are packed for the CPU's matrix products.

    Every slot is packed, however its expert came to be there, because a packed and a plain matrix may differ in the
    bits of their products. A slot takes memory when it is first written.
    """

    def __init__(self, *, num_slots: int, hidden: int, intermediate: int, dtype: torch.dtype) -> None:
        self.num_slots = num_slots
        self.intermediate = intermediate
        self.dtype = dtype
        self._gate_up = torch.empty(2 * intermediate, hidden, dtype=dtype)
        self._down = torch.empty(hidden, intermediate, dtype=dtype)
        empty = torch.empty(0, dtype=dtype)
        self.gate_up = [empty] * num_slots
        self.down = [empty] * num_slots

    def write(self, slot: int, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> None:
        """Put one expert, gate and up [I, H] and down [H, I], into a slot, rounded to the slab's dtype."""
        self._gate_up[: self.intermediate].copy_(gate)
        self._gate_up[self.intermediate :].copy_(up)
        self._down.copy_(down)
        self.gate_up[slot] = _packed(self._gate_up)
        self.down[slot] = _packed(self._down)


def _packed(matrix: torch.Tensor) -> torch.Tensor:
    """A copy of `matrix` in the kernels' form, which on some machines is the plain one."""
    packed = pack_weight(matrix)
    return packed.clone() if packed is matrix else packed
