"""Triton: the end of one block and the beginning of the next, in two launches: `hyper_enter` of new streams.

The first launch also reduces the experts' results and writes the streams.
"""

import torch

from moeyard_kernels.hyper_connections.hyper_rows import hyper_rows
from moeyard_kernels.hyper_connections.hyper_sums import SumsConfig, hyper_sums
from moeyard_kernels.types.layers import HyperLayer, HyperMix


def hyper_leave(
    result: torch.Tensor,
    streams: torch.Tensor,
    mix: HyperMix,
    site: HyperLayer,
    *,
    weights: torch.Tensor | None = None,
    shared: torch.Tensor | None = None,
    shared_gate: torch.Tensor | None = None,
    config: SumsConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor, HyperMix | None]:
    """See `moeyard_kernels.ops.hyper_leave`. Raises ValueError as `hyper_sums` and `hyper_rows`."""
    streams, sums = hyper_sums(
        streams,
        site,
        result=result,
        mix=mix,
        weights=weights,
        shared=shared,
        shared_gate=shared_gate,
        config=config,
    )
    return streams, *hyper_rows(streams, sums, site)
