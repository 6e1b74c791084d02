"""Causal attention of several prompt chunks: scores, softmax and sum of each in fp32, straight from the formula."""

import torch

from moeyard_kernels.common.checks import show
from moeyard_kernels.types.prefill_plan import PrefillPlan


def attn_prefill_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    plan: PrefillPlan,
    scale: float,
    k_rope: torch.Tensor | None = None,
    return_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `moeyard_kernels.ops.attn_prefill_varlen`. Raises ValueError for a page that k has not."""
    table = plan.page_table
    if table is not None and table.numel() and int(table.max()) >= k.shape[1]:
        raise ValueError(f"attn_prefill_varlen: the plan's page_table names page {int(table.max())}, k is {show(k)}")
    out = q.new_empty(*q.shape[:2], v.shape[-1])
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    cu_q = plan.cu_q.tolist()
    for b, start in enumerate(plan.starts.tolist()):
        rows = slice(cu_q[b], cu_q[b + 1])
        end = start + cu_q[b + 1] - cu_q[b]
        keys, values = _keys(k, plan, b, end), _keys(v, plan, b, end)
        if k_rope is not None:
            shared = _keys(k_rope.unsqueeze(1), plan, b, end)
            keys = torch.cat((keys, shared.expand(keys.shape[0], -1, -1)), -1)
        out[rows], lse[rows] = _chunk(q[rows], keys, values, start=start, scale=scale, window=plan.window)
    return out, lse if return_lse else None


def _keys(x: torch.Tensor, plan: PrefillPlan, b: int, end: int) -> torch.Tensor:
    """Positions [0, end) of chunk b of keys or values, [Hkv, end, D] fp32."""
    if plan.page_table is not None:
        pages = plan.page_table[b, : -(-end // plan.page_size)].long()
        return x[:, pages].flatten(1, 2)[:, :end].float()
    assert plan.cu_kv is not None, "a plan has a page table or rows"
    first = int(plan.cu_kv[b])
    return x[first : first + end].transpose(0, 1).float()


def _chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, start: int, scale: float, window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [T, Hq, D] at positions from `start` on, k [Hkv, L, D], v [Hkv, L, Dv] -> [T, Hq, Dv], [T, Hq], both fp32."""
    num_rows, num_heads, _ = q.shape
    group = num_heads // k.shape[0]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = q.float().transpose(0, 1) @ k.transpose(1, 2) * scale
    query, key = torch.arange(start, start + num_rows)[:, None], torch.arange(k.shape[1])
    hidden = key > query
    if window is not None:
        hidden |= key <= query - window
    scores = scores.masked_fill(hidden, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(0, 1), scores.logsumexp(-1).T
