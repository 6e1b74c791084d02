"""Small experts on a CPU, several in one product.

A call of the CPU's library takes about 13 us. In that time it could multiply far more than a row or two by a matrix of
a few dozen kilobytes. So the matrices of the needed experts are copied next to each other and multiplied as one batch,
each by its own rows. A row has the bits of the expert's packed matrix. This was measured for bf16 with torch 2.13 on
AVX-512: K 8 to 2048, N 8 to 512, batches of 1 to 24, 4 to 16 rows. It holds down to 4096 multiplications, where torch
uses its own loops instead of oneDNN. `joins` measures the shapes of the model on every machine.
"""

from collections.abc import Sequence

import numpy as np
import torch

from moeyard_kernels.cpu.linear import pack_weight, padded_rows, project
from moeyard_kernels.ops.elementwise import silu_mul

# Copying a larger matrix takes longer than a call.
_MOST_BYTES = 64 << 10
# Matrices are copied in pieces of at most this many bytes, which stay in a core's cache and are recycled by malloc.
_PIECE = 512 << 10
# Rows of one expert per place in a batch; an expert with more rows takes several places.
_MOST_ROWS = 16
# Above this average number of rows experts are computed one by one: their rows take longer than the calls.
JOINT_ROWS = 32
# Up to this number of pairs each pair has its own place. Most pairs have different experts anyway, and for a few rows
# grouping takes longer than multiplying a matrix twice.
FEW_PAIRS = 16
_TILE = 4


def joins(*, hidden: int, intermediate: int, dtype: torch.dtype) -> bool:
    """Return whether `joint_mlp` pays off for experts of this shape and has the bits of packed matrices on this
    machine. It has not in fp32, where batches use another library (MKL) and another order of the sums."""
    if dtype != torch.bfloat16 or 2 * intermediate * hidden * dtype.itemsize > _MOST_BYTES:
        return False
    return all(_same_bits(dim, num_out, dtype) for dim, num_out in ((hidden, 2 * intermediate), (intermediate, hidden)))


def _same_bits(dim: int, num_out: int, dtype: torch.dtype) -> bool:
    """Return whether plain matrices, alone and in batches of all row counts and a few sizes, have the bits of packed
    ones.

    Every product of the test occurs with both signs in the sum, so the result is pure rounding error. Another order of
    summation cannot go unnoticed.
    """
    generator = torch.Generator().manual_seed(dim * num_out)
    signs = torch.tensor([1.0, -1.0]).repeat_interleave(dim // 2)
    places = torch.randperm(dim - dim % 2, generator=generator)
    matrices, rows = torch.zeros(7, num_out, dim, dtype=dtype), torch.zeros(7, _MOST_ROWS, dim, dtype=dtype)
    for x, sign in ((matrices, signs), (rows, signs.abs())):
        half = torch.randn(7, x.shape[1], dim // 2, generator=generator)
        x[..., : dim - dim % 2] = (half.repeat(1, 1, 2) * sign)[..., places].to(dtype)
    pairs = list(zip(rows, matrices, strict=True))
    wanted = torch.stack([project(x, pack_weight(matrix)) for x, matrix in pairs])
    alone = torch.stack([project(x, matrix) for x, matrix in pairs])
    return torch.equal(alone, wanted) and all(
        torch.equal(_products(rows[:count, -tile:], list(matrices[:count])), wanted[:count, -tile:])
        for tile in range(4, _MOST_ROWS + 1, 4)
        for count in (1, 2, 7)
    )


def _products(rows: torch.Tensor, matrices: list[torch.Tensor]) -> torch.Tensor:
    """rows [n, M, K] times n matrices [N, K] -> [n, M, N]."""
    joined = torch.cat(matrices).view(len(matrices), *matrices[0].shape)
    return torch.bmm(rows, joined.transpose(1, 2))


def pairs_mlp(
    rows: torch.Tensor,
    slots: Sequence[int],
    gate_up: Sequence[torch.Tensor],
    down: Sequence[torch.Tensor],
    limit: float | None = None,
) -> torch.Tensor:
    """Compute the pairs of rows [R, H] with K slots each, row by row, at most `FEW_PAIRS` -> [R, K, H]. Each place of
    the batch is one row, repeated. The bits are those of `joint_mlp`."""
    (num_rows, hidden), count = rows.shape, len(slots)
    x = rows.unsqueeze(1).expand(num_rows, count // num_rows * _TILE, hidden).reshape(count, _TILE, hidden)
    y = _products(x, [gate_up[slot] for slot in slots]).view(count * _TILE, -1)
    y = _products(silu_mul.reference(y, limit).view(count, _TILE, -1), [down[slot] for slot in slots])
    return y[:, 0].contiguous().view(num_rows, -1, hidden)


def joint_mlp(
    rows: torch.Tensor,
    row_of_pair: torch.Tensor,
    groups: Sequence[tuple[int, int, int]],
    gate_up: Sequence[torch.Tensor],
    down: Sequence[torch.Tensor],
    out: torch.Tensor,
    limit: float | None = None,
) -> torch.Tensor:
    """`grouped_mlp` with plain matrices, for shapes with `joins`.

    A group takes as many places of the batch as it needs. Each place has as many rows as the largest group, up to 16,
    and is padded with the pairs after it, whose results are dropped.
    """
    if not groups:
        return out
    tile = padded_rows(min(_MOST_ROWS, max(count for _, count, _ in groups)))
    places = [
        (first, min(tile, start + count - first), slot)
        for start, count, slot in groups
        for first in range(start, start + count, tile)
    ]
    most = max(2, _PIECE // (gate_up[groups[0][2]].numel() * out.itemsize))
    of_pair, nth = row_of_pair.numpy(), np.arange(tile)
    for begin in range(0, len(places), most):
        firsts, counts, slots = zip(*places[begin : begin + most], strict=True)
        if len(slots) % 2:
            # oneDNN compiles a kernel for every number of matrices (about 1 ms once) and keeps 1024 of them.
            firsts, counts, slots = (*firsts, firsts[0]), (*counts, 0), (*slots, slots[0])
        pairs = np.add.outer(firsts, nth)
        x = rows.index_select(0, torch.from_numpy(of_pair.take(pairs.ravel(), mode="clip")))
        y = _products(x.view(len(slots), tile, -1), [gate_up[slot] for slot in slots])
        h = silu_mul.reference(y.view(len(slots) * tile, -1), limit).view(len(slots), tile, -1)
        y = _products(h, [down[slot] for slot in slots]).view(len(slots) * tile, -1)
        wanted = np.less.outer(nth, counts).T
        kept = torch.from_numpy(wanted.ravel().nonzero()[0])
        out.index_copy_(0, torch.from_numpy(pairs[wanted]), y.index_select(0, kept))
    return out
