"""The door to a cache of experts whose residency the GPU decides itself. See `ops`."""

import torch

from moeyard_kernels.common.checks import check_devices, show
from moeyard_kernels.door.load import kernel
from moeyard_kernels.types.expert_residency import NUM_COUNTS, ResidencyState
from moeyard_kernels.types.fetch_window import FetchWindow


def cache_access(
    ids: torch.Tensor, state: ResidencyState, *, layer: int, num_needed: int | None = None
) -> torch.Tensor:
    """Make the experts resident that decode rows of one layer need -> tables [1 + waves, E] int32 of slots.

    ids [T, K] (int64 or int32) count from 0 within the layer, -1 is masked; at most `num_needed` are distinct, if the
    caller knows. Row 0 of the result names the slots of the
    experts that have one, row 1 + w those of the experts that are to be copied for wave w; -1 for all others. What row
    w > 1 takes may be in use until the wave before is computed. Hits and the misses of wave 0 are at most half of the
    slots, unless there are more hits; later waves have at most half, and so there are `max_waves`.

    Changes `state` as the policy does that it names (`moeyard_worker.experts`): the same victims, the same slots. No
    host sync; nothing is changed where no id is left. Ids must lie in [-1, E): checked on a CPU, and on a GPU within
    `launch.checked()`.
    """
    if ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"cache_access: ids must be int64 or int32 [T, K], got {show(ids)}")
    if not 0 <= layer < state.slot_of.shape[0]:
        raise ValueError(f"cache_access: layer {layer} of {state.slot_of.shape[0]}")
    if not ids.numel() or (num_needed is not None and num_needed < 1):
        raise ValueError(f"cache_access: nothing is asked for, ids {show(ids)}, num_needed {num_needed}")
    check_devices("cache_access", ids=ids, slot_of=state.slot_of)
    return kernel("experts.cache_access", ids).cache_access(ids, state, layer=layer, num_needed=num_needed)


def gather_experts(
    store: torch.Tensor,
    table: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    layer: int,
    counts: torch.Tensor | None = None,
) -> None:
    """Copy the experts of one layer that have a slot in `table` [E] int32 (-1: none) from host memory into it.

    store [L E, 2 I H + H I] holds an expert per row, gate_up's values before down's; on a GPU it is pinned memory of
    the host. gate_up [S, 2 I, H] and down [S, H, I] are the slots, in the same dtype (fp32 or bf16). `counts`: of a
    `ResidencyState`, to which the time that this takes is added. No host sync: the launch leaves at once where the
    table is empty.
    """
    _check("gather_experts", store, table, gate_up, down, layer, counts)
    check_devices("gather_experts", table=table, gate_up=gate_up, down=down, counts=counts)
    kernel("experts.gather_experts", table).gather_experts(store, table, gate_up, down, layer=layer, counts=counts)


def fetch_experts(
    store: torch.Tensor,
    table: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    window: FetchWindow,
    *,
    layer: int,
    counts: torch.Tensor | None = None,
    tell: bool = True,
    read: bool = True,
    move: bool = True,
) -> None:
    """`gather_experts` of all ranks of a host, over the links of all: who misses little reads for who misses much.

    Between `dispatch_rows` and `combine_rows` of an exchange, once and by all ranks or none. As of `gather_experts` are
    the arguments and what they hold when the launch has ended; `counts` counts also the bytes that were read for peers
    and by them. A call tells peers what is missed, reads, and moves what peers have read, unless it is told to do some
    of that; on a CPU nothing comes while it waits. Ranks that do not share (`FetchWindow.share`), or that have failed,
    read alone. No host sync. What does not come within the exchange's limit is in its record of failure, as of
    `dispatch_rows`, in the phase FETCH, and the rank reads by itself what it lacks.
    """
    _check("fetch_experts", store, table, gate_up, down, layer, counts)
    sizes = (gate_up[0].nbytes, down[0].nbytes)
    if sizes != (window.shape.up_bytes, window.shape.down_bytes):
        raise ValueError(
            f"fetch_experts: experts of {sizes} bytes, the memory is for ({window.shape.up_bytes}, "
            f"{window.shape.down_bytes})"
        )
    check_devices("fetch_experts", table=table, gate_up=gate_up, down=down, counts=counts, windows=window.table)
    kernel("experts.fetch_experts", table).fetch_experts(
        store, table, gate_up, down, window, layer=layer, counts=counts, tell=tell, read=read, move=move
    )


def _check(
    op: str, store: torch.Tensor, table: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, layer: int,
    counts: torch.Tensor | None,
) -> None:  # fmt: skip
    if gate_up.dim() != 3 or down.dim() != 3 or down.shape[0] != gate_up.shape[0]:
        raise ValueError(f"{op}: gate_up {show(gate_up)} and down {show(down)}, expected [S, ...] of each")
    size = gate_up.shape[1] * gate_up.shape[2] + down.shape[1] * down.shape[2]
    if table.dim() != 1 or table.dtype != torch.int32:
        raise ValueError(f"{op}: table must be int32 [E], got {show(table)}")
    if store.dim() != 2 or store.shape[1] != size or store.shape[0] < (layer + 1) * table.shape[0] or layer < 0:
        raise ValueError(f"{op}: store {show(store)} for layer {layer} of {table.shape[0]} x {size}")
    if store.dtype != gate_up.dtype or down.dtype != gate_up.dtype or store.itemsize not in (2, 4):
        raise ValueError(f"{op}: store {store.dtype}, gate_up {gate_up.dtype}, down {down.dtype}")
    if counts is not None and (counts.dtype != torch.int64 or counts.shape != (NUM_COUNTS,)):
        raise ValueError(f"{op}: counts {show(counts)}, expected int64 [{NUM_COUNTS}]")
