"""DeepSeek-V4's attention of prompt rows: pooled entries, their choice, attention, and the state that is left.

Positions are rotated by the callers, except entries, which `pool_blocks` rotates. `layers/compressed.py` of the worker
has the formula.
"""

from types import MappingProxyType

import torch

from moeyard_kernels.common.checks import check_indices
from moeyard_kernels.ops.attention import rope as rotate
from moeyard_kernels.ops.elementwise import rms_norm, sum_in_order
from moeyard_kernels.ops.op import op
from moeyard_kernels.types.layers import Pooling
from moeyard_kernels.types.prompt_tables import ChosenRows, PromptTables

_TABLES = MappingProxyType(
    {
        "tables.chunks": "int32 [B, 4] contiguous",
        "tables.rows": "int32 [P, 2] contiguous",
        "tables.page_table": "int32 [B, _] contiguous",
    }
)


@op(
    "attention.pool_blocks",
    "C == (2 * D if pooling.overlaps else D)",
    "0 <= column and column + 2 * C <= W <= Wc",
    "R % 2 == 0 and D % 2 == 0 and R <= D",
    compressed="fp32 [P, Wc] rows",
    pending="fp32 [num_slots, size, W] contiguous",
    **{
        "pooling.bias": "fp32 [ratio, C] contiguous",
        "pooling.norm": "float [D] contiguous",
        "pooling.entries": "float [_, D] contiguous",
    },
    rope="fp32 [_, R] contiguous",
    **_TABLES,
)
def pool_blocks(
    compressed: torch.Tensor,
    pending: torch.Tensor,
    *,
    pooling: Pooling,
    rope: torch.Tensor,
    eps: float,
    column: int,
    tables: PromptTables,
) -> None:
    """Write the entries of all blocks that end in the chunks into the pages of `pooling`.

    compressed [P, C'] holds the values, then the gates, of this pooling from `column` on. `pending` holds those of
    earlier positions. An entry is the sum of its positions' values, weighted by the softmax of gates plus bias in each
    column. Then it is rounded, normalised and rotated at its first position. rope [positions, Dr]: cos, then sin. Sums
    are fp32 in the order of positions. Bits: a GPU gives the same ones for every cut into chunks.
    """
    ratio, width, dim = pooling.ratio, pooling.bias.shape[1], pooling.norm.shape[0]
    chunks = tables.chunks.tolist()
    for b, w in tables.blocks(ratio).tolist():
        first, start, before, _ = chunks[b]
        halves = [(w * ratio, dim if pooling.overlaps else 0)]
        if pooling.overlaps and w:
            halves.insert(0, ((w - 1) * ratio, 0))
        values, gates = list[torch.Tensor](), list[torch.Tensor]()
        for begin, at in halves:
            if begin < start:
                rows = pending[before, torch.arange(begin, begin + ratio, device=pending.device) % pending.shape[1]]
            else:
                rows = compressed[first + begin - start : first + begin - start + ratio]
            values.append(rows[:, column + at : column + at + dim])
            gates.append(rows[:, column + width + at : column + width + at + dim] + pooling.bias[:, at : at + dim])
        gate = torch.cat(gates)
        weights = (gate - gate.amax(0)).exp_()
        pooled = sum_in_order(weights * torch.cat(values), 0) / sum_in_order(weights, 0)
        normed = rms_norm.reference(pooled.to(pooling.entries.dtype), pooling.norm, eps)
        cos, sin = rope[w * ratio : w * ratio + 1].chunk(2, 1)
        rotated = rotate.reference(normed[-rope.shape[1] :].float().view(1, 1, -1), cos, sin, interleaved=True)
        normed[-rope.shape[1] :] = rotated.view(-1)
        pooling.entries[_places(tables, pooling, b, w, w + 1)] = normed


