"""DeepSeek-V4's attention at output positions: rotation, pooled entries, the indexer's choice, and attention over both.

A head's rotated values are its last ones. They leave the first values of all pairs before the second ones, as `rope`
does. `rotate_back` puts them in pairs again.
"""

from collections.abc import Sequence
from types import MappingProxyType

import torch

from moeyard_kernels.common.checks import check_indices
from moeyard_kernels.ops.attention import rope
from moeyard_kernels.ops.elementwise import rms_norm, sum_in_order
from moeyard_kernels.ops.op import op
from moeyard_kernels.types.compressed_rows import CompressedRows
from moeyard_kernels.types.layers import Pooling

_ANGLES = MappingProxyType({"cos": "fp32 [T, half]", "sin": "like cos"})
_ROWS = MappingProxyType({"rows.positions": "int64 [T]"})


def _check_state(rows: CompressedRows | None, recent: torch.Tensor, op: str) -> None:
    if rows is not None:
        check_indices(op, low=0, high=recent.shape[0], slots=rows.slots)


@op(
    "attention.compressed_rotate",
    "2 * half <= D",
    "W >= heads * D",
    "index_heads == 0 or (W - heads * D) % index_heads == 0",
    "index_heads > 0 or W == heads * D",
    "rows is None or rows.num_rows == T",
    "(compressed is None) == (pending is None)",
    "pending is None or Cp <= C",
    _check_state,
    q="float [T, W] rows",
    kv="q [T, D] rows",
    **_ANGLES,
    recent="q [slots, ring, D] contiguous",
    compressed="fp32 [T, C] rows?",
    pending="fp32 [_, _, Cp] contiguous?",
)
def compressed_rotate(
    q: torch.Tensor,
    kv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    recent: torch.Tensor,
    *,
    heads: int,
    index_heads: int,
    eps: float,
    compressed: torch.Tensor | None = None,
    pending: torch.Tensor | None = None,
    rows: CompressedRows | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return rotated queries [T, Hq, D], keys [T, D] and the indexer's queries [T, Hi, Di] (None without).

    q [T, Hq D + Hi Di], kv [T, D], cos and sin [T, Dr/2]. Queries are first divided by their root mean square. With
    `rows` each row that has a place stores its key in recent[slot, position % ring], and the first columns of
    compressed [T, C] in pending[slot, position % ring]. Rows of one sequence store in distinct places.
    """
    dim = kv.shape[1]
    ones = torch.ones(dim, dtype=q.dtype, device=q.device)
    queries = rms_norm.reference(q[:, : heads * dim].unflatten(1, (heads, dim)), ones, eps)
    queries = _rotate_last(queries, cos, sin)
    keys = _rotate_last(kv.unsqueeze(1), cos, sin).squeeze(1)
    wanted = None
    if index_heads:
        wanted = _rotate_last(q[:, heads * dim :].unflatten(1, (index_heads, -1)), cos, sin)
    if rows is not None:
        stored = (rows.places >= 0).nonzero()[:, 0]
        slots, positions = rows.slots[stored // rows.num_queries], rows.positions[stored]
        recent[slots, positions % recent.shape[1]] = keys[stored]
        if pending is not None and compressed is not None:
            pending[slots, positions % pending.shape[1]] = compressed[stored, : pending.shape[2]]
    return queries, keys, wanted


@op("attention.compressed_rotate", "2 * half <= D", "D % 2 == 0", x="float [T, H, D] contiguous", **_ANGLES)
def rotate_back(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Undo the rotation of the last values of x [T, Hq, D]: pairs (i, i + Dr/2) turn back and become (2 i, 2 i + 1)."""
    first = x.shape[2] - 2 * cos.shape[1]
    out = x.clone()
    turned = rope.reference(x[..., first:].float(), cos, -sin, interleaved=False).to(x.dtype)
    out[..., first::2], out[..., first + 1 :: 2] = turned.chunk(2, -1)
    return out


def _rotate_last(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first = x.shape[2] - 2 * cos.shape[1]
    turned = rope.reference(x[..., first:].float(), cos, sin, interleaved=True).to(x.dtype)
    return torch.cat((x[..., :first], turned), -1)


def _check_poolings(poolings: Sequence[Pooling], pending: torch.Tensor, op: str) -> None:
    width = sum(2 * each.bias.shape[1] for each in poolings)
    if not 1 <= len(poolings) <= 2 or width != pending.shape[2] or poolings[0].ratio != poolings[-1].ratio:
        raise ValueError(f"{op}: {len(poolings)} poolings of {width} columns, pending has {pending.shape[2]}")
    for each in poolings:
        wanted = (2 if each.overlaps else 1) * each.norm.shape[0]
        if each.bias.shape != (each.ratio, wanted) or each.entries.shape[1] != each.norm.shape[0]:
            raise ValueError(
                f"{op}: bias {list(each.bias.shape)}, norm {list(each.norm.shape)}, entries {list(each.entries.shape)}"
            )


@op(
    "attention.compressed_pool",
    _check_poolings,
    pending="fp32 [slots, ring, C] contiguous",
    rope="fp32 [_, _] contiguous",
    **{"rows.positions": "int64 [_]"},
)
def compressed_pool(
    pending: torch.Tensor, rope: torch.Tensor, *, poolings: Sequence[Pooling], rows: CompressedRows, eps: float
) -> None:
    """Store the entries of all blocks that end at positions of `rows` with a place.

    pending [slots, ring, C] fp32 holds, for each pooling in turn, values and gates of the last positions. An entry is
    the sum of its positions' values, weighted by a softmax of gates plus bias in each column. It is rounded, normalised
    and rotated at the block's first position, by rope [positions, Dr].
    """
    ratio, column = poolings[0].ratio, 0
    ended = (((rows.positions + 1) % ratio == 0) & (rows.places >= 0)).nonzero()[:, 0]
    ends, slots = rows.positions[ended], rows.slots[ended // max(1, rows.num_queries)]
    for pooling in poolings:
        width, dim = pooling.bias.shape[1], pooling.norm.shape[0]
        reach = 2 * ratio if pooling.overlaps else ratio
        at = ends.unsqueeze(1) + torch.arange(1 - reach, 1, device=ends.device)
        blocks = pending[slots.unsqueeze(1), at % pending.shape[1], column : column + 2 * width]
        values, gates = blocks.chunk(2, 2)
        if pooling.overlaps:
            gates = gates + pooling.bias.repeat(2, 1)
            values, gates = (torch.cat((x[:, :ratio, :dim], x[:, ratio:, dim:]), 1) for x in (values, gates))
            missing = (at < 0).unsqueeze(2)
            values, gates = values.masked_fill(missing, 0), gates.masked_fill(missing, float("-inf"))
        else:
            gates = gates + pooling.bias
        weights = (gates - gates.amax(1, keepdim=True)).exp_()
        pooled = sum_in_order(weights * values, 1) / sum_in_order(weights, 1)
        normed = rms_norm.reference(pooled.to(pooling.entries.dtype), pooling.norm, eps)
        cos, sin = rope.index_select(0, ends - ratio + 1).chunk(2, 1)
        rotated = _rotate_last(normed.unsqueeze(1), cos, sin).squeeze(1)
        pooling.entries.index_copy_(0, rows.places[ended] // pooling.granule, rotated)
        column += 2 * width


@op(
    "attention.output_scores",
    "0 < top_k < rows.num_entries(ratio)",
    wanted="float [T, Hi, Di] contiguous",
    weights="fp32 [T, Hi] rows",
    entries="wanted [_, Di] contiguous",
    **_ROWS,
)
def output_scores(
    wanted: torch.Tensor,
    weights: torch.Tensor,
    entries: torch.Tensor,
    *,
    rows: CompressedRows,
    ratio: int,
    granule: int,
    top_k: int,
) -> torch.Tensor:
    """Return fp32 [T, N]: the sum over heads of relu(q k) * weight, both scaled, for N = rows.num_entries(ratio).

    wanted [T, Hi, Di], weights [T, Hi]. Values are defined for the entries that a row sees, if it sees more than
    `top_k`. No value is a negative zero.
    """
    heads, dim = wanted.shape[1:]
    out = wanted.new_zeros(len(wanted), rows.num_entries(ratio), dtype=torch.float32)
    for row, count in enumerate(((rows.positions + 1) // ratio).tolist()):
        if count > top_k:
            keys = entries[_places_of(rows, row, torch.arange(count), ratio) // granule].float()
            scores = (wanted[row].float() @ keys.T).relu_() * dim**-0.5 * (weights[row] * heads**-0.5).unsqueeze(1)
            out[row, :count] = sum_in_order(scores, 0) + 0.0
    return out


def _places_of(rows: CompressedRows, row: int, entries: torch.Tensor, ratio: int) -> torch.Tensor:
    """Return page * page_size + offset of the last positions of a row's entries."""
    ends = (entries.to(rows.page_table.device) + 1) * ratio - 1
    pages = rows.page_table[row // rows.num_queries, ends // rows.page_size].long()
    return pages * rows.page_size + ends % rows.page_size


@op(
    "attention.output_choice",
    "0 < top_k < N",
    scores="fp32 [T, N] contiguous",
    positions="int64 [T] contiguous",
)
def output_choice(scores: torch.Tensor, positions: torch.Tensor, *, ratio: int, top_k: int) -> torch.Tensor:
    """Return int32 [T, top_k]: the entries with the largest scores [T, N] of those that a row sees, ascending.

    Among equal scores the lower entry wins. Values are defined for rows that see more than `top_k` entries.
    """
    out = torch.zeros(len(scores), top_k, dtype=torch.int32, device=scores.device)
    for row, count in enumerate(((positions + 1) // ratio).tolist()):
        if count > top_k:
            best = scores[row, :count].sort(descending=True, stable=True).indices[:top_k]
            out[row] = best.sort().values
    return out


@op(
    "attention.compressed_decode",
    "0 < window <= ring",
    "2 * half <= D",
    "D % 2 == 0",
    "(entries is None) == (ratio == 0)",
    _check_state,
    queries="float [T, Hq, D] contiguous",
    recent="queries [slots, ring, D] contiguous",
    entries="queries [_, D] contiguous?",
    chosen="int32 [T, top_k] contiguous?",
    sink="fp32 [Hq] contiguous",
    **_ANGLES,
    **_ROWS,
)
def compressed_decode(
    queries: torch.Tensor,
    recent: torch.Tensor,
    entries: torch.Tensor | None,
    chosen: torch.Tensor | None,
    sink: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    rows: CompressedRows,
    window: int,
    ratio: int,
    granule: int,
    top_k: int,
) -> torch.Tensor:
    """Attend from rotated queries [T, Hq, D] -> [T, Hq, D], rotated back as by `rotate_back`.

    A row sees the last `window` positions in recent [slots, ring, D], then the entries that end at or before it.
    `top_k`: at most so many, which chosen [T, top_k] names if there are more; 0 for all. A key is the value too. The
    scale is D ** -0.5, and sink [Hq] is the logit of a head without a value.
    """
    dim = queries.shape[2]
    out = torch.empty_like(queries)
    for row, position in enumerate(rows.positions.tolist()):
        shown = torch.arange(max(0, position - window + 1), position + 1, device=queries.device)
        keys = recent[rows.slots[row // rows.num_queries], shown % recent.shape[1]]
        count = (position + 1) // ratio if ratio else 0
        if count and entries is not None:
            seen = torch.arange(count)
            if top_k and count > top_k:
                assert chosen is not None, "a row that sees more entries chooses"
                seen = chosen[row].long()
            keys = torch.cat((keys, entries[_places_of(rows, row, seen, ratio) // granule]))
        scores = queries[row].float() @ keys.float().T * dim**-0.5
        p = torch.cat((sink.unsqueeze(1), scores), 1).softmax(1)[:, 1:]
        out[row] = (p @ keys.float()).to(out.dtype)
    return rotate_back.reference(out, cos, sin)
