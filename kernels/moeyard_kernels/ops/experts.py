"""The routed experts: the choice, the products of the chosen experts, and the weighted sum of their results."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch
import torch.nn.functional as F

from moeyard_kernels.common.checks import check_indices, show
from moeyard_kernels.ops.elementwise import add_rms_norm, scale_rows_, silu_mul
from moeyard_kernels.ops.op import op
from moeyard_kernels.ops.projections import linear
from moeyard_kernels.types.expert_layout import FEW_PAIRS, ExpertLayout, ExpertPairs, max_blocks
from moeyard_kernels.types.gate import SharedRow, TokenChoice
from moeyard_kernels.types.matrix import Matrix, dequantize
from moeyard_kernels.types.peer_window import POISONED, PeerWindow

# Scores of a contiguous tensor take a scalar path for values that do not fill two vector registers.
_LANES = 32
# The weighted reduce sums rows in pieces of about this many fp64 values, which stay in a core's cache.
_PIECE = 16 * 1024


def _check_groups(op: str, E: int, top_k: int, num_groups: int, topk_groups: int, group_score: str) -> None:
    """Raise ValueError unless top_k of E experts can be chosen within groups."""
    if num_groups == topk_groups == 1:
        return
    if num_groups < 1 or E % num_groups:
        raise ValueError(f"{op}: {E} experts in {num_groups} groups")
    if not 1 <= topk_groups <= num_groups:
        raise ValueError(f"{op}: topk_groups {topk_groups} of {num_groups} groups")
    if top_k > E // num_groups * topk_groups:
        raise ValueError(f"{op}: top_k {top_k} exceeds {topk_groups} groups of {E // num_groups}")
    if group_score not in ("max", "top2sum"):
        raise ValueError(f"{op}: group_score {group_score!r} is neither 'max' nor 'top2sum'")
    if group_score == "top2sum" and E // num_groups < 2:
        raise ValueError(f"{op}: group_score 'top2sum' of groups of {E // num_groups}")


@op(
    "experts.topk_gate",
    "1 <= top_k <= E",
    "scoring in ('softmax', 'sigmoid', 'sqrtsoftplus')",
    _check_groups,
    "(counts is None) == (entries is None)",
    logits="float [T, E]",
    bias="fp32 [E]?",
    ids="int64 [T, top_k]?",
    counts="int64 [E] contiguous?",
    entries="int64 [T] contiguous?",
)
def topk_gate(
    logits: torch.Tensor,
    *,
    top_k: int,
    scoring: Literal["softmax", "sigmoid", "sqrtsoftplus"],
    renormalize: bool,
    bias: torch.Tensor | None = None,
    num_groups: int = 1,
    topk_groups: int = 1,
    group_score: Literal["max", "top2sum"] = "max",
    scaling: float = 1.0,
    ids: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    entries: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts for logits [T, E], fp32 or bf16 -> (weights [T, K] fp32, ids [T, K] int64), by falling score.

    Rows of logits may be slices of wider rows. scores = softmax, sigmoid or sqrt(softplus) of the logits. With ids [T,
    K] int64 the choice is given, and only its weights are computed. Otherwise the choice is by scores +
    bias [E] fp32, ties by the lowest id, within the `topk_groups` best of `num_groups` groups of consecutive experts. A
    group's score is its best score, or the sum of its two best. Weights are the unbiased scores, divided by their sum
    (+ 1e-20 unless softmax) if `renormalize`, times `scaling`. Outside the chosen groups, a score is 0 (softmax) or
    -inf for the choice, as in transformers. Models: mixtral, qwen3_moe, deepseek_v2 to deepseek_v4.

    counts [E] and entries [T] are int64, both or neither. Each row with entries[t] >= 0 adds one to counts of each
    expert that it chose. They do not change weights and ids.
    """
    logits = logits.float().contiguous()
    scores = torch.softmax(logits, -1) if scoring == "softmax" else _by_lanes(_SCORES[scoring], logits)
    if ids is None:
        choice = scores if bias is None else scores + bias
        if topk_groups < num_groups:
            masked = 0.0 if scoring == "softmax" else float("-inf")
            choice = _mask_groups(choice, num_groups, topk_groups, group_score, masked)
        ids = _largest(choice, top_k)
    if counts is not None and entries is not None:
        counts += torch.bincount(ids[entries >= 0].flatten(), minlength=counts.shape[0])
    weights = scores.gather(1, ids)
    if renormalize:
        total = weights.sum(-1, keepdim=True)
        weights /= total if scoring == "softmax" else total.add_(1e-20)
    if scaling != 1.0:
        weights *= scaling
    return weights, ids


