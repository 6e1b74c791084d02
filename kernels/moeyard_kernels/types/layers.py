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

    weight [E, H] is fp32 if the family computes its logits in fp32; bias [E] fp32 affects the choice only. table
    [vocabulary, K] int32 holds the experts of each token id, of a layer that chooses by it. `dtype` is the dtype of the
    rows. shared_gate [1, H] gives the logit of a shared expert; `shared` are its gate_up [2 I, H] and
    down [H, I], with `limit` of `ops.silu_mul`.
    """

    rule: GateRule
    weight: Matrix
    bias: torch.Tensor | None
    dtype: torch.dtype
    table: torch.Tensor | None = None
    shared_gate: Matrix | None = None
    shared: tuple[Matrix, Matrix] | None = None
    limit: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooling:
    """The compression of `ratio` positions into one entry of width D, as a sum weighted by a softmax.

    bias [ratio, C]: added to the gates of each position of a block. norm [D]: of the sum. entries [places, D]: the
    layer's pages as rows of entries. The entry of block w has the place of position (w + 1) * ratio - 1 in the pages,
    divided by `granule`. With `overlaps` an entry also covers the block before, and C = 2 D: the first half of values
    and gates belongs to the next block's entry.
    """

    ratio: int
    overlaps: bool
    bias: torch.Tensor
    norm: torch.Tensor
    entries: torch.Tensor

    @property
    def granule(self) -> int:
        """Positions of a page per entry."""
        return min(self.ratio, GRANULE)


# A page holds an entry for every block, or for at most this many positions.
GRANULE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexer:
    """The choice of `top_k` compressed entries per query, by `num_heads` heads over entries of its own."""

    num_heads: int
    top_k: int
    pooling: Pooling


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedLayer:
    """DeepSeek-V4's attention: one key per position for all heads, which is also the value.

    A query sees the last `window` positions, and with `pooling` the compressed entries of earlier blocks. rope
    [positions, Dr]: cos, then sin, of the last Dr values of a head in pairs (2 i, 2 i + 1). sink [Hq] fp32: a logit per
    head without a value. o_a [G, R, Hq D / G]: the first output projection of each group of heads. compress [C', H]
    fp32: values and gates of `pooling`, those of the indexer, and the weights of its heads.

    State, with position p in row p % rows: recent [num_slots, rows, D], the keys of the last positions, and pending
    [num_slots, rows, C''] fp32, the values and gates of the last positions. Both have more rows than a query reads.

    `block`: rows of a block, for `Backend.block_attend`. A slot has at least that many rows beside the window.
    """

    num_heads: int
    head_dim: int
    rope_dim: int
    window: int
    eps: float
    rope: torch.Tensor
    sink: torch.Tensor
    o_a: torch.Tensor
    recent: torch.Tensor
    pooling: Pooling | None = None
    indexer: Indexer | None = None
    compress: Matrix | None = None
    pending: torch.Tensor | None = None
    block: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperLayer:
    """The weights of hyper-connections with S streams at one place: weight [M, S H], base [M] and scale, all fp32.

    In front of a block M = 2 S + S^2, for reading, writing and mixing the streams, with a scale [3] of each. In front
    of the head M = S. norm [H] follows. `eps` is added to the weights, `rms_eps` to mean squares. `iterations`: of the
    Sinkhorn-Knopp normalisation.
    """

    weight: Matrix
    base: torch.Tensor
    scale: torch.Tensor
    norm: torch.Tensor
    eps: float
    rms_eps: float
    iterations: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperMix:
    """How streams are written after a block, for each row: post [num_rows, S] and comb [num_rows, S, S], fp32."""

    post: torch.Tensor
    comb: torch.Tensor
