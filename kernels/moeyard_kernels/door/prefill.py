"""The door to attention over whole prompts. See `ops` for the rules."""

import torch

from moeyard_kernels.checks import FLOATS, missing, show
from moeyard_kernels.ref import attn_prefill as _attn_prefill


def attn_prefill(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, start: int, scale: float, window: int | None = None
) -> torch.Tensor:
    """Causal attention of q [T, Hq, Dk] at positions start..start+T-1 of one sequence -> [T, Hq, Dv] in q's dtype.

    k [Hkv, L, Dk] and v [Hkv, L, Dv] hold positions 0..L-1, L >= start + T (what lies behind is finite and unseen);
    query head h uses key head h // (Hq // Hkv). With `window` a query at p sees p - window + 1..p. A query's bits
    depend on its own row and the keys it sees, not on the chunk, L or the tile.
    """
    if q.dim() != 3 or k.dim() != 3 or v.dim() != 3 or k.shape[:2] != v.shape[:2] or q.shape[2] != k.shape[2]:
        raise ValueError(f"attn_prefill: q {show(q)}, k {show(k)}, v {show(v)} do not fit")
    if k.shape[0] == 0 or q.shape[1] % k.shape[0]:
        raise ValueError(f"attn_prefill: {q.shape[1]} query heads over {k.shape[0]} key heads")
    if q.dtype not in FLOATS or k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(f"attn_prefill: q {q.dtype}, k {k.dtype}, v {v.dtype} must share a dtype, fp32 or bf16")
    if start < 0 or k.shape[1] < start + q.shape[0]:
        raise ValueError(f"attn_prefill: start {start} + {q.shape[0]} queries exceed {k.shape[1]} keys")
    if window is not None and window < 1:
        raise ValueError(f"attn_prefill: window {window} is not positive")
    if q.is_cuda:
        raise missing("attn_prefill")
    return _attn_prefill.attn_prefill(q, k, v, start=start, scale=scale, window=window)
