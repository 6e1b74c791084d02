"""Grouped-query attention over paged keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from moeyard_kernels.backend import Backend, GqaAttend, StepPlan
from moeyard_kernels.types.footprint import Footprint, Footprints
from moeyard_kernels.types.layers import GqaLayer
from moeyard_worker.config.rope_config import RopeConfig
from moeyard_worker.layers.weights import Loaded, Weight, matrix, norm, regrouped, stacked, weight
from moeyard_worker.state.layout import LayerState, PagedArray, paged

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Gqa:
    """`Attention` with grouped heads.

    `qk_norm`: normalise queries and keys before the rotation, each "head" alone or "all" heads together.
    `sliding_window`: a row sees itself and the `sliding_window - 1` positions before it. `norm_eps` belongs to
    `qk_norm`; with `norm_less_one` the checkpoint stores its weights minus one. `output_gate`: half of the query
    projection, head by head, gates the output. `rope.dim` may be less than `head_dim`: then only the first `rope.dim`
    values of a head are rotated.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    bias: bool
    qk_norm: Literal["head", "all"] | None
    norm_eps: float
    sliding_window: int | None
    rope: RopeConfig | None
    output_gate: bool = False
    norm_less_one: bool = False

    def weights(self, hidden: int, at: str) -> dict[str, Weight]:
        """qkv [(Hq + 2 Hkv) D, H] is one product, with Hq D rows of an output gate first."""
        num_q, dim = self.num_heads * (2 if self.output_gate else 1), self.head_dim
        heads = {"q_proj": num_q, "k_proj": self.num_kv_heads, "v_proj": self.num_kv_heads}
        rows = [(f"{at}{name}", count * dim) for name, count in heads.items()]
        found = {
            "qkv": stacked(*((f"{name}.weight", count) for name, count in rows), width=hidden),
            "o": matrix(f"{at}o_proj.weight", hidden, self.num_heads * self.head_dim),
        }
        if self.bias:
            found["qkv_bias"] = stacked(*((f"{name}.bias", count) for name, count in rows))
            found["o_bias"] = weight(f"{at}o_proj.bias", hidden)
        if self.qk_norm is not None:
            for name, count in (("q_norm", self.num_heads), ("k_norm", self.num_kv_heads)):
                width = dim * (count if self.qk_norm == "all" else 1)
                found[name] = norm(f"{at}{name}.weight", width, less_one=self.norm_less_one)
        if self.output_gate:
            order = (self.num_heads, ((dim, 2 * dim), (0, dim)))
            for name in found.keys() & {"qkv", "qkv_bias"}:
                found[name] = regrouped(found[name], {f"{at}q_proj.{kind}": order for kind in ("weight", "bias")})
        return found

    def state(self) -> LayerState:
        """Keys and values of every head."""
        one = PagedArray(heads=self.num_kv_heads, width=self.head_dim)
        return paged(k=one, v=one)

    def footprint(self, footprints: Footprints) -> Footprint:
        return footprints.gqa(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            head_norm=self.qk_norm == "head",
            fp32_norm=self.norm_less_one,
        )

    def build(self, backend: Backend, *, weights: Loaded, state: Loaded, rope: torch.Tensor | None) -> GqaBlock:
        attend = backend.gqa(
            GqaLayer(
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                scale=self.scale,
                window=self.sliding_window,
                eps=self.norm_eps,
                q_norm=weights.get("q_norm"),
                k_norm=weights.get("k_norm"),
                rope=rope,
                interleaved=self.rope is not None and self.rope.interleaved,
                k=state["k"],
                v=state["v"],
            )
        )
        return GqaBlock(self, backend, attend, weights)


class GqaBlock:
    """One product for queries, keys and values; attention; its gate, if any; one product back."""

    def __init__(self, spec: Gqa, backend: Backend, attend: GqaAttend, weights: Loaded) -> None:
        self._backend, self._attend = backend, attend
        self._num_gates = spec.num_heads * spec.head_dim if spec.output_gate else 0
        self._qkv, self._qkv_bias = weights["qkv"], weights.get("qkv_bias")
        self._o, self._o_bias = weights["o"], weights.get("o_bias")

    def forward(self, x: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        """x [num_rows, H] -> [num_rows, H]."""
        qkv, count = self._backend.linear(x, self._qkv, self._qkv_bias), self._num_gates
        if not count:
            return self._backend.linear(self._attend.attend(qkv, plan), self._o, self._o_bias)
        out = self._backend.sigmoid_mul(self._attend.attend(qkv[:, count:], plan), qkv[:, :count])
        return self._backend.linear(out, self._o, self._o_bias)
