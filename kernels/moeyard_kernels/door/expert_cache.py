"""The door to a cache of experts whose residency the GPU decides itself. See `ops`."""

import torch

from moeyard_kernels.common.checks import check_devices, show
from moeyard_kernels.door.load import kernel
from moeyard_kernels.types.expert_ranks import max_waves
from moeyard_kernels.types.expert_residency import ResidencyState


def cache_access(ids: torch.Tensor, state: ResidencyState, *, layer: int, num_waves: int) -> torch.Tensor:
    """Make the experts resident that decode rows of one layer need -> tables [1 + num_waves, E] int32 of slots.

    ids [T, K] (int64 or int32) count from 0 within the layer, -1 is masked. Row 0 of the result names the slots of the
    experts that have one, row 1 + w those of the experts that are to be copied for wave w; -1 for all others. What row
    w > 1 takes may be in use until the wave before is computed. Hits and the misses of wave 0 are at most half of the
    slots, unless there are more hits; later waves have at most half (`max_waves`).

    Changes `state` as the policy does that it names (`moeyard_worker.experts`): the same victims, the same slots. No
    host sync; nothing is changed where no id is left. Ids must lie in [-1, E): checked on a CPU, and on a GPU within
    `launch.checked()`.
    """
    if ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"cache_access: ids must be int64 or int32 [T, K], got {show(ids)}")
    num_layers, num_experts = state.slot_of.shape
    if not 0 <= layer < num_layers:
        raise ValueError(f"cache_access: layer {layer} of {num_layers}")
    if num_waves < (wanted := max_waves(min(ids.numel(), num_experts), state.num_slots)):
        raise ValueError(f"cache_access: {num_waves} waves for ids {show(ids)}, which may need {wanted}")
    check_devices("cache_access", ids=ids, slot_of=state.slot_of)
    return kernel("experts.cache_access", ids).cache_access(ids, state, layer=layer, num_waves=num_waves)


def gather_experts(
    store: torch.Tensor, table: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, *, layer: int
) -> None:
    """Copy the experts of one layer that have a slot in `table` [E] int32 (-1: none) from host memory into it.

    store [L E, 2 I H + H I] holds an expert per row, gate_up's values before down's; on a GPU it is pinned memory of
    the host. gate_up [S, 2 I, H] and down [S, H, I] are the slots, in the same dtype (fp32 or bf16). No host sync: the
    launch leaves at once where the table is empty.
    """
    if gate_up.dim() != 3 or down.dim() != 3 or down.shape[0] != gate_up.shape[0]:
        raise ValueError(f"gather_experts: gate_up {show(gate_up)} and down {show(down)}, expected [S, ...] of each")
    size = gate_up.shape[1] * gate_up.shape[2] + down.shape[1] * down.shape[2]
    if table.dim() != 1 or table.dtype != torch.int32:
        raise ValueError(f"gather_experts: table must be int32 [E], got {show(table)}")
    if store.dim() != 2 or store.shape[1] != size or store.shape[0] < (layer + 1) * table.shape[0] or layer < 0:
        raise ValueError(f"gather_experts: store {show(store)} for layer {layer} of {table.shape[0]} x {size}")
    if store.dtype != gate_up.dtype or down.dtype != gate_up.dtype or store.itemsize not in (2, 4):
        raise ValueError(f"gather_experts: store {store.dtype}, gate_up {gate_up.dtype}, down {down.dtype}")
    check_devices("gather_experts", table=table, gate_up=gate_up, down=down)
    kernel("experts.gather_experts", table).gather_experts(store, table, gate_up, down, layer=layer)
