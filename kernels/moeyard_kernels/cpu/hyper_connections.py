"""Hyper-connections on a CPU: the formulas of `ops.hyper_connections` over packed weights."""

import torch

from moeyard_kernels.cpu.linear import linear
from moeyard_kernels.ops.hyper_connections import read_streams
from moeyard_kernels.types.layers import HyperLayer, HyperMix


class CpuHyperSite:
    """The place before a block: reads streams [num_rows, S, H] into one row each, and decides how to write them."""

    def __init__(self, layer: HyperLayer) -> None:
        self._layer = layer

    def enter(self, streams: torch.Tensor) -> tuple[torch.Tensor, HyperMix | None]:
        weight = self._layer.weight.data
        return read_streams(streams, self._layer, lambda flat: linear(flat, weight))
