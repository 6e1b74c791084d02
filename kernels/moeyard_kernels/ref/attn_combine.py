"""Merge attention over consecutive splits of the keys, in ascending order."""

import torch


def attn_combine(partial: torch.Tensor, lse: torch.Tensor, *, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """See `moeyard_kernels.ops.attn_combine`."""
    top = lse.amax(1)
    top = torch.where(top == float("-inf"), 0.0, top)
    out, total = torch.zeros_like(partial[:, 0]), torch.zeros_like(top)
    for s in range(partial.shape[1]):
        w = (lse[:, s] - top).exp()
        total = total + w
        out = torch.addcmul(out, w.unsqueeze(-1), partial[:, s])
    seen = total > 0
    out = torch.where(seen.unsqueeze(-1), out / torch.where(seen, total, 1.0).unsqueeze(-1), 0.0)
    return out.to(dtype), torch.where(seen, top + total.log(), float("-inf"))
