"""The memory of a layer's state. The scheduler decides which sequence owns which page and slot."""

import torch

from moeyard_worker.state.layout import LayerState


def allocate(
    state: LayerState, *, num_pages: int, page_size: int, num_slots: int, dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor]:
    """Return a layer's arrays by name: paged ones [(heads,) num_pages, page_size, width], slots [num_slots, *shape].

    They are zeros at first, because attention multiplies masked entries by zero and needs finite values there.
    """
    arrays = {}
    for name, paged in state.paged.items():
        heads = () if paged.heads is None else (paged.heads,)
        arrays[name] = torch.zeros(*heads, num_pages, page_size, paged.width, dtype=dtype, device=device)
    for name, slot in state.slots.items():
        arrays[name] = torch.zeros(num_slots, *slot.shape, dtype=torch.float32 if slot.fp32 else dtype, device=device)
    return arrays
