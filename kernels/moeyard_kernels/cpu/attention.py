"""Attention layers on a CPU. Row padding stays inside this file."""

from dataclasses import replace

import torch
import torch.nn.functional as F

from moeyard_kernels.common.snapkv import latest
from moeyard_kernels.cpu.attn_prefill import attn_prefill, snapkv
from moeyard_kernels.cpu.plan import CpuPlan, DecodePlan, PromptSegment, pad_rows
from moeyard_kernels.ops.attention import rope as rotate
from moeyard_kernels.ops.elementwise import rms_norm
from moeyard_kernels.types.decode_tables import BLOCK
from moeyard_kernels.types.layers import GqaLayer, MlaLayer

# Blocks are gathered from the cache in pieces of about this many values. 2 MiB of fp32 stay in a core's cache, and
# malloc recycles them. Larger pieces would be mapped and zeroed by the kernel each time.
_PIECE = 512 * 1024


class CpuGqa:
    def __init__(self, layer: GqaLayer) -> None:
        # The combined form below replaces the layer's norms.
        self._layer, self._k, self._v = replace(layer, q_norm=None, k_norm=None), layer.k, layer.v
        self._flat_k, self._flat_v = layer.k.flatten(1, 2), layer.v.flatten(1, 2)
        self._norm: torch.Tensor | None = None
        self._wide_norms: tuple[torch.Tensor, torch.Tensor] | None = None
        if layer.q_norm is not None and layer.k_norm is not None:
            if layer.q_norm.shape[0] == layer.head_dim:
                # One pass over all heads, with a weight row per head.
                heads = layer.num_heads, layer.num_kv_heads
                pairs = zip((layer.q_norm, layer.k_norm), heads, strict=True)
                self._norm = torch.cat([norm.expand(count, -1) for norm, count in pairs])
            else:
                self._wide_norms = layer.q_norm, layer.k_norm

    def attend(self, qkv: torch.Tensor, plan: CpuPlan) -> torch.Tensor:
        layer = self._layer
        num_q, num_qk = layer.num_heads, layer.num_heads + layer.num_kv_heads
        qkv = qkv.view(qkv.shape[0], -1, layer.head_dim)
        qk = self._normalised(qkv[:, :num_qk])
        if layer.rope is not None:
            width = layer.rope.shape[1]
            rotated = rotate.reference(qk[..., :width], *plan.rotation(layer.rope), interleaved=layer.interleaved)
            qk = rotated if width == layer.head_dim else torch.cat((rotated, qk[..., width:]), -1)
        num_tokens = plan.num_tokens
        self._flat_k.index_copy_(1, plan.entries, qk[:num_tokens, num_q:].transpose(0, 1))
        self._flat_v.index_copy_(1, plan.entries, qkv[:num_tokens, num_qk:].transpose(0, 1))
        return self._attend(qk[:, :num_q], plan).flatten(1)

    def _normalised(self, qk: torch.Tensor) -> torch.Tensor:
        if self._norm is not None:
            return rms_norm.reference(qk, self._norm, self._layer.eps)
        if self._wide_norms is not None:
            heads = qk.split((self._layer.num_heads, self._layer.num_kv_heads), 1)
            pairs = zip(heads, self._wide_norms, strict=True)
            done = [rms_norm.reference(x.flatten(1), weight, self._layer.eps).view(x.shape) for x, weight in pairs]
            return torch.cat(done, 1)
        return qk

    def _attend(self, q: torch.Tensor, plan: CpuPlan) -> torch.Tensor:
        """q [num_rows, Hq, D] -> the same shape, zero in the padding."""
        if not plan.segments:
            return pad_rows(self._decode(q[: plan.num_decode], plan), plan.num_rows)
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        for part in plan.segments:
            k, v = (x.index_select(1, part.pages).flatten(1, 2) for x in (self._k, self._v))
            out[part.begin : part.end] = attn_prefill(
                q[part.begin : part.end], k, v, start=part.start, scale=self._layer.scale, window=self._layer.window
            )
            if part.kept is not None:
                self._compact(q, k, v, part)
        if plan.num_decode:
            rows = slice(plan.num_prompt, plan.num_tokens)
            out[rows] = self._decode(q[rows], plan)
        return out

    def _compact(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: PromptSegment) -> None:
        """Copy the kept positions of a prompt, k and v [Hkv, L, D], to new places, because the old pages may be shared.

        With a sliding window each layer keeps the latest positions, so that distances between places stay those of
        positions.
        """
        kept = part.kept
        assert kept is not None, "only compacted prompts get here"
        if self._layer.window is None:
            rows = q[part.end - kept.window : part.end]
            found = snapkv(rows, k, length=kept.length, scale=self._layer.scale, budget=kept.count)
        else:
            found = latest(kept.length, kept.count).expand(k.shape[0], -1)
        for flat, x in ((self._flat_k, k), (self._flat_v, v)):
            flat.index_copy_(1, kept.entries, x.gather(1, found.unsqueeze(2).expand(-1, -1, x.shape[2])))

    def _decode(self, q: torch.Tensor, plan: CpuPlan) -> torch.Tensor:
        return gqa_decode(q, self._k, self._v, plan=plan.decode[self._layer.window], scale=self._layer.scale)


