"""How a rank's memory is divided between weights, KV pages and expert slots. Pure: sizes in, sizes out (bytes)."""

from dataclasses import dataclass

from moeyard_worker.cache.spec import StateSpec
from moeyard_worker.config import EngineConfig, format_size
from moeyard_worker.experts.slots import resolve_slots

# Without --kv-memory, KV pages take at most this share of what the dense weights leave free.
AUTO_KV_SHARE = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What fits: pages of KV, expert slots, and the longest sequence that the pages can hold."""

    num_pages: int
    expert_slots: int
    max_model_len: int


def plan_memory(
    *,
    config: EngineConfig,
    state: StateSpec,
    max_position: int,
    dense_bytes: int,
    expert_bytes: int,
    num_local_experts: int,
    available: int,
) -> MemoryPlan:
    """Divide `available` bytes of one rank. `expert_bytes` is one expert in one layer, `num_local_experts` counts
    (layer, expert) pairs of this rank.

    Raises ValueError with both numbers and the flag to change when something does not fit.
    """
    free = available - dense_bytes
    if free <= 0:
        raise ValueError(
            f"the dense weights need {format_size(dense_bytes)}, this worker has {format_size(available)} of free "
            "memory; use fewer workers on this host or a machine with more memory"
        )
    page_bytes = config.page_size * state.bytes_per_token
    max_model_len = config.max_model_len or max_position
    if max_model_len > max_position:
        raise ValueError(f"--max-model-len {max_model_len} exceeds the model's {max_position}")
    pages_per_sequence = -(-max_model_len // config.page_size)
    if config.kv_memory is None:
        num_pages = min(config.max_num_seqs * pages_per_sequence, int(free * AUTO_KV_SHARE) // page_bytes)
    else:
        if config.kv_memory > free:
            raise ValueError(
                f"--kv-memory {format_size(config.kv_memory)} does not fit: this worker has {format_size(free)} of "
                "free memory beside its dense weights"
            )
        num_pages = config.kv_memory // page_bytes
    if num_pages < 2:
        raise ValueError(
            f"KV memory holds {num_pages} pages of {format_size(page_bytes)}, at least 2 are needed; raise --kv-memory"
        )
    if config.max_model_len is not None and num_pages < pages_per_sequence:
        raise ValueError(
            f"--max-model-len {max_model_len} needs {pages_per_sequence} KV pages, memory holds {num_pages}; "
            "raise --kv-memory or lower --max-model-len"
        )
    slots = resolve_slots(
        slots=config.expert_slots,
        memory_bytes=config.expert_memory,
        expert_bytes=expert_bytes,
        num_experts=num_local_experts,
        available_bytes=free - num_pages * page_bytes,
    )
    return MemoryPlan(
        num_pages=num_pages, expert_slots=slots, max_model_len=min(max_model_len, num_pages * config.page_size)
    )
