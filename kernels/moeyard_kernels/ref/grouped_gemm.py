"""The routed experts over a layout: each slot's rows through its gated MLP, one output row per pair."""

import torch

from moeyard_kernels.ref.expert_layout import expert_layout
from moeyard_kernels.ref.linear import linear
from moeyard_kernels.ref.silu_mul import silu_mul
from moeyard_kernels.ref.topk_gate import make_choice
from moeyard_kernels.types.expert_layout import ExpertLayout, ExpertPairs
from moeyard_kernels.types.peer_window import POISONED, PeerWindow


def grouped_gemm(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    layout: ExpertLayout | ExpertPairs,
    *,
    top_k: int,
    out: torch.Tensor | None = None,
    home: PeerWindow | None = None,
) -> torch.Tensor:
    """See `moeyard_kernels.ops.grouped_gemm`."""
    if isinstance(layout, ExpertPairs):
        if layout.choice is not None:
            make_choice(layout.choice)
            if layout.choice.shared is not None:
                shared = layout.choice.shared
                shared.out.copy_(linear(silu_mul(shared.gate_up.to(shared.down.dtype)), shared.down))
        layout = expert_layout(
            layout.topk_ids, layout.slot_of_expert, num_slots=layout.num_slots, block_rows=layout.block_rows
        )
    out = x.new_empty(layout.num_pairs, x.shape[1]) if out is None else out
    num_blocks = int(layout.num_blocks)
    rows = layout.pairs.view(-1, layout.block_rows)
    for slot in layout.slot_of_block[:num_blocks].unique().tolist():
        pairs = rows[:num_blocks][layout.slot_of_block[:num_blocks] == slot].flatten()
        pairs = pairs[pairs >= 0].long()
        out[pairs] = linear(silu_mul(linear(x[pairs // top_k], gate_up[slot])), down[slot])
    if home is None:
        return out
    pairs = rows[:num_blocks].flatten()
    _put_home(out, pairs[pairs >= 0].long(), home)
    return home.views(home.rank).home.flatten(0, 1)


def _put_home(out: torch.Tensor, pairs: torch.Tensor, window: PeerWindow) -> None:
    """Rows of `out` [R K, H] to their places in the memory of the rows' sources."""
    world, top_k = window.shape.world_size, window.shape.top_k
    if window.state[POISONED]:
        return
    row, k = pairs // top_k, pairs % top_k
    for peer in range(world):
        of_peer = row % world == peer
        window.views(peer).home[row[of_peer] // world, k[of_peer]] = out[pairs[of_peer]]
