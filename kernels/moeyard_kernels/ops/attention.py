"""Rotary embedding, the paged cache, and attention over it: decode rows, whole prompts, and the scores of keys."""

from types import MappingProxyType

import torch

from moeyard_kernels.common.checks import check_indices, show
from moeyard_kernels.ops.elementwise import rms_norm
from moeyard_kernels.ops.op import op
from moeyard_kernels.types.decode_tables import GQA_SPLIT, DecodeTables, mla_split
from moeyard_kernels.types.prefill_plan import PrefillPlan

_ROTATION = MappingProxyType({"cos": "float [T, Dc]", "sin": "like cos"})
_STEP = MappingProxyType(
    {"q": "float [T, Hq, D]", "k": "q [T, Hkv, D]", "v": "like k", **_ROTATION, "slot_mapping": "int64 [T]"}
    | {
        "k_cache": "q [Hkv, pages, page, D]",
        "v_cache": "like k_cache",
        "q_norm": "q|fp32 [D]?",
        "k_norm": "q|fp32 [D]?",
    }
)
_STEP_RULES = ("D % 2 == 0", "1 <= Dc <= D // 2 or Dc == D", "(q_norm is None) == (k_norm is None)")
_TABLES = MappingProxyType({"tables.page_table": "int32 [_, _] contiguous"})
_CACHES = MappingProxyType(dict.fromkeys(("k_cache", "v_cache"), "q [Hkv, pages, page, D] contiguous"))
_TABLE_RULES = ("tables.num_rows == T", "tables.page_size == page", "scale > 0")
_GROUPS = "Hkv > 0 and Hq % Hkv == 0"


@op("attention.rope", "Dc in (half, 2 * half)", x="float [T, heads, 2*half]", **_ROTATION)
def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """Rotate x [T, heads, D] by the angles of cos, sin [T, D/2] (or [T, D]: the first half counts) -> [T, heads, D].

    A pair (a, b) becomes (a cos - b sin, b cos + a sin). Pairs are (i, i + D/2), or (2i, 2i + 1) if `interleaved`. The
    result is in the first form either way, as transformers 5.17 leaves it for deepseek_v3. (For deepseek_v2 it leaves
    the pairs in place, which permutes queries and keys alike, so scores do not change.) Products and sums are each
    rounded to the wider dtype of x and cos. Pass cos and sin in x's dtype for mixtral, qwen3_moe and deepseek_v3, in
    fp32 for deepseek_v2 (complex fp32, one rounding).
    """
    half = x.shape[-1] // 2
    cos, sin = cos[:, None, :half], sin[:, None, :half]
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    out = torch.empty_like(x)
    out[..., :half] = first * cos - second * sin
    out[..., half:] = second * cos + first * sin
    return out


@op("attention.rope_cache_write", *_STEP_RULES, **_STEP)
def rope_cache_write_gqa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    interleaved: bool,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Return `rope` of q [T, Hq, D]. Write `rope` of k [T, Hkv, D], and v unchanged, into the caches.

    cos and sin [T, Dr/2] rotate the first Dr <= D values of each head. If they are [T, D], all values rotate by their
    first half. With q_norm and k_norm [D], `rms_norm(q, q_norm, eps)` and `rms_norm(k, k_norm, eps)` replace q and k.
    The last stride of the caches [Hkv, num_pages, page, D] is 1. The slot of a token is page number * page + position
    in the page. slot_mapping [T] int64 holds distinct slots, or -1 for tokens that are not written. Bits: those of the
    norms, of `rope` and of a copy.
    """
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm.reference(q, q_norm, eps), rms_norm.reference(k, k_norm, eps)
    tokens, page, entry = _entries("rope_cache_write_gqa", slot_mapping, *k_cache.shape[1:3])
    rotated = _rotate_first(k, cos, sin, interleaved=interleaved)
    k_cache[:, page, entry] = rotated[tokens].transpose(0, 1)
    v_cache[:, page, entry] = v[tokens].transpose(0, 1)
    return _rotate_first(q, cos, sin, interleaved=interleaved)


@op(
    "attention.rope_cache_write",
    "Dc in (half, 2 * half)",
    q_rope="float [T, Hq, 2*half]",
    kv_a="q_rope [T, R]",
    k_rope="q_rope [T, 2*half]",
    **_ROTATION,
    slot_mapping="int64 [T]",
    cache="q_rope [pages, page, R + 2*half]",
    kv_norm="q_rope|fp32 [R]?",
)
def rope_cache_write_mla(
    q_rope: torch.Tensor,
    kv_a: torch.Tensor,
    k_rope: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slot_mapping: torch.Tensor,
    cache: torch.Tensor,
    *,
    interleaved: bool,
    kv_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Return `rope` of q_rope [T, Hq, Dr]. Write kv_a [T, R] and `rope` of k_rope [T, Dr] into the cache.

    With kv_norm [R], `rms_norm(kv_a, kv_norm, eps)` is written. cache [num_pages, page, R + Dr] may have any strides if
    the last is 1. slot_mapping is as in `rope_cache_write_gqa`. Bits: those of the norm, of `rope` and of a copy.
    """
    if kv_norm is not None:
        kv_a = rms_norm.reference(kv_a, kv_norm, eps)
    tokens, page, entry = _entries("rope_cache_write_mla", slot_mapping, *cache.shape[:2])
    rotated = rope.reference(k_rope.unsqueeze(1), cos, sin, interleaved=interleaved).squeeze(1)
    cache[page, entry] = torch.cat((kv_a, rotated), 1)[tokens]
    return rope.reference(q_rope, cos, sin, interleaved=interleaved)


