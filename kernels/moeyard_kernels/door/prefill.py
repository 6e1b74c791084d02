"""The door to attention over whole prompts. See `ops` for the rules."""

import torch

from moeyard_kernels.common.checks import FLOATS, check_devices, show
from moeyard_kernels.door.load import kernel
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
    """Causal attention of several chunks q [T, Hq, Dk] over their prefixes -> ([T, Hq, Dv] in q's dtype, lse or None).

    `plan` is the step's `plan_prefill`. Paged: k [Hkv, num_pages, page, Dk] and v [Hkv, num_pages, page, Dv], caches
    as the pools lay them out, contiguous. Else k [L, Hkv, Dk] and v [L, Hkv, Dv] hold the chunks' keys one after the
    other; strides are free but for the last, so both may be parts of one product. With `k_rope` [L, Dr], k holds the
    first Dk - Dr of each head's key and k_rope the rest, which all heads share (latent attention).
    Keys and values that a chunk sees are finite; what other rows and pages hold (NaN too) does not show. The lse
    is the log of the sum of exp(scale q . k), [T, Hq] fp32, only with `return_lse`, for it costs a store. A query's
    bits depend on its row and the keys it sees, not on the chunk, its neighbours or where keys lie.
    """
    _check_varlen(q, k, v, plan, k_rope, scale)
    return kernel("attention.attn_prefill_varlen", q).attn_prefill_varlen(
        q, k, v, plan=plan, scale=scale, k_rope=k_rope, return_lse=return_lse
    )


def _check_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: PrefillPlan, k_rope: torch.Tensor | None, scale: float
) -> None:
    """Raise ValueError naming the argument and both values unless everything fits the plan."""
    op, paged = "attn_prefill_varlen", plan.page_size > 0
    rank, heads = (4, 0) if paged else (3, 1)
    if q.dim() != 3 or k.dim() != rank or v.dim() != rank or k.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            f"{op}: q {show(q)}, k {show(k)}, v {show(v)} do not fit a {'paged' if paged else 'flat'} plan"
        )
    shared = 0
    if k_rope is not None:
        if paged or k_rope.dim() != 2 or k_rope.shape[0] != k.shape[0]:
            raise ValueError(f"{op}: k_rope {show(k_rope)} does not fit k {show(k)} ({'paged' if paged else 'flat'})")
        shared = k_rope.shape[1]
    if q.shape[2] != k.shape[-1] + shared:
        raise ValueError(f"{op}: q {show(q)} for keys {show(k)} and {shared} shared dimensions")
    if k.shape[heads] == 0 or q.shape[1] % k.shape[heads]:
        raise ValueError(f"{op}: {q.shape[1]} query heads over {k.shape[heads]} key heads")
    tensors = {"q": q, "k": k, "v": v} | ({} if k_rope is None else {"k_rope": k_rope})
    for name, x in tensors.items():
        if x.dtype != q.dtype or q.dtype not in FLOATS:
            raise ValueError(f"{op}: {name} {x.dtype} and q {q.dtype} must share a dtype, fp32 or bf16")
        if x.stride(-1) != 1 and x.shape[-1] > 1:
            raise ValueError(
                f"{op}: {name} {show(x)} with strides {x.stride()} is not contiguous in its last dimension"
            )
        check_devices(op, **{"the plan": plan.cu_q, name: x})
    if plan.num_rows != q.shape[0]:
        raise ValueError(f"{op}: the plan is for {plan.num_rows} rows, q is {show(q)}")
    if paged:
        if k.shape[2] != plan.page_size:
            raise ValueError(f"{op}: the plan is for pages of {plan.page_size}, k is {show(k)}")
        if not k.is_contiguous() or not v.is_contiguous():
            raise ValueError(
                f"{op}: k {show(k)} and v {show(v)} with strides {k.stride()}, {v.stride()}: contiguous only"
            )
    elif plan.num_keys > k.shape[0]:
        raise ValueError(f"{op}: the plan is for {plan.num_keys} rows of keys, k is {show(k)}")
    if not scale > 0:
        raise ValueError(f"{op}: scale {scale} is not positive")
