"""Attention layers on a GPU."""

from functools import cache
from typing import Any

import torch

from moeyard_kernels import ops
from moeyard_kernels.common.snapkv import best, latest, sum_rows
from moeyard_kernels.cuda.plan import CudaPlan, PromptCompaction
from moeyard_kernels.types.layers import GqaLayer, MlaLayer

# Positions of the table of layers without rotation, which takes no memory.
_ANY_POSITION = 1 << 30


class CudaGqa:
    def __init__(self, layer: GqaLayer) -> None:
        self._layer, self._heads = layer, (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
        self._k, self._v, self._window, self._scale = layer.k, layer.v, layer.window, layer.scale
        # A norm per head is part of the rotation's launch; a norm over all heads is a separate launch.
        self._by_head = layer.q_norm is not None and layer.q_norm.shape[0] == layer.head_dim
        self._rope = _rotation_table(layer.rope, layer.head_dim, layer.k.device)

    def attend(self, qkv: torch.Tensor, plan: CudaPlan) -> torch.Tensor:
        layer = self._layer
        q, k, v = qkv.view(qkv.shape[0], -1, layer.head_dim).split(self._heads, 1)
        norms: dict[str, Any] = {"interleaved": layer.interleaved}
        if self._by_head:
            norms |= {"q_norm": layer.q_norm, "k_norm": layer.k_norm, "eps": layer.eps}
        else:
            q, k = self._normalised(q, layer.q_norm), self._normalised(k, layer.k_norm)
        step = (q, k, v, *plan.rotation(self._rope), plan.entries, self._k, self._v)
        if not plan.num_prompt and plan.num_tokens:
            # The launch before is a product or a norm of these rows. Tables and keys of earlier steps are older.
            tables, lone = plan.decode[self._window], plan.lone_rows
            out, _ = ops.rope_gqa_decode(
                *step, tables=tables, scale=self._scale, static_tables=True, lone_rows=lone, **norms
            )
            return out.flatten(1)
        q = ops.rope_cache_write_gqa(*step, **norms)
        parts = []
        if plan.num_prompt:
            paged = plan.paged[self._window]
            parts.append(
                ops.attn_prefill_varlen(q[: plan.num_prompt], self._k, self._v, plan=paged, scale=self._scale)[0]
            )
        if plan.num_prompt < plan.num_tokens:
            tables = plan.decode[self._window]
            rows = q[plan.num_prompt :]
            # The launch before is the cache write or the prompts' attention. The tables are older.
            out, _ = ops.gqa_decode(rows, self._k, self._v, tables=tables, scale=self._scale, static_tables=True)
            parts.append(out)
        if plan.num_prompt:
            for kept in plan.kept:
                self._compact(q[kept.choosing], kept)
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).flatten(1)

    def _compact(self, q: torch.Tensor, kept: PromptCompaction) -> None:
        """Copy the kept positions of a prompt to new places; q [W, Hq, D] are its last queries. With a sliding window
        each layer keeps the latest positions, so that distances between places stay those of positions."""
        k, v = self._k.flatten(1, 2), self._v.flatten(1, 2)
        if self._window is None:
            scores = ops.snapkv_scores(q, k, rows=kept.places, length=kept.length, scale=self._scale)
            found = best(scores, length=kept.length, budget=kept.count)
        else:
            found = latest(kept.length, kept.count, k.device).expand(k.shape[0], -1)
        source = kept.places[found].unsqueeze(2)
        for flat in (k, v):
            flat.index_copy_(1, kept.entries, flat.gather(1, source.expand(-1, -1, flat.shape[2])))

    def warm_compaction(self) -> None:
        """Compile the kernels of the choice before a prompt waits for them."""
        k = self._k.flatten(1, 2)
        rows = torch.zeros(2, dtype=torch.int64, device=k.device)
        q = k.new_zeros(1, self._layer.num_heads, self._layer.head_dim)
        best(ops.snapkv_scores(q, k, rows=rows, length=2, scale=self._scale), length=2, budget=1)

    def _normalised(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """Normalise x [T, heads, D], all heads together."""
        return x if weight is None else ops.rms_norm(x.flatten(1), weight, self._layer.eps).view(x.shape)


class CudaMla:
    """Prompt rows decompress, decode rows are absorbed, as in `CpuMla`."""

    def __init__(self, layer: MlaLayer) -> None:
        self._layer, self._latents, self._scale = layer, layer.latents, layer.scale
        self._rope = _rotation_table(layer.rope, layer.rope_dim, layer.latents.device)
        self._kv_b, self._rank = layer.kv_b.flatten(0, 1), layer.rank
        self._k_absorb = layer.kv_b[:, : layer.nope_dim].transpose(1, 2)
        self._v_expand = layer.kv_b[:, layer.nope_dim :]

    def attend(self, q: torch.Tensor, latent: torch.Tensor, k_rope: torch.Tensor, plan: CudaPlan) -> torch.Tensor:
        layer = self._layer
        q_nope, q_rope = q.view(q.shape[0], layer.num_heads, -1).split((layer.nope_dim, layer.rope_dim), 2)
        step = (q_rope, latent, k_rope, *plan.rotation(self._rope), plan.entries, self._latents)
        q_rope = ops.rope_cache_write_mla(*step, interleaved=layer.interleaved, kv_norm=layer.kv_norm, eps=layer.eps)
        parts = []
        if plan.num_prompt:
            parts.append(self._prompt(q_nope[: plan.num_prompt], q_rope[: plan.num_prompt], plan))
        if plan.num_prompt < plan.num_tokens:
            parts.append(self._decode(q_nope[plan.num_prompt :], q_rope[plan.num_prompt :], plan))
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).flatten(1)

    def _prompt(self, q_nope: torch.Tensor, q_rope: torch.Tensor, plan: CudaPlan) -> torch.Tensor:
        """Return [num_prompt, Hq, Dv], from keys and values decompressed per head."""
        assert plan.flat is not None, "latent attention needs a flat plan of prompts"
        rows = self._latents.flatten(0, 1).index_select(0, plan.prefix_entries)
        kv = ops.linear(rows[:, : self._rank].contiguous(), self._kv_b, static_weight=True)
        layer = self._layer
        k, v = kv.view(rows.shape[0], layer.num_heads, -1).split((layer.nope_dim, layer.v_dim), 2)
        queries, k_rope = torch.cat((q_nope, q_rope), 2), rows[:, self._rank :]
        for kept in plan.kept:
            here = kept.keys
            self._compact(queries[kept.choosing], k[here].transpose(0, 1), k_rope[here], rows[here], kept)
        return ops.attn_prefill_varlen(queries, k, v, plan=plan.flat, scale=self._scale, k_rope=k_rope)[0]

    def _compact(
        self, q: torch.Tensor, k: torch.Tensor, k_rope: torch.Tensor, latents: torch.Tensor, kept: PromptCompaction
    ) -> None:
        """Copy the kept positions of a prompt. All heads choose together, because one latent is the key of all."""
        scores = ops.snapkv_scores(q, k, k_rope=k_rope, length=kept.length, scale=self._scale)
        found = best(sum_rows(scores).unsqueeze(0), length=kept.length, budget=kept.count)
        self._latents.flatten(0, 1).index_copy_(0, kept.entries, latents.index_select(0, found[0]))

    def warm_compaction(self) -> None:
        """See `CudaGqa.warm_compaction`."""
        layer = self._layer
        q = self._latents.new_zeros(1, layer.num_heads, layer.nope_dim + layer.rope_dim)
        kv = self._latents.new_zeros(2, layer.num_heads, layer.nope_dim + layer.v_dim)
        k, k_rope = kv[..., : layer.nope_dim].transpose(0, 1), self._latents.flatten(0, 1)[:2, self._rank :]
        scores = ops.snapkv_scores(q, k, k_rope=k_rope, length=2, scale=self._scale)
        best(sum_rows(scores).unsqueeze(0), length=2, budget=1)

    def _decode(self, q_nope: torch.Tensor, q_rope: torch.Tensor, plan: CudaPlan) -> torch.Tensor:
        """Return [decode rows, Hq, Dv] in the absorbed form."""
        q_latent = ops.head_linear(q_nope, self._k_absorb, static_weight=True)
        # The product before and the cache write before it may still run. Tables are older. So are a sequence's keys
        # except its own row's, unless the step has several rows of it.
        latent, _ = ops.mla_decode(
            q_latent,
            q_rope,
            self._latents,
            tables=plan.decode[None],
            scale=self._scale,
            static_tables=True,
            static_keys=plan.lone_rows,
        )
        return ops.head_linear(latent, self._v_expand, static_weight=True)


def _rotation_table(rope: torch.Tensor | None, dim: int, device: torch.device) -> torch.Tensor:
    """Return the table, or one that turns nothing: multiplying by 1 and subtracting 0 are exact."""
    return _still(dim, device) if rope is None else rope


@cache
def _still(dim: int, device: torch.device) -> torch.Tensor:
    """Return one table for all layers, so that a step looks its rows up once."""
    still = torch.cat((torch.ones(1, dim // 2), torch.zeros(1, dim // 2)), 1).to(device)
    return still.expand(_ANY_POSITION, -1)
