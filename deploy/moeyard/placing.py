"""The placement of experts that a fleet starts with."""

from pathlib import Path

from moeyard_worker.config.placement import Placement
from moeyard_worker.experts.placement import partition
from moeyard_worker.models.model_config import ModelConfig

# Four times what 100 layers of 1000 experts need.
MAX_FILE_BYTES = 4 << 20


def placement_of(file: str | None, model: ModelConfig, num_workers: int) -> Placement:
    """What `file` says, or contiguous shards. Raises ValueError, in one line, for a file that places nothing."""
    if file is None:
        return Placement.of_shards(model.moe_layers, partition(model.num_experts, num_workers))
    try:
        with Path(file).open("rb") as stream:
            text = stream.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise ValueError(f"it has more than {MAX_FILE_BYTES >> 20} MiB")
        return Placement.parse(
            text.decode(), layers=model.moe_layers, num_experts=model.num_experts, num_ranks=num_workers
        )
    except (OSError, ValueError) as error:
        raise ValueError(f"--expert-placement {file}: {getattr(error, 'strerror', None) or error}") from error
