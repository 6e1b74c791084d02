"""The memory behind a layer's state. Which sequence owns which page and slot is the scheduler's business."""

import torch

from moeyard_worker.state.layout import LayerState


def allocate(
    state: LayerState, *, num_pages: int, page_size: int, num_slots: int, dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor]:
    """One layer's arrays by name: paged ones [(heads,) num_pages, page_size, width], others [num_slots, *shape].

    They start as zeros, since attention multiplies unseen entries by zero and so needs them finite.
    """
    arrays = {}
    for name, paged in state.paged.items():
        heads = () if paged.heads is None else (paged.heads,)
        arrays[name] = torch.zeros(*heads, num_pages, page_size, paged.width, dtype=dtype, device=device)
    for name, slot in state.slots.items():
        arrays[name] = torch.zeros(num_slots, *slot.shape, dtype=torch.float32 if slot.fp32 else dtype, device=device)
    return arrays
