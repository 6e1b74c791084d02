"""The one door to the kernels: each op runs as Triton on CUDA tensors and as the torch reference on CPU tensors.

A CUDA tensor given to an op that has no Triton kernel yet raises NotImplementedError naming the op. Wrong ranks, shapes
and dtypes raise ValueError naming the argument and both values. T counts tokens, M and R rows, P (token, k) pairs.

One answer: on a CPU with one thread, a row of any result depends on that row's inputs alone, never on how many rows
there are, on its place among them or on its neighbours.
"""

from collections.abc import Sequence
from typing import Literal

import torch

from moeyard_kernels.checks import FLOATS, check_expert, check_groups, check_norm, check_plan, show
from moeyard_kernels.decode_plan import BLOCK, DecodePlan, plan_decode
from moeyard_kernels.ref import attn_prefill as _attn_prefill
from moeyard_kernels.ref import gqa_decode as _gqa_decode
from moeyard_kernels.ref import grouped_mlp as _grouped_mlp
from moeyard_kernels.ref import linear as _linear
from moeyard_kernels.ref import mla_decode as _mla_decode
from moeyard_kernels.ref import moe_weighted_reduce as _moe_weighted_reduce
from moeyard_kernels.ref import rms_norm as _rms_norm
from moeyard_kernels.ref import rope as _rope
from moeyard_kernels.ref import scale_rows as _scale_rows
from moeyard_kernels.ref import silu_mul as _silu_mul
from moeyard_kernels.ref import topk_gate as _topk_gate

__all__ = [
    "BLOCK",
    "DecodePlan",
    "add_rms_norm",
    "attn_prefill",
    "gqa_decode",
    "grouped_mlp",
    "linear",
    "mla_decode",
    "moe_weighted_reduce",
    "pack_weight",
    "padded_rows",
    "plan_decode",
    "rms_norm",
    "rope",
    "scale_rows_",
    "silu_mul",
    "topk_gate",
]


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """weight [N, K] (fp32 or bf16) in the form that `linear` and `grouped_mlp` are fastest with.

    On a CPU: a blocked copy of the same size, opaque but for `shape` and `dtype`, 1.2 to 2 times as fast for few rows.
    Its bits may differ from those of the plain weight, so a given weight is packed always or never. On CUDA: itself.
    """
    if weight.dim() != 2 or weight.dtype not in FLOATS:
        raise ValueError(f"pack_weight: weight must be fp32 or bf16 [N, K], got {show(weight)}")
    return weight if weight.is_cuda else _linear.pack_weight(weight)


