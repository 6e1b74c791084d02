"""The number of expert slots of a rank. Pure."""

from moeyard_worker.config.engine_config import format_size


def slot_bytes(slots: int, *, expert_bytes: int, num_experts: int, stream_slots: int) -> int:
    """Return the memory of `slots` slots, with `stream_slots` more if they do not hold all experts."""
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
    """Return the number of slots of one rank's expert cache, from 1 to `num_experts` (of all layers together).

    slots: the wanted number; more than `num_experts` means all.
    memory_bytes: the wanted memory instead. With neither, all experts get slots, or as many as fit.
    expert_bytes: bytes of one slot.
    available_bytes: free memory.
    stream_slots: number of further slots for prompts if not all experts have slots.

    Raises ValueError with both numbers for less than 1 slot or too much memory, and if both wishes are given.
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
