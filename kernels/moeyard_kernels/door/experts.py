"""The door to the routed experts: their products and the weighted sum of their results. See `ops`."""

import torch

from moeyard_kernels.common.checks import FLOATS, check_devices, check_norm, show
from moeyard_kernels.door.load import kernel
from moeyard_kernels.door.routing import check_gate
from moeyard_kernels.types.expert_layout import FEW_PAIRS, ExpertLayout, ExpertPairs
from moeyard_kernels.types.gate import SharedRow, TokenChoice
from moeyard_kernels.types.peer_window import PeerWindow

_BLOCK_ROWS = (16, 32, 64, 128)


def _check_routing(op: str, topk_ids: torch.Tensor, slot_of_expert: torch.Tensor) -> None:
    if topk_ids.dim() != 2 or topk_ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{op}: topk_ids must be int64 or int32 [T, K], got {show(topk_ids)}")
    if slot_of_expert.dim() != 1 or slot_of_expert.dtype != torch.int32 or not len(slot_of_expert):
        raise ValueError(f"{op}: slot_of_expert must be int32 [E], got {show(slot_of_expert)}")
    check_devices(op, slot_of_expert=slot_of_expert, topk_ids=topk_ids)


def expert_layout(
    topk_ids: torch.Tensor, slot_of_expert: torch.Tensor, *, num_slots: int, block_rows: int, one_in: int = 1
) -> ExpertLayout:
    """Group the pairs t * K + k of topk_ids [T, K] (int64 or int32) by expert; slot_of_expert [E] int32, -1: not here.

    Pairs of one expert stay in order, and each expert begins at a multiple of `block_rows` (16, 32, 64 or 128; see
    `expert_block_rows`). In no block are pairs of experts that are not here, and masked ones, whose id is -1: those of
    a padding row, or of another rank's expert. No host sync: all counts stay on the device. The cost does not depend on
    `num_slots`, which may count the slots of all layers. `one_in`: of so many pairs at best one is here, on which
    no result depends. Ids must lie in [-1, E) and slots in [-1, num_slots): checked on a CPU, and on a GPU within
    `launch.checked()`.
    """
    _check_routing("expert_layout", topk_ids, slot_of_expert)
    if num_slots < 1 or block_rows not in _BLOCK_ROWS:
        raise ValueError(f"expert_layout: {num_slots} slots in blocks of {block_rows} rows, expected {_BLOCK_ROWS}")
    return kernel("experts.expert_layout", topk_ids).expert_layout(
        topk_ids, slot_of_expert, num_slots=num_slots, block_rows=block_rows, one_in=one_in
    )


