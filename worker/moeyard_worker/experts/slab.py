"""Device memory of the expert cache: equal slots, each one contiguous blob that holds one expert."""

import torch

# Slots start at equal alignments, so that no library may choose other code (and other bits) for another slot.
ALIGNMENT = 256


class Slab:
    """`gate_up` [S, 2I, H] (gate rows first) and `down` [S, H, I]: two views of one allocation of S blobs.

    The blobs are not initialized. Within a slot both matrices are contiguous; the stride between slots is larger than
    one matrix, since a slot's `down` follows its `gate_up`.
    """

    def __init__(
        self, *, num_slots: int, hidden: int, intermediate: int, dtype: torch.dtype, device: torch.device | None = None
    ) -> None:
        down_start, blob_size = _layout(hidden, intermediate, dtype)
        self.num_slots = num_slots
        self.intermediate = intermediate
        self.blobs = torch.empty(num_slots, blob_size, dtype=dtype, device=device)
        matrix = intermediate * hidden
        self.gate_up = self.blobs[:, : 2 * matrix].view(num_slots, 2 * intermediate, hidden)
        self.down = self.blobs[:, down_start : down_start + matrix].view(num_slots, hidden, intermediate)

    def write(self, slot: int, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> None:
        """Copy one expert, gate and up [I, H] and down [H, I], into a slot, rounding to the slab's dtype."""
        self.gate_up[slot, : self.intermediate].copy_(gate)
        self.gate_up[slot, self.intermediate :].copy_(up)
        self.down[slot].copy_(down)


def slot_bytes(*, hidden: int, intermediate: int, dtype: torch.dtype) -> int:
    """Bytes of one slot, alignment included."""
    return _layout(hidden, intermediate, dtype)[1] * dtype.itemsize


def _layout(hidden: int, intermediate: int, dtype: torch.dtype) -> tuple[int, int]:
    """Elements before `down`, and of the whole blob."""
    step = ALIGNMENT // dtype.itemsize
    down_start = -(-2 * intermediate * hidden // step) * step
    return down_start, -(-(down_start + intermediate * hidden) // step) * step
