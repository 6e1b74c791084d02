"""Which positions of a prompt stay by the scores of its keys: the choice of SnapKV (arXiv 2404.14469), on any device.

Nothing here sums but `sum_rows`, in an order of its own: pooling takes maxima, and sorting is stable.
"""

import torch
import torch.nn.functional as F

# Neighbours that a key is pooled with, itself in the middle, as in the runs of the paper on LongBench.
POOLED = 7


def best(scores: torch.Tensor, *, length: int, budget: int) -> torch.Tensor:
    """Positions to keep of a prompt of `length`, ascending: int64 [heads, budget].

    scores [heads, length - W] fp32 are those of the keys before the window of W <= budget < length. The window stays,
    and of the positions before it those with the largest score among 3 neighbours to each side; of equal ones the
    lower.
    """
    window = length - scores.shape[1]
    pooled = F.max_pool1d(scores.unsqueeze(1), POOLED, stride=1, padding=POOLED // 2).squeeze(1)
    found = pooled.sort(stable=True, dim=1, descending=True).indices[:, : budget - window].sort(1).values
    return torch.cat((found, latest(length, window, scores.device).expand(found.shape[0], -1)), 1)


def latest(length: int, count: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """The last `count` positions of `length`, [1, count] int64."""
    return torch.arange(length - count, length, device=device).unsqueeze(0)


def sum_rows(x: torch.Tensor) -> torch.Tensor:
    """x [R, ...] -> [...], halves onto halves: an order that only R decides, in additions of whole rows."""
    while x.shape[0] > 1:
        half = x.shape[0] // 2
        folded = x[:half] + x[half : 2 * half]
        x = torch.cat((folded, x[2 * half :])) if x.shape[0] % 2 else folded
    return x[0]
