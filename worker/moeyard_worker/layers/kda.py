"""Kimi Delta Attention (arXiv 2510.26692): Gated DeltaNet with a separate decay rate for each row of the state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moeyard_kernels.backend import Backend
from moeyard_kernels.types.footprint import Footprint, Footprints
from moeyard_kernels.types.layers import KdaLayer
from moeyard_worker.config.rope_config import RopeConfig
from moeyard_worker.layers.gdn import DeltaBlock, delta_state, delta_tensors
from moeyard_worker.layers.weights import Loaded, Part, Weight, matrix, stacked, weight
from moeyard_worker.state.layout import LayerState

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Kda:
    """`Attention` by the delta rule with H heads of one width, after a convolution over `conv_size` positions.

    Decay rates and output gate go through a projection of one head's width. `norm_eps` belongs to the norm of the
    output.
    """

    num_heads: int
    head_dim: int
    conv_size: int
    norm_eps: float

    @property
    def rope(self) -> RopeConfig | None:
        """None: the state encodes the order of positions."""
        return None

    @property
    def width(self) -> int:
        """Values of all heads."""
        return self.num_heads * self.head_dim

    def weights(self, hidden: int, at: str) -> dict[str, Weight]:
        """q, k, v, the two low-rank projections and beta are one product, in that order."""
        width, narrow, size = self.width, self.head_dim, self.conv_size
        rows = {"q_proj": width, "k_proj": width, "v_proj": width, "f_a_proj": narrow, "g_a_proj": narrow}
        rows["b_proj"] = self.num_heads
        wide = tuple(Part(f"{at}{x}_b_proj.weight", (width, narrow), i * width) for i, x in enumerate("fg"))
        convs = tuple(Part(f"{at}{x}_conv1d.weight", (width, 1, size), i * width) for i, x in enumerate("qkv"))
        return {
            "projections": stacked(*((f"{at}{name}.weight", count) for name, count in rows.items()), width=hidden),
            "wide": Weight((2, width, narrow), wide),
            "conv": Weight((3 * width, size), convs),
            "a_log": Weight((self.num_heads,), (Part(f"{at}A_log", (1, 1, self.num_heads, 1)),), fp32=True),
            "dt_bias": weight(f"{at}dt_bias", width, fp32=True),
            "norm": weight(f"{at}o_norm.weight", narrow, fp32=True),
            "o": matrix(f"{at}o_proj.weight", hidden, width),
        }

    def state(self) -> LayerState:
        return delta_state((self.num_heads, self.head_dim, self.head_dim), (self.conv_size - 1, 3 * self.width))

    def footprint(self, footprints: Footprints) -> Footprint:
        return footprints.kda(num_heads=self.num_heads, head_dim=self.head_dim)

    def build(self, backend: Backend, *, weights: Loaded, state: Loaded, rope: torch.Tensor | None) -> DeltaBlock:
        tensors = delta_tensors(weights, state)
        layer = KdaLayer(
            num_heads=self.num_heads, head_dim=self.head_dim, eps=self.norm_eps, wide=weights["wide"], **tensors
        )
        return DeltaBlock(backend, backend.kda(layer), weights)
