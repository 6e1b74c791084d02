"""DeepSeek-V4's attention on a GPU: a window of keys in slots, and compressed entries of earlier positions in pages.

`CompressedPrompts` has the formula of prompt positions. Other positions of a step, at most 16 of each sequence at once,
are stored together and then attend. A key of a later position is hidden by its position.
"""

from dataclasses import dataclass, replace

import torch

from moeyard_kernels import ops
from moeyard_kernels.cuda.compressed_prompts import CompressedPrompts
from moeyard_kernels.cuda.output_rows import OutputWave
from moeyard_kernels.cuda.plan import CudaPlan
from moeyard_kernels.types.compressed_rows import CompressedRows
from moeyard_kernels.types.layers import CompressedLayer


@dataclass(frozen=True, slots=True, kw_only=True)
class RowInputs:
    """Rows of a step: q and kv as projected, cos and sin of their positions, and the product with `compress`."""

    q: torch.Tensor
    kv: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    compressed: torch.Tensor | None = None

    def part(self, rows: slice) -> "RowInputs":
        compressed = None if self.compressed is None else self.compressed[rows]
        return RowInputs(
            q=self.q[rows], kv=self.kv[rows], cos=self.cos[rows], sin=self.sin[rows], compressed=compressed
        )

    def at(self, rows: torch.Tensor) -> "RowInputs":
        compressed = None if self.compressed is None else self.compressed.index_select(0, rows)
        # One table of both keeps their strides equal.
        cos, sin = torch.cat((self.cos, self.sin), 1).index_select(0, rows).chunk(2, 1)
        return RowInputs(
            q=self.q.index_select(0, rows), kv=self.kv.index_select(0, rows), cos=cos, sin=sin, compressed=compressed
        )


class CudaCompressed:
    """The attention of one layer.

    `compress` gives fp32 results. If its values are bf16, as in the released weights, both operands stay bf16, as in
    `CudaGate`.
    """

    def __init__(self, layer: CompressedLayer) -> None:
        # The loaded weight of `compress` is freed if another form replaces it.
        self._layer = replace(layer, compress=None)
        self._prompts = CompressedPrompts(self._layer)
        self._compress: torch.Tensor | None = None
        if layer.compress is not None:
            weight, dtype = layer.compress.data, layer.recent.dtype
            rounded = weight.to(dtype)
            self._compress = rounded if torch.equal(rounded.to(weight.dtype), weight) else weight
        self._poolings = [each for each in (layer.pooling, layer.indexer and layer.indexer.pooling) if each]

    def attend(self, x: torch.Tensor, q: torch.Tensor, kv: torch.Tensor, plan: CudaPlan) -> torch.Tensor:
        layer, first = self._layer, plan.num_prompt
        groups, width = layer.o_a.shape[0], layer.num_heads * layer.head_dim
        if not plan.num_rows:
            return q.new_empty(0, groups * layer.o_a.shape[1])
        compressed = None
        if self._compress is not None:
            rows = x.to(self._compress.dtype)
            compressed = ops.linear(rows, self._compress, static_weight=True, out_dtype=torch.float32)
        cos, sin = plan.rotation(layer.rope)
        inputs, parts = RowInputs(q=q, kv=kv, cos=cos, sin=sin, compressed=compressed), []
        if first:
            parts.append(self._prompt(inputs if first == plan.num_rows else inputs.part(slice(first)), plan))
        if first < plan.num_rows:
            parts.append(self._outputs(inputs.part(slice(first, None)) if first else inputs, plan.outputs))
        mixed = parts[0] if len(parts) == 1 else torch.cat(parts)
        out = ops.head_linear(mixed.view(plan.num_rows, groups, width // groups), layer.o_a, static_weight=True)
        return out.flatten(1)

    def _rotated(
        self, inputs: RowInputs, rows: CompressedRows | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        layer, stored = self._layer, rows is not None
        return ops.compressed_rotate(
            inputs.q,
            inputs.kv,
            inputs.cos,
            inputs.sin,
            layer.recent,
            heads=layer.num_heads,
            index_heads=0 if layer.indexer is None else layer.indexer.num_heads,
            eps=layer.eps,
            compressed=inputs.compressed if stored else None,
            pending=layer.pending if stored else None,
            rows=rows,
        )

    def _prompt(self, inputs: RowInputs, plan: CudaPlan) -> torch.Tensor:
        queries, keys, wanted = self._rotated(inputs, None)
        mixed = self._prompts.attend(queries, keys, inputs.compressed, wanted, plan)
        return ops.rotate_back(mixed, inputs.cos, inputs.sin)

    def _outputs(self, inputs: RowInputs, waves: tuple[OutputWave, ...]) -> torch.Tensor:
        """Return [rows, Hq, D] of all rows but prompts'."""
        if len(waves) == 1 and waves[0].at is None:
            return self._wave(inputs, waves[0].rows)
        out = inputs.q.new_empty(inputs.q.shape[0], self._layer.num_heads, self._layer.head_dim)
        for wave in waves:
            assert wave.at is not None, "a wave of several names its rows"
            out.index_copy_(0, wave.at, self._wave(inputs.at(wave.at), wave.rows))
        return out

    def _wave(self, inputs: RowInputs, rows: CompressedRows) -> torch.Tensor:
        layer = self._layer
        queries, _, wanted = self._rotated(inputs, rows)
        if layer.pending is not None:
            ops.compressed_pool(layer.pending, layer.rope, poolings=self._poolings, rows=rows, eps=layer.eps)
        turns = rows.turns(self._row_bytes(rows))
        parts = [
            self._attended(queries[part], wanted if wanted is None else wanted[part], inputs.part(part), some)
            for part, some in turns
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _row_bytes(self, rows: CompressedRows) -> int:
        """Return the bytes of partial results of one row: sums of splits, and scores of entries."""
        layer, ratio, top_k = self._layer, self._ratio, self._top_k
        sums = rows.num_splits(ratio, top_k) * layer.num_heads * (layer.head_dim + 1)
        return 4 * (sums + (rows.num_entries(ratio) + top_k if top_k else 0))

    @property
    def _ratio(self) -> int:
        return 0 if self._layer.pooling is None else self._layer.pooling.ratio

    @property
    def _top_k(self) -> int:
        return 0 if self._layer.indexer is None else self._layer.indexer.top_k

    def _attended(
        self, queries: torch.Tensor, wanted: torch.Tensor | None, inputs: RowInputs, rows: CompressedRows
    ) -> torch.Tensor:
        layer, ratio, top_k, chosen = self._layer, self._ratio, self._top_k, None
        granule = 0 if layer.pooling is None else layer.pooling.granule
        # Tables as narrow as the choice leave nothing to choose.
        if layer.indexer is not None and rows.num_entries(ratio) > top_k:
            assert wanted is not None, "an indexer has queries"
            assert inputs.compressed is not None, "an indexer has weights of its heads"
            weights, keys = inputs.compressed[:, -layer.indexer.num_heads :], layer.indexer.pooling.entries
            scores = ops.output_scores(wanted, weights, keys, rows=rows, ratio=ratio, granule=granule, top_k=top_k)
            chosen = ops.output_choice(scores, rows.positions, ratio=ratio, top_k=top_k)
        return ops.compressed_decode(
            queries,
            layer.recent,
            None if layer.pooling is None else layer.pooling.entries,
            chosen,
            layer.sink,
            inputs.cos,
            inputs.sin,
            rows=rows,
            window=layer.window,
            ratio=ratio,
            granule=granule,
            top_k=top_k,
        )
