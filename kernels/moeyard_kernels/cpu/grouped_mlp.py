"""The routed experts: each expert's rows through its gated MLP."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from moeyard_kernels.cpu.linear import padded_rows, project
from moeyard_kernels.ref.silu_mul import silu_mul


def grouped_mlp(
    rows: torch.Tensor,
    row_of_pair: torch.Tensor,
    groups: Sequence[tuple[int, int, int]],
    gate_up: torch.Tensor | Sequence[torch.Tensor],
    down: torch.Tensor | Sequence[torch.Tensor],
    out: torch.Tensor,
) -> torch.Tensor:
    """Run pairs through their experts: out[p] = down[slot] @ silu_mul(gate_up[slot] @ rows[row_of_pair[p]]) -> out.

    rows [R, H], row_of_pair [P] int64, out [P, H]; gate_up and down hold S matrices [2 I, H] and [H, I], packed or not.
    Each group (start, count, slot) covers the pairs start..start + count - 1; pairs that no group covers keep what
    `out` holds, so hits and misses can be computed by two calls into one `out`.

    A group is padded to a row count of `linear` with the pairs that follow it, whose results are dropped: rows do not
    see their neighbours, and no padding has to be written.
    """
    num_pairs = row_of_pair.shape[0]
    for start, count, slot in groups:
        if count == 0:
            continue
        w_in, w_out = gate_up[slot], down[slot]
        stop = start + padded_rows(count)
        if stop > row_of_pair.shape[0]:
            row_of_pair = F.pad(row_of_pair[:num_pairs], (0, stop - num_pairs))
        x = rows.index_select(0, row_of_pair[start:stop])
        y = project(silu_mul(project(x, w_in)), w_out)
        out[start : start + count] = y[:count]
    return out
