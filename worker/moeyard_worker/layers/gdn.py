"""Gated DeltaNet (arXiv 2412.06464): linear attention whose state has the same size at every sequence length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moeyard_kernels.backend import Backend, DeltaMix, StepPlan
from moeyard_kernels.types.footprint import Footprint, Footprints
from moeyard_kernels.types.layers import GdnLayer
from moeyard_worker.config.rope_config import RopeConfig
from moeyard_worker.layers.weights import Loaded, Weight, matrix, regrouped, stacked, weight
from moeyard_worker.state.layout import LayerState, SlotArray

if TYPE_CHECKING:
    import torch

# Positions of one chunk of the chunk formula.
CHUNK = 64


def delta_state(state: tuple[int, int, int], window: tuple[int, int]) -> LayerState:
    """Return the layout: the rule's state [heads, Dk, Dv], and the convolution's last inputs [size - 1, channels]."""
    slots = {"state": SlotArray(shape=state, fp32=True), "window": SlotArray(shape=window, fp32=False)}
    return LayerState(paged={}, slots=slots, chunk_alignment=CHUNK)


def delta_tensors(weights: Loaded, state: Loaded) -> dict[str, Any]:
    """Return the tensors of a `DeltaLayer` by name."""
    return {**{name: weights[name] for name in ("conv", "a_log", "dt_bias", "norm")}, **state}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gdn:
    """`Attention` by the gated delta rule, after a convolution over `conv_size` positions.

    Value head h uses key head h // (Hv // Hk). `norm_eps` belongs to the norm of the output. `by_key_head`: the
    checkpoint has one tensor of queries, keys, values and output gates, grouped by key head, and one of both gates of
    the rule (Qwen3-Next). Otherwise it has one tensor of queries, keys and values, and three others (Qwen3.5).
    """

    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    conv_size: int
    norm_eps: float
    by_key_head: bool

    @property
    def num_heads(self) -> int:
        return self.num_v_heads

    @property
    def rope(self) -> RopeConfig | None:
        """None: the state encodes the order of positions."""
        return None

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.num_k_heads * self.k_dim + self.num_v_heads * self.v_dim

    def weights(self, hidden: int, at: str) -> dict[str, Weight]:
        """All input projections are one product: q, k, v, z, b, a in that order."""
        heads, values = self.num_v_heads, self.num_v_heads * self.v_dim
        conv = weight(f"{at}conv1d.weight", self.num_channels, 1, self.conv_size)
        return {
            "projections": self._projections(hidden, at),
            "conv": Weight((self.num_channels, self.conv_size), conv.parts),
            "a_log": weight(f"{at}A_log", heads, fp32=True),
            "dt_bias": weight(f"{at}dt_bias", heads, fp32=True),
            "norm": weight(f"{at}norm.weight", self.v_dim),
            "o": matrix(f"{at}out_proj.weight", hidden, values),
        }

    def _projections(self, hidden: int, at: str) -> Weight:
        heads, values = self.num_v_heads, self.num_v_heads * self.v_dim
        if not self.by_key_head:
            rows = {"in_proj_qkv": self.num_channels, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
            return stacked(*((f"{at}{name}.weight", count) for name, count in rows.items()), width=hidden)
        qkvz, ba = f"{at}in_proj_qkvz.weight", f"{at}in_proj_ba.weight"
        share = heads // self.num_k_heads
        k_end, v_end = 2 * self.k_dim, 2 * self.k_dim + share * self.v_dim
        pieces = ((0, self.k_dim), (self.k_dim, k_end), (k_end, v_end), (v_end, v_end + share * self.v_dim))
        order = {qkvz: (self.num_k_heads, pieces), ba: (self.num_k_heads, ((0, share), (share, 2 * share)))}
        return regrouped(stacked((qkvz, self.num_channels + values), (ba, 2 * heads), width=hidden), order)

    def state(self) -> LayerState:
        return delta_state((self.num_v_heads, self.k_dim, self.v_dim), (self.conv_size - 1, self.num_channels))

    @property
    def _dims(self) -> dict[str, Any]:
        names = ("num_k_heads", "num_v_heads", "k_dim", "v_dim")
        return {name: getattr(self, name) for name in names}

    def footprint(self, footprints: Footprints) -> Footprint:
        return footprints.gdn(**self._dims, conv_size=self.conv_size)

    def build(self, backend: Backend, *, weights: Loaded, state: Loaded, rope: torch.Tensor | None) -> DeltaBlock:
        layer = GdnLayer(**self._dims, eps=self.norm_eps, **delta_tensors(weights, state))
        return DeltaBlock(backend, backend.gdn(layer), weights)


class DeltaBlock:
    """One product for all inputs of the rule, the rule, one product back."""

    def __init__(self, backend: Backend, mix: DeltaMix, weights: Loaded) -> None:
        self._backend, self._mix = backend, mix
        self._projections, self._o = weights["projections"], weights["o"]

    def forward(self, x: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        """x [num_rows, H] -> [num_rows, H]."""
        return self._backend.linear(self._mix.mix(self._backend.linear(x, self._projections), plan), self._o)
