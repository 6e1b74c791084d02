"""Hyper-connections on a GPU: launches of the ops `hyper_enter`, `hyper_leave` and `hyper_write`."""

from typing import Any

import torch

from moeyard_kernels import ops
from moeyard_kernels.ops.hyper_connections import in_pieces
from moeyard_kernels.types.gate import ExpertParts
from moeyard_kernels.types.layers import HyperLayer, HyperMix


class CudaHyperSite:
    """The place before a block, or before the head. The weight is kept in pieces of the rows' dtype."""

    def __init__(self, layer: HyperLayer) -> None:
        self._site = in_pieces(layer)

    def enter(self, streams: torch.Tensor) -> tuple[torch.Tensor, HyperMix | None]:
        return ops.hyper_enter(streams, self._site)

    def leave(
        self, result: torch.Tensor | ExpertParts, streams: torch.Tensor, mix: HyperMix
    ) -> tuple[torch.Tensor, torch.Tensor, HyperMix | None]:
        """Write a block's result into streams [num_rows, S, H], and enter this site. Return (streams, rows, mix)."""
        rows, parts = _parts(result)
        return ops.hyper_leave(rows, streams, mix, self._site, **parts)


def write_streams(result: torch.Tensor | ExpertParts, streams: torch.Tensor, mix: HyperMix) -> torch.Tensor:
    """Write the last block's result into streams [num_rows, S, H]."""
    rows, parts = _parts(result)
    return ops.hyper_write(rows, streams, mix, **parts)


def _parts(result: torch.Tensor | ExpertParts) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return the rows or parts of a result, and the arguments of ops for parts."""
    if isinstance(result, torch.Tensor):
        return result, {}
    return result.routed, {"weights": result.weights, "shared": result.shared, "shared_gate": result.shared_gate}
