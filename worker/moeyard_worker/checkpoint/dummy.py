"""Weights of chance for a named architecture without a file: norms 1, the embedding N(0, 1), the rest N(0, 0.02).

All-tiny weights would send every token to the same experts and flatter whatever is measured. So would an embedding on
the scale of the rest: what a first layer of chance adds, the mean over the context above all, is larger than such a
row, and 512 different tokens chose 52 of 128 experts behind two layers (all 128 with rows of N(0, 1)). Where the
embedding is the head, too, it stays on that scale: a model would repeat its last token for ever. Seeded by the tensor's
name, so that ranks and runs agree.
"""

from collections.abc import Callable
from zlib import crc32

import torch

from moeyard_kernels.backend import Backend
from moeyard_worker.layers.weights import Weight
from moeyard_worker.models.spec import ModelSpec

_SCALE = 0.02


class DummyWeights:
    """The loader and the `ExpertSource` of a model that exists as a shape only, made on the backend's device."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        backend: Backend,
        dtype: torch.dtype,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self._spec, self._backend, self._dtype, self._progress = spec, backend, dtype, progress

    def load(self, weight: Weight) -> torch.Tensor:
        """The parameter `weight` describes."""
        key = weight.parts[0].key
        dtype = torch.float32 if weight.fp32 else self._dtype
        if key.endswith("norm.weight"):
            out = torch.ones(weight.shape, dtype=dtype, device=self._backend.device)
        elif len(weight.shape) == 1:
            out = torch.zeros(weight.shape, dtype=dtype, device=self._backend.device)
        else:
            # Checkpoints hold in the served dtype what is kept in fp32, and some backends gain from that.
            wide = weight is self._spec.embed and self._spec.lm_head is not None
            out = self._draw(key, weight.shape, 1.0 if wide else _SCALE).to(dtype)
        if self._progress is not None:
            self._progress(out.numel() * out.itemsize)
        return self._backend.matrix(out) if weight.matrix else out

    def tensors(self, layer: int, expert: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(gate [I, H], up [I, H], down [H, I]) of an expert."""
        hidden, width = self._spec.config.hidden_size, self._spec.config.moe_intermediate_size
        every = self._draw(f"{layer}.{expert}", (3, width * hidden))
        return every[0].view(width, hidden), every[1].view(width, hidden), every[2].view(hidden, width)

    def check(self, layer: int, expert: int) -> None:
        """There is no file to change."""

    def _draw(self, key: str, shape: tuple[int, ...], scale: float = _SCALE) -> torch.Tensor:
        device = self._backend.device
        generator = torch.Generator(device).manual_seed(crc32(key.encode()))
        return torch.empty(shape, dtype=self._dtype, device=device).normal_(0, scale, generator=generator)
