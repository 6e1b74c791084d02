"""Which rank owns which experts of a layer: contiguous shards, the same in every MoE layer. Pure."""

import itertools


def partition(num_experts: int, world_size: int) -> tuple[range, ...]:
    """Split experts 0..num_experts-1 into one contiguous shard per rank, the larger shards first (16 on 3: 6, 5, 5).

    Raises ValueError when there is no rank, or when a rank would own no expert.
    """
    if world_size < 1:
        raise ValueError(f"expert parallelism needs at least 1 rank, got {world_size}")
    if world_size > num_experts:
        raise ValueError(f"{world_size} ranks for {num_experts} experts per layer: every rank must own at least one")
    share, larger = divmod(num_experts, world_size)
    starts = [rank * share + min(rank, larger) for rank in range(world_size + 1)]
    return tuple(range(start, stop) for start, stop in itertools.pairwise(starts))
