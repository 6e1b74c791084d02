"""y = x @ weight.T (+ bias) with rows that do not know how many they are."""

import torch
import torch.nn.functional as F

ROW_TILE = 16


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [M, K], weight [N, K], bias [N] -> [M, N], all of one dtype (fp32 or bf16).

    CPU matrix products choose their kernel by M, and with it the order of the sum over K. A multiple of 16 rows always
    takes the same one, so rows are padded up to that; an M that is already a multiple costs no copy.
    """
    num_rows = x.shape[0]
    pad = -num_rows % ROW_TILE
    if pad == 0:
        return F.linear(x, weight, bias)
    padded = x.new_zeros(num_rows + pad, x.shape[1])
    padded[:num_rows] = x
    return F.linear(padded, weight, bias)[:num_rows]
