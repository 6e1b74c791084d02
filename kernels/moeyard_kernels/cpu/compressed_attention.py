"""DeepSeek-V4's attention on a CPU: a window of keys and compressed entries of earlier positions.

A query sees keys in one order: the window by position, then the entries by block. Products run over blocks of 64 keys,
and sums over ascending blocks. Blocks begin at multiples of 64 positions or entries, and hidden keys add exact zeros.
So neither the cut of a prompt nor the number of known entries changes a bit. Chunks of prompts begin at multiples of
128 positions.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F

from moeyard_kernels.common.snapkv import sum_rows
from moeyard_kernels.cpu.attn_prefill import ROW_TILE, key_blocks
from moeyard_kernels.cpu.linear import linear, pack_weight
from moeyard_kernels.cpu.plan import CpuPlan, PromptSegment
from moeyard_kernels.ops.attention import rope as rotate
from moeyard_kernels.ops.elementwise import rms_norm, sum_in_order
from moeyard_kernels.types.decode_tables import BLOCK
from moeyard_kernels.types.layers import CompressedLayer, Pooling
from moeyard_kernels.types.plan_parts import entries_of

# Blocks are gathered in pieces of about this many values (2 MiB of fp32).
_PIECE = 512 * 1024


class _Heads:
    """Queries and keys of a layer in front of the sums over keys, and the output projection behind them."""

    def __init__(self, layer: CompressedLayer) -> None:
        # The packed matrices below replace o_a.
        self._layer = replace(layer, o_a=layer.o_a.new_empty(0))
        # `rotate` leaves the first values of all pairs before the second ones. The output's columns follow.
        order = torch.arange(layer.num_heads // layer.o_a.shape[0] * layer.head_dim).view(-1, layer.head_dim)
        rotated = order[:, -layer.rope_dim :]
        order = torch.cat((order[:, : -layer.rope_dim], rotated[:, 0::2], rotated[:, 1::2]), 1).flatten()
        self._o_a = [pack_weight(each.index_select(1, order)) for each in layer.o_a]
        self._ones = torch.ones(layer.head_dim, dtype=layer.recent.dtype)

    def queries(self, q: torch.Tensor, plan: CpuPlan) -> torch.Tensor:
        """Return q [num_rows, Hq D or more] normalised and rotated, [num_rows, Hq, D]."""
        heads, dim = self._layer.num_heads, self._layer.head_dim
        queries = rms_norm.reference(q[:, : heads * dim].unflatten(1, (heads, dim)), self._ones, self._layer.eps)
        return self.rotated(queries, plan)

    def rotated(self, x: torch.Tensor, plan: CpuPlan) -> torch.Tensor:
        """Return x [num_rows, heads, D], rotated at the rows' positions."""
        return _rotate_last(x, *plan.rotation(self._layer.rope), interleaved=True)

    def out(self, x: torch.Tensor, plan: CpuPlan) -> torch.Tensor:
        """Undo the rotation of values x [num_rows, Hq, D], and return their projection [num_rows, G R]."""
        cos, sin = plan.rotation(self._layer.rope)
        # Pairs are (i, i + Dr / 2) by now.
        groups = _rotate_last(x, cos, -sin, interleaved=False).view(plan.num_rows, len(self._o_a), -1).unbind(1)
        return torch.cat([linear(x.contiguous(), each) for x, each in zip(groups, self._o_a, strict=True)], 1)


