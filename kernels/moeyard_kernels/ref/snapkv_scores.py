"""Weights of a prompt's keys by its last queries, straight from the formula."""

import torch


def snapkv_scores(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    length: int,
    scale: float,
    rows: torch.Tensor | None = None,
    k_rope: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `moeyard_kernels.ops.snapkv_scores`."""
    window, num_heads, _ = q.shape
    num_kv_heads = k.shape[0]
    if rows is None:
        rows = torch.arange(length)
    keys = k.index_select(1, rows[:length]).float()
    if k_rope is not None:
        keys = torch.cat((keys, k_rope.index_select(0, rows[:length]).float().expand(num_kv_heads, -1, -1)), 2)
    queries = q.float().transpose(0, 1).reshape(num_kv_heads, -1, q.shape[2])
    scores = (queries @ keys.transpose(1, 2) * scale).view(num_heads, window, length)
    hidden = torch.arange(length) > torch.arange(length - window, length).unsqueeze(1)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)[..., : length - window]
    return weights.reshape(num_kv_heads, -1, length - window).sum(1)
