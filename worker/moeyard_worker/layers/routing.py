"""The experts that a step's rows chose, for requests that want to know them."""

from collections.abc import Sequence

import torch


class StepRouting:
    """Ids [max_rows, MoE layers, top_k] of the experts that rows chose, before placement, on the model's device.

    The layers write them as part of the step, so a captured graph writes them too. The next step overwrites them. An
    id has one byte, or two in a model with more than 256 experts. Layers of multi-token prediction write nothing.
    """

    def __init__(
        self, layers: Sequence[int], *, max_rows: int, top_k: int, id_bytes: int, device: torch.device
    ) -> None:
        self._index = {layer: i for i, layer in enumerate(layers)}
        dtype = torch.uint8 if id_bytes == 1 else torch.int16
        self._ids = torch.zeros(max_rows, len(layers), top_k, dtype=dtype, device=device)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self._ids[0].numel() * self._ids.element_size()

    def write(self, layer: int, ids: torch.Tensor) -> None:
        """Store the ids [num_rows, K] that a layer's gate has chosen."""
        self._ids[: len(ids), self._index[layer]] = ids

    def rows(self, count: int) -> torch.Tensor:
        """Return a view of the first `count` rows."""
        return self._ids[:count]
