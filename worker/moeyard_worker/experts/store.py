"""Host side of the expert cache: one rank's experts as the checkpoint holds them, read on demand."""

import torch

from moeyard_worker.experts.base import ExpertSource


class HostStore:
    """Reads experts through the source's memory-mapped views: only the pages of a copied expert are ever touched."""

    def __init__(self, source: ExpertSource, *, hidden: int, intermediate: int) -> None:
        self._source = source
        self._in_shape = torch.Size((intermediate, hidden))
        self._out_shape = torch.Size((hidden, intermediate))

    def read(self, layer: int, expert: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(gate, up, down) of a global expert, of the shapes that they should have."""
        gate, up, down = self._source.tensors(layer, expert)
        for name, tensor, shape in (
            ("gate", gate, self._in_shape),
            ("up", up, self._in_shape),
            ("down", down, self._out_shape),
        ):
            assert tensor.shape == shape, f"layer {layer} expert {expert}: {name} is {tuple(tensor.shape)}, not {shape}"
        return gate, up, down

    def check(self, layer: int, expert: int) -> None:
        """What was copied after `read` is what the checkpoint held when it was checked; raises what the source does."""
        self._source.check(layer, expert)
