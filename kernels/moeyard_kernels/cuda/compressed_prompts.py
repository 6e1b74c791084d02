"""DeepSeek-V4's attention of the prompt rows of a step, over pages and slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from moeyard_kernels import ops
from moeyard_kernels.types.layers import CompressedLayer
from moeyard_kernels.types.plan_parts import page_table
from moeyard_kernels.types.prompt_tables import PromptTables
from moeyard_kernels.types.step import ChunkRows, slot_left, slot_restored

if TYPE_CHECKING:
    from moeyard_kernels.cuda.plan import CudaPlan


def plan_prompts(prefill: Sequence[ChunkRows], page_size: int, device: torch.device | str) -> PromptTables:
    """Return the tables of a step's prompt chunks, which hold one row each at least."""
    slots, moves = list[tuple[int, int]](), list[tuple[int, int, int]]()
    for b, chunk in enumerate(prefill):
        own, restored = slot_left(chunk), slot_restored(chunk)
        before = (restored if restored >= 0 else own) if chunk.start else -1
        slots.append((before, own))
        moves += [(b, position, slot) for position, slot in chunk.snapshots]
        moves.append((b, chunk.start + len(chunk.token_ids), own))
    return PromptTables(
        starts=[chunk.start for chunk in prefill],
        lengths=[len(chunk.token_ids) for chunk in prefill],
        slots=slots,
        moves=moves,
        page_table=page_table(prefill, page_size),
        page_size=page_size,
        device=device,
    )


class CompressedPrompts:
    """The prompt part of a layer's attention."""

    def __init__(self, layer: CompressedLayer) -> None:
        self._layer, self._sink = layer, layer.sink.float().contiguous()
        # In the order of their columns in `compress`.
        self._poolings = [] if layer.pooling is None else [layer.pooling]
        if layer.indexer is not None:
            self._poolings.append(layer.indexer.pooling)

    def attend(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        compressed: torch.Tensor | None,
        wanted: torch.Tensor | None,
        plan: CudaPlan,
    ) -> torch.Tensor:
        """Return [P, Hq, D] in the dtype of queries [P, Hq, D], and update pages and slots.

        keys [P, D], compressed [P, C'] fp32: the rows' product with the layer's `compress`. wanted [P, Hi, Di]: queries
        of the indexer. Queries and keys are rotated; the result is not rotated back.
        """
        layer, tables = self._layer, plan.compressed_prompts
        assert tables is not None, "the plan has prompt rows"
        found = None
        if compressed is not None and layer.pending is not None:
            self._pool(compressed, layer.pending, tables)
            found = self._found(compressed, wanted, tables)
        out = ops.attend_entries(
            queries,
            keys,
            layer.recent,
            self._sink,
            window=layer.window,
            scale=layer.head_dim**-0.5,
            tables=tables,
            pooling=layer.pooling,
            found=found,
        )
        # All launches above read the state before the chunks.
        ops.keep_last(keys, layer.recent, compressed, layer.pending, tables=tables)
        return out

    def _pool(self, compressed: torch.Tensor, pending: torch.Tensor, tables: PromptTables) -> None:
        """Write the entries of all blocks that end in the chunks."""
        layer, column = self._layer, 0
        for pooling in self._poolings:
            ops.pool_blocks(
                compressed, pending, pooling=pooling, rope=layer.rope, eps=layer.eps, column=column, tables=tables
            )
            column += 2 * pooling.bias.shape[1]

    def _found(
        self, compressed: torch.Tensor, wanted: torch.Tensor | None, tables: PromptTables
    ) -> torch.Tensor | None:
        """Return the places of chosen entries, int32 [P, top_k]; undefined for rows that see at most top_k entries.

        Pages of entries and of the indexer's entries have the same places.
        """
        indexer = self._layer.indexer
        if indexer is None:
            return None
        assert wanted is not None, "the indexer has queries"
        parts = tables.chosen(indexer.pooling.ratio, indexer.top_k)
        if not parts:
            return None
        found = torch.empty(tables.num_rows, indexer.top_k, dtype=torch.int32, device=wanted.device)
        weights = compressed[:, -indexer.num_heads :]
        for chosen in parts:
            scores = ops.index_scores(wanted, weights, pooling=indexer.pooling, chosen=chosen, tables=tables)
            ops.choose_entries(
                scores, found, pooling=indexer.pooling, top_k=indexer.top_k, chosen=chosen, tables=tables
            )
        return found
