"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) over a paged cache of latents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moeyard_kernels.backend import Backend, MlaAttend, StepPlan
from moeyard_kernels.types.footprint import Footprint, Footprints
from moeyard_kernels.types.layers import MlaLayer
from moeyard_worker.config.rope_config import RopeConfig
from moeyard_worker.layers.weights import Loaded, Weight, matrix, stacked, weight
from moeyard_worker.state.layout import LayerState, PagedArray, paged

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Mla:
    """`Attention` over latents. `bias` belongs to the two down projections and o.

    `norm_eps` belongs to the norms inside the attention, which differ from the model's.
    """

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    scale: float
    bias: bool
    rope: RopeConfig | None
    norm_eps: float = 1e-6

    @property
    def qk_dim(self) -> int:
        """Width of a query head or a decompressed key head."""
        return self.nope_dim + self.rope_dim

    @property
    def latent_dim(self) -> int:
        """Width of a cached row: the latent, then the rotated key that all heads share."""
        return self.kv_lora_rank + self.rope_dim

    def weights(self, hidden: int, at: str) -> dict[str, Weight]:
        """Name the weights and their checkpoint tensors.

        q_kv_a [Rq + R + Dr, H] joins the down projections of the query and the latent. Without a query rank its first
        rows are the whole query projection, and q_norm and q_b are absent. The decompression kv_b [Hq, nope + Dv, R]
        turns a latent into each head's key (without its rotated part) and value.
        """
        heads, rank, query_rank = self.num_heads, self.kv_lora_rank, self.q_lora_rank
        first = ("q_proj", heads * self.qk_dim) if query_rank is None else ("q_a_proj", query_rank)
        down = ("kv_a_proj_with_mqa", self.latent_dim)
        found = {
            "q_kv_a": stacked(*((f"{at}{name}.weight", count) for name, count in (first, down)), width=hidden),
            "kv_norm": weight(f"{at}kv_a_layernorm.weight", rank),
            "kv_b": Weight(
                (heads, self.nope_dim + self.v_dim, rank),
                weight(f"{at}kv_b_proj.weight", heads * (self.nope_dim + self.v_dim), rank).parts,
            ),
            "o": matrix(f"{at}o_proj.weight", hidden, heads * self.v_dim),
        }
        if query_rank is not None:
            found["q_norm"] = weight(f"{at}q_a_layernorm.weight", query_rank)
            found["q_b"] = matrix(f"{at}q_b_proj.weight", heads * self.qk_dim, query_rank)
        if self.bias:
            # The full query projection never has a bias.
            query_bias = (None if query_rank is None else f"{at}q_a_proj.bias", first[1])
            found["q_kv_a_bias"] = stacked(query_bias, (f"{at}{down[0]}.bias", down[1]))
            found["o_bias"] = weight(f"{at}o_proj.bias", hidden)
        return found

    def state(self) -> LayerState:
        """One latent with its rotated key for all heads."""
        return paged(latents=PagedArray(heads=None, width=self.latent_dim))

    def footprint(self, footprints: Footprints) -> Footprint:
        return footprints.mla(
            num_heads=self.num_heads,
            nope_dim=self.nope_dim,
            rope_dim=self.rope_dim,
            v_dim=self.v_dim,
            rank=self.kv_lora_rank,
        )

    def build(self, backend: Backend, *, weights: Loaded, state: Loaded, rope: torch.Tensor | None) -> MlaBlock:
        attend = backend.mla(
            MlaLayer(
                num_heads=self.num_heads,
                nope_dim=self.nope_dim,
                rope_dim=self.rope_dim,
                v_dim=self.v_dim,
                scale=self.scale,
                kv_b=weights["kv_b"],
                rope=rope,
                interleaved=self.rope is not None and self.rope.interleaved,
                # With a query rank one launch normalises both, before the query's up projection.
                kv_norm=None if "q_norm" in weights else weights["kv_norm"],
                eps=self.norm_eps,
                latents=state["latents"],
            )
        )
        return MlaBlock(self, backend, attend, weights)


class MlaBlock:
    """Down projections, norms, the query's up projection, attention, one product back."""

    def __init__(self, spec: Mla, backend: Backend, attend: MlaAttend, weights: Loaded) -> None:
        self._backend, self._attend, self._eps = backend, attend, spec.norm_eps
        self._q_kv_a, self._q_kv_a_bias = weights["q_kv_a"], weights.get("q_kv_a_bias")
        self._q_norm, self._q_b, self._kv_norm = weights.get("q_norm"), weights.get("q_b"), weights["kv_norm"]
        self._o, self._o_bias = weights["o"], weights.get("o_bias")
        self._widths = (self._q_kv_a.shape[0] - spec.latent_dim, spec.kv_lora_rank, spec.rope_dim)

    def forward(self, x: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        """x [num_rows, H] -> [num_rows, H]."""
        backend = self._backend
        down = backend.linear(x, self._q_kv_a, self._q_kv_a_bias)
        if self._q_norm is not None and self._q_b is not None:
            q, latent, k_rope = backend.mla_split_qkv_a_norm(down, self._q_norm, self._kv_norm, self._eps)
            q = backend.linear(q, self._q_b)
        else:
            q, latent, k_rope = down.split_with_sizes(self._widths, 1)
        return backend.linear(self._attend.attend(q, latent, k_rope, plan), self._o, self._o_bias)
