"""The attention of layers through the door's kernels."""

from typing import Any

import torch

from moeyard_kernels import ops
from moeyard_kernels.cuda.plan import CudaPlan

# Positions that a table without memory of its own has rows for.
_ANY_POSITION = 1 << 30


class CudaGqa:
    """See `Backend.gqa`."""

    def __init__(
        self, *, num_heads: int, num_kv_heads: int, head_dim: int, scale: float, window: int | None, eps: float,
        q_norm: torch.Tensor | None, k_norm: torch.Tensor | None, rope: torch.Tensor | None, interleaved: bool,
        k: torch.Tensor, v: torch.Tensor,
    ) -> None:  # fmt: skip
        self._heads = (num_heads, num_kv_heads, num_kv_heads)
        self._head_dim, self._scale, self._window, self._eps = head_dim, scale, window, eps
        # Norms of each head are part of the launch that rotates; those of all heads together are launches of their own.
        self._norms = q_norm, k_norm
        self._by_head = q_norm is not None and q_norm.shape[0] == head_dim
        self._rope, self._interleaved = _rotation_table(rope, head_dim, k.device), interleaved
        self._k, self._v = k, v

    def attend(self, qkv: torch.Tensor, plan: CudaPlan) -> torch.Tensor:
        """See `GqaAttend.attend`."""
        q, k, v = qkv.view(qkv.shape[0], -1, self._head_dim).split(self._heads, 1)
        norms: dict[str, Any] = {}
        if self._by_head:
            norms = dict(zip(("q_norm", "k_norm"), self._norms, strict=True), eps=self._eps)
        else:
            q, k = (self._normalised(x, weight) for x, weight in zip((q, k), self._norms, strict=True))
        q = ops.rope_cache_write_gqa(
            q, k, v, *plan.rotation(self._rope), plan.entries, self._k, self._v,
            interleaved=self._interleaved, **norms,
        )  # fmt: skip
        parts = []
        if plan.num_prompt:
            paged = plan.paged[self._window]
            parts.append(
                ops.attn_prefill_varlen(q[: plan.num_prompt], self._k, self._v, plan=paged, scale=self._scale)[0]
            )
        if plan.num_prompt < plan.num_tokens:
            tables = plan.decode[self._window]
            rows = q[plan.num_prompt :]
            # The launch ahead is the cache write, or the prompts' attention: the tables are older.
            out, _ = ops.gqa_decode(rows, self._k, self._v, tables=tables, scale=self._scale, static_tables=True)
            parts.append(out)
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).flatten(1)

    def _normalised(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """x [T, heads, D], all heads together."""
        return x if weight is None else ops.rms_norm(x.flatten(1), weight, self._eps).view(x.shape)


class CudaMla:
    """See `Backend.mla`; prompt rows decompress, decode rows are absorbed, as in `CpuMla`."""

    def __init__(
        self, *, num_heads: int, nope_dim: int, rope_dim: int, v_dim: int, scale: float, kv_b: torch.Tensor,
        rope: torch.Tensor | None, interleaved: bool, latents: torch.Tensor,
    ) -> None:  # fmt: skip
        self._num_heads, self._widths = num_heads, (nope_dim, rope_dim)
        self._nope_dim, self._v_dim, self._rank, self._scale = nope_dim, v_dim, kv_b.shape[2], scale
        self._rope, self._interleaved = _rotation_table(rope, rope_dim, latents.device), interleaved
        self._latents = latents
        self._kv_b = kv_b.flatten(0, 1)
        self._k_absorb, self._v_expand = kv_b[:, :nope_dim].transpose(1, 2), kv_b[:, nope_dim:]

    def attend(self, q: torch.Tensor, latent: torch.Tensor, k_rope: torch.Tensor, plan: CudaPlan) -> torch.Tensor:
        """See `MlaAttend.attend`."""
        q = q.view(q.shape[0], self._num_heads, sum(self._widths))
        q_nope, q_rope = q.split(self._widths, 2)
        q_rope = ops.rope_cache_write_mla(
            q_rope, latent, k_rope, *plan.rotation(self._rope), plan.entries, self._latents,
            interleaved=self._interleaved,
        )  # fmt: skip
        parts = []
        if plan.num_prompt:
            parts.append(self._prompt(q_nope[: plan.num_prompt], q_rope[: plan.num_prompt], plan))
        if plan.num_prompt < plan.num_tokens:
            parts.append(self._decode(q_nope[plan.num_prompt :], q_rope[plan.num_prompt :], plan))
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).flatten(1)

    def _prompt(self, q_nope: torch.Tensor, q_rope: torch.Tensor, plan: CudaPlan) -> torch.Tensor:
        """[num_prompt, Hq, Dv] from keys and values decompressed per head."""
        assert plan.flat is not None, "a plan with prompts is made flat too once there is latent attention"
        rows = self._latents.flatten(0, 1).index_select(0, plan.prefix_entries)
        kv = ops.linear(rows[:, : self._rank].contiguous(), self._kv_b, static_weight=True)
        k, v = kv.view(rows.shape[0], self._num_heads, -1).split((self._nope_dim, self._v_dim), 2)
        return ops.attn_prefill_varlen(
            torch.cat((q_nope, q_rope), 2), k, v, plan=plan.flat, scale=self._scale, k_rope=rows[:, self._rank :]
        )[0]

    def _decode(self, q_nope: torch.Tensor, q_rope: torch.Tensor, plan: CudaPlan) -> torch.Tensor:
        """[decode rows, Hq, Dv] in the absorbed form."""
        q_latent = ops.head_linear(q_nope, self._k_absorb, static_weight=True)
        # At work are the product ahead and the cache write ahead of it: tables are older, and so are a sequence's keys
        # but its row's, unless the step has several rows of it.
        latent, _ = ops.mla_decode(
            q_latent, q_rope, self._latents, tables=plan.decode[None], scale=self._scale,
            static_tables=True, static_keys=plan.lone_rows,
        )  # fmt: skip
        return ops.head_linear(latent, self._v_expand, static_weight=True)


def _rotation_table(rope: torch.Tensor | None, dim: int, device: torch.device) -> torch.Tensor:
    """The table itself; without one, a table that turns nothing: a factor of 1 and a zero taken off are exact."""
    if rope is not None:
        return rope
    still = torch.cat((torch.ones(1, dim // 2), torch.zeros(1, dim // 2)), 1).to(device)
    return still.expand(_ANY_POSITION, -1)