class CpuBlockAttend:
    """`BlockAttend`. Drafts cannot change an answer, so the order of its sums is free."""

    def __init__(self, layer: CompressedLayer) -> None:
        self._heads, self._layer = _Heads(layer), replace(layer, o_a=layer.o_a.new_empty(0))
        self._sink = layer.sink.float()

    def store(self, kv: torch.Tensor, plan: CpuPlan) -> None:
        recent = self._layer.recent
        keys = self._heads.rotated(kv.unsqueeze(1), plan).squeeze(1)
        for part in plan.segments:
            _keep_last(recent, keys[part.begin : part.end], part)
        for of_wave, _, slots in plan.waves:
            recent[slots, plan.positions[of_wave] % recent.shape[1]] = keys[of_wave]

    def attend(self, q: torch.Tensor, kv: torch.Tensor, plan: CpuPlan) -> torch.Tensor:
        layer = self._layer
        queries = self._heads.queries(q, plan)
        keys = self._heads.rotated(kv.unsqueeze(1), plan).squeeze(1)
        # Each wave has a row of every chunk.
        rows = torch.stack([of_wave for of_wave, _, _ in plan.waves], 1)  # [B, n]
        slots, starts = plan.waves[0][2], plan.positions[rows[:, :1]]
        shown = starts + torch.arange(-layer.window, 0)
        before = layer.recent[slots.unsqueeze(1), shown % layer.recent.shape[1]]
        seen = torch.cat((before, keys[rows]), 1).float()
        hidden = F.pad(shown < 0, (0, rows.shape[1])).view(len(rows), 1, 1, -1)
        scores = torch.einsum("bnhd,bkd->bnhk", queries[rows].float() * layer.head_dim**-0.5, seen)
        sink = self._sink.view(-1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat((scores.masked_fill(hidden, float("-inf")), sink), -1).softmax(-1)[..., :-1]
        out = q.new_zeros(plan.num_rows, layer.num_heads, layer.head_dim)
        out[rows] = torch.einsum("bnhk,bkd->bnhd", weights, seen).to(q.dtype)
        return self._heads.out(out, plan)


class CpuCompressed:
    """`CompressedAttend`."""

    def __init__(self, layer: CompressedLayer) -> None:
        self._heads, self._layer = _Heads(layer), replace(layer, o_a=layer.o_a.new_empty(0))
        self._sink = layer.sink.float()
        # The parts of a row of `compress`: values and gates of each pooling, then the weights of the indexer's heads.
        self._poolings = [pooling for pooling in (layer.pooling, layer.indexer and layer.indexer.pooling) if pooling]
        self._widths = [2 * pooling.bias.shape[1] for pooling in self._poolings]

    def attend(self, x: torch.Tensor, q: torch.Tensor, kv: torch.Tensor, plan: CpuPlan) -> torch.Tensor:
        layer = self._layer
        heads, dim = layer.num_heads, layer.head_dim
        queries = self._heads.queries(q, plan)
        keys = self._heads.rotated(kv.unsqueeze(1), plan).squeeze(1)
        compressed = wanted = None
        if layer.compress is not None:
            compressed = linear(x.float(), layer.compress.data)
        if layer.indexer is not None:
            wanted = q[:, heads * dim :].unflatten(1, (layer.indexer.num_heads, -1))
            wanted = self._heads.rotated(wanted, plan)
        rows = _Rows(queries, keys, compressed, wanted)
        out = q.new_zeros(plan.num_rows, heads, dim)
        for part in plan.segments:
            out[part.begin : part.end] = self._prompt(rows, part, plan)
        for of_wave, _, slots in plan.waves:
            out.index_copy_(0, of_wave, self._decode(rows.at(of_wave), of_wave, slots, plan))
        return self._heads.out(out, plan)

    # Prompts.

    def _prompt(self, rows: "_Rows", part: PromptSegment, plan: CpuPlan) -> torch.Tensor:
        """Return [rows of the part, Hq, D], and update the sequence's state."""
        layer, here = self._layer, slice(part.begin, part.end)
        keys = rows.keys[here]
        if part.start:
            keys = torch.cat((_rows_before(part, layer.recent, layer.window), keys))
        entries = []
        if layer.pending is not None and rows.compressed is not None:
            entries = self._pool_prompt(rows.compressed[here], layer.pending, part, plan)
            _keep_last(layer.pending, rows.compressed[here, : layer.pending.shape[2]], part)
        out = self._attend_prompt(rows.of(here), keys, entries, part.start)
        # The keys before the chunk are read above, and overwritten here.
        _keep_last(layer.recent, rows.keys[here], part)
        return out

    def _pool_prompt(
        self, compressed: torch.Tensor, pending: torch.Tensor, part: PromptSegment, plan: CpuPlan
    ) -> list[torch.Tensor]:
        """Store the entries of all blocks that end in the chunk. Return all known entries of each pooling, [n, D]."""
        found, column, end = [], 0, part.start + part.end - part.begin
        for pooling, width in zip(self._poolings, self._widths, strict=True):
            ratio = pooling.ratio
            num_blocks = compressed.shape[0] // ratio
            blocks = compressed[: num_blocks * ratio, column : column + width].unflatten(0, (num_blocks, ratio))
            if num_blocks:
                if pooling.overlaps:
                    earlier = _rows_before(part, pending, ratio)[:, column : column + width]
                    earlier = earlier if part.start else _no_block(earlier)
                    blocks = torch.cat((torch.cat((earlier.unsqueeze(0), blocks[:-1])), blocks), 1)
                places = plan.entries[part.begin + ratio - 1 : part.end : ratio] // pooling.granule
                firsts = torch.arange(part.start, end - ratio + 1, ratio)
                pooling.entries.index_copy_(0, places, self._pooled(blocks, pooling, firsts))
            known = entries_of(part.pages.numpy(), np.arange(ratio - 1, end, ratio), plan.page_size)
            found.append(pooling.entries.index_select(0, torch.from_numpy(known // pooling.granule)))
            column += width
        return found

    def _pooled(self, blocks: torch.Tensor, pooling: Pooling, firsts: torch.Tensor) -> torch.Tensor:
        """Return the entries [n, D] of blocks [n, positions, values and gates], at first positions [n]."""
        values, gates = blocks.chunk(2, 2)
        dim = pooling.norm.shape[0]
        if pooling.overlaps:
            ratio = pooling.ratio
            gates = gates + pooling.bias.repeat(2, 1)
            values, gates = (torch.cat((x[:, :ratio, :dim], x[:, ratio:, dim:]), 1) for x in (values, gates))
        else:
            gates = gates + pooling.bias
        weights = (gates - gates.amax(1, keepdim=True)).exp_()
        pooled = sum_in_order(weights * values, 1) / sum_in_order(weights, 1)
        normed = rms_norm.reference(pooled.to(pooling.entries.dtype), pooling.norm, self._layer.eps)
        cos, sin = self._layer.rope.index_select(0, firsts).chunk(2, 1)
        return _rotate_last(normed.unsqueeze(1), cos, sin, interleaved=True).squeeze(1)

    def _attend_prompt(
        self, rows: "_Rows", keys: torch.Tensor, entries: Sequence[torch.Tensor], start: int
    ) -> torch.Tensor:
        """Return [T, Hq, D] for queries at positions start.. over keys that end with theirs, and over entries."""
        layer = self._layer
        count, heads, dim = rows.queries.shape
        low, scale = start + count - keys.shape[0], dim**-0.5
        missing = ROW_TILE + -(keys.shape[0] + ROW_TILE) % BLOCK
        recent = F.pad(keys.float(), (0, 0, 0, missing))
        known = [key_blocks(each.unsqueeze(0), 0, each.shape[0])[0] for each in entries]
        out = rows.queries.new_empty(count, heads, dim)
        for begin in range(0, count, ROW_TILE):
            size, first = min(ROW_TILE, count - begin), start + begin
            q = rows.queries.new_zeros(heads, ROW_TILE, dim, dtype=torch.float32)
            torch.mul(rows.queries[begin : begin + size].transpose(0, 1), scale, out=q[:, :size])
            positions = torch.arange(first, first + ROW_TILE).unsqueeze(1)
            oldest = max(low, (first - layer.window + 1) // BLOCK * BLOCK)
            newest = first + ROW_TILE + -(first + ROW_TILE) % BLOCK
            at = torch.arange(oldest, newest)
            hidden = (at > positions) | (at <= positions - layer.window)
            blocks, masks = [recent[oldest - low : newest - low]], [hidden]
            if layer.pooling is not None:
                ends = (positions + 1) // layer.pooling.ratio
                visible = int(ends[-1]) + -int(ends[-1]) % BLOCK
                some = F.pad(known[0][:visible], (0, 0, 0, max(0, visible - known[0].shape[0])))
                hidden = torch.arange(visible) >= ends
                if layer.indexer is not None and int(ends[-1]) > layer.indexer.top_k:
                    index = F.pad(known[1][:visible], (0, 0, 0, max(0, visible - known[1].shape[0])))
                    hidden = ~self._chosen(rows, begin, size, index, hidden)
                blocks.append(some)
                masks.append(hidden)
            mask = torch.zeros(1, 1, 1).masked_fill(torch.cat(masks, 1), float("-inf"))
            done = self._tile(q, torch.cat(blocks), mask)
            out[begin : begin + size] = done[:, :size].transpose(0, 1)
        return out

    def _chosen(self, rows: "_Rows", begin: int, size: int, index: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return [16, n] bool: the entries that each query of a tile chose, of entries that are not `hidden`."""
        indexer = self._layer.indexer
        assert indexer is not None and rows.wanted is not None and rows.compressed is not None  # noqa: PT018
        heads, dim = indexer.num_heads, index.shape[1]
        q, weights = index.new_zeros(heads, ROW_TILE, dim), index.new_zeros(heads, ROW_TILE, 1)
        q[:, :size] = rows.wanted[begin : begin + size].transpose(0, 1)
        weights[:, :size, 0] = rows.compressed[begin : begin + size, -heads:].t()
        scores = (q.flatten(0, 1) @ index.t()).view(heads, ROW_TILE, -1)
        return _best(_index_scores(scores, weights, dim), hidden, indexer.top_k)

    def _tile(self, q: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """q [Hq, M, D] over keys [n, D], n a multiple of 64; mask [1, M, n] is 0 or -inf -> [Hq, M, D] fp32."""
        heads, m, dim = q.shape
        scores = (q.flatten(0, 1) @ keys.t()).view(heads, m, -1).add_(mask)
        sink = self._sink.view(-1, 1, 1)
        top = torch.maximum(scores.amax(-1, keepdim=True), sink)
        p = scores.sub_(top).exp_().view(heads * m, -1)
        acc = p.new_zeros(heads * m, dim)
        for b in range(0, keys.shape[0], BLOCK):
            acc.addmm_(p[:, b : b + BLOCK], keys[b : b + BLOCK])
        total = p.view(heads, m, -1, BLOCK).sum(-1).cumsum(-1)[..., -1:] + (sink - top).exp()
        return acc.view(heads, m, dim).div_(total)

    # Output positions.

    def _decode(self, rows: "_Rows", of_wave: torch.Tensor, slots: torch.Tensor, plan: CpuPlan) -> torch.Tensor:
        """Return [B, Hq, D] for one position of each of B sequences, and update their state."""
        layer = self._layer
        at = plan.positions.index_select(0, of_wave)
        layer.recent[slots, at % layer.recent.shape[1]] = rows.keys
        table = plan.table[of_wave - plan.num_prompt]
        if layer.pending is not None and rows.compressed is not None:
            layer.pending[slots, at % layer.pending.shape[1]] = rows.compressed[:, : layer.pending.shape[2]]
            self._pool_output(at, slots, table, plan.page_size)
        # The window in the order of positions, in 128 / 64 blocks per row.
        shown = at.unsqueeze(1) + torch.arange(1 - layer.window, 1)
        keys = layer.recent[slots.unsqueeze(1), shown % layer.recent.shape[1]].float().view(-1, BLOCK, layer.head_dim)
        hidden = (shown < 0).view(-1, BLOCK)
        per_row = layer.window // BLOCK
        row_of_block = torch.arange(len(at)).repeat_interleave(per_row)
        if layer.pooling is not None:
            more = self._entry_blocks(rows, at, table, plan.page_size)
            keys, hidden = torch.cat((keys, more[0])), torch.cat((hidden, more[1]))
            row_of_block = torch.cat((row_of_block, more[2]))
        return self._attend_blocks(rows.queries.float() * layer.head_dim**-0.5, keys, hidden, row_of_block)

    def _pool_output(self, at: torch.Tensor, slots: torch.Tensor, table: torch.Tensor, page_size: int) -> None:
        """Store the entries of blocks that end at positions `at`, from the sequences' pending rows."""
        pending, column = self._layer.pending, 0
        assert pending is not None, "the caller has it"
        for pooling, width in zip(self._poolings, self._widths, strict=True):
            ratio = pooling.ratio
            ended = ((at + 1) % ratio == 0).nonzero()[:, 0]
            if len(ended):
                ends = at[ended]
                reach = 2 * ratio if pooling.overlaps else ratio
                rows = ends.unsqueeze(1) + torch.arange(1 - reach, 1)
                blocks = pending[slots[ended].unsqueeze(1), rows % pending.shape[1], column : column + width]
                if pooling.overlaps:
                    first = (ends < ratio).view(-1, 1, 1) & (torch.arange(reach) < ratio).view(1, -1, 1)
                    blocks = torch.where(first, _no_block(blocks), blocks)
                places = (table[ended, ends // page_size] * page_size + ends % page_size) // pooling.granule
                pooling.entries.index_copy_(0, places, self._pooled(blocks, pooling, ends - ratio + 1))
            column += width

    def _entry_blocks(
        self, rows: "_Rows", at: torch.Tensor, table: torch.Tensor, page_size: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the visible entries of each row in blocks [n, 64, D] fp32, which are hidden [n, 64], and the rows."""
        pooling, indexer = self._layer.pooling, self._layer.indexer
        assert pooling is not None, "the caller has it"
        keys, hidden, owners = [], [], []
        for row, position in enumerate(at.tolist()):
            count = (position + 1) // pooling.ratio
            if not count:
                continue
            ends = np.arange(pooling.ratio - 1, position + 1, pooling.ratio)
            places = torch.from_numpy(entries_of(table[row].numpy(), ends, page_size) // pooling.granule)
            unseen = torch.arange(count + -count % BLOCK) >= count
            if indexer is not None and count > indexer.top_k:
                unseen = ~self._chosen_by(rows, row, indexer.pooling.entries.index_select(0, places), unseen)
            keys.append(key_blocks(pooling.entries.index_select(0, places).unsqueeze(0), 0, count)[0])
            hidden.append(unseen)
            owners += [row] * (len(unseen) // BLOCK)
        dim = self._layer.head_dim
        if not keys:
            return (
                torch.zeros(0, BLOCK, dim),
                torch.zeros(0, BLOCK, dtype=torch.bool),
                torch.zeros(0, dtype=torch.int64),
            )
        return torch.cat(keys).view(-1, BLOCK, dim), torch.cat(hidden).view(-1, BLOCK), torch.tensor(owners)

    def _chosen_by(self, rows: "_Rows", row: int, entries: torch.Tensor, unseen: torch.Tensor) -> torch.Tensor:
        """Return the entries that a row chose, of n entries padded to whole blocks: bool."""
        indexer = self._layer.indexer
        assert indexer is not None and rows.wanted is not None and rows.compressed is not None  # noqa: PT018
        index = key_blocks(entries.unsqueeze(0), 0, entries.shape[0])[0].view(-1, BLOCK, entries.shape[1])
        q = rows.wanted[row].float().expand(index.shape[0], -1, -1)
        scores = torch.bmm(q, index.transpose(1, 2)).transpose(0, 1).flatten(1).unsqueeze(1)
        weights = rows.compressed[row, -indexer.num_heads :].view(-1, 1, 1)
        return _best(_index_scores(scores, weights, entries.shape[1]), unseen.unsqueeze(0), indexer.top_k)[0]

    def _attend_blocks(
        self, q: torch.Tensor, keys: torch.Tensor, hidden: torch.Tensor, row_of_block: torch.Tensor
    ) -> torch.Tensor:
        """q [B, Hq, D] fp32 over blocks of keys [n, 64, D], in the order of each row -> [B, Hq, D] fp32."""
        num_rows, heads, dim = q.shape
        step = max(1, _PIECE // (BLOCK * max(dim, heads)))
        pieces = [slice(i, i + step) for i in range(0, keys.shape[0], step)]
        mask = torch.zeros(()).masked_fill(hidden, float("-inf")).unsqueeze(1)
        scores = [
            torch.bmm(q.index_select(0, row_of_block[piece]), keys[piece].transpose(1, 2)).add_(mask[piece])
            for piece in pieces
        ]
        sink = self._sink.expand(num_rows, heads)
        tops = torch.cat([each.amax(-1) for each in scores])
        top = sink.scatter_reduce(0, row_of_block.unsqueeze(1).expand(-1, heads), tops, "amax")
        out, total = q.new_zeros(q.shape), (sink - top).exp()
        sums = torch.zeros_like(total)
        for piece, each in zip(pieces, scores, strict=True):
            row = row_of_block[piece]
            p = each.sub_(top.index_select(0, row).unsqueeze(-1)).exp_()
            out.index_add_(0, row, torch.bmm(p, keys[piece]))
            sums.index_add_(0, row, p.sum(-1))
        return out.div_(sums.add_(total).unsqueeze(-1)).to(self._layer.recent.dtype)


class _Rows:
    """Rows of a step: rotated queries [T, Hq, D], keys [T, D], the product with `compress`, the indexer's queries."""

    __slots__ = ("compressed", "keys", "queries", "wanted")

    def __init__(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        compressed: torch.Tensor | None,
        wanted: torch.Tensor | None,
    ) -> None:
        self.queries, self.keys, self.compressed, self.wanted = queries, keys, compressed, wanted

    def of(self, rows: slice) -> "_Rows":
        return _Rows(*(None if x is None else x[rows] for x in self._all()))  # type: ignore[arg-type]

    def at(self, rows: torch.Tensor) -> "_Rows":
        return _Rows(*(None if x is None else x.index_select(0, rows) for x in self._all()))  # type: ignore[arg-type]

    def _all(self) -> tuple[torch.Tensor | None, ...]:
        return self.queries, self.keys, self.compressed, self.wanted


def _rotate_last(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """Rotate the last values of each head of x [rows, heads, D] by cos, sin [rows, Dr / 2]."""
    width = x.shape[2] - 2 * cos.shape[1]
    rotated = rotate.reference(x[..., width:].float(), cos, sin, interleaved=interleaved).to(x.dtype)
    return torch.cat((x[..., :width], rotated), -1)


def _no_block(rows: torch.Tensor) -> torch.Tensor:
    """Return values of zero and gates of -inf in place of rows [..., values and gates] before position 0."""
    values, gates = rows.chunk(2, -1)
    return torch.cat((torch.zeros_like(values), torch.full_like(gates, float("-inf"))), -1)


def _index_scores(scores: torch.Tensor, weights: torch.Tensor, dim: int) -> torch.Tensor:
    """Return [M, n]: the sum over heads of relu(scores [heads, M, n]) times weights [heads, M, 1], both scaled."""
    heads = scores.shape[0]
    return sum_rows(scores.relu_().mul_(dim**-0.5).mul_(weights * heads**-0.5))


def _best(scores: torch.Tensor, hidden: torch.Tensor, top_k: int) -> torch.Tensor:
    """Return bool [M, n]: the `top_k` largest scores [M, n] of entries that are not `hidden`, ties by lower index."""
    found = scores.masked_fill(hidden, float("-inf")).sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    return torch.zeros_like(hidden.expand_as(scores)).scatter_(1, found, True) & ~hidden


def _before(part: PromptSegment, slots: torch.Tensor) -> torch.Tensor:
    """Return the state that a chunk begins with, at any position but 0."""
    return slots[part.restored if part.restored >= 0 else part.slot]


def _rows_before(part: PromptSegment, slots: torch.Tensor, count: int) -> torch.Tensor:
    """Return the rows of the last `count` positions before a chunk."""
    return _before(part, slots)[torch.arange(part.start - count, part.start) % slots.shape[1]]


def _keep_last(slots: torch.Tensor, rows: torch.Tensor, part: PromptSegment) -> None:
    """Write the last rows of a chunk into its slot, and into those of its snapshots: position p at row p % size."""
    size = slots.shape[1]
    state = _before(part, slots).clone() if part.start else torch.zeros_like(slots[part.slot])
    begin = part.begin
    for end, slot in part.parts:
        some = rows[max(begin, end - size) - part.begin : end - part.begin]
        first = part.start + end - part.begin - len(some)
        state[torch.arange(first, first + len(some)) % size] = some
        if slot >= 0:
            slots[slot] = state
        begin = end
    slots[part.slot] = state
