"""What sequences keep of a layer, copied between slots."""

import torch

from moeyard_kernels.common.checks import check_indices
from moeyard_kernels.types.state_slots import SlotMoves


def restore_slots(state: torch.Tensor, window: torch.Tensor, *, moves: SlotMoves) -> None:
    """See `moeyard_kernels.ops.restore_slots`."""
    num_slots = state.shape[0]
    check_indices("restore_slots", low=-1, high=num_slots, source=moves.source)
    check_indices("restore_slots", low=0, high=num_slots, target=moves.target)
    for source, target in zip(moves.source.tolist(), moves.target.tolist(), strict=True):
        if source >= 0:
            state[target], window[target] = state[source], window[source]
