"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) over a paged cache of latents.

Prompt rows decompress the latents of the whole prefix into keys and values per head. Decode rows use the absorbed form:
the key decompression moves to the query and the value decompression behind the attention, so that a step reads one
latent per position and not a key and a value per head. Same mathematics, other bits: which form a position takes
depends on whether it is prompt or output, and on nothing else.
"""

import torch
import torch.nn.functional as F

from moeyard_kernels import ops
from moeyard_kernels.cpu.attn_prefill import attn_prefill
from moeyard_kernels.cpu.linear import linear
from moeyard_kernels.cpu.mla_decode import mla_decode
from moeyard_worker.engine.batch import Batch, PromptSegment, pad_heads
from moeyard_worker.models.attention_config import MlaConfig
from moeyard_worker.state.pools import LatentLayer


class MlaAttention:
    """q_kv_a [Rq + R + Dr, H] is the query's and the latent's down projection in one product.

    Without a query rank its first rows are the whole query projection and q_norm, q_b are absent. kv_b
    [Hq, nope + Dv, R] decompresses a latent into each head's key (without its rotated part) and value.
    """

    def __init__(
        self,
        config: MlaConfig,
        *,
        interleaved: bool,
        q_kv_a: torch.Tensor,
        kv_norm: torch.Tensor,
        kv_b: torch.Tensor,
        o: torch.Tensor,
        q_norm: torch.Tensor | None = None,
        q_b: torch.Tensor | None = None,
        q_kv_a_bias: torch.Tensor | None = None,
        o_bias: torch.Tensor | None = None,
    ) -> None:
        self._config, self._interleaved = config, interleaved
        self._q_kv_a, self._q_kv_a_bias = q_kv_a, q_kv_a_bias
        self._q_norm, self._q_b, self._kv_norm = q_norm, q_b, kv_norm
        self._o, self._o_bias = o, o_bias
        self._kv_b = _columns(kv_b.transpose(1, 2))  # [Hq, R, nope + Dv]
        self._k_absorb = _columns(kv_b[:, : config.nope_dim])  # [Hq, nope, R]
        self._v_expand = _columns(kv_b[:, config.nope_dim :].transpose(1, 2))  # [Hq, R, Dv]
        self._num_first = q_kv_a.shape[0] - config.latent_dim

    def forward(
        self, x: torch.Tensor, batch: Batch, cos: torch.Tensor, sin: torch.Tensor, *, cache: LatentLayer
    ) -> torch.Tensor:
        """x [num_rows, H] -> [num_rows, H]. The step's latents are in the cache before anything attends."""
        config = self._config
        rows = linear(x, self._q_kv_a, self._q_kv_a_bias)
        first, latent, k_rope = torch.split_with_sizes(rows, (self._num_first, config.kv_lora_rank, config.rope_dim), 1)
        if self._q_norm is not None and self._q_b is not None:
            first = linear(ops.rms_norm(first, self._q_norm, config.norm_eps), self._q_b)
        q = first.view(-1, config.num_heads, config.qk_dim)
        # The key's rotated part rotates as one more head of the query.
        rotated = torch.cat((q[..., config.nope_dim :], k_rope.unsqueeze(1)), 1)
        rotated = ops.rope(rotated, cos, sin, interleaved=self._interleaved)
        q_rope, k_rope = rotated[:, : config.num_heads], rotated[:, config.num_heads]
        latent = torch.cat((ops.rms_norm(latent, self._kv_norm, config.norm_eps), k_rope), 1)
        cache.write(batch.slots, latent[: batch.num_tokens])

        out = self._attend(q, q_rope, batch, cache)
        return linear(out.flatten(1), self._o, self._o_bias)

    def _attend(self, q: torch.Tensor, q_rope: torch.Tensor, batch: Batch, cache: LatentLayer) -> torch.Tensor:
        """[num_rows, Hq, Dv]; what the padding holds is finite."""
        if not batch.segments:
            return pad_heads(self._decode(q, q_rope, batch, cache), batch.num_rows)
        out = q.new_zeros(batch.num_rows, self._config.num_heads, self._config.v_dim)
        for part in batch.segments:
            out[part.begin : part.end] = self._prompt(q, q_rope, part, cache)
        if batch.num_decode:
            done = self._decode(q, q_rope, batch, cache)
            out[batch.num_prefill : batch.num_tokens] = done[: batch.num_decode]
        return out

    def _prompt(self, q: torch.Tensor, q_rope: torch.Tensor, part: PromptSegment, cache: LatentLayer) -> torch.Tensor:
        """[rows of the part, Hq, Dv] from keys and values decompressed per head."""
        config = self._config
        rows = cache.read(part.pages)  # [L, R + Dr], L a multiple of 64
        latent = rows[:, : config.kv_lora_rank].expand(config.num_heads, -1, -1)
        kv = torch.bmm(latent, self._kv_b)
        k_nope, v = kv[..., : config.nope_dim], kv[..., config.nope_dim : config.nope_dim + config.v_dim]
        k_rope = rows[:, config.kv_lora_rank :].expand(config.num_heads, -1, -1)
        here = slice(part.begin, part.end)
        return attn_prefill(
            torch.cat((q[here, :, : config.nope_dim], q_rope[here]), -1),
            torch.cat((k_nope, k_rope), -1),
            v,
            start=part.start,
            scale=config.scale,
        )

    def _decode(self, q: torch.Tensor, q_rope: torch.Tensor, batch: Batch, cache: LatentLayer) -> torch.Tensor:
        """[padded decode rows, Hq, Dv] in the absorbed form; both products run over padded rows."""
        config, begin = self._config, batch.num_prefill
        q_nope = q[begin : begin + batch.num_decode_rows, :, : config.nope_dim]
        q_latent = torch.bmm(q_nope.transpose(0, 1), self._k_absorb).transpose(0, 1)
        latent = mla_decode(
            q_latent[: batch.num_decode, :, : config.kv_lora_rank],
            q_rope[begin : batch.num_tokens],
            cache.rows,
            plan=batch.plan,
            scale=config.scale,
        )
        latent = pad_heads(latent, batch.num_decode_rows)
        return torch.bmm(latent.transpose(0, 1), self._v_expand).transpose(0, 1)[..., : config.v_dim]


def _columns(weight: torch.Tensor) -> torch.Tensor:
    """weight [X, K, N] with N padded to a multiple of 16 by zeros: products of fewer columns take paths of the CPU's
    library on which a row's bits depend on its place. A view where nothing is missing."""
    missing = -weight.shape[2] % 16
    return F.pad(weight, (0, missing)) if missing else weight
