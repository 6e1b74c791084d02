"""Linear attention on a GPU: convolution, the delta rule over states in slots, gated norm."""

from collections.abc import Callable

import torch

from moeyard_kernels import ops
from moeyard_kernels.cuda.plan import CudaPlan
from moeyard_kernels.cuda.state_rows import StateRows
from moeyard_kernels.types.layers import DeltaLayer, GdnLayer, KdaLayer
from moeyard_kernels.types.state_slots import StateSlots

Rule = Callable[..., torch.Tensor]


class _Delta:
    """The delta rule of one layer, with the convolution before it and the gated norm after it.

    `chunked` is the rule of prompt rows, `recurrent` that of decode rows. `step` is all three parts of a step that has
    only decode rows. The shape of dt_bias is that of `recurrent`.
    """

    def __init__(
        self, chunked: Rule, recurrent: Rule, step: Rule, layer: DeltaLayer, *, dt_bias: torch.Tensor, sigmoid: bool
    ) -> None:
        self._chunked, self._recurrent, self._step = chunked, recurrent, step
        self._layer, self._rates, self._sigmoid = layer, (layer.a_log, dt_bias), sigmoid
        # Transposed, so that a thread reads contiguous taps.
        self._conv = layer.conv.t().contiguous().t()

    def __call__(
        self, qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, gate: torch.Tensor, plan: CudaPlan
    ) -> torch.Tensor:
        """qkv [num_rows, C], b [num_rows, H], a and gate as projected -> [num_rows, H Dv] in their dtype."""
        rows, layer = plan.state, self._layer
        assert rows is not None, "linear attention needs a plan with slots"
        if rows.chunks is None and rows.restored is None and rows.slots is not None:
            # Products run between this launch and the launches of the step before that wrote these slots.
            inputs = (qkv, self._conv, layer.window, b, a, *self._rates, layer.state, gate, layer.norm, layer.eps)
            return self._step(*inputs, slots=rows.slots, sigmoid=self._sigmoid, rows=rows.stand_in, static_state=True)
        mixed = self._mixed(qkv, b, a, plan, rows)
        return ops.gated_rms_norm(mixed, gate, layer.norm, layer.eps, sigmoid=self._sigmoid, rows=rows.stand_in)

    def _mixed(
        self, qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, plan: CudaPlan, rows: StateRows
    ) -> torch.Tensor:
        """Return [num_rows, H, Dv] of prompt rows and decode rows."""
        first, parts = plan.num_prompt, []
        if rows.restored is not None:
            ops.restore_slots(self._layer.state, self._layer.window, moves=rows.restored)
        if rows.chunks is not None:
            mixed = ops.causal_conv1d_prefill(qkv[:first], self._conv, self._layer.window, chunks=rows.chunks)
            parts.append(
                self._chunked(mixed, b[:first], a[:first], *self._rates, self._layer.state, chunks=rows.chunks)
            )
        if first < plan.num_tokens:
            inputs = (qkv, b, a) if not first else (qkv[first:], b[first:], a[first:])
            if rows.slots is not None:
                parts.append(self._steps(*inputs, rows.slots))
            else:
                out = qkv.new_empty(plan.num_tokens - first, *self._layer.state.shape[1:4:2])
                for wave in rows.waves:
                    some_qkv, some_b, some_a = (x.index_select(0, wave.rows) for x in inputs)
                    some = self._steps(some_qkv, some_b, some_a, wave.slots)
                    out.index_copy_(0, wave.at, some.index_select(0, wave.taken))
                parts.append(out)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _steps(self, qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, slots: StateSlots) -> torch.Tensor:
        mixed = ops.causal_conv1d_update(qkv, self._conv, self._layer.window, slots=slots)
        return self._recurrent(mixed, b, a, *self._rates, self._layer.state, slots=slots)


class CudaGdn:
    def __init__(self, layer: GdnLayer) -> None:
        values, heads = layer.num_v_heads * layer.v_dim, layer.num_v_heads
        self._widths = (2 * layer.num_k_heads * layer.k_dim + values, values, heads, heads)
        self._rule = _Delta(
            ops.gdn_chunk_prefill, ops.gdn_recurrent, ops.gdn_step, layer, dt_bias=layer.dt_bias, sigmoid=False
        )

    def mix(self, x: torch.Tensor, plan: CudaPlan) -> torch.Tensor:
        qkv, z, b, a = x.split_with_sizes(self._widths, 1)
        return self._rule(qkv, b, a, z, plan)


class CudaKda:
    def __init__(self, layer: KdaLayer) -> None:
        heads, dim = layer.num_heads, layer.head_dim
        self._widths, self._wide = (3 * heads * dim, 2 * dim, heads), layer.wide
        dt_bias = layer.dt_bias.view(heads, dim)
        self._rule = _Delta(
            ops.kda_chunk_prefill, ops.kda_recurrent, ops.kda_step, layer, dt_bias=dt_bias, sigmoid=True
        )

    def mix(self, x: torch.Tensor, plan: CudaPlan) -> torch.Tensor:
        qkv, narrow, beta = x.split_with_sizes(self._widths, 1)
        # Both products in one launch, over strided slices.
        decay, gate = ops.head_linear(narrow.unflatten(1, (2, -1)), self._wide, static_weight=True).unbind(1)
        return self._rule(qkv, beta, decay, gate, plan)
