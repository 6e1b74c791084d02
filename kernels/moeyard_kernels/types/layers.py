"""Sizes, weights and state that a layer passes to a backend. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from moeyard_kernels.types.gate import GateRule
    from moeyard_kernels.types.matrix import Matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class GqaLayer:
    """Grouped-query attention.

    q_norm, k_norm: [D] to normalise each head, or [heads D] to normalise all heads together. Values in rope
    [positions, Dr] are cos, then sin, of the first Dr <= D values of a head. The layer's pages are k, v
    [Hkv, num_pages, page_size, D], initially zero.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    eps: float
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    rope: torch.Tensor | None
    interleaved: bool
    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaLayer:
    """Latent attention.

    kv_b [Hq, nope + Dv, R]. kv_norm [R] and eps normalise the projected latents; None if they come normalised.
    latents [num_pages, page_size, R + Dr]: the layer's pages, initially zero.
    """

    num_heads: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    scale: float
    kv_b: torch.Tensor
    rope: torch.Tensor | None
    interleaved: bool
    kv_norm: torch.Tensor | None
    eps: float
    latents: torch.Tensor

    @property
    def rank(self) -> int:
        """R."""
        return self.latents.shape[2] - self.rope_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaLayer:
    """Common part of both kinds of linear attention.

    conv [C, K]: a convolution of C channels. a_log [Hv] fp32. norm [Dv], with eps. state [num_slots, Hv, Dk, Dv] fp32
    and window [num_slots, K - 1, C]: the layer's slots. A chunk at position 0 starts from zeros.
    """

    eps: float
    conv: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    state: torch.Tensor
    window: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class GdnLayer(DeltaLayer):
    """Gated DeltaNet: C = 2 Hk Dk + Hv Dv channels; dt_bias [Hv] fp32."""

    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KdaLayer(DeltaLayer):
    """Kimi Delta Attention: C = 3 H D channels; dt_bias [H D] and norm fp32.

    wide [2, H D, D] expands the low-rank decay rates and the low-rank gate to all heads.
    """

    num_heads: int
    head_dim: int
    wide: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class GateLayer:
    """The router of a Mixture-of-Experts layer.

    weight [E, H] is fp32 if the family computes its logits in fp32; bias [E] fp32 affects the choice only. `dtype` is
    the dtype of the rows. shared_gate [1, H] gives the logit of a shared expert; `shared` are its gate_up [2 I, H] and
    down [H, I].
    """

    rule: GateRule
    weight: Matrix
    bias: torch.Tensor | None
    dtype: torch.dtype
    shared_gate: Matrix | None = None
    shared: tuple[Matrix, Matrix] | None = None
