"""DeepSeek-V4's attention: a sliding window, and compressed entries of earlier positions chosen by an indexer.

One key per position serves all heads and is the value too. Source: the authors' inference code for DeepSeek-V4,
checked against transformers 5.17. The authors simulate fp8 and fp4 rounding of keys, which is left out here, as
transformers does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from moeyard_kernels.backend import Backend, BlockAttend, CompressedAttend, StepPlan
from moeyard_kernels.types.footprint import Footprint, Footprints
from moeyard_kernels.types.layers import GRANULE, CompressedLayer, Indexer, Pooling
from moeyard_worker.config.rope_config import RopeConfig
from moeyard_worker.layers.weights import Loaded, Weight, matrix, stacked, weight
from moeyard_worker.state.layout import LayerState, PagedArray, SlotArray

if TYPE_CHECKING:
    import torch

# Keys are read in blocks of this many positions.
BLOCK = 64
# Rows of a slot for positions of drafts, beside those that are needed: as many as a step's rows of one sequence.
SPARE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerConfig:
    """Sizes of the choice of entries: heads, their width, entries per query."""

    num_heads: int
    head_dim: int
    top_k: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Compressed:
    """`Attention` over the last `window` positions, and over one entry per `ratio` earlier positions (0: none).

    With an `indexer` each query chooses entries, and an entry also covers the block before its own (CSA). Otherwise a
    query sees all entries (HCA). The output projection has `groups` groups of heads, each with `o_rank` results.

    `block`: rows of a block if the layer is part of DSpark (`BlockAttention`), else 0.
    """

    num_heads: int
    head_dim: int
    q_rank: int
    groups: int
    o_rank: int
    window: int
    ratio: int
    rope: RopeConfig
    norm_eps: float
    indexer: IndexerConfig | None = None
    block: int = 0

    @property
    def _widths(self) -> dict[str, int]:
        """The columns of values and of gates, by the checkpoint prefix of each pooling."""
        if not self.ratio:
            return {}
        if self.indexer is None:
            return {"compressor.": self.head_dim}
        return {"compressor.": 2 * self.head_dim, "indexer.compressor.": 2 * self.indexer.head_dim}

    def weights(self, hidden: int, at: str) -> dict[str, Weight]:
        """Name the weights and their checkpoint tensors.

        q_kv_a [Rq + D, H] joins the down projection of queries and the key. q_b joins the queries of all heads and
        those of the indexer. compress [C, H] joins the values and gates of each pooling, and the weights of the
        indexer's heads.
        """
        heads, dim, rank = self.num_heads, self.head_dim, self.q_rank
        queries = [(f"{at}wq_b.weight", heads * dim)]
        found = {
            "q_kv_a": stacked((f"{at}wq_a.weight", rank), (f"{at}wkv.weight", dim), width=hidden),
            "q_norm": weight(f"{at}q_norm.weight", rank),
            "kv_norm": weight(f"{at}kv_norm.weight", dim),
            "sink": weight(f"{at}attn_sink", heads, fp32=True),
            "o_a": Weight(
                (self.groups, self.o_rank, heads * dim // self.groups),
                weight(f"{at}wo_a.weight", self.groups * self.o_rank, heads * dim // self.groups).parts,
            ),
            "o_b": matrix(f"{at}wo_b.weight", hidden, self.groups * self.o_rank),
        }
        columns: list[tuple[str | None, int]] = []
        for prefix, width in self._widths.items():
            columns += [(f"{at}{prefix}{name}.weight", width) for name in ("wkv", "wgate")]
            found[f"{prefix}bias"] = weight(f"{at}{prefix}ape", self.ratio, width, fp32=True)
            found[f"{prefix}norm"] = weight(f"{at}{prefix}norm.weight", width // 2 if self.indexer else width)
        if self.indexer is not None:
            queries.append((f"{at}indexer.wq_b.weight", self.indexer.num_heads * self.indexer.head_dim))
            columns.append((f"{at}indexer.weights_proj.weight", self.indexer.num_heads))
        found["q_b"] = stacked(*queries, width=rank)
        if columns:
            found["compress"] = replace(stacked(*columns, width=hidden), fp32=True)
        return found

    def state(self) -> LayerState:
        """Entries in pages; the window's keys, and values and gates of blocks that are not complete, in slots."""
        slots = {"recent": SlotArray(shape=(self.window + SPARE, self.head_dim), fp32=False)}
        paged = {}
        if self.ratio:
            granule = min(self.ratio, GRANULE)
            paged["entries"] = PagedArray(heads=None, width=self.head_dim // granule)
            reach, columns = self.ratio, 2 * sum(self._widths.values())
            if self.indexer is not None:
                reach = 2 * self.ratio
                paged["index"] = PagedArray(heads=None, width=self.indexer.head_dim // granule)
            slots["pending"] = SlotArray(shape=(reach + SPARE, columns), fp32=True)
        aligned = math.lcm(BLOCK, self.window, self.ratio or 1)
        return LayerState(paged=paged, slots=slots, chunk_alignment=aligned, by_position=True, compressible=False)

    def footprint(self, footprints: Footprints) -> Footprint:
        return footprints.compressed(
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            ratio=self.ratio,
            index_heads=0 if self.indexer is None else self.indexer.num_heads,
            index_dim=0 if self.indexer is None else self.indexer.head_dim,
            top_k=0 if self.indexer is None else self.indexer.top_k,
            groups_width=self.groups * self.o_rank,
        )

    def build(
        self, backend: Backend, *, weights: Loaded, state: Loaded, rope: torch.Tensor | None
    ) -> CompressedBlock | BlockAttention:
        assert rope is not None, "every layer is rotated"

        def pooling(prefix: str, entries: str, dim: int) -> Pooling:
            return Pooling(
                ratio=self.ratio,
                overlaps=self.indexer is not None,
                bias=weights[f"{prefix}bias"],
                norm=weights[f"{prefix}norm"],
                entries=state[entries].view(-1, dim),
            )

        indexer = None
        if self.indexer is not None:
            indexer = Indexer(
                num_heads=self.indexer.num_heads,
                top_k=self.indexer.top_k,
                pooling=pooling("indexer.compressor.", "index", self.indexer.head_dim),
            )
        layer = CompressedLayer(
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            rope_dim=self.rope.dim,
            window=self.window,
            eps=self.norm_eps,
            rope=rope,
            sink=weights["sink"],
            o_a=weights["o_a"],
            recent=state["recent"],
            pooling=pooling("compressor.", "entries", self.head_dim) if self.ratio else None,
            indexer=indexer,
            compress=weights.get("compress"),
            pending=state.get("pending"),
            block=self.block,
        )
        if self.block:
            return BlockAttention(self, backend, backend.block_attend(layer), weights)
        return CompressedBlock(self, backend, backend.compressed(layer), weights)


class Projections:
    """Down projections, norms, the queries' up projection, and one product back."""

    def __init__(self, spec: Compressed, backend: Backend, weights: Loaded) -> None:
        self._backend, self._eps, self._rank = backend, spec.norm_eps, spec.q_rank
        self._q_kv_a, self._q_b, self._o_b = weights["q_kv_a"], weights["q_b"], weights["o_b"]
        self._q_norm, self._kv_norm = weights["q_norm"], weights["kv_norm"]

    def down(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the normalised low-rank queries [num_rows, Rq] and keys [num_rows, D] of rows x [num_rows, H]."""
        down, rms_norm = self._backend.linear(x, self._q_kv_a), self._backend.rms_norm
        return (
            rms_norm(down[:, : self._rank], self._q_norm, self._eps),
            rms_norm(down[:, self._rank :], self._kv_norm, self._eps),
        )

    def queries(self, low: torch.Tensor) -> torch.Tensor:
        """Return the queries of all heads, then those of the indexer."""
        return self._backend.linear(low, self._q_b)

    def back(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output [num_rows, H] of the groups' results x."""
        return self._backend.linear(x, self._o_b)


class CompressedBlock:
    """Projections around attention."""

    def __init__(self, spec: Compressed, backend: Backend, attend: CompressedAttend, weights: Loaded) -> None:
        self._attend, self._projections = attend, Projections(spec, backend, weights)

    def forward(self, x: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        """x [num_rows, H] -> [num_rows, H]."""
        low, kv = self._projections.down(x)
        return self._projections.back(self._attend.attend(x, self._projections.queries(low), kv, plan))


class BlockAttention:
    """The attention of DSpark: the rows of a block see each other, and keys that were stored before.

    A block's keys may be stored, too. The rows that take these positions overwrite them.
    """

    def __init__(self, spec: Compressed, backend: Backend, attend: BlockAttend, weights: Loaded) -> None:
        self._attend, self._projections = attend, Projections(spec, backend, weights)

    def store(self, x: torch.Tensor, plan: StepPlan) -> None:
        """Store the keys of rows x [num_rows, H] at their positions."""
        self._attend.store(self._projections.down(x)[1], plan)

    def forward(self, x: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        """x [num_rows, H] -> [num_rows, H]. Each chunk of the plan is a block."""
        low, kv = self._projections.down(x)
        return self._projections.back(self._attend.attend(self._projections.queries(low), kv, plan))
