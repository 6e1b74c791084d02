"""The placement of experts that a fleet starts with."""

from pathlib import Path

from moeyard_worker.config.placement import Placement, partition
from moeyard_worker.models.model_config import ModelConfig

# Four times what 100 layers of 1000 experts need.
MAX_FILE_BYTES = 4 << 20


STRATEGIES = ("linear", "round_robin")


def placement_of(said: str, model: ModelConfig, num_workers: int) -> Placement:
    """Contiguous shards ("linear"), experts dealt in turn ("round_robin"), or what the file of that name says.

    Raises ValueError, in one line, for a file that places nothing, and for more ranks than experts.
    """
    if said in STRATEGIES:
        shards = partition(model.num_experts, num_workers)
        if said == "round_robin":
            shards = tuple(range(rank, model.num_experts, num_workers) for rank in range(num_workers))
        return Placement.of_shards(model.moe_layers, shards)
    try:
        with Path(said).open("rb") as stream:
            text = stream.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise ValueError(f"it has more than {MAX_FILE_BYTES >> 20} MiB")
        return Placement.parse(
            text.decode(), layers=model.moe_layers, num_experts=model.num_experts, num_ranks=num_workers
        )
    except (OSError, ValueError) as error:
        raise ValueError(f"--expert-placement {said}: {getattr(error, 'strerror', None) or error}") from error