def _places(tables: PromptTables, pooling: Pooling, chunk: int, begin: int, end: int) -> torch.Tensor:
    """Return int64: the rows of blocks [begin, end) of a chunk's sequence among the entries."""
    ends = torch.arange(begin + 1, end + 1, device=tables.page_table.device) * pooling.ratio - 1
    pages = tables.page_table[chunk, ends // tables.page_size].long()
    return (pages * tables.page_size + ends % tables.page_size) // pooling.granule


@op(
    "attention.index_scores",
    wanted="float [P, H, D] rows",
    weights="fp32 [P, H] rows",
    **{"pooling.entries": "wanted [_, D] contiguous", "chosen.rows": "int32 [R] contiguous"},
    **_TABLES,
)
def index_scores(
    wanted: torch.Tensor, weights: torch.Tensor, *, pooling: Pooling, chosen: ChosenRows, tables: PromptTables
) -> torch.Tensor:
    """Score entries for some rows: sum over heads of relu(wanted . entry) weight / sqrt(D H) -> [R, width] fp32.

    A row at position p has scores for the first (p + 1) // ratio entries. The others are undefined. Heads are summed in
    order. Bits: a GPU gives the same ones for every cut into chunks and parts.
    """
    scores = torch.empty(chosen.rows.shape[0], chosen.width, device=wanted.device)
    scale = (wanted.shape[2] * wanted.shape[1]) ** -0.5
    for i, row in enumerate(chosen.rows.tolist()):
        b, position = tables.rows[row].tolist()
        seen = (position + 1) // pooling.ratio
        entries = pooling.entries[_places(tables, pooling, b, 0, seen)].float()
        products = (wanted[row].float() @ entries.t()).relu_()
        scores[i, :seen] = sum_in_order(products * (weights[row] * scale).unsqueeze(1), 0)
    return scores


@op(
    "attention.choose_entries",
    "top_k > 0",
    "pooling.entries.shape[0] * pooling.granule < 2**31",
    scores="fp32 [R, _] contiguous",
    found="int32 [P, top_k] contiguous",
    **{"chosen.rows": "int32 [R] contiguous"},
    **_TABLES,
)
def choose_entries(
    scores: torch.Tensor, found: torch.Tensor, *, pooling: Pooling, top_k: int, chosen: ChosenRows, tables: PromptTables
) -> None:
    """Write into found [P, top_k] the places in the pages of the `top_k` best entries of each of some rows.

    They are in ascending order of entries. Of equal scores the lowest entries are taken. A row at position p has
    (p + 1) // ratio > top_k scores. The result is exact.
    """
    for i, row in enumerate(chosen.rows.tolist()):
        b, position = tables.rows[row].tolist()
        seen = (position + 1) // pooling.ratio
        best = scores[i, :seen].sort(descending=True, stable=True).indices[:top_k]
        found[row] = _places(tables, pooling, b, 0, seen)[best.sort().values].int()


@op(
    "attention.attend_entries",
    "scale > 0",
    "window > 0",
    "pooling is None or pooling.entries.shape[0] * pooling.granule < 2**31",
    queries="float [P, H, D] rows",
    keys="queries [P, D] rows",
    recent="queries [num_slots, size, D] contiguous",
    sink="fp32 [H] contiguous",
    **_TABLES,
    **{"pooling.entries": "queries [_, D] contiguous?"},
    found="int32 [P, top_k] contiguous?",
)
def attend_entries(
    queries: torch.Tensor,
    keys: torch.Tensor,
    recent: torch.Tensor,
    sink: torch.Tensor,
    *,
    window: int,
    scale: float,
    tables: PromptTables,
    pooling: Pooling | None = None,
    found: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend to the last `window` positions, and to entries of earlier blocks -> [P, H, D] in the dtype of queries.

    A key is its value too, and serves all heads. keys [P, D] are those of this step, and `recent` holds earlier ones.
    A row at position p sees the first (p + 1) // ratio entries of `pooling`. If there are more than top_k, it sees
    those at the places `found` [P, top_k]. sink [H] is the logit of a key whose value is zero. Bits: a GPU gives the
    same ones for every cut into chunks.
    """
    out = queries.new_empty(queries.shape)
    chunks = tables.chunks.tolist()
    for row, (b, position) in enumerate(tables.rows.tolist()):
        first, start, before, _ = chunks[b]
        low = max(0, position - window + 1)
        seen = [keys[first + max(low, start) - start : row + 1]]
        if low < start:
            seen.insert(0, recent[before, torch.arange(low, start, device=recent.device) % recent.shape[1]])
        if pooling is not None and (count := (position + 1) // pooling.ratio):
            places = _places(tables, pooling, b, 0, count)
            if found is not None and count > found.shape[1]:
                places = found[row].long()
            seen.append(pooling.entries[places])
        known = torch.cat(seen).float()
        scores = torch.cat((queries[row].float() @ known.t() * scale, sink.unsqueeze(1)), 1)
        out[row] = (scores.softmax(1)[:, :-1] @ known).to(out.dtype)
    return out


@op(
    "attention.keep_last",
    "(compressed is None) == (pending is None)",
    "W <= C",
    keys="float [P, D] rows",
    recent="keys [num_slots, _, D] contiguous",
    compressed="fp32 [P, C] rows?",
    pending="fp32 [num_slots, _, W] contiguous?",
    **_TABLES,
    **{"tables.moves": "int32 [_, 3] contiguous"},
)
def keep_last(
    keys: torch.Tensor,
    recent: torch.Tensor,
    compressed: torch.Tensor | None = None,
    pending: torch.Tensor | None = None,
    *,
    tables: PromptTables,
) -> None:
    """Write the last rows of each chunk into its slot, and those before a snapshot into the snapshot's slot.

    keys [P, D] go to `recent`, and the first W values of rows of compressed [P, C] to `pending`. The row of position p
    is row p % size of a slot. Rows of earlier positions come from the state before the chunk, and are zero before
    position 0. All slots that hold a state before a chunk are read first. The result is exact.
    """
    check_indices("keep_last", low=0, high=recent.shape[0], moves=tables.moves[:, 2])
    for rows, slots in ((keys, recent), (compressed, pending)):
        if rows is not None and slots is not None:
            _keep_last(rows, slots, tables)


def _keep_last(rows: torch.Tensor, slots: torch.Tensor, tables: PromptTables) -> None:
    chunks, size = tables.chunks.tolist(), slots.shape[1]
    states = [torch.zeros_like(slots[0]) if before < 0 else slots[before].clone() for _, _, before, _ in chunks]
    for b, end, slot in tables.moves.tolist():
        first, start = chunks[b][:2]
        at = torch.arange(max(start, end - size), end, device=slots.device)
        state = states[b].clone()
        state[at % size] = rows[first + at - start, : slots.shape[2]]
        slots[slot] = state