def padded_rows(num_rows: int) -> int:
    """The count up to which a step's rows are best padded once, so that `linear` need not copy in every layer."""
    return _linear.padded_rows(num_rows)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [M, K] @ weight [N, K].T + bias [N] -> [M, N]; fp32 or bf16, all alike. M may be 0; `weight` may be packed."""
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"linear: x {show(x)} does not fit weight {show(weight)}")
    if x.dtype != weight.dtype or x.dtype not in FLOATS:
        raise ValueError(f"linear: x {show(x)} and weight {show(weight)} must share a dtype, fp32 or bf16")
    if bias is not None and (bias.dtype != x.dtype or bias.shape != weight.shape[:1]):
        raise ValueError(f"linear: bias {show(bias)} does not fit weight {show(weight)}")
    if x.is_cuda:
        raise _missing("linear")
    return _linear.linear(x, weight, bias)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """weight [D] * cast(x32 / sqrt(mean(x32^2) + eps)) for x [..., D]; the cast is to x's dtype, x32 is x in fp32."""
    check_norm("rms_norm", x, weight)
    if x.is_cuda:
        raise _missing("rms_norm")
    return _rms_norm.rms_norm(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(r, weight, eps), r) with r = x + residual rounded to the dtype; x, residual [..., D], weight [D]."""
    check_norm("add_rms_norm", x, weight)
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(f"add_rms_norm: residual {show(residual)} is not like x {show(x)}")
    if x.is_cuda:
        raise _missing("add_rms_norm")
    return _rms_norm.add_rms_norm(x, residual, weight, eps)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """Rotate x [T, heads, D] by the angles of cos, sin [T, D/2] (or [T, D]: the first half counts) -> [T, heads, D].

    A pair (a, b) becomes (a cos - b sin, b cos + a sin); pairs are (i, i + D/2), or (2i, 2i + 1) if `interleaved`. The
    result is in the first form either way, as deepseek_v3 leaves it in transformers 5.17; deepseek_v2 leaves the pairs
    in place, which permutes queries and keys alike. Rounding points are those of the wider dtype of x and cos: pass cos
    and sin in x's dtype for mixtral, qwen3_moe and deepseek_v3, in fp32 for deepseek_v2 (complex fp32, one rounding).
    """
    if x.dim() != 3 or x.shape[2] % 2:
        raise ValueError(f"rope: x must be [T, heads, even D], got {show(x)}")
    if cos.shape != sin.shape or cos.dtype != sin.dtype:
        raise ValueError(f"rope: cos {show(cos)} and sin {show(sin)} differ")
    if cos.dim() != 2 or cos.shape[0] != x.shape[0] or cos.shape[1] not in (x.shape[2], x.shape[2] // 2):
        raise ValueError(f"rope: cos {show(cos)} does not fit x {show(x)}")
    if x.is_cuda:
        raise _missing("rope")
    return _rope.rope(x, cos, sin, interleaved=interleaved)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate_up[:, :I]) * gate_up[:, I:] -> [M, I] for gate_up [M, 2 I]; each factor is rounded to the dtype."""
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"silu_mul: gate_up must be [M, 2 I], got {show(gate_up)}")
    if gate_up.is_cuda:
        raise _missing("silu_mul")
    return _silu_mul.silu_mul(gate_up)


