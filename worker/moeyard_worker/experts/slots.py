"""How many experts a rank keeps in device memory. Pure."""

from moeyard_worker.config.engine_config import format_size


def slot_bytes(slots: int, *, expert_bytes: int, num_experts: int, stream_slots: int) -> int:
    """Memory of so many slots: `stream_slots` more if they do not hold all experts."""
    return expert_bytes * (slots if slots >= num_experts else slots + stream_slots)


def resolve_slots(
    *,
    slots: int | None,
    memory_bytes: int | None,
    expert_bytes: int,
    num_experts: int,
    available_bytes: int,
    stream_slots: int,
) -> int:
    """Slots of one rank's expert cache, from 1 to `num_experts` (all layers of the rank's shard together).

    `slots` is the wanted number (more than `num_experts` means all) and `memory_bytes` the memory wanted instead; with
    neither, all experts if they fit into `available_bytes`, else what fits. `expert_bytes` is one slot; where not all
    experts have theirs, `stream_slots` more are needed for prompts.
    Raises ValueError, naming both numbers, for less than 1 slot or more memory than there is, and when both are given.
    """
    if slots is not None and memory_bytes is not None:
        raise ValueError(f"--expert-slots {slots} and --expert-memory {format_size(memory_bytes)} exclude each other")
    if memory_bytes is not None and memory_bytes > available_bytes:
        raise ValueError(
            f"--expert-memory {format_size(memory_bytes)} is more than the {format_size(available_bytes)} left on this "
            "worker"
        )
    budget = available_bytes if memory_bytes is None else memory_bytes
    fits = budget // expert_bytes
    if fits < num_experts:
        fits = max(0, fits - stream_slots)
    if slots is not None:
        return _checked(
            min(slots, num_experts),
            fits=min(fits, num_experts),
            expert_bytes=expert_bytes,
            num_experts=num_experts,
            available_bytes=available_bytes,
            stream_slots=stream_slots,
        )
    if fits < 1:
        kind = "this worker has left" if memory_bytes is None else "--expert-memory gives it"
        raise ValueError(
            f"the expert cache needs at least one expert of {format_size(expert_bytes)} and {stream_slots} more for "
            f"prompts, {format_size((1 + stream_slots) * expert_bytes)}, but {kind} {format_size(max(budget, 0))}"
        )
    return min(fits, num_experts)


def _checked(
    slots: int, *, fits: int, expert_bytes: int, num_experts: int, available_bytes: int, stream_slots: int
) -> int:
    if slots < 1:
        raise ValueError(f"--expert-slots {slots}: the expert cache needs at least 1")
    needed = slot_bytes(slots, expert_bytes=expert_bytes, num_experts=num_experts, stream_slots=stream_slots)
    if needed > available_bytes:
        beside = f" and {stream_slots} more for prompts" if slots < num_experts else ""
        raise ValueError(
            f"{slots} expert slots{beside} need {format_size(needed)}, but this worker has "
            f"{format_size(max(available_bytes, 0))} left, enough for {fits}; lower --expert-slots"
        )
    return slots
