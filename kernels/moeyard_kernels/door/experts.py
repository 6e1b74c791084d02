"""The door to the routed experts: their products and the weighted sum of their results. See `ops`."""

from collections.abc import Sequence

import torch

from moeyard_kernels.checks import FLOATS, check_expert, missing, show
from moeyard_kernels.ref import grouped_mlp as _grouped_mlp
from moeyard_kernels.ref import moe_weighted_reduce as _moe_weighted_reduce


def grouped_mlp(
    rows: torch.Tensor,
    row_of_pair: torch.Tensor,
    groups: Sequence[tuple[int, int, int]],
    gate_up: torch.Tensor | Sequence[torch.Tensor],
    down: torch.Tensor | Sequence[torch.Tensor],
    out: torch.Tensor,
) -> torch.Tensor:
    """Run pairs through their experts: out[p] = down[slot] @ silu_mul(gate_up[slot] @ rows[row_of_pair[p]]).

    rows [R, H], row_of_pair [P] int64, gate_up [S, 2 I, H] and down [S, H, I] (tensors, or sequences of S matrices that
    may be packed), out [P, H]. Each group (start, count, slot) covers the pairs start..start + count - 1; pairs that no
    group covers keep what `out` holds, so hits and misses can be computed by two calls into one `out`. Returns `out`.
    """
    if rows.dim() != 2 or row_of_pair.dim() != 1 or row_of_pair.dtype != torch.int64:
        raise ValueError(f"grouped_mlp: rows {show(rows)} must be [R, H], row_of_pair {show(row_of_pair)} int64 [P]")
    num_pairs, hidden, num_slots = row_of_pair.shape[0], rows.shape[1], len(gate_up)
    if out.shape != (num_pairs, hidden) or out.dtype != rows.dtype or rows.dtype not in FLOATS:
        raise ValueError(f"grouped_mlp: out {show(out)} for {num_pairs} pairs of rows {show(rows)}, fp32 or bf16")
    if len(down) != num_slots:
        raise ValueError(f"grouped_mlp: {num_slots} slots of gate_up, {len(down)} of down")
    for start, count, slot in groups:
        if start < 0 or count < 0 or start + count > num_pairs or not 0 <= slot < num_slots:
            raise ValueError(
                f"grouped_mlp: group ({start}, {count}, {slot}) is outside {num_pairs} pairs or {num_slots} slots"
            )
    if groups:
        check_expert(gate_up[groups[0][2]], down[groups[0][2]], rows)
    if rows.is_cuda:
        raise missing("grouped_mlp")
    return _grouped_mlp.grouped_mlp(rows, row_of_pair, groups, gate_up, down, out)


def moe_weighted_reduce(
    partial: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor | None = None
) -> torch.Tensor:
    """partial [T, K, H], weights [T, K] fp32, shared [T, H] -> [T, H] in partial's dtype (fp32 or bf16).

    acc = 0 in fp32; for k = 0..K-1: acc = fma(weights[t, k], float(partial[t, k]), acc); then acc + float(shared), and
    one rounding to the dtype. Reference and Triton kernel agree bit for bit.
    """
    if partial.dim() != 3 or partial.dtype not in FLOATS:
        raise ValueError(f"moe_weighted_reduce: partial must be fp32 or bf16 [T, K, H], got {show(partial)}")
    num_tokens, top_k, hidden = partial.shape
    if weights.shape != (num_tokens, top_k) or weights.dtype != torch.float32:
        raise ValueError(f"moe_weighted_reduce: weights {show(weights)}, expected fp32 [{num_tokens}, {top_k}]")
    if shared is not None and (shared.shape != (num_tokens, hidden) or shared.dtype != partial.dtype):
        raise ValueError(
            f"moe_weighted_reduce: shared {show(shared)}, expected {partial.dtype} [{num_tokens}, {hidden}]"
        )
    if partial.is_cuda:
        # Triton is loaded only where there is a GPU to run it.
        from moeyard_kernels import moe_weighted_reduce as triton_kernel

        return triton_kernel.moe_weighted_reduce(partial, weights, shared)
    return _moe_weighted_reduce.moe_weighted_reduce(partial, weights, shared)
