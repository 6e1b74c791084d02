"""How many experts a rank keeps in device memory. Pure."""

from typing import Literal


def resolve_slots(
    spec: int | Literal["auto"],
    memory_bytes: int | None,
    *,
    bytes_per_slot: int,
    num_experts: int,
    available_bytes: int,
) -> int:
    """Slots of one rank's expert cache, from 1 to `num_experts` (all layers of the rank's shard together).

    `spec` is the wanted number of slots (more than `num_experts` means all) or "auto"; `memory_bytes` is the memory
    wanted instead. With "auto" and no memory given: all experts if they fit into `available_bytes`, else what fits.
    Raises ValueError, naming both numbers, for less than 1 slot or more memory than there is, and when both are given.
    """
    if spec != "auto":
        if memory_bytes is not None:
            raise ValueError(f"expert slots ({spec}) and expert memory ({_size(memory_bytes)}) exclude each other")
        if spec < 1:
            raise ValueError(
                f"{spec} expert slots: the expert cache needs at least 1, this rank has {num_experts} experts"
            )
        slots = min(spec, num_experts)
        if slots * bytes_per_slot > available_bytes:
            raise ValueError(
                f"{slots} expert slots need {_size(slots * bytes_per_slot)}, but {_size(available_bytes)} "
                f"are available: ask for at most {available_bytes // bytes_per_slot} slots"
            )
        return slots
    if memory_bytes is not None and memory_bytes > available_bytes:
        raise ValueError(f"expert memory {_size(memory_bytes)} is more than the {_size(available_bytes)} available")
    budget = available_bytes if memory_bytes is None else memory_bytes
    slots = min(budget // bytes_per_slot, num_experts)
    if slots < 1:
        kind = "available" if memory_bytes is None else "expert memory"
        raise ValueError(f"one expert needs {_size(bytes_per_slot)}, but {kind} is {_size(budget)}: no slot fits")
    return slots


def _size(num_bytes: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(num_bytes) >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes} bytes"
