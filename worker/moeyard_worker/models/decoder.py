"""The decoder that all families share: embedding, layers of norm, attention, norm, MLP or MoE, final norm, head."""

from collections.abc import Callable

import torch

from moeyard_kernels import ops
from moeyard_kernels.cpu.linear import linear
from moeyard_worker.engine.batch import Batch
from moeyard_worker.exchange.base import Exchange
from moeyard_worker.layers.gqa import GqaAttention
from moeyard_worker.layers.mla import MlaAttention
from moeyard_worker.layers.mlp import Mlp
from moeyard_worker.layers.moe import Experts, Moe
from moeyard_worker.layers.rope import RopeTable
from moeyard_worker.layers.weights import Weight
from moeyard_worker.models.attention_config import GqaConfig, MlaConfig
from moeyard_worker.models.model_config import ModelConfig
from moeyard_worker.models.spec import LayerSpec, ModelSpec
from moeyard_worker.state.pools import KvLayer, KvPool, LatentLayer, LatentPool

Load = Callable[[Weight], torch.Tensor]


class DecoderLayer:
    """One layer; `attend` and `transform` are its attention and its MLP, both [num_rows, H] to the same."""

    def __init__(
        self, config: ModelConfig, spec: LayerSpec, *, index: int, load: Load, exchange: Exchange, experts: Experts,
        cache: KvLayer | LatentLayer,
    ) -> None:  # fmt: skip
        self.input_norm, self.post_norm = load(spec.input_norm), load(spec.post_norm)
        self._attention: GqaAttention | MlaAttention
        self._cache = cache
        interleaved = config.rope.interleaved
        weights = {name: load(weight) for name, weight in spec.attention.items()}
        if isinstance(config.attention, MlaConfig):
            self._attention = MlaAttention(config.attention, interleaved=interleaved, **weights)
        else:
            self._attention = GqaAttention(config.attention, eps=config.rms_eps, interleaved=interleaved, **weights)
        self.moe: Moe | None = None
        self._mlp: Mlp | None = None
        weights = {name: load(weight) for name, weight in spec.mlp.items()}
        if spec.experts is None:
            self._mlp = Mlp(**weights)
        else:
            self.moe = Moe(config.gate, layer=index, exchange=exchange, experts=experts, **weights)

    def attend(self, x: torch.Tensor, batch: Batch, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """The attention block of normalised rows."""
        return self._attention.forward(x, batch, cos, sin, cache=self._cache)  # type: ignore[arg-type]

    def transform(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """The MLP or MoE block of normalised rows."""
        if self.moe is not None:
            return self.moe.forward(x, batch)
        assert self._mlp is not None
        return self._mlp.forward(x)


class Decoder:
    """A model of one of the supported families, holding its dense weights and its state pool."""

    def __init__(
        self, spec: ModelSpec, *, load: Load, exchange: Exchange, experts: Experts, pool: KvPool | LatentPool
    ) -> None:
        config = spec.config
        self._eps = config.rms_eps
        self._embed = load(spec.embed)
        self._layers = [
            DecoderLayer(config, layer, index=i, load=load, exchange=exchange, experts=experts, cache=pool.layer(i))
            for i, layer in enumerate(spec.layers)
        ]
        self._norm = load(spec.norm)
        self._lm_head = self._embed if spec.lm_head is None else load(spec.lm_head)
        self._rope = RopeTable(config.rope, max_position=config.max_position)

    def forward(self, batch: Batch) -> torch.Tensor:
        """fp32 logits [padded num_sampled, V] of the batch's sample rows."""
        if not batch.num_tokens:
            return self._idle(batch)
        cos, sin = self._rope.lookup(batch.positions)
        x = residual = self._embed.index_select(0, batch.token_ids)
        first = self._layers[0]
        x = ops.rms_norm(x, first.input_norm, self._eps)
        for layer in self._layers:
            if layer is not first:
                x, residual = ops.add_rms_norm(x, residual, layer.input_norm, self._eps)
            x = layer.attend(x, batch, cos, sin)
            x, residual = ops.add_rms_norm(x, residual, layer.post_norm, self._eps)
            x = layer.transform(x, batch)
        if not batch.num_sampled:
            return x.new_empty(0, self._lm_head.shape[0], dtype=torch.float32)
        x, residual = x.index_select(0, batch.sample_rows), residual.index_select(0, batch.sample_rows)
        x, _ = ops.add_rms_norm(x, residual, self._norm, self._eps)
        return linear(x, self._lm_head).float()

    def _idle(self, batch: Batch) -> torch.Tensor:
        """A step without rows: only the exchanges, which every rank takes part in."""
        x = self._embed.new_empty(0, self._embed.shape[1])
        for layer in self._layers:
            if layer.moe is not None:
                layer.moe.forward(x, batch)
        return x.new_empty(0, self._lm_head.shape[0], dtype=torch.float32)


def make_pool(
    config: ModelConfig, *, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device | None = None
) -> KvPool | LatentPool:
    """The state pool of all layers: `num_pages * page_size * config.state_spec(...).bytes_per_token` bytes."""
    sizes = {"num_layers": config.num_layers, "num_pages": num_pages, "page_size": page_size}
    if isinstance(config.attention, GqaConfig):
        return KvPool(config.attention, **sizes, dtype=dtype, device=device)
    return LatentPool(config.attention, **sizes, dtype=dtype, device=device)