class CpuMla:
    """Prompt rows decompress the latents of the whole prefix into keys and values per head. Decode rows use the
    absorbed form: the key decompression is applied to the query and the value decompression after the attention. So a
    step reads one latent per position instead of a key and a value per head. The mathematics is the same but the bits
    differ; only the kind of a position, prompt or output, selects the form."""

    def __init__(self, layer: MlaLayer) -> None:
        kv_b, nope = layer.kv_b, layer.nope_dim
        # The padded copies below replace kv_b.
        self._layer = replace(layer, kv_b=kv_b.new_empty(0))
        self._latents, self._flat = layer.latents, layer.latents.flatten(0, 1)
        self._kv_b = _columns(kv_b.transpose(1, 2))  # [Hq, R, nope + Dv]
        self._k_absorb = _columns(kv_b[:, :nope])  # [Hq, nope, R]
        self._v_expand = _columns(kv_b[:, nope:].transpose(1, 2))  # [Hq, R, Dv]

    def attend(self, q: torch.Tensor, latent: torch.Tensor, k_rope: torch.Tensor, plan: CpuPlan) -> torch.Tensor:
        q = q.view(-1, self._layer.num_heads, self._layer.nope_dim + self._layer.rope_dim)
        # Rotate the key's rotated part as one more head of the query.
        rotated = torch.cat((q[..., self._layer.nope_dim :], k_rope.unsqueeze(1)), 1)
        if self._layer.rope is not None:
            rotated = rotate.reference(rotated, *plan.rotation(self._layer.rope), interleaved=self._layer.interleaved)
        q_rope, k_rope = rotated[:, : self._layer.num_heads], rotated[:, self._layer.num_heads]
        if self._layer.kv_norm is not None:
            latent = rms_norm.reference(latent, self._layer.kv_norm, self._layer.eps)
        latent = torch.cat((latent, k_rope), 1)
        self._flat.index_copy_(0, plan.entries, latent[: plan.num_tokens])
        return self._attend(q, q_rope, plan).flatten(1)

    def _attend(self, q: torch.Tensor, q_rope: torch.Tensor, plan: CpuPlan) -> torch.Tensor:
        """Return [num_rows, Hq, Dv]."""
        if not plan.segments:
            return pad_rows(self._decode(q, q_rope, plan), plan.num_rows)
        out = q.new_zeros(plan.num_rows, self._layer.num_heads, self._layer.v_dim)
        for part in plan.segments:
            out[part.begin : part.end] = self._prompt(q, q_rope, part)
        if plan.num_decode:
            done = self._decode(q, q_rope, plan)
            out[plan.num_prompt : plan.num_tokens] = done[: plan.num_decode]
        return out

    def _prompt(self, q: torch.Tensor, q_rope: torch.Tensor, part: PromptSegment) -> torch.Tensor:
        """Return [rows of the part, Hq, Dv], from keys and values decompressed per head."""
        nope, heads = self._layer.nope_dim, self._layer.num_heads
        rows = self._latents.index_select(0, part.pages).flatten(0, 1)  # [L, R + Dr], L a multiple of 64
        kv = torch.bmm(rows[:, : self._layer.rank].expand(heads, -1, -1), self._kv_b)
        k_nope, v = kv[..., :nope], kv[..., nope : nope + self._layer.v_dim]
        k_rope = rows[:, self._layer.rank :].expand(heads, -1, -1)
        here = slice(part.begin, part.end)
        queries, keys = torch.cat((q[here, :, :nope], q_rope[here]), -1), torch.cat((k_nope, k_rope), -1)
        if part.kept is not None:
            kept = part.kept
            # All heads choose together, because one latent is the key of all.
            rows_of_window, scale = queries[-kept.window :], self._layer.scale
            found = snapkv(rows_of_window, keys, length=kept.length, scale=scale, budget=kept.count, shared=True)
            self._flat.index_copy_(0, kept.entries, rows.index_select(0, found[0]))
        return attn_prefill(queries, keys, v, start=part.start, scale=self._layer.scale)

    def _decode(self, q: torch.Tensor, q_rope: torch.Tensor, plan: CpuPlan) -> torch.Tensor:
        """Return [padded decode rows, Hq, Dv] in the absorbed form; both products run over padded rows."""
        begin, count = plan.num_prompt, plan.num_decode
        q_nope = q[begin : begin + plan.num_decode_rows, :, : self._layer.nope_dim]
        q_latent = torch.bmm(q_nope.transpose(0, 1), self._k_absorb).transpose(0, 1)
        q_latent, q_rope = q_latent[:count, :, : self._layer.rank], q_rope[begin : begin + count]
        latent = mla_decode(q_latent, q_rope, self._latents, plan=plan.decode[None], scale=self._layer.scale)
        latent = pad_rows(latent, plan.num_decode_rows)
        return torch.bmm(latent.transpose(0, 1), self._v_expand).transpose(0, 1)[..., : self._layer.v_dim]


