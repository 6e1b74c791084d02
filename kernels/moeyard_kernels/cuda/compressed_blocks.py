"""The attention of DSpark's blocks on a GPU, with the ops of compressed attention at output positions.

A block's keys are stored first. Then each of its rows attends as a row at the block's last position would, over a
window that has room for the block, too.
"""

from dataclasses import replace

import torch

from moeyard_kernels import ops
from moeyard_kernels.cuda.compressed import RowInputs
from moeyard_kernels.cuda.plan import CudaPlan
from moeyard_kernels.types.compressed_rows import CompressedRows
from moeyard_kernels.types.layers import CompressedLayer

# An fp32 value of the intermediate results.
_BYTES = 4


class CudaBlockAttend:
    """`BlockAttend` of one layer."""

    def __init__(self, layer: CompressedLayer) -> None:
        self._layer = layer

    def store(self, kv: torch.Tensor, plan: CudaPlan) -> None:
        layer, first = self._layer, plan.num_prompt
        cos, sin = plan.rotation(layer.rope)
        inputs = RowInputs(q=kv[:, :0], kv=kv, cos=cos, sin=sin)
        if first:
            assert plan.compressed_prompts is not None, "the plan has prompt rows"
            _, keys = self._rotated(inputs.part(slice(first)))
            ops.keep_last(keys, layer.recent, tables=plan.compressed_prompts)
        outputs = inputs.part(slice(first, None))
        for wave in plan.outputs:
            its = outputs if wave.at is None else outputs.at(wave.at)
            self._rotated(replace(its, q=its.kv[:, :0]), wave.rows)

    def attend(self, q: torch.Tensor, kv: torch.Tensor, plan: CudaPlan) -> torch.Tensor:
        layer, num_rows = self._layer, plan.num_rows
        groups, size = layer.o_a.shape[0], layer.block
        if not num_rows:
            return q.new_empty(0, groups * layer.o_a.shape[1])
        assert len(plan.outputs) == 1, "a block has few rows, none of them of a prompt"
        rows = plan.outputs[0].rows
        cos, sin = plan.rotation(layer.rope)
        queries, _ = self._rotated(RowInputs(q=q, kv=kv, cos=cos, sin=sin), rows)
        ends = rows.positions.view(-1, size)[:, -1:].expand(-1, size).flatten().contiguous()
        turns = replace(rows, positions=ends).turns(_BYTES * layer.num_heads * (layer.head_dim + 1))
        parts = [self._attended(queries[part], cos[part], sin[part], some) for part, some in turns]
        mixed = parts[0] if len(parts) == 1 else torch.cat(parts)
        out = ops.head_linear(mixed.view(num_rows, groups, -1), layer.o_a, static_weight=True)
        return out.flatten(1)

    def _rotated(self, inputs: RowInputs, rows: CompressedRows | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries [T, heads, D] and keys [T, D], rotated. With `rows` the keys are stored."""
        layer = self._layer
        queries, keys, _ = ops.compressed_rotate(
            inputs.q,
            inputs.kv,
            inputs.cos,
            inputs.sin,
            layer.recent,
            heads=inputs.q.shape[1] // layer.head_dim,
            index_heads=0,
            eps=layer.eps,
            rows=rows,
        )
        return queries, keys

    def _attended(
        self, queries: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rows: CompressedRows
    ) -> torch.Tensor:
        layer = self._layer
        return ops.compressed_decode(
            queries,
            layer.recent,
            None,
            None,
            layer.sink,
            cos,
            sin,
            rows=rows,
            window=layer.window + layer.block,
            ratio=0,
            granule=0,
            top_k=0,
        )