def _rotate_first(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """Rotate the first 2 cos.shape[1] values of each head of x [T, heads, D]."""
    width = min(x.shape[2], 2 * cos.shape[1])
    rotated = rope.reference(x[..., :width], cos, sin, interleaved=interleaved)
    return rotated if width == x.shape[2] else torch.cat((rotated, x[..., width:]), 2)


def _entries(
    op: str, slots: torch.Tensor, num_pages: int, page_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the tokens to write, their pages and positions in the page. Raises ValueError for a slot out of range."""
    check_indices(op, low=-1, high=num_pages * page_size, slot_mapping=slots)
    tokens = (slots >= 0).nonzero().squeeze(1)
    return tokens, slots[tokens] // page_size, slots[tokens] % page_size


@op(
    "attention.gqa_decode",
    _GROUPS,
    *_TABLE_RULES,
    q="float [T, Hq, D] contiguous",
    k_cache="q [Hkv, pages, page, D] contiguous",
    v_cache="q [Hkv, pages, page, Dv] contiguous",
    **_TABLES,
)
def gqa_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    tables: DecodeTables,
    scale: float,
    static_tables: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q [B, Hq, Dk], each row over its own pages -> ([B, Hq, Dv] in q's dtype, lse [B, Hq] fp32).

    k_cache [Hkv, num_pages, page, Dk] and v_cache [Hkv, num_pages, page, Dv] are contiguous. `tables` hold the step's
    lengths, pages and window. Positions that no query sees may hold anything. lse is ln(sum(exp(scores))). The bits of
    a row depend on the row and the keys that it sees. static_tables: no launch in flight writes the tables, which holds
    between the layers of a step. A GPU may then read them before the previous launch has ended.
    """
    check_tables("gqa_decode", tables, k_cache.shape[1])
    return attend(q, k_cache, v_cache, tables=tables, scale=scale, split=GQA_SPLIT)


@op(
    "attention.rope_gqa_decode",
    *_STEP_RULES,
    _GROUPS,
    *_TABLE_RULES,
    **_STEP | _CACHES | _TABLES,
)
def rope_gqa_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    tables: DecodeTables,
    scale: float,
    interleaved: bool,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    static_tables: bool = False,
    lone_rows: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rope_cache_write_gqa`, then `gqa_decode` of its result: (out [T, Hq, D], lse [T, Hq] fp32), caches written.

    The caches are contiguous. A row's own key is at position kv_lens - 1. lone_rows: no row sees a key that another row
    writes in this call, except copies of a row, which like padding are not written (-1). A GPU may then use one launch,
    if a config says so. static_tables: as in `gqa_decode`. With lone_rows it also covers keys of earlier steps and the
    norms' weights. Bits: those of the two ops.
    """
    inputs = (q, k, v, cos, sin, slot_mapping, k_cache, v_cache)
    q = rope_cache_write_gqa.reference(*inputs, interleaved=interleaved, q_norm=q_norm, k_norm=k_norm, eps=eps)
    return gqa_decode.reference(q, k_cache, v_cache, tables=tables, scale=scale)


@op(
    "attention.mla_decode",
    *_TABLE_RULES,
    q_latent="float [T, Hq, R] contiguous",
    q_rope="q_latent [T, Hq, Dr] contiguous",
    latent_cache="q_latent [pages, page, R + Dr] contiguous",
    **_TABLES,
)
def mla_decode(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent_cache: torch.Tensor,
    *,
    tables: DecodeTables,
    scale: float,
    static_tables: bool = False,
    static_keys: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Absorbed latent attention of q_latent [B, Hq, R], q_rope [B, Hq, Dr] -> ([B, Hq, R], lse [B, Hq] fp32).

    latent_cache is [num_pages, page, R + Dr]. All query heads read the same latent, whose first R values are also the
    values. `tables`, `static_tables` and the cache's contents are as in `gqa_decode`. static_keys: no launch in flight
    writes the cache rows of earlier steps, which are those below a sequence's least length minus one.
    """
    check_tables("mla_decode", tables, latent_cache.shape[0])
    keys = latent_cache.unsqueeze(0)
    values = keys[..., : q_latent.shape[2]]
    return attend(
        torch.cat((q_latent, q_rope), -1), keys, values, tables=tables, scale=scale, split=mla_split(q_latent.shape[1])
    )


def attend(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *, tables: DecodeTables, scale: float, split: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q [B, Hq, Dk] over caches [Hkv, num_pages, page, D] -> ([B, Hq, Dv] in q's dtype, lse [B, Hq])."""
    num_kv_heads, num_q = k_cache.shape[0], tables.num_queries
    out, lse = q.new_zeros(*q.shape[:2], v_cache.shape[3]), q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
    for row, length in enumerate(tables.kv_lens.flatten().tolist()):
        if length == 0:
            continue
        pages = tables.page_table[row // num_q, : -(-length // tables.page_size)].long()
        low = max(0, length - tables.window) if tables.window else 0
        k = k_cache[:, pages].flatten(1, 2)[:, :length].float()
        v = v_cache[:, pages].flatten(1, 2)[:, :length].float()
        heads = q[row].float().view(num_kv_heads, -1, q.shape[2])
        partials, lses = [], []
        for start in range(low // split * split, length, split):
            span = slice(max(start, low), min(start + split, length))
            scores = heads @ k[:, span].transpose(1, 2) * scale
            lses.append(scores.logsumexp(-1).flatten())
            partials.append((scores.softmax(-1) @ v[:, span]).flatten(0, 1))
        merged = attn_combine.reference(torch.stack(partials)[None], torch.stack(lses)[None], dtype=q.dtype)
        out[row], lse[row] = merged[0][0], merged[1][0]
    return out, lse


def check_tables(op: str, tables: DecodeTables, num_pages: int) -> None:
    """Raise ValueError for lengths that the table cannot hold, and for used pages that the cache does not have."""
    lens, table = tables.kv_lens.view(tables.num_sequences, tables.num_queries), tables.page_table
    longest = table.shape[1] * tables.page_size
    if lens.numel() and not 0 <= int(lens.min()) <= int(lens.max()) <= longest:
        raise ValueError(f"{op}: kv_lens holds {int(lens.min())} to {int(lens.max())}, outside 0 to {longest}")
    for row in range(tables.num_sequences):
        used = table[row, : -(-int(lens[row].max()) // tables.page_size)]
        if used.numel() and not 0 <= int(used.min()) <= int(used.max()) < num_pages:
            raise ValueError(
                f"{op}: page_table[{row}] holds {int(used.min())} to {int(used.max())}, outside 0 to {num_pages - 1}"
            )


@op(
    "attention.attn_combine",
    "S > 0",
    "dtype in FLOATS",
    partial="fp32 [B, S, H, D] contiguous",
    lse="fp32 [B, S, H] contiguous",
)
def attn_combine(
    partial: torch.Tensor, lse: torch.Tensor, *, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over S consecutive pieces of the keys -> ([B, H, D] in `dtype`, lse [B, H]).

    partial [B, S, H, D] and lse [B, S, H] are fp32. lse holds natural logarithms. A piece that saw nothing has lse -inf
    and a finite partial. out = sum_s w_s partial_s / sum_s w_s, s ascending, w_s = exp(lse_s - max lse). A single piece
    is returned bit for bit. If all lse are -inf, the results are zeros and -inf.
    """
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


def _check_keys(op: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: PrefillPlan) -> None:
    """Raise ValueError for keys and values whose layout does not fit the plan."""
    paged = plan.page_size > 0
    if k.dim() != (4 if paged else 3) or k.shape[:-1] != v.shape[:-1]:
        kind = "paged" if paged else "flat"
        raise ValueError(f"{op}: q {show(q)}, k {show(k)}, v {show(v)} do not fit a {kind} plan")
    heads = k.shape[0 if paged else 1]
    if heads == 0 or q.shape[1] % heads:
        raise ValueError(f"{op}: {q.shape[1]} query heads over {heads} key heads")
    if not paged:
        if plan.num_keys > k.shape[0]:
            raise ValueError(f"{op}: the plan is for {plan.num_keys} rows of keys, k is {show(k)}")
        return
    if k.shape[2] != plan.page_size:
        raise ValueError(f"{op}: the plan is for pages of {plan.page_size}, k is {show(k)}")
    if not k.is_contiguous() or not v.is_contiguous():
        raise ValueError(f"{op}: k {show(k)} and v {show(v)} with strides {k.stride()}, {v.stride()}: contiguous only")


@op(
    "attention.attn_prefill_varlen",
    _check_keys,
    "k_rope is None or (plan.page_size == 0 and k.shape[0] == L)",
    "D == Dk + Dr",
    "plan.num_rows == T",
    "scale > 0",
    q="float [T, Hq, D] rows",
    k="q [..., Dk] rows",
    v="q [..., Dv] rows",
    k_rope="q [L, Dr] rows?",
    **{"plan.cu_q": "int32 [_]"},
)
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

    `plan` is the step's `plan_prefill`. If it is paged, k [Hkv, num_pages, page, Dk] and v [Hkv, num_pages, page, Dv]
    are contiguous caches. Otherwise k [L, Hkv, Dk] and v [L, Hkv, Dv] hold the keys of all chunks in order. Only their
    last stride is fixed, so both may be parts of one product. With `k_rope` [L, Dr], k holds the first Dk - Dr values
    of each head's key and k_rope the others, which all heads share (latent attention). Keys and values that a chunk
    sees are finite. Other rows and pages may hold anything. return_lse: also return the log of the sum of exp(scale q .
    k), [T, Hq] fp32, which costs a store. The bits of a query depend on its row and the keys that it sees, not on the
    chunk, other queries or the layout of the keys.
    """
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
    """Return positions [0, end) of the keys or values of chunk b, [Hkv, end, D] fp32."""
    if plan.page_table is not None:
        pages = plan.page_table[b, : -(-end // plan.page_size)].long()
        return x[:, pages].flatten(1, 2)[:, :end].float()
    assert plan.cu_kv is not None, "a plan has a page table or rows"
    first = int(plan.cu_kv[b])
    return x[first : first + end].transpose(0, 1).float()


def _chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, start: int, scale: float, window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with q [T, Hq, D], from position `start` on, to k [Hkv, L, D], v [Hkv, L, Dv] -> fp32 [T, Hq, Dv], lse."""
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


@op(
    "attention.snapkv_scores",
    "Hq > 0",
    _GROUPS,
    "D == Dk + Dr",
    "1 <= W < length",
    "length <= (N if rows is None else known)",
    "scale > 0",
    q="float [W, Hq, D] rows",
    k="q [Hkv, N, Dk] rows",
    rows="int64 [known] contiguous?",
    k_rope="q [N, Dr] rows?",
)
def snapkv_scores(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    length: int,
    scale: float,
    rows: torch.Tensor | None = None,
    k_rope: torch.Tensor | None = None,
) -> torch.Tensor:
    """Score each key before a prompt's last W queries by these queries -> fp32 [Hkv, length - W].

    q [W, Hq, D] has positions length - W to length - 1, and 1 <= W < length. k [Hkv, N, D] has the key of position p in
    row p. With `rows` [length or more] int64 it is in row rows[p]. Only the last stride of k is fixed. With `k_rope`
    [N, Dr], k holds the first D - Dr values of a key and k_rope the others, which all heads share. A query's softmax
    weights are those of scale q . k over all keys that it sees. The score of a key sums its weights over the window and
    the query heads that share it. The bits depend on queries and keys, not on their layout. Source: arXiv 2404.14469.
    """
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
