"""How KV memory is divided between pages and snapshots of state per sequence. Pure: sizes in, counts out."""

from moeyard_worker.config.engine_config import EngineConfig, format_size
from moeyard_worker.state.spec import StateSpec

# Where a model keeps state per sequence, this share of KV memory is for snapshots of it, up to so many for each of the
# sequences that may run.
SNAPSHOT_SHARE = 0.5
SNAPSHOTS_PER_SEQUENCE = 4


def num_snapshots_of(config: EngineConfig, state: StateSpec, *, whole: int, longest: int) -> int:
    """Snapshots in `whole` bytes of KV memory: of --snapshot-memory, or as many as a share of it holds.

    Where --max-model-len is given, pages for one sequence of that length, `longest` bytes, come before a share.
    Raises ValueError where --snapshot-memory is given in vain.
    """
    if config.snapshot_memory is not None:
        if not state.bytes_per_sequence:
            raise ValueError("--snapshot-memory is for linear attention: here no state is kept per sequence")
        found = config.snapshot_memory // state.bytes_per_sequence
        if not found:
            raise ValueError(
                f"--snapshot-memory {format_size(config.snapshot_memory)} holds no snapshot: each takes "
                f"{format_size(state.bytes_per_sequence)}"
            )
        return found
    if not (state.bytes_per_sequence and config.prefix_caching):
        return 0
    share = int(whole * SNAPSHOT_SHARE)
    if config.max_model_len is not None:
        share = max(0, min(share, whole - longest))
    return min(share // state.bytes_per_sequence, SNAPSHOTS_PER_SEQUENCE * config.max_num_seqs)


def num_pages_of(
    config: EngineConfig, state: StateSpec, *, budget: int, snapshot_bytes: int, max_model_len: int, per_position: int
) -> int:
    """Pages of --kv-memory beside its snapshots, or, without it, as many as can be used and `budget` allows."""
    page_bytes = config.page_size * state.bytes_per_token
    longest = -(-max_model_len // config.page_size)
    if config.kv_memory is not None:
        num_pages = (config.kv_memory - snapshot_bytes) // page_bytes
    else:
        # Pages that make the longest sequence longer also make its attention take more.
        both = page_bytes + config.page_size * per_position
        num_pages = budget // both
        if num_pages > longest:
            num_pages = min(longest + (budget - longest * both) // page_bytes, config.max_num_seqs * longest)
    if num_pages < 2:
        beside, lower = "", ""
        if config.snapshot_memory is not None:
            beside, lower = f" beside {format_size(snapshot_bytes)} of snapshots", " or lower --snapshot-memory"
        raise ValueError(
            f"KV memory holds {max(num_pages, 0)} pages of {format_size(page_bytes)}{beside}, at least 2 are needed; "
            f"raise --kv-memory{lower}"
        )
    if config.max_model_len is not None and num_pages < longest:
        raise ValueError(
            f"--max-model-len {max_model_len} needs {longest} KV pages, memory holds {num_pages}; "
            "raise --kv-memory or lower --max-model-len"
        )
    return num_pages