def _columns(weight: torch.Tensor) -> torch.Tensor:
    """Return weight [X, K, N] with N padded to a multiple of 16 by zeros; a view if nothing is missing. Products of
    fewer columns use kernels of the CPU's library in which a row's bits depend on its place."""
    missing = -weight.shape[2] % 16
    return F.pad(weight, (0, missing)) if missing else weight


def gqa_decode(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *, plan: DecodePlan, scale: float
) -> torch.Tensor:
    """Attention of q [B, Hq, Dk], each row over its own pages -> [B, Hq, Dv] in q's dtype.

    k_cache [Hkv, num_pages, page, Dk] and v_cache [Hkv, num_pages, page, Dv] are finite everywhere; `plan` holds the
    step's lengths, pages and window. Scores and sums are fp32, also for bf16 caches.
    """
    num_rows, num_q_heads, dim = q.shape
    num_kv_heads, dim_v = k_cache.shape[0], v_cache.shape[-1]
    if num_rows == 0:
        return q.new_empty(0, num_q_heads, dim_v)
    heads_first = (q.float() * scale).view(num_rows, num_kv_heads, -1, dim).transpose(0, 1)
    out = attend_blocks(heads_first, k_cache, v_cache, dim_v=dim_v, plan=plan)
    return out.transpose(0, 1).reshape(num_rows, num_q_heads, dim_v).to(q.dtype)


def mla_decode(
    q_latent: torch.Tensor, q_rope: torch.Tensor, latent_cache: torch.Tensor, *, plan: DecodePlan, scale: float
) -> torch.Tensor:
    """Absorbed latent attention of q_latent [B, Hq, R], q_rope [B, Hq, Dr] -> [B, Hq, R] in q's dtype.

    latent_cache [num_pages, page, R + Dr] is finite everywhere. Every query head reads the one latent, whose first R
    values are also the values. Scores and sums are fp32, also for bf16 caches.
    """
    rank = q_latent.shape[2]
    if q_latent.shape[0] == 0:
        return torch.empty_like(q_latent)
    q = torch.cat((q_latent, q_rope), -1).float().mul_(scale)
    out = attend_blocks(q.unsqueeze(0), latent_cache.unsqueeze(0), None, dim_v=rank, plan=plan)
    return out.view(q_latent.shape).to(q_latent.dtype)


def attend_blocks(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor | None, *, dim_v: int, plan: DecodePlan
) -> torch.Tensor:
    """q [X, B, M, Dk] fp32, scaled; caches [X, num_pages, page, D] -> [X, B, M, dim_v] fp32.

    X counts key heads, M the query heads of each. Without `v_cache` the values are the first `dim_v` of the keys. Per
    row: out = sum_b exp(s_b - m) v_b / sum_b sum(exp(s_b - m)). m is the row's maximum over all its blocks, which is
    exact in any order. Both sums run over ascending blocks. Every product is M x 64 whatever the batch, and every
    exponential runs over a multiple of 64 values. So neither the batch nor the pieces affect the bits.
    """
    num_heads, num_rows, m, dim = q.shape
    num_blocks = plan.row_of_block.shape[0]
    step = max(1, _PIECE // (num_heads * BLOCK * dim))
    pieces = [slice(i, min(i + step, num_blocks)) for i in range(0, num_blocks, step)]
    scores = []
    for piece in pieces:
        k = _gather(k_cache, plan, piece)
        rows = q.index_select(1, plan.row_of_block[piece]).view(-1, m, dim)
        s = torch.bmm(rows, k.transpose(1, 2)).view(num_heads, -1, m, BLOCK)
        scores.append(s.add_(plan.mask[piece]))
    tops = [s.amax(-1) for s in scores]
    top = torch.cat(tops, 1) if len(tops) > 1 else tops[0]
    top = top.index_select(1, plan.blocks_of_row).view(num_heads, num_rows, -1, m).amax(2)
    out = q.new_zeros(num_heads, num_rows, m, dim_v)
    total = q.new_zeros(num_heads, num_rows, m)
    for piece, s in zip(pieces, scores, strict=True):
        row = plan.row_of_block[piece]
        p = s.sub_(top.index_select(1, row).unsqueeze(-1)).exp_()
        if v_cache is not None:
            v = _gather(v_cache, plan, piece)
        else:
            v = (k if len(pieces) == 1 else _gather(k_cache, plan, piece))[..., :dim_v]
        o = torch.bmm(p.view(-1, m, BLOCK), v)
        out.index_add_(1, row, o.view(num_heads, -1, m, dim_v))
        total.index_add_(1, row, p.sum(-1))
    return out.div_(total.unsqueeze(-1))


def _gather(cache: torch.Tensor, plan: DecodePlan, piece: slice) -> torch.Tensor:
    """Return the blocks of `piece` of each head, [X * blocks, 64, D] fp32."""
    per_block = BLOCK // plan.page_size
    pages = plan.page_ids[piece.start * per_block : piece.stop * per_block]
    return cache.index_select(1, pages).float().view(-1, BLOCK, cache.shape[-1])
