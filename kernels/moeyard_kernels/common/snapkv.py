"""Positions of a prompt that are kept, chosen by key scores: SnapKV (arXiv 2404.14469), on any device.

Only `sum_rows` sums, in a fixed order. Pooling takes maxima, and sorting is stable.
"""

import torch
import torch.nn.functional as F

# Width of the pooling window, centred on the key, as in the paper's LongBench runs.
POOLED = 7


def best(scores: torch.Tensor, *, length: int, budget: int) -> torch.Tensor:
    """Return the positions to keep of a prompt of `length`, ascending: int64 [heads, budget].

    scores [heads, length - W] fp32 belong to the keys before the window of W <= budget < length. The window is kept,
    and the positions before it with the largest score among 3 neighbours to each side. Ties keep the lower position.
    """
    window = length - scores.shape[1]
    pooled = F.max_pool1d(scores.unsqueeze(1), POOLED, stride=1, padding=POOLED // 2).squeeze(1)
    found = pooled.sort(stable=True, dim=1, descending=True).indices[:, : budget - window].sort(1).values
    return torch.cat((found, latest(length, window, scores.device).expand(found.shape[0], -1)), 1)


def latest(length: int, count: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return the last `count` positions of `length`, [1, count] int64."""
    return torch.arange(length - count, length, device=device).unsqueeze(0)


def sum_rows(x: torch.Tensor) -> torch.Tensor:
    """Sum x [R, ...] to [...], adding halves of whole rows. The order depends only on R."""
    while x.shape[0] > 1:
        half = x.shape[0] // 2
        folded = x[:half] + x[half : 2 * half]
        x = torch.cat((folded, x[2 * half :])) if x.shape[0] % 2 else folded
    return x[0]