def grouped_gemm(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    layout: ExpertLayout | ExpertPairs,
    *,
    top_k: int,
    out: torch.Tensor | None = None,
    home: PeerWindow | None = None,
) -> torch.Tensor:
    """One unweighted row per pair: out[t * K + k] = down[slot] @ silu_mul(gate_up[slot] @ x[t]) -> [T * K, H].

    x [T, H], gate_up [S, 2 I, H] and down [S, H, I] (contiguous, fp32 or bf16), slots as `layout` has them. Rows of
    pairs that are in no block of the layout are left as they are: garbage in a new `out`, while hits and misses may be
    computed by two calls into one. Of at most FEW_PAIRS pairs `ExpertPairs` will do, which take no launch to make; one
    token's may still be to choose (`ExpertPairs.choice`), and are chosen then, with `topk_gate`'s bits; a shared expert
    in it is computed with them (`SharedRow`). A row's bits depend on that row and its expert alone, not on the layout.
    Rounding points: both halves of the first product, silu, its product with the up half, and the result.

    `home`, in place of `out`: x are the rows that a `dispatch_rows` gave, and results go to the memory of the ranks
    that these came from, where `combine_rows` would bring them; -> [max_tokens * K, H], what comes home to this rank.
    Call `combine_rows` without results then, by which all ranks learn that theirs are complete.
    """
    if x.dim() != 2 or x.dtype not in FLOATS:
        raise ValueError(f"grouped_gemm: x must be fp32 or bf16 [T, H], got {show(x)}")
    hidden, num_pairs = x.shape[1], x.shape[0] * top_k
    if gate_up.dim() != 3 or gate_up.shape[0] != layout.num_slots or gate_up.shape[1] % 2 or gate_up.shape[2] != hidden:
        raise ValueError(
            f"grouped_gemm: gate_up {show(gate_up)} for x {show(x)}, expected [{layout.num_slots}, 2 I, {hidden}]"
        )
    wanted = (layout.num_slots, hidden, gate_up.shape[1] // 2)
    if down.shape != wanted:
        raise ValueError(f"grouped_gemm: down {show(down)} for gate_up {show(gate_up)}, expected {list(wanted)}")
    if gate_up.dtype != x.dtype or down.dtype != x.dtype:
        raise ValueError(f"grouped_gemm: gate_up {gate_up.dtype}, down {down.dtype} for x of {x.dtype}")
    if top_k < 1 or layout.num_pairs != num_pairs:
        raise ValueError(f"grouped_gemm: layout of {layout.num_pairs} pairs for {x.shape[0]} tokens, top_k {top_k}")
    if out is not None and (out.shape != (num_pairs, hidden) or out.dtype != x.dtype):
        raise ValueError(f"grouped_gemm: out {show(out)}, expected {x.dtype} [{num_pairs}, {hidden}]")
    if home is not None and (home.hidden, home.dtype, home.shape.top_k, out) != (hidden, x.dtype, top_k, None):
        raise ValueError(f"grouped_gemm: rows {show(x)}, top_k {top_k} for peers' {home.dtype} [{home.hidden}], no out")
    if home is not None and (x.shape[0] % home.shape.world_size or x.shape[0] > home.shape.num_rows):
        raise ValueError(
            f"grouped_gemm: rows {show(x)} of {home.shape.world_size} ranks, at most {home.shape.num_rows}"
        )
    index = layout.pairs if isinstance(layout, ExpertLayout) else layout.topk_ids
    if isinstance(layout, ExpertPairs):
        _check_routing("grouped_gemm", layout.topk_ids, layout.slot_of_expert)
        if num_pairs > FEW_PAIRS:
            raise ValueError(f"grouped_gemm: {num_pairs} pairs without a layout, at most {FEW_PAIRS}")
        if layout.choice is not None:
            _check_choice(layout.choice, layout, top_k, x)
    table = None if home is None else home.table
    check_devices("grouped_gemm", x=x, gate_up=gate_up, down=down, layout=index, out=out, home=table)
    return kernel("experts.grouped_gemm", x).grouped_gemm(x, gate_up, down, layout, top_k=top_k, out=out, home=home)


def _check_choice(choice: TokenChoice, pairs: ExpertPairs, top_k: int, x: torch.Tensor) -> None:
    op, rule, logits = "grouped_gemm", choice.rule, choice.logits
    check_gate(op, logits, rule, choice.bias, choice.counts, choice.entries)
    if logits.shape != (1, pairs.slot_of_expert.shape[0]) or logits.stride(1) != 1:
        raise ValueError(f"{op}: logits {show(logits)} to choose by, expected a row of {len(pairs.slot_of_expert)}")
    if choice.ids is not pairs.topk_ids or choice.ids.dtype != torch.int64:
        raise ValueError(f"{op}: a choice writes the pairs' own topk_ids, int64")
    wanted = (1, top_k)
    if rule.top_k != top_k or choice.ids.shape != wanted:
        raise ValueError(f"{op}: a choice of {rule.top_k} into {show(choice.ids)}, expected {list(wanted)}")
    weights = choice.weights
    if weights.shape != wanted or weights.dtype != torch.float32 or not weights.is_contiguous():
        raise ValueError(f"{op}: weights {show(weights)}, expected contiguous fp32 {list(wanted)}")
    check_devices(op, ids=choice.ids, weights=weights, logits=logits)
    if choice.shared is not None:
        _check_shared(choice.shared, x)


def _check_shared(shared: SharedRow, x: torch.Tensor) -> None:
    op, row, down = "grouped_gemm", shared.gate_up, shared.down
    if down.dim() != 2 or down.shape[0] != x.shape[1] or down.dtype != x.dtype:
        raise ValueError(f"{op}: a shared down {show(down)} for x {show(x)}, expected {x.dtype} [{x.shape[1]}, I]")
    if row.shape != (1, 2 * down.shape[1]) or row.dtype not in (torch.float32, x.dtype):
        raise ValueError(f"{op}: a shared gate_up {show(row)} for down {show(down)}, expected [1, {2 * down.shape[1]}]")
    if shared.out.shape != x.shape or shared.out.dtype != x.dtype or not shared.out.is_contiguous():
        raise ValueError(f"{op}: a shared out {show(shared.out)}, expected contiguous {x.dtype} {list(x.shape)}")
    check_devices(op, x=x, gate_up=row, down=down, out=shared.out)


def moe_weighted_reduce(
    partial: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """partial [T, K, H], weights [T, K] fp32, shared and residual [T, H] -> [T, H] in partial's dtype (fp32 or bf16).

    acc = 0 in fp32; for k = 0..K-1: acc = fma(weights[t, k], float(partial[t, k]), acc); then acc + float(shared), and
    one rounding to the dtype. With a residual, residual + that, rounded again: the bits of adding it afterwards.
    Reference and Triton kernel agree bit for bit.
    """
    _check_reduce("moe_weighted_reduce", partial, weights, shared=shared, residual=residual)
    return kernel("experts.moe_weighted_reduce", partial).moe_weighted_reduce(partial, weights, shared, residual)


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

    partial [T, K, H], weights [T, K] fp32, shared (or None) and residual [T, H], norm [H] -> (normalised rows [T, H],
    the sum of residual and experts [T, H]), bit for bit. shared_gate [T], fp32 or bf16, of any stride: `shared` counts
    as `scale_rows_(shared, shared_gate, sigmoid=True)` leaves it.
    """
    op = "moe_reduce_add_norm"
    _check_reduce(op, partial, weights, shared=shared, residual=residual)
    check_norm(op, residual, norm)
    if shared_gate is not None and (shared is None or shared_gate.shape != partial.shape[:1]):
        raise ValueError(f"{op}: shared_gate {show(shared_gate)} for partial {show(partial)} and its shared rows")
    if shared_gate is not None and shared_gate.dtype not in FLOATS:
        raise ValueError(f"{op}: shared_gate must be fp32 or bf16 [T], got {show(shared_gate)}")
    check_devices(op, partial=partial, norm=norm, shared_gate=shared_gate)
    return kernel("experts.moe_reduce_add_norm", partial).moe_reduce_add_norm(
        partial, weights, shared, residual, norm, eps, shared_gate=shared_gate
    )


def _check_reduce(op: str, partial: torch.Tensor, weights: torch.Tensor, **rows: torch.Tensor | None) -> None:
    if partial.dim() != 3 or partial.dtype not in FLOATS:
        raise ValueError(f"{op}: partial must be fp32 or bf16 [T, K, H], got {show(partial)}")
    num_tokens, top_k, hidden = partial.shape
    if weights.shape != (num_tokens, top_k) or weights.dtype != torch.float32:
        raise ValueError(f"{op}: weights {show(weights)}, expected fp32 [{num_tokens}, {top_k}]")
    for name, x in rows.items():
        if x is not None and (x.shape != (num_tokens, hidden) or x.dtype != partial.dtype):
            raise ValueError(f"{op}: {name} {show(x)}, expected {partial.dtype} [{num_tokens}, {hidden}]")
    check_devices(op, partial=partial, weights=weights, **rows)
