"""How many experts a rank keeps in device memory. Pure."""

from moeyard_worker.config.engine_config import format_size


def resolve_slots(
    *,
    slots: int | None,
    memory_bytes: int | None,
    expert_bytes: int,
    num_experts: int,
    available_bytes: int,
) -> int:
    """Slots of one rank's expert cache, from 1 to `num_experts` (all layers of the rank's shard together).

    `slots` is the wanted number (more than `num_experts` means all) and `memory_bytes` the memory wanted instead; with
    neither, all experts if they fit into `available_bytes`, else what fits. `expert_bytes` is one slot.
    Raises ValueError, naming both numbers, for less than 1 slot or more memory than there is, and when both are given.
    """
    if slots is not None and memory_bytes is not None:
        raise ValueError(f"--expert-slots {slots} and --expert-memory {format_size(memory_bytes)} exclude each other")
    if slots is not None:
        return _checked(min(slots, num_experts), expert_bytes=expert_bytes, available_bytes=available_bytes)
    if memory_bytes is not None and memory_bytes > available_bytes:
        raise ValueError(
            f"--expert-memory {format_size(memory_bytes)} is more than the {format_size(available_bytes)} left on this "
            "worker"
        )
    budget = available_bytes if memory_bytes is None else memory_bytes
    if budget < expert_bytes:
        kind = "this worker has left" if memory_bytes is None else "--expert-memory gives it"
        raise ValueError(
            f"the expert cache needs at least one expert, {format_size(expert_bytes)}, but {kind} "
            f"{format_size(max(budget, 0))}"
        )
    return min(budget // expert_bytes, num_experts)


def _checked(slots: int, *, expert_bytes: int, available_bytes: int) -> int:
    if slots < 1:
        raise ValueError(f"--expert-slots {slots}: the expert cache needs at least 1")
    if slots * expert_bytes > available_bytes:
        fits = max(available_bytes, 0)
        raise ValueError(
            f"{slots} expert slots need {format_size(slots * expert_bytes)}, but this worker has {format_size(fits)} "
            f"left, enough for {fits // expert_bytes}; lower --expert-slots"
        )
    return slots
