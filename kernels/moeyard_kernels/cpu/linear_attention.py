"""Linear attention on a CPU: convolution, gates, the delta rule over the state in a sequence's slot, gated norm."""

from dataclasses import replace

import torch
import torch.nn.functional as F

from moeyard_kernels.cpu.delta import DeltaRows, chunk_delta_rule, step_delta_rule
from moeyard_kernels.cpu.linear import linear, pack_weight
from moeyard_kernels.cpu.plan import CpuPlan, PromptSegment
from moeyard_kernels.ops.elementwise import gated_rms_norm, rows_apart
from moeyard_kernels.ops.linear_attention import L2_EPS, causal_conv1d
from moeyard_kernels.types.layers import GdnLayer, KdaLayer


class CpuGdn:
    def __init__(self, layer: GdnLayer) -> None:
        # The rate replaces a_log.
        self._layer, self._rate = replace(layer, a_log=layer.a_log.new_empty(0)), layer.a_log.exp().neg_()
        self._keys, self._values = layer.num_k_heads * layer.k_dim, layer.num_v_heads * layer.v_dim

    def mix(self, x: torch.Tensor, plan: CpuPlan) -> torch.Tensor:
        heads = self._layer.num_v_heads
        qkv, z, b, a = x.split_with_sizes((2 * self._keys + self._values, self._values, heads, heads), 1)
        mixed = convolved(qkv, self._layer.conv, self._layer.window, plan)
        q, k, v = mixed.split_with_sizes((self._keys, self._keys, self._values), 1)
        q, k = (x.unflatten(1, (-1, self._layer.k_dim)) for x in (q, k))
        g = F.softplus(rows_apart(a).add_(self._layer.dt_bias)) * self._rate
        rows = DeltaRows(q, k, v.unflatten(1, (heads, -1)), g, rows_apart(b).sigmoid())
        out = attended(rows, self._layer.state, plan)
        return gated_rms_norm.reference(out.to(x.dtype), z, self._layer.norm, self._layer.eps)


class CpuKda:
    def __init__(self, layer: KdaLayer) -> None:
        heads, dim = layer.num_heads, layer.head_dim
        # The packed weight and the rate below replace these two.
        self._layer = replace(layer, a_log=layer.a_log.new_empty(0), wide=layer.wide.new_empty(0))
        self._shape, self._widths = (heads, dim), (3 * heads * dim, dim, dim, heads)
        self._wide = [pack_weight(each) for each in layer.wide]
        self._rate = layer.a_log.exp().neg_().unsqueeze(-1)

    def mix(self, x: torch.Tensor, plan: CpuPlan) -> torch.Tensor:
        qkv, *narrow, beta = x.split_with_sizes(self._widths, 1)
        decay, gate = (linear(part.contiguous(), each) for part, each in zip(narrow, self._wide, strict=True))
        mixed = convolved(qkv, self._layer.conv, self._layer.window, plan)
        q, k, v = (x.unflatten(1, self._shape) for x in mixed.chunk(3, 1))
        g = F.softplus(rows_apart(decay).add_(self._layer.dt_bias)).unflatten(1, self._shape) * self._rate
        out = attended(DeltaRows(q, k, v, g, rows_apart(beta).sigmoid()), self._layer.state, plan)
        # The norm's weight and rows are fp32: one rounding at the end.
        out = out.to(qkv.dtype).float()
        return gated_rms_norm.reference(out, gate, self._layer.norm, self._layer.eps, sigmoid=True).to(qkv.dtype)


def attended(rows: DeltaRows, state: torch.Tensor, plan: CpuPlan) -> torch.Tensor:
    """Apply the rule to a step's rows, whose q and k are not normalised yet -> [num_rows, Hv, Dv] fp32, zero in the
    padding. state [num_slots, Hv, Dk, Dv] is updated.
    """
    q, k = _normalised(rows.q).mul_(rows.q.shape[2] ** -0.5), _normalised(rows.k)
    rows = rows._replace(q=q, k=k)
    out = torch.zeros(rows.v.shape)
    for part in plan.segments:
        kept, begin = _before(part, state), part.begin
        for end, slot in part.parts:
            here, begin = slice(begin, end), end
            out[here] = chunk_delta_rule(rows.at(here), kept)
            if slot >= 0:
                state[slot] = kept
    if plan.waves:
        decay = rows_apart(rows.g.flatten(1)).exp().view(rows.g.shape)
        rows = rows._replace(g=decay if decay.dim() == 3 else decay.unsqueeze(-1))
    for of_wave, read, write in plan.waves:
        out.index_copy_(0, of_wave, step_delta_rule(rows.at(of_wave), state, read, write))
    return out


def convolved(x: torch.Tensor, conv: torch.Tensor, window: torch.Tensor, plan: CpuPlan) -> torch.Tensor:
    """Return silu of the convolution of x [num_rows, C] by conv [C, K], rounded to x's dtype, in fp32; zero in the
    padding.

    The window [num_slots, K - 1, C] holds the inputs before each sequence's next position, and is updated.
    """
    size = conv.shape[1]
    out = rows_apart(torch.zeros(1, 1).expand(x.shape))
    for part in plan.segments:
        before = _before(part, window)
        rows = x[part.begin : part.end]
        out[part.begin : part.end] = causal_conv1d(rows, conv, before)
        inputs = torch.cat((before, rows))
        for end, slot in (*part.parts, (part.end, part.slot)):
            if slot >= 0:
                window[slot] = inputs[end - part.begin :][: size - 1]
    factors = conv.float().t().contiguous()
    for rows, read, write in plan.waves:
        inputs = torch.cat((window.index_select(0, read), x.index_select(0, rows).unsqueeze(1)), 1)
        window.index_copy_(0, write, inputs[:, 1:])
        # The products and sums of `causal_conv1d`, in its order.
        wide = inputs.float()
        done = wide[:, 0] * factors[0]
        for i in range(1, size):
            done += wide[:, i] * factors[i]
        out.index_copy_(0, rows, done)
    return F.silu(out).to(x.dtype).float()


def _before(part: PromptSegment, slots: torch.Tensor) -> torch.Tensor:
    """Return the state that a chunk begins with, placed in its target slot of `slots` [num_slots, ...]."""
    kept = slots[part.slot]
    if not part.start:
        kept.zero_()
    elif part.restored >= 0:
        kept.copy_(slots[part.restored])
    return kept


def _normalised(x: torch.Tensor) -> torch.Tensor:
    """Normalise each head of x [rows, heads, D] fp32 to length 1."""
    return x * x.square().sum(-1, keepdim=True).add_(L2_EPS).rsqrt_()
