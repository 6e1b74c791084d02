"""Random weights for a named architecture. They choose experts as variedly as a trained model does.

Norms are 1 and most other weights are N(0, 0.02). The state of linear attention decays within 1 to 200 positions, by
head. The embedding is N(0, 1), and projections into the residual are smaller by sqrt(2 layers), as in GPT-2. With one
scale for all weights, the results of layers outweigh the differences between tokens. Then 8192 random tokens chose only
36 of 128 experts per layer of Qwen3-30B-A3B, which flattered every prompt figure. A tied embedding keeps the scale
0.02, because otherwise the model repeats its last token for ever. Seeds derive from tensor names, so ranks and runs
agree.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any
from zlib import crc32

import torch

from moeyard_kernels.backend import Backend
from moeyard_kernels.types.matrix import ExpertViews, Matrix, tile_
from moeyard_worker.checkpoint.formats.quantized import QuantizedFormat
from moeyard_worker.checkpoint.quantizing import quantize
from moeyard_worker.layers.weights import Weight
from moeyard_worker.models.spec import ModelSpec

_SCALE = 0.02
_INTO_RESIDUAL = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "wo_b.weight", "w2.weight")
# A_log: a state decays at the rate exp(A_log) * softplus(a + dt_bias), and softplus of about 0 is 0.7.
_SLOW, _FAST = math.log(0.007), math.log(1.4)


class DummyWeights:
    """Random plain weights of the model `spec`, drawn on the backend's device. It replaces `CheckpointWeights`."""

    read_rate = None

    def __init__(
        self,
        spec: ModelSpec,
        *,
        backend: Backend,
        dtype: torch.dtype,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self._spec, self._backend, self._dtype, self._progress = spec, backend, dtype, progress
        weights = spec.config.weights
        self._exponents = isinstance(weights, QuantizedFormat) and weights.scales == "ue8m0"
        self._residual_scale = _SCALE / math.sqrt(2 * spec.config.num_layers)

    def load(self, weight: Weight) -> Any:
        """Return the parameter that `weight` describes."""
        key = weight.parts[0].key
        dtype = torch.float32 if weight.fp32 else self._dtype
        # "model.norm.weight", "q_norm.weight", "pre_fc_norm_hidden.weight".
        if key.endswith(".weight") and "norm" in key.split(".")[-2]:
            out = torch.ones(weight.shape, dtype=dtype, device=self._backend.device)
        elif weight.parts[0].ids:
            out = self._draw_ids(key, weight.shape)
        elif key.endswith("_scale"):
            out = torch.ones(weight.shape, dtype=dtype, device=self._backend.device)
        elif key.endswith("A_log"):
            heads = weight.shape[0]
            out = torch.linspace(_SLOW, _FAST, heads, dtype=dtype, device=self._backend.device)
        elif len(weight.shape) == 1:
            out = torch.zeros(weight.shape, dtype=dtype, device=self._backend.device)
        else:
            # Drawn in the served dtype even if kept in fp32, as checkpoints store it. Some backends profit from that.
            scale = self._residual_scale if key.endswith(_INTO_RESIDUAL) else _SCALE
            if weight is self._spec.embed and self._spec.lm_head is not None:
                scale = 1.0
            out = self._draw(key, weight.shape, scale).to(dtype)
        found, form = Matrix.plain(out), self._spec.form(weight, str(self._dtype).removeprefix("torch."))
        if form.tiled:
            found = Matrix.empty(form, weight.rows, weight.columns, self._backend.device)
            tile_(found, quantize(out, form, exponents=self._exponents))
        if self._progress is not None:
            self._progress(sum(array.nbytes for array in found.arrays))
        return self._backend.matrix(found) if weight.matrix else out

    def _draw_ids(self, key: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a table of distinct experts per row, int32."""
        device = self._backend.device
        generator = torch.Generator(device).manual_seed(crc32(key.encode()))
        order = torch.rand(shape[0], self._spec.config.num_experts, generator=generator, device=device).argsort(1)
        return order[:, : shape[1]].to(torch.int32)

    def expect(self, experts: Iterable[tuple[int, int]]) -> None:
        """Do nothing: there are no files."""

    def fill(self, layer: int, expert: int, out: ExpertViews) -> None:
        """Write an expert into `out`."""
        hidden, width = self._spec.config.hidden_size, self._spec.config.moe_intermediate_size
        gate, up, down = self._draw(f"{layer}.{expert}", (3, width * hidden))
        down *= self._residual_scale / _SCALE
        matrices = ((out.gate, gate, width), (out.up, up, width), (out.down, down, hidden))
        for target, values, rows in matrices:
            if target.form.tiled:
                tile_(target, quantize(values.view(rows, -1), target.form, exponents=self._exponents))
            else:
                target.data.copy_(values.view(rows, -1))

    def _draw(self, key: str, shape: tuple[int, ...], scale: float = _SCALE) -> torch.Tensor:
        device = self._backend.device
        generator = torch.Generator(device).manual_seed(crc32(key.encode()))
        return torch.empty(shape, dtype=self._dtype, device=device).normal_(0, scale, generator=generator)
