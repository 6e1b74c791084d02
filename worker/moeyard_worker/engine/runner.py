"""Runs steps on one rank: a `Step` in, logits of its sampled rows out."""

from collections.abc import Callable

import torch

from moeyard_kernels.ops import BLOCK
from moeyard_worker.checkpoint.check import CheckedCheckpoint
from moeyard_worker.checkpoint.loading import DenseLoader
from moeyard_worker.engine.batch import build_batch
from moeyard_worker.exchange.base import Exchange
from moeyard_worker.layers.moe import Experts
from moeyard_worker.models.attention_config import GqaConfig
from moeyard_worker.models.decoder import Decoder, make_pool
from moeyard_worker.scheduling.step import Step


class Runner:
    """A model with its dense weights and state pages on one rank.

    `experts` computes the rows that the exchange brings; both are shared with nobody. `progress` is called with the
    bytes of each block of dense weights read (`checkpoint.dense_bytes()` in all). `page_size` must divide 64, the
    attention's block. Raises ValueError for a page size that does not fit, CheckpointError for a file that shrank.
    """

    def __init__(
        self,
        checkpoint: CheckedCheckpoint,
        *,
        exchange: Exchange,
        experts: Experts,
        dtype: torch.dtype,
        num_pages: int,
        page_size: int,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        if page_size < 1 or BLOCK % page_size:
            raise ValueError(f"page_size {page_size} does not divide {BLOCK}")
        config = checkpoint.spec.config
        self.config = config
        self.page_size = page_size
        self._window = config.attention.sliding_window if isinstance(config.attention, GqaConfig) else None
        loader = DenseLoader(checkpoint, dtype=dtype, progress=progress)
        with torch.inference_mode():
            self._model = Decoder(
                checkpoint.spec,
                load=loader.load,
                exchange=exchange,
                experts=experts,
                pool=make_pool(config, num_pages=num_pages, page_size=page_size, dtype=dtype),
            )

    @torch.inference_mode()
    def forward(self, step: Step) -> torch.Tensor:
        """fp32 logits [num_sampled padded, V]; row i is that of step.sample_rows[i], the padding is garbage.

        An empty step returns no row but takes part in every exchange. Raises ExchangeError when a peer is lost.
        """
        return self._model.forward(build_batch(step, page_size=self.page_size, window=self._window))