def make_choice(choice: TokenChoice) -> None:
    """Choose the experts of one token and write `choice.weights` and `choice.ids`."""
    arguments = {**asdict(choice.rule), "counts": choice.counts, "entries": choice.entries}
    weights, ids = topk_gate.reference(choice.logits, bias=choice.bias, **arguments)
    choice.weights.copy_(weights)
    choice.ids.copy_(ids)


def _by_lanes(score: Callable[[torch.Tensor], torch.Tensor], logits: torch.Tensor) -> torch.Tensor:
    """Return score(logits), with all values on the vector path."""
    num_rows, num_experts = logits.shape
    if num_rows * num_experts % _LANES == 0:
        return score(logits)
    padded = logits.new_zeros(num_rows + -num_rows % _LANES, num_experts)
    padded[:num_rows] = logits
    return score(padded)[:num_rows]


def _sqrt_softplus(logits: torch.Tensor) -> torch.Tensor:
    return F.softplus(logits).sqrt_()


_SCORES: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType(
    {"sigmoid": torch.sigmoid, "sqrtsoftplus": _sqrt_softplus}
)


def _mask_groups(
    choice: torch.Tensor, num_groups: int, topk_groups: int, group_score: str, masked: float
) -> torch.Tensor:
    """Set all experts of choice [T, E] outside the best `topk_groups` groups of consecutive experts to `masked`."""
    grouped = choice.view(choice.shape[0], num_groups, choice.shape[1] // num_groups)
    best = grouped.amax(-1) if group_score == "max" else grouped.topk(2, -1).values.sum(-1)
    kept = _largest(best, topk_groups)
    dropped = torch.ones_like(best, dtype=torch.bool).scatter_(1, kept, False)
    return grouped.masked_fill(dropped.unsqueeze(-1), masked).view_as(choice)


def _largest(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Return ids [T, k] of the k largest of scores [T, N], falling, ties by the lower id (topk leaves ties open)."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :k].contiguous()


@op(
    "experts.expert_layout",
    "E > 0",
    "num_slots >= 1",
    "block_rows in (16, 32, 64, 128)",
    topk_ids="int [T, K]",
    slot_of_expert="int32 [E]",
)
def expert_layout(
    topk_ids: torch.Tensor, slot_of_expert: torch.Tensor, *, num_slots: int, block_rows: int, one_in: int = 1
) -> ExpertLayout:
    """Group the pairs t * K + k of topk_ids [T, K] (int64 or int32) by expert.

    slot_of_expert [E] int32 is -1 for experts that are not local. Pairs of one expert stay in order, and each expert
    begins at a multiple of `block_rows` (16, 32, 64 or 128; see `expert_block_rows`). Blocks leave out pairs
    without a local expert: padding rows and other ranks' pairs have the id -1. There is no host sync, because all
    counts stay on the device. The cost does not depend on `num_slots`, which may count the slots of all layers.
    one_in: hint that about 1/one_in of the pairs are local; no result depends on it. Ids must lie in [-1, E) and slots
    in [-1, num_slots). This is checked on a CPU, and on a GPU within `launch.checked()`. The kernel does not write
    values that are -1 in the reference's result.
    """
    num_pairs, num_experts = topk_ids.numel(), len(slot_of_expert)
    check_indices("expert_layout", low=-1, high=num_experts, topk_ids=topk_ids)
    check_indices("expert_layout", low=-1, high=num_slots, slot_of_expert=slot_of_expert)
    experts = topk_ids.flatten().long()
    here = ((experts >= 0) & (slot_of_expert[experts.clamp(min=0)] >= 0)).nonzero().flatten()
    order = here[torch.sort(experts[here], stable=True).indices]
    counts = torch.bincount(experts[here], minlength=num_experts)
    blocks = (counts + (block_rows - 1)) // block_rows
    capacity = max_blocks(num_pairs, num_experts, block_rows)
    # The padding rows before each expert.
    shift = (blocks.cumsum(0) - blocks) * block_rows - (counts.cumsum(0) - counts)
    pairs = torch.full((capacity * block_rows,), -1, dtype=torch.int32)
    pairs[torch.arange(len(order)) + shift[experts[order]]] = order.int()
    slot_of_block = torch.full((capacity,), -1, dtype=torch.int32)
    slot_of_block[: int(blocks.sum())] = slot_of_expert[torch.repeat_interleave(blocks)]
    return ExpertLayout(
        block_rows=block_rows,
        num_pairs=num_pairs,
        num_slots=num_slots,
        one_in=one_in,
        counts=counts.int(),
        pairs=pairs,
        slot_of_block=slot_of_block,
        num_blocks=blocks.sum(dtype=torch.int32).reshape(1),
    )


def _check_layout(op: str, x: torch.Tensor, layout: ExpertLayout | ExpertPairs, top_k: int) -> None:
    """Raise ValueError for a layout, or an open choice, that does not fit x."""
    index = layout.pairs if isinstance(layout, ExpertLayout) else layout.topk_ids
    if index.device != x.device:
        raise ValueError(f"{op}: layout is on {index.device}, x on {x.device}")
    if isinstance(layout, ExpertLayout):
        return
    expert_layout.check(layout.topk_ids, layout.slot_of_expert, num_slots=layout.num_slots, block_rows=16)
    if layout.num_pairs > FEW_PAIRS:
        raise ValueError(f"{op}: {layout.num_pairs} pairs without a layout, at most {FEW_PAIRS}")
    if layout.choice is not None:
        _check_choice(op, layout.choice, layout, top_k)
        if layout.choice.shared is not None:
            _check_shared(op, layout.choice.shared, x)


def _check_choice(op: str, choice: TokenChoice, pairs: ExpertPairs, top_k: int) -> None:
    rule, logits, weights = choice.rule, choice.logits, choice.weights
    topk_gate.check(
        logits,
        top_k=rule.top_k,
        scoring=rule.scoring,
        renormalize=rule.renormalize,
        bias=choice.bias,
        num_groups=rule.num_groups,
        topk_groups=rule.topk_groups,
        group_score=rule.group_score,
        counts=choice.counts,
        entries=choice.entries,
    )
    if logits.shape != (1, len(pairs.slot_of_expert)) or logits.stride(1) != 1:
        raise ValueError(f"{op}: logits {show(logits)} to choose by, expected a row of {len(pairs.slot_of_expert)}")
    if choice.ids is not pairs.topk_ids or choice.ids.dtype != torch.int64:
        raise ValueError(f"{op}: a choice writes the pairs' own topk_ids, int64")
    wanted = (1, top_k)
    if rule.top_k != top_k or choice.ids.shape != wanted:
        raise ValueError(f"{op}: a choice of {rule.top_k} into {show(choice.ids)}, expected {list(wanted)}")
    if weights.shape != wanted or weights.dtype != torch.float32 or not weights.is_contiguous():
        raise ValueError(f"{op}: weights {show(weights)}, expected contiguous float32 {list(wanted)}")
    if not choice.ids.device == weights.device == logits.device:
        raise ValueError(f"{op}: ids on {choice.ids.device}, weights on {weights.device}, logits on {logits.device}")


def _check_shared(op: str, shared: SharedRow, x: torch.Tensor) -> None:
    row, down, out = shared.gate_up, shared.down, shared.out
    if down.dim() != 2 or down.shape[0] != x.shape[1] or down.dtype != x.dtype:
        raise ValueError(f"{op}: a shared down {show(down)} for x {show(x)}, expected {x.dtype} [{x.shape[1]}, I]")
    if row.shape != (1, 2 * down.shape[1]) or row.dtype not in (torch.float32, x.dtype):
        raise ValueError(f"{op}: a shared gate_up {show(row)} for down {show(down)}, expected [1, {2 * down.shape[1]}]")
    if out.shape != x.shape or out.dtype != x.dtype or not out.is_contiguous():
        raise ValueError(f"{op}: a shared out {show(out)}, expected contiguous {x.dtype} {list(x.shape)}")
    if not x.device == row.device == down.device == out.device:
        raise ValueError(
            f"{op}: x on {x.device}, shared gate_up, down, out on {row.device}, {down.device}, {out.device}"
        )


def _check_home(op: str, x: torch.Tensor, top_k: int, out: torch.Tensor | None, home: PeerWindow | None) -> None:
    """Raise ValueError for results that do not fit the memory of peers."""
    if home is None:
        return
    world, most = home.shape.world_size, home.shape.num_rows
    if (home.hidden, home.dtype, home.shape.top_k, out) != (x.shape[1], x.dtype, top_k, None):
        raise ValueError(f"{op}: rows {show(x)}, top_k {top_k} for peers' {home.dtype} [{home.hidden}], no out")
    if x.shape[0] % world or x.shape[0] > most:
        raise ValueError(f"{op}: rows {show(x)} of {world} ranks, at most {most}")
    if home.table.device != x.device:
        raise ValueError(f"{op}: home is on {home.table.device}, x on {x.device}")


@op(
    "experts.grouped_gemm",
    "top_k >= 1 and layout.num_pairs == T * top_k",
    "limit is None or limit > 0",
    _check_layout,
    _check_home,
    x="float [T, H]",
    gate_up="x [layout.num_slots, 2*I, H]",
    down="x [layout.num_slots, H, I]",
    out="x [T * top_k, H]?",
)
def grouped_gemm(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    layout: ExpertLayout | ExpertPairs,
    *,
    top_k: int,
    limit: float | None = None,
    out: torch.Tensor | None = None,
    home: PeerWindow | None = None,
) -> torch.Tensor:
    """One unweighted row per pair: out[t * K + k] = down[slot] @ silu_mul(gate_up[slot] @ x[t]) -> [T * K, H].

    limit: as in `silu_mul`. x [T, H], gate_up [S, 2 I, H] and down [S, H, I] are contiguous, fp32 or bf16. `layout`
    names the slots. Rows of pairs outside all blocks of the layout are not written. They are garbage in a new `out`,
    but two calls may compute hits and misses into one `out`. At most FEW_PAIRS pairs may come as `ExpertPairs`, which
    need no launch. The choice of one token may still be open (`ExpertPairs.choice`). It is made here, with
    `topk_gate`'s bits, and its shared expert is computed too (`SharedRow`). The bits of a row depend on that row and
    its expert alone, not on the layout. Rounding points: both halves of the first product, silu, its product with the
    up half, and the result.

    home, instead of `out`: x are rows from `dispatch_rows`. Results go to the memory of their source ranks, as
    `combine_rows` would copy them. Return [max_tokens * K, H], the results for this rank's tokens. Then call
    `combine_rows` without results, which tells all ranks that theirs are complete.
    """
    if isinstance(layout, ExpertPairs):
        if layout.choice is not None:
            make_choice(layout.choice)
            if layout.choice.shared is not None:
                shared = layout.choice.shared
                shared.out.copy_(
                    linear.reference(
                        silu_mul.reference(shared.gate_up.to(shared.down.dtype), shared.limit), shared.down
                    )
                )
        layout = expert_layout.reference(
            layout.topk_ids, layout.slot_of_expert, num_slots=layout.num_slots, block_rows=layout.block_rows
        )
    out = x.new_empty(layout.num_pairs, x.shape[1]) if out is None else out
    num_blocks = int(layout.num_blocks)
    rows = layout.pairs.view(-1, layout.block_rows)
    for slot in layout.slot_of_block[:num_blocks].unique().tolist():
        pairs = rows[:num_blocks][layout.slot_of_block[:num_blocks] == slot].flatten()
        pairs = pairs[pairs >= 0].long()
        out[pairs] = linear.reference(
            silu_mul.reference(linear.reference(x[pairs // top_k], gate_up[slot]), limit), down[slot]
        )
    if home is None:
        return out
    pairs = rows[:num_blocks].flatten()
    _put_home(out, pairs[pairs >= 0].long(), home)
    return home.views(home.rank).home.flatten(0, 1)


@dataclass(frozen=True, slots=True)
class _Values:
    """Values of the matrices of a stack, made when one is read."""

    stack: Matrix

    def __getitem__(self, slot: int) -> torch.Tensor:
        return dequantize(self.stack[slot])


def _check_packed(
    op: str, x: torch.Tensor, gate_up: Matrix, down: Matrix, layout: ExpertLayout | ExpertPairs, top_k: int
) -> None:
    """Raise ValueError for matrices that are not tiled or do not fit."""
    inner = down.shape[-1]
    wanted = ((layout.num_slots, 2 * inner, x.shape[1]), (layout.num_slots, x.shape[1], inner))
    if (gate_up.shape, down.shape) != wanted or not (gate_up.form.tiled and down.form.tiled):
        shapes = f"gate_up {gate_up.form.name} {gate_up.shape}, down {down.form.name} {down.shape}"
        raise ValueError(f"{op}: {shapes}, expected tiled {wanted[0]} and {wanted[1]}")
    if x.dtype != torch.bfloat16 or gate_up.data.device != x.device or down.data.device != x.device:
        raise ValueError(f"{op}: x {show(x)} on {x.device} for weights on {gate_up.data.device}, {down.data.device}")


@op(
    "experts.grouped_packed",
    "top_k >= 1 and layout.num_pairs == T * top_k",
    "limit is None or limit > 0",
    _check_layout,
    _check_home,
    _check_packed,
    x="float [T, H] rows",
    out="x [T * top_k, H]?",
)
def grouped_gemm_packed(
    x: torch.Tensor,
    gate_up: Matrix,
    down: Matrix,
    layout: ExpertLayout | ExpertPairs,
    *,
    top_k: int,
    limit: float | None = None,
    out: torch.Tensor | None = None,
    home: PeerWindow | None = None,
) -> torch.Tensor:
    """`grouped_gemm` over the values of tiled stacks gate_up [S, 2 I, H] and down [S, H, I], bit for bit.

    x is bf16. The values are those of `dequantize`. On a GPU they are made in registers, which needs Hopper.
    """
    first: Any = _Values(gate_up)
    second: Any = _Values(down)
    return grouped_gemm.reference(x, first, second, layout, top_k=top_k, limit=limit, out=out, home=home)


def _put_home(out: torch.Tensor, pairs: torch.Tensor, window: PeerWindow) -> None:
    """Copy rows of `out` [R K, H] to the memory of the ranks that sent them."""
    world, top_k = window.shape.world_size, window.shape.top_k
    if window.state[POISONED]:
        return
    row, k = pairs // top_k, pairs % top_k
    for peer in range(world):
        of_peer = row % world == peer
        window.views(peer).home[row[of_peer] // world, k[of_peer]] = out[pairs[of_peer]]


@op(
    "experts.moe_weighted_reduce",
    partial="float [T, K, H]",
    weights="fp32 [T, K]",
    shared="partial [T, H]?",
    residual="partial [T, H]?",
)
def moe_weighted_reduce(
    partial: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """partial [T, K, H], weights [T, K] fp32, shared and residual [T, H] -> [T, H] in partial's dtype (fp32 or bf16).

    acc = 0 in fp32; for k = 0..K-1: acc = fma(weights[t, k], float(partial[t, k]), acc); then acc + float(shared), and
    one rounding to the dtype. A residual is added to that and rounded again, as in a separate addition. Reference and
    Triton kernel agree bit for bit.

    Torch has no multiply-add that is fused on every path, so the reference runs the chain in fp64. There a product of
    two fp32 values is exact, and a step rounds twice: the sum to fp64, then to fp32. The result differs from a single
    rounding only if the fp64 sum is so close to the middle of two fp32 values that its own error matters. So each sum
    is moved by one to two of its last places to either side, which encloses the exact sum. Rounding is monotonic: if
    both ends round to the same fp32 value, so does the exact sum. If not, and the sum was inexact, the chain runs again
    with sums rounded to odd. Then only the second rounding counts.
    """
    if residual is not None:
        return residual + moe_weighted_reduce.reference(partial, weights, shared)
    num_tokens, _, hidden = partial.shape
    step = max(1, _PIECE // max(1, hidden))
    w64 = weights.double().unsqueeze(2)
    if num_tokens <= step:
        return _reduce(w64, partial, shared)
    out = torch.empty(num_tokens, hidden, dtype=partial.dtype)
    for t in range(0, num_tokens, step):
        piece = slice(t, t + step)
        out[piece] = _reduce(w64[piece], partial[piece], None if shared is None else shared[piece])
    return out


def _reduce(w: torch.Tensor, partial: torch.Tensor, shared: torch.Tensor | None) -> torch.Tensor:
    acc = _chain(w, partial.double())
    if shared is not None:
        acc += shared
    return acc.to(partial.dtype)


def _chain(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the fp32 chain acc = fma(w[:, k], x[:, k], acc), for fp32 values in fp64: w [T, K, 1], x [T, K, H]."""
    num_tokens, top_k, hidden = x.shape
    # Adding zero turns a product of -0 into the +0 that fma(a, b, +0) is.
    acc = (w[:, 0] * x[:, 0]).add_(0.0).float()
    if top_k == 1:
        return acc
    accs = x.new_empty(num_tokens, top_k - 1, hidden)
    sums = torch.empty_like(accs)
    for k in range(1, top_k):
        c, s = accs[:, k - 1], sums[:, k - 1]
        c.copy_(acc)
        acc = torch.addcmul(c, w[:, k], x[:, k], out=s).float()
    apart = (sums * (1 + 2.0**-52)).float() != (sums * (1 - 2.0**-52)).float()
    if apart.any():
        # A sum is exact if subtracting either summand gives the other. One of these subtractions is always exact.
        p = w[:, 1:] * x[:, 1:]
        if (apart & ((sums - accs != p) | (sums - p != accs))).any():
            return _chain_to_odd(w, x)
    return acc


def _chain_to_odd(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the chain with each fp64 sum rounded to odd (towards the odd neighbour if inexact), then to fp32.

    Boldo and Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd", 2008.
    """
    acc = torch.zeros_like(x[:, 0])
    for k in range(x.shape[1]):
        p = w[:, k] * x[:, k]
        s = p + acc
        # Knuth's two-sum: p + acc - s exactly.
        t = s - p
        error = (p - (s - t)) + (acc - t)
        away = torch.where(s > 0, error > 0, error < 0)
        toward = torch.where(s > 0, error < 0, error > 0)
        bits = s.view(torch.int64)
        bits += (away.long() - toward.long()) * (1 - (bits & 1))
        acc = s.float().double()
    return acc.float()


@op(
    "experts.moe_reduce_add_norm",
    "shared_gate is None or shared is not None",
    partial="float [T, K, H]",
    weights="fp32 [T, K]",
    shared="partial [T, H]?",
    residual="partial [T, H]",
    norm="partial|fp32 [H]",
    shared_gate="float [T]?",
)
def moe_reduce_add_norm(
    partial: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None,
    residual: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    *,
    shared_gate: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`add_rms_norm(moe_weighted_reduce(partial, weights, shared), residual, norm, eps)` in one launch on a GPU.

    Return (normalised rows [T, H], sum of residual and experts [T, H]), bit for bit. Shapes: partial [T, K, H], weights
    [T, K], shared (or None) and residual [T, H], norm [H]. With shared_gate [T], fp32 or bf16 of any stride,
    `scale_rows_(shared, shared_gate, sigmoid=True)` replaces `shared`.
    """
    if shared is not None and shared_gate is not None:
        shared = scale_rows_.reference(shared.clone(), shared_gate, sigmoid=True)
    return add_rms_norm.reference(moe_weighted_reduce.reference(partial, weights, shared), residual, norm, eps)
