"""The door to attention over whole prompts, and to what their last queries look at. See `ops` for the rules."""

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


def snapkv_scores(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    length: int,
    scale: float,
    rows: torch.Tensor | None = None,
    k_rope: torch.Tensor | None = None,
) -> torch.Tensor:
    """What the last W queries of a prompt of `length` positions give each key before them: fp32 [Hkv, length - W].

    q [W, Hq, D] sits at positions length - W .. length - 1, 1 <= W < length; k [Hkv, N, D] has the key of position p in
    row p, or in row rows[p] where `rows` [length or more] int64 is given; strides are free but for the last. With
    `k_rope` [N, Dr], k holds the first D - Dr values of a key and k_rope the rest, which all heads share. A key's score
    is the sum of its softmax weights (scale q . k over all keys that a query sees) over the window and the query heads
    that share it. Its bits depend on the queries and keys, not on where these lie. Source: arXiv 2404.14469.
    """
    op = "snapkv_scores"
    if q.dim() != 3 or k.dim() != 3 or q.dtype not in FLOATS:
        raise ValueError(f"{op}: q {show(q)} and k {show(k)}, expected fp32 or bf16 [W, Hq, D] and [Hkv, N, D]")
    shared = 0
    if k_rope is not None:
        if k_rope.dim() != 2 or k_rope.shape[0] != k.shape[1]:
            raise ValueError(f"{op}: k_rope {show(k_rope)} does not fit k {show(k)}")
        shared = k_rope.shape[1]
    if q.shape[2] != k.shape[2] + shared:
        raise ValueError(f"{op}: q {show(q)} for keys {show(k)} and {shared} shared dimensions")
    if k.shape[0] == 0 or q.shape[1] == 0 or q.shape[1] % k.shape[0]:
        raise ValueError(f"{op}: {q.shape[1]} query heads over {k.shape[0]} key heads")
    if not 1 <= q.shape[0] < length:
        raise ValueError(f"{op}: a window of {q.shape[0]} in a prompt of {length}")
    known = k.shape[1]
    if rows is not None:
        if rows.dim() != 1 or rows.dtype != torch.int64 or not rows.is_contiguous():
            raise ValueError(f"{op}: rows {show(rows)}, expected contiguous int64 [{length} or more]")
        known = rows.shape[0]
    if known < length:
        raise ValueError(f"{op}: keys of {known} positions in a prompt of {length}")
    for name, x in {"q": q, "k": k, "k_rope": k_rope}.items():
        if x is None:
            continue
        if x.dtype != q.dtype:
            raise ValueError(f"{op}: {name} {x.dtype} and q {q.dtype} must share a dtype, fp32 or bf16")
        if x.stride(-1) != 1 and x.shape[-1] > 1:
            raise ValueError(
                f"{op}: {name} {show(x)} with strides {x.stride()} is not contiguous in its last dimension"
            )
    check_devices(op, q=q, k=k, rows=rows, k_rope=k_rope)
    if not scale > 0:
        raise ValueError(f"{op}: scale {scale} is not positive")
    return kernel("attention.snapkv_scores", q).snapkv_scores(
        q, k, length=length, scale=scale, rows=rows, k_rope=k_rope
    )
