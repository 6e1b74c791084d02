"""Small layers of compressed attention, and rows of prompt chunks, for tests."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from moeyard_kernels.cuda.compressed_prompts import plan_prompts
from moeyard_kernels.types.layers import CompressedLayer, Indexer, Pooling
from moeyard_kernels.types.matrix import Matrix
from moeyard_kernels.types.prompt_tables import PromptTables
from moeyard_worker.scheduling.step import Chunk

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE = 32
POSITIONS = 2048
NUM_SLOTS = 10
SPARE = 16
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def chunk(start: int, length: int, *, slot: int, first_page: int = 0, **options: Any) -> Chunk:
    """Return prompt rows of a sequence whose pages descend from its last one to `first_page`."""
    pages = range(first_page + -(-(start + length) // PAGE) - 1, first_page - 1, -1)
    given = {"state_slot": slot, "prompt": True, "num_sampled": 0, **options}
    return Chunk(key=(b"", ""), start=start, token_ids=(0,) * length, pages=tuple(pages), **given)


def tables_of(*chunks: Chunk, device: str = DEVICE) -> PromptTables:
    return plan_prompts(chunks, PAGE, device)


def make_layer(
    ratio: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    heads: int = 4,
    dim: int = 32,
    rope_dim: int = 8,
    window: int = 128,
    index_heads: int = 3,
    index_dim: int = 16,
    top_k: int = 8,
    hidden: int = 16,
    device: str = DEVICE,
) -> CompressedLayer:
    """Return a layer with random weights and random state: CSA for ratio 4, HCA for others, window only for 0."""

    def random(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape).to(dtype).to(device)

    def pooling(width: int) -> Pooling:
        columns = 2 * width if ratio == 4 else width
        return Pooling(
            ratio=ratio,
            overlaps=ratio == 4,
            bias=random(ratio, columns, dtype=torch.float32),
            norm=random(width),
            entries=random(POSITIONS // min(ratio, 16), width),
        )

    angles = torch.rand(POSITIONS, rope_dim // 2) * 6
    layer = CompressedLayer(
        num_heads=heads,
        head_dim=dim,
        rope_dim=rope_dim,
        window=window,
        eps=1e-6,
        rope=torch.cat((angles.cos(), angles.sin()), 1).to(device),
        sink=random(heads, dtype=torch.float32),
        o_a=random(2, 24, heads * dim // 2),
        recent=random(NUM_SLOTS, window + SPARE, dim),
    )
    if not ratio:
        return layer
    main, indexer = pooling(dim), None
    columns = 2 * main.bias.shape[1]
    if ratio == 4:
        indexer = Indexer(num_heads=index_heads, top_k=top_k, pooling=pooling(index_dim))
        columns += 2 * indexer.pooling.bias.shape[1]
    reach = 2 * ratio if ratio == 4 else ratio
    # The values of a released weight.
    weight = random(columns + (index_heads if indexer else 0), hidden, dtype=torch.bfloat16).float() / 8
    return replace(
        layer,
        pooling=main,
        indexer=indexer,
        compress=Matrix.plain(weight),
        pending=random(NUM_SLOTS, reach + SPARE, columns, dtype=torch.float32),
    )


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of a sequence, or of a step."""

    queries: torch.Tensor
    keys: torch.Tensor
    compressed: torch.Tensor | None
    wanted: torch.Tensor | None

    def parts(self) -> tuple[torch.Tensor | None, ...]:
        return self.queries, self.keys, self.compressed, self.wanted

    def at(self, begin: int, end: int) -> "Rows":
        return joined([self], [(begin, end)])


def joined(rows: Sequence[Rows], spans: Sequence[tuple[int, int]]) -> Rows:
    """Return the rows [begin, end) of each sequence, one after the other."""
    found = []
    for parts in zip(*(each.parts() for each in rows), strict=True):
        some = [x[begin:end] for x, (begin, end) in zip(parts, spans, strict=True) if x is not None]
        found.append(torch.cat(some) if some else None)
    queries, keys, compressed, wanted = found
    assert queries is not None and keys is not None  # noqa: PT018
    return Rows(queries=queries, keys=keys, compressed=compressed, wanted=wanted)


def make_rows(layer: CompressedLayer, count: int) -> Rows:
    """Return random rows of a sequence."""

    def random(*shape: int, dtype: torch.dtype = layer.recent.dtype) -> torch.Tensor:
        return torch.randn(count, *shape).to(dtype).to(layer.recent.device)

    compressed = wanted = None
    if layer.pending is not None:
        heads = 0 if layer.indexer is None else layer.indexer.num_heads
        compressed = random(layer.pending.shape[2] + heads, dtype=torch.float32)
    if layer.indexer is not None:
        wanted = random(layer.indexer.num_heads, layer.indexer.pooling.norm.shape[0])
    return Rows(
        queries=random(layer.num_heads, layer.head_dim),
        keys=random(layer.head_dim),
        compressed=compressed,
        wanted=wanted,
    )


def with_own_state(layer: CompressedLayer) -> CompressedLayer:
    """Return the same layer over copies of its slots and pages."""
    pooling, indexer = layer.pooling, layer.indexer
    if indexer is not None:
        own = replace(indexer.pooling, entries=indexer.pooling.entries.clone())
        indexer = replace(indexer, pooling=own)
    return replace(
        layer,
        recent=layer.recent.clone(),
        pending=None if layer.pending is None else layer.pending.clone(),
        pooling=None if pooling is None else replace(pooling, entries=pooling.entries.clone()),
        indexer=indexer,
    )
