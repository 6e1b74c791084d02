"""The experts that a step's rows chose, for requests that want to know them."""

from collections.abc import Sequence

import torch

# The most rows whose ids are kept until the end of a step, where two launches store those of all layers.
_KEPT_ROWS = 256


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
        self._kept: dict[int, torch.Tensor] = {}

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self._ids[0].numel() * self._ids.element_size()

    def write(self, layer: int, ids: torch.Tensor) -> None:
        """Store the ids [num_rows, K] that a layer's gate chooses; those of few rows by `settle`.

        Then a later launch of the layer may still have to write them.
        """
        if len(ids) > _KEPT_ROWS:
            self._ids[: len(ids), self._index[layer]] = ids
        else:
            self._kept[self._index[layer]] = ids

    def settle(self) -> None:
        """Store the kept ids at the end of a step. For one row, a launch per layer would take 7 % of the step."""
        kept, self._kept = self._kept, {}
        if len(kept) == self._ids.shape[1]:
            ids = torch.stack([kept[i] for i in range(len(kept))], 1)
            self._ids[: len(ids)] = ids
        else:
            for i, ids in kept.items():
                self._ids[: len(ids), i] = ids

    def rows(self, count: int) -> torch.Tensor:
        """Return a view of the first `count` rows."""
        return self._ids[:count]
