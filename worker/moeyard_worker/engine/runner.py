"""Runs steps on one rank: a `Step` in, logits of its sampled rows out."""

from collections.abc import Callable

import torch

from moeyard_kernels.backend import Backend
from moeyard_worker.checkpoint.check import CheckedCheckpoint
from moeyard_worker.checkpoint.loading import DenseLoader
from moeyard_worker.exchange.base import Exchange
from moeyard_worker.layers.moe import Experts
from moeyard_worker.models.decoder import Decoder
from moeyard_worker.scheduling.step import Step
from moeyard_worker.state.pools import allocate


class Runner:
    """A model with its dense weights and state on one rank.

    `experts` computes the rows that the exchange brings; both are shared with nobody. `progress` is called with the
    bytes of each block of dense weights read (`checkpoint.dense_bytes()` in all). Raises CheckpointError for a file
    that shrank.
    """

    def __init__(
        self,
        checkpoint: CheckedCheckpoint,
        *,
        backend: Backend,
        exchange: Exchange,
        experts: Experts,
        dtype: torch.dtype,
        num_pages: int,
        num_slots: int = 0,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self.config = config = checkpoint.spec.config
        self.page_size = page_size = backend.page_size
        self._backend = backend
        loader = DenseLoader(checkpoint, backend=backend, dtype=dtype, progress=progress)

        def arrays(layer: int) -> dict[str, torch.Tensor]:
            state = config.attention[layer].state()
            return allocate(
                state, num_pages=num_pages, page_size=page_size, num_slots=num_slots, dtype=dtype, device=backend.device
            )

        with torch.inference_mode():
            self._model = Decoder(
                checkpoint.spec, backend=backend, load=loader.load, exchange=exchange, experts=experts, allocate=arrays
            )

    @torch.inference_mode()
    def forward(self, step: Step) -> torch.Tensor:
        """fp32 logits [num_sampled padded, V]; row i belongs to step.sample_rows[i], the padding is garbage.

        An empty step returns no row but takes part in every exchange. Raises ExchangeError when a peer is lost.
        """
        return self._model.forward(self._backend.plan(step))
