"""Where a rank's weights come from: a checkpoint's files, through pinned memory to a GPU, or chance."""

from collections.abc import Callable

import torch

from moeyard_kernels.backend import Backend
from moeyard_worker.checkpoint.check import CheckedCheckpoint, DummyCheckpoint
from moeyard_worker.checkpoint.dummy import DummyWeights
from moeyard_worker.checkpoint.loading import DenseLoader, MappedExperts
from moeyard_worker.checkpoint.staging import StagedExperts, Staging
from moeyard_worker.experts.base import ExpertSource
from moeyard_worker.models.decoder import Load


def open_weights(
    checkpoint: CheckedCheckpoint | DummyCheckpoint,
    backend: Backend,
    dtype: torch.dtype,
    staging: Staging | None,
    progress: Callable[[int], None],
) -> tuple[Load, ExpertSource]:
    """What gives the dense weights, and what the experts. `progress` is told the bytes of every block."""
    if isinstance(checkpoint, DummyCheckpoint):
        drawn = DummyWeights(checkpoint.spec, backend=backend, dtype=dtype, progress=progress)
        return drawn.load, drawn
    loader = DenseLoader(checkpoint, backend=backend, dtype=dtype, progress=progress, staging=staging)
    return loader.load, MappedExperts(checkpoint) if staging is None else StagedExperts(checkpoint, staging)
