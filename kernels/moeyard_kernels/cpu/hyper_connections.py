"""Hyper-connections on a CPU: several residual streams, mixed by small matrices that depend on the row.

Manifold-constrained hyper-connections (DeepSeek-V4). All sums are fp32 with a fixed order. Streams are rounded once per
block.
"""

import torch

from moeyard_kernels.cpu.linear import linear
from moeyard_kernels.ops.elementwise import rms_norm, rows_apart, sum_in_order
from moeyard_kernels.types.layers import HyperLayer, HyperMix


class CpuHyperSite:
    """The place before a block: reads streams [num_rows, S, H] into one row each, and decides how to write them."""

    def __init__(self, layer: HyperLayer) -> None:
        self._layer = layer

    def enter(self, streams: torch.Tensor) -> tuple[torch.Tensor, HyperMix | None]:
        layer, count = self._layer, streams.shape[1]
        wide = streams.float()
        flat = wide.flatten(1)
        scale = flat.square().mean(-1, keepdim=True).add_(layer.rms_eps).rsqrt_()
        # [num_rows, S], or [num_rows, 2 S + S^2] in front of a block.
        mixed = linear(flat, layer.weight.data) * scale
        before = rows_apart(mixed[:, :count] * layer.scale[0] + layer.base[:count]).sigmoid_() + layer.eps
        rows = sum_in_order(before.unsqueeze(-1) * wide, 1).to(streams.dtype)
        mix = None if mixed.shape[1] == count else self._mix(mixed[:, count:], count)
        return rms_norm.reference(rows, layer.norm, layer.rms_eps), mix

    def _mix(self, mixed: torch.Tensor, count: int) -> HyperMix:
        layer = self._layer
        base = layer.base[count:]
        post = rows_apart(mixed[:, :count] * layer.scale[1] + base[:count]).sigmoid_() * 2
        comb = mixed[:, count:] * layer.scale[2] + base[count:]
        comb = comb.view(-1, count, count)
        comb = rows_apart((comb - comb.amax(-1, keepdim=True)).flatten(1)).exp_().unflatten(1, (count, count))
        comb = comb / sum_in_order(comb, -1).unsqueeze(-1) + layer.eps
        comb = comb / (sum_in_order(comb, -2).unsqueeze(-2) + layer.eps)
        for _ in range(layer.iterations - 1):
            comb = comb / (sum_in_order(comb, -1).unsqueeze(-1) + layer.eps)
            comb = comb / (sum_in_order(comb, -2).unsqueeze(-2) + layer.eps)
        return HyperMix(post=post, comb=comb)


def leave(result: torch.Tensor, streams: torch.Tensor, mix: HyperMix) -> torch.Tensor:
    """Return the streams after a block: stream k is post[k] * result + the sum over j of comb[j, k] * stream j."""
    wide = streams.float()
    out = mix.post.unsqueeze(-1) * result.float().unsqueeze(1)
    for j in range(streams.shape[1]):
        out += mix.comb[:, j].unsqueeze(-1) * wide[:, j : j + 1]
    return out.to(streams.dtype)