def topk_gate(
    logits: torch.Tensor,
    *,
    top_k: int,
    scoring: Literal["softmax", "sigmoid"],
    renormalize: bool,
    bias: torch.Tensor | None = None,
    num_groups: int = 1,
    topk_groups: int = 1,
    group_score: Literal["max", "top2sum"] = "max",
    scaling: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts for logits [T, E] fp32 -> (weights [T, K] fp32, ids [T, K] int64), by falling score.

    scores = softmax or sigmoid of the logits; the choice is by scores + bias [E] fp32 (ties: the lowest id), within the
    `topk_groups` best of `num_groups` groups of consecutive experts, a group counting as its best score or the sum of
    its two best. Weights are the unbiased scores, divided by their sum (+ 1e-20 for sigmoid) if `renormalize`, times
    `scaling`. Outside the chosen groups a score is -inf (sigmoid) or 0 (softmax) for the choice, as in transformers.
    """
    if logits.dim() != 2 or logits.dtype != torch.float32:
        raise ValueError(f"topk_gate: logits must be fp32 [T, E], got {show(logits)}")
    num_experts = logits.shape[1]
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"topk_gate: top_k {top_k} of {num_experts} experts")
    if scoring not in ("softmax", "sigmoid"):
        raise ValueError(f"topk_gate: scoring {scoring!r} is neither 'softmax' nor 'sigmoid'")
    if bias is not None and (bias.dtype != torch.float32 or bias.shape != (num_experts,)):
        raise ValueError(f"topk_gate: bias must be fp32 [{num_experts}], got {show(bias)}")
    if num_groups != 1 or topk_groups != 1:
        check_groups(num_experts, top_k, num_groups, topk_groups, group_score)
    if logits.is_cuda:
        raise _missing("topk_gate")
    return _topk_gate.topk_gate(
        logits,
        top_k=top_k,
        scoring=scoring,
        renormalize=renormalize,
        bias=bias,
        num_groups=num_groups,
        topk_groups=topk_groups,
        group_score=group_score,
        scaling=scaling,
    )


def grouped_mlp(
    rows: torch.Tensor,
    row_of_pair: torch.Tensor,
    groups: Sequence[tuple[int, int, int]],
    gate_up: torch.Tensor | Sequence[torch.Tensor],
    down: torch.Tensor | Sequence[torch.Tensor],
    out: torch.Tensor,
) -> torch.Tensor:
    """Run pairs through their experts: out[p] = down[slot] @ silu_mul(gate_up[slot] @ rows[row_of_pair[p]]).

    rows [R, H], row_of_pair [P] int64, gate_up [S, 2 I, H] and down [S, H, I] (tensors, or sequences of S matrices that
    may be packed), out [P, H]. Each group (start, count, slot) covers the pairs start..start + count - 1; pairs that no
    group covers keep what `out` holds, so hits and misses can be computed by two calls into one `out`. Returns `out`.
    """
    if rows.dim() != 2 or row_of_pair.dim() != 1 or row_of_pair.dtype != torch.int64:
        raise ValueError(f"grouped_mlp: rows {show(rows)} must be [R, H], row_of_pair {show(row_of_pair)} int64 [P]")
    num_pairs, hidden, num_slots = row_of_pair.shape[0], rows.shape[1], len(gate_up)
    if out.shape != (num_pairs, hidden) or out.dtype != rows.dtype or rows.dtype not in FLOATS:
        raise ValueError(f"grouped_mlp: out {show(out)} for {num_pairs} pairs of rows {show(rows)}, fp32 or bf16")
    if len(down) != num_slots:
        raise ValueError(f"grouped_mlp: {num_slots} slots of gate_up, {len(down)} of down")
    for start, count, slot in groups:
        if start < 0 or count < 0 or start + count > num_pairs or not 0 <= slot < num_slots:
            raise ValueError(
                f"grouped_mlp: group ({start}, {count}, {slot}) is outside {num_pairs} pairs or {num_slots} slots"
            )
    if groups:
        check_expert(gate_up[groups[0][2]], down[groups[0][2]], rows)
    if rows.is_cuda:
        raise _missing("grouped_mlp")
    return _grouped_mlp.grouped_mlp(rows, row_of_pair, groups, gate_up, down, out)


def moe_weighted_reduce(
    partial: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor | None = None
) -> torch.Tensor:
    """partial [T, K, H], weights [T, K] fp32, shared [T, H] -> [T, H] in partial's dtype (fp32 or bf16).

    acc = 0 in fp32; for k = 0..K-1: acc = fma(weights[t, k], float(partial[t, k]), acc); then acc + float(shared), and
    one rounding to the dtype. Reference and Triton kernel agree bit for bit.
    """
    if partial.dim() != 3 or partial.dtype not in FLOATS:
        raise ValueError(f"moe_weighted_reduce: partial must be fp32 or bf16 [T, K, H], got {show(partial)}")
    num_tokens, top_k, hidden = partial.shape
    if weights.shape != (num_tokens, top_k) or weights.dtype != torch.float32:
        raise ValueError(f"moe_weighted_reduce: weights {show(weights)}, expected fp32 [{num_tokens}, {top_k}]")
    if shared is not None and (shared.shape != (num_tokens, hidden) or shared.dtype != partial.dtype):
        raise ValueError(
            f"moe_weighted_reduce: shared {show(shared)}, expected {partial.dtype} [{num_tokens}, {hidden}]"
        )
    if partial.is_cuda:
        # Triton is loaded only where there is a GPU to run it.
        from moeyard_kernels import moe_weighted_reduce as triton_kernel

        return triton_kernel.moe_weighted_reduce(partial, weights, shared)
    return _moe_weighted_reduce.moe_weighted_reduce(partial, weights, shared)


def scale_rows_(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x [T, H] becomes round(float(x) * float(scale[t])) in place, its own rounded pass; scale [T]. Returns x."""
    if x.dim() != 2 or x.dtype not in FLOATS:
        raise ValueError(f"scale_rows_: x must be fp32 or bf16 [T, H], got {show(x)}")
    if scale.shape != x.shape[:1] or scale.dtype not in FLOATS:
        raise ValueError(f"scale_rows_: scale {show(scale)} does not fit x {show(x)}")
    if x.is_cuda:
        # Triton is loaded only where there is a GPU to run it.
        from moeyard_kernels import scale_rows as triton_kernel

        return triton_kernel.scale_rows_(x, scale)
    return _scale_rows.scale_rows_(x, scale)


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
        raise _missing("attn_prefill")
    return _attn_prefill.attn_prefill(q, k, v, start=start, scale=scale, window=window)


def gqa_decode(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *, plan: DecodePlan, scale: float
) -> torch.Tensor:
    """Attention of q [B, Hq, Dk], each row over its own pages -> [B, Hq, Dv] in q's dtype.

    k_cache [Hkv, num_pages, page, Dk] and v_cache [Hkv, num_pages, page, Dv], finite everywhere; `plan` is the step's
    `plan_decode` (it holds lengths, pages and window). A row's bits depend on the row and the keys it sees.
    """
    if q.dim() != 3 or k_cache.dim() != 4 or v_cache.dim() != 4 or k_cache.shape[:3] != v_cache.shape[:3]:
        raise ValueError(f"gqa_decode: q {show(q)}, k_cache {show(k_cache)}, v_cache {show(v_cache)} do not fit")
    if q.shape[2] != k_cache.shape[3] or k_cache.shape[0] == 0 or q.shape[1] % k_cache.shape[0]:
        raise ValueError(f"gqa_decode: q {show(q)} does not fit k_cache {show(k_cache)}")
    if q.dtype not in FLOATS or k_cache.dtype != q.dtype or v_cache.dtype != q.dtype:
        raise ValueError(
            f"gqa_decode: q {q.dtype}, k_cache {k_cache.dtype}, v_cache {v_cache.dtype} must share a dtype, "
            f"fp32 or bf16"
        )
    check_plan("gqa_decode", plan, q.shape[0], k_cache.shape[2])
    if q.is_cuda:
        raise _missing("gqa_decode")
    return _gqa_decode.gqa_decode(q, k_cache, v_cache, plan=plan, scale=scale)


def mla_decode(
    q_latent: torch.Tensor, q_rope: torch.Tensor, latent_cache: torch.Tensor, *, plan: DecodePlan, scale: float
) -> torch.Tensor:
    """Absorbed latent attention: q_latent [B, Hq, R], q_rope [B, Hq, Dr] over latent_cache -> [B, Hq, R] in q's dtype.

    latent_cache [num_pages, page, R + Dr] is finite everywhere; every query head reads the one latent, whose first R
    values are also the values. `plan` is the step's `plan_decode`.
    """
    if q_latent.dim() != 3 or q_rope.dim() != 3 or q_latent.shape[:2] != q_rope.shape[:2]:
        raise ValueError(f"mla_decode: q_latent {show(q_latent)} does not fit q_rope {show(q_rope)}")
    if latent_cache.dim() != 3 or latent_cache.shape[2] != q_latent.shape[2] + q_rope.shape[2]:
        raise ValueError(
            f"mla_decode: latent_cache {show(latent_cache)} does not hold {q_latent.shape[2]} + {q_rope.shape[2]}"
        )
    if q_latent.dtype not in FLOATS or q_rope.dtype != q_latent.dtype or latent_cache.dtype != q_latent.dtype:
        raise ValueError(
            f"mla_decode: q_latent {q_latent.dtype}, q_rope {q_rope.dtype}, latent_cache {latent_cache.dtype} must "
            f"share a dtype, fp32 or bf16"
        )
    check_plan("mla_decode", plan, q_latent.shape[0], latent_cache.shape[1])
    if q_latent.is_cuda:
        raise _missing("mla_decode")
    return _mla_decode.mla_decode(q_latent, q_rope, latent_cache, plan=plan, scale=scale)


def _missing(op: str) -> NotImplementedError:
    return NotImplementedError(f"{op}: no Triton kernel yet, CPU tensors only")
