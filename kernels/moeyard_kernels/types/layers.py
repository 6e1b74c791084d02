"""What a layer gives a backend: its sizes, weights and state. Pure."""

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

    q_norm, k_norm: [D] (each head by itself) or [heads D] (all heads together). rope [positions, Dr]: cos, then sin, of
    the first Dr <= D values of a head. k, v [Hkv, num_pages, page_size, D]: the layer's pages, zero at first.
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

    kv_b [Hq, nope + Dv, R]. kv_norm [R], with eps: for latents that come as projected; None if they come normalised.
    latents [num_pages, page_size, R + Dr]: the layer's pages, zero at first.
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
    """What both kinds of linear attention have.

    conv [C, K]: the convolution of C channels. a_log [Hv] fp32. norm [Dv], with eps. state [num_slots, Hv, Dk, Dv] fp32
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

    wide [2, H D, D] takes the narrow rates of forgetting and the narrow gate to all heads.
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
