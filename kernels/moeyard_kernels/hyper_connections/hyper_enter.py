"""Triton: the sums over residual streams, then the rows of a block, in two launches.

The weights of the rows need sums over all columns of all streams, which few rows split over programs.
"""

import torch

from moeyard_kernels.hyper_connections.hyper_rows import hyper_rows
from moeyard_kernels.hyper_connections.hyper_sums import SumsConfig, hyper_sums
from moeyard_kernels.types.layers import HyperLayer, HyperMix


def hyper_enter(
    streams: torch.Tensor, site: HyperLayer, *, config: SumsConfig | None = None
) -> tuple[torch.Tensor, HyperMix | None]:
    """See `moeyard_kernels.ops.hyper_enter`. Raises ValueError as `hyper_sums` and `hyper_rows`."""
    _, sums = hyper_sums(streams, site, config=config)
    return hyper_rows(streams, sums, site)
