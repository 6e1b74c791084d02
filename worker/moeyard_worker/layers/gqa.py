"""Grouped-query attention over paged keys and values."""

import torch

from moeyard_kernels import ops
from moeyard_kernels.cpu.attn_prefill import attn_prefill
from moeyard_kernels.cpu.gqa_decode import gqa_decode
from moeyard_kernels.cpu.linear import linear
from moeyard_worker.engine.batch import Batch, pad_heads
from moeyard_worker.models.attention_config import GqaConfig
from moeyard_worker.state.pools import KvLayer


class GqaAttention:
    """qkv [(Hq + 2 Hkv) D, H] is one product; q_norm and k_norm [D] normalise each head before the rotation."""

    def __init__(
        self,
        config: GqaConfig,
        *,
        eps: float,
        interleaved: bool,
        qkv: torch.Tensor,
        o: torch.Tensor,
        qkv_bias: torch.Tensor | None = None,
        o_bias: torch.Tensor | None = None,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
    ) -> None:
        self._config, self._eps, self._interleaved = config, eps, interleaved
        self._qkv, self._qkv_bias, self._o, self._o_bias = qkv, qkv_bias, o, o_bias
        self._qk_norm: torch.Tensor | None = None
        if q_norm is not None and k_norm is not None:
            # One pass over all heads: a norm of weight one, then each head's own weight; a factor of one is exact.
            heads = (q_norm.expand(config.num_heads, -1), k_norm.expand(config.num_kv_heads, -1))
            self._qk_norm, self._one = torch.cat(heads), torch.ones_like(q_norm)

    def forward(
        self, x: torch.Tensor, batch: Batch, cos: torch.Tensor, sin: torch.Tensor, *, cache: KvLayer
    ) -> torch.Tensor:
        """x [num_rows, H] -> [num_rows, H]. The step's keys and values are in the cache before anything attends."""
        config = self._config
        num_q, num_qk = config.num_heads, config.num_heads + config.num_kv_heads
        qkv = linear(x, self._qkv, self._qkv_bias).view(x.shape[0], -1, config.head_dim)
        qk = qkv[:, :num_qk]
        if self._qk_norm is not None:
            qk = ops.rms_norm(qk, self._one, self._eps).mul_(self._qk_norm)
        qk = ops.rope(qk, cos, sin, interleaved=self._interleaved)
        cache.write(batch.slots, qk[: batch.num_tokens, num_q:], qkv[: batch.num_tokens, num_qk:])
        out = self._attend(qk[:, :num_q], batch, cache)
        return linear(out.flatten(1), self._o, self._o_bias)

    def _attend(self, q: torch.Tensor, batch: Batch, cache: KvLayer) -> torch.Tensor:
        """q [num_rows, Hq, D] -> the same shape, zero in the padding."""
        config = self._config
        if not batch.segments:
            done = gqa_decode(q[: batch.num_decode], cache.k, cache.v, plan=batch.plan, scale=config.scale)
            return pad_heads(done, batch.num_rows)
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        for part in batch.segments:
            k, v = cache.read(part.pages)
            out[part.begin : part.end] = attn_prefill(
                q[part.begin : part.end], k, v, start=part.start, scale=config.scale, window=config.sliding_window
            )
        if batch.num_decode:
            rows = slice(batch.num_prefill, batch.num_tokens)
            out[rows] = gqa_decode(q[rows], cache.k, cache.v, plan=batch.plan, scale=config.scale)
        return out
