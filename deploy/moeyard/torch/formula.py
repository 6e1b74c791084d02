"""A backend of plain torch operations that autograd differentiates, in the dtype of the weights.

It computes one whole sequence. Each operation is the mathematical function of the one in `Backend`, without caches and
without the served dtype's roundings. Prompt and output positions share a formula here, because they share a function.
The experts of each row are given, so that rounding cannot change the choice.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from moeyard_kernels.types.gate import Chosen, ExpertParts, GateRule
from moeyard_kernels.types.layers import (
    CompressedLayer,
    GateLayer,
    GdnLayer,
    GqaLayer,
    HyperLayer,
    HyperMix,
    KdaLayer,
    MlaLayer,
    Pooling,
)
from moeyard_kernels.types.matrix import Matrix
from moeyard_worker.exchange.base import Dispatched
from moeyard_worker.layers.weights import Weight
from moeyard_worker.models.spec import ModelSpec

# Added to the squared length of the delta rule's queries and keys.
_L2_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class SequencePlan:
    """A `StepPlan` of one sequence of T rows.

    token_ids, positions [T] int64. routed [T, MoE layers, K] int64: the experts of each row.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    routed: torch.Tensor
    num_tokens: int
    num_rows: int
    num_prompt: int = 0
    num_sampled: int = 0
    sample_rows: torch.Tensor | None = None

    @staticmethod
    def of(token_ids: torch.Tensor, routed: torch.Tensor) -> "SequencePlan":
        """Return the plan of a sequence."""
        count = token_ids.shape[0]
        positions = torch.arange(count, device=token_ids.device)
        return SequencePlan(token_ids=token_ids, positions=positions, routed=routed, num_tokens=count, num_rows=count)


def routing_weights(logits: torch.Tensor, ids: torch.Tensor, rule: GateRule) -> torch.Tensor:
    """Return the weights [T, K] of given experts `ids` [T, K] under logits [T, E]; `ops.topk_gate` has the formula."""
    if rule.scoring == "softmax":
        scores, least = logits.softmax(-1), 0.0
    else:
        scores, least = logits.sigmoid() if rule.scoring == "sigmoid" else F.softplus(logits).sqrt(), 1e-20
    weights = scores.gather(1, ids)
    if rule.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + least)
    return weights * rule.scaling


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def _silu_mul(gate_up: torch.Tensor, limit: float | None = None) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return F.silu(gate) * up


def _rotate(x: torch.Tensor, table: torch.Tensor | None, plan: SequencePlan, *, interleaved: bool) -> torch.Tensor:
    """Rotate the first values of each head of x [T, heads, D], as many as the table [positions, Dr] has columns."""
    if table is None:
        return x
    width = table.shape[1]
    cos, sin = table[plan.positions].to(x.dtype).unsqueeze(1).chunk(2, -1)
    turned, rest = x[..., :width], x[..., width:]
    first, second = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, window: int | None = None
) -> torch.Tensor:
    """Causal attention of q [T, Hq, D] over k [T, Hkv, D] and v [T, Hkv, Dv] -> [T, Hq Dv]."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    seen = None
    if window is not None:
        rows = torch.arange(q.shape[0], device=q.device)
        distance = rows[:, None] - rows
        seen = (distance >= 0) & (distance < window)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=seen is None, scale=scale)
    return out[0].transpose(0, 1).flatten(1)


class _Gqa:
    def __init__(self, layer: GqaLayer) -> None:
        self._layer = layer

    def attend(self, qkv: torch.Tensor, plan: SequencePlan) -> torch.Tensor:
        layer = self._layer
        heads = layer.num_heads, layer.num_kv_heads, layer.num_kv_heads
        q, k, v = qkv.unflatten(1, (-1, layer.head_dim)).split(heads, 1)
        q, k = self._normalised(q, layer.q_norm), self._normalised(k, layer.k_norm)
        q, k = (_rotate(x, layer.rope, plan, interleaved=layer.interleaved) for x in (q, k))
        return _attention(q, k, v, scale=layer.scale, window=layer.window)

    def _normalised(self, x: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        """Normalise each head of x [T, heads, D], or all heads together if the norm is that wide."""
        if norm is None:
            return x
        if norm.shape[0] == x.shape[2]:
            return _rms_norm(x, norm, self._layer.eps)
        return _rms_norm(x.flatten(1), norm, self._layer.eps).view_as(x)


class _Mla:
    def __init__(self, layer: MlaLayer) -> None:
        self._layer = layer

    def attend(self, q: torch.Tensor, latent: torch.Tensor, k_rope: torch.Tensor, plan: SequencePlan) -> torch.Tensor:
        layer, nope = self._layer, self._layer.nope_dim
        q_nope, q_rope = q.unflatten(1, (layer.num_heads, -1)).split((nope, layer.rope_dim), -1)
        rotated = torch.cat((q_rope, k_rope.unsqueeze(1)), 1)
        rotated = _rotate(rotated, layer.rope, plan, interleaved=layer.interleaved)
        q_rope, k_rope = rotated.split((layer.num_heads, 1), 1)
        if layer.kv_norm is not None:
            latent = _rms_norm(latent, layer.kv_norm, layer.eps)
        k_nope, v = torch.einsum("tr,hdr->thd", latent, layer.kv_b).split((nope, layer.v_dim), -1)
        k = torch.cat((k_nope, k_rope.expand(-1, layer.num_heads, -1)), -1)
        return _attention(torch.cat((q_nope, q_rope), -1), k, v, scale=layer.scale)


class _Gdn:
    def __init__(self, layer: GdnLayer) -> None:
        self._layer = layer

    def mix(self, x: torch.Tensor, plan: SequencePlan) -> torch.Tensor:
        layer, heads = self._layer, self._layer.num_v_heads
        keys, values = layer.num_k_heads * layer.k_dim, heads * layer.v_dim
        qkv, z, b, a = x.split((2 * keys + values, values, heads, heads), 1)
        q, k, v = _convolved(qkv, layer.conv).split((keys, keys, values), 1)
        q, k = (
            part.unflatten(1, (layer.num_k_heads, -1)).repeat_interleave(heads // layer.num_k_heads, 1)
            for part in (q, k)
        )
        decay = (-layer.a_log.exp() * F.softplus(a + layer.dt_bias)).exp().unsqueeze(-1)
        out = _delta_rule(q, k, v.unflatten(1, (heads, -1)), decay, b.sigmoid())
        return _rms_norm(out, layer.norm, layer.eps).flatten(1) * F.silu(z)


class _Kda:
    def __init__(self, layer: KdaLayer) -> None:
        self._layer = layer

    def mix(self, x: torch.Tensor, plan: SequencePlan) -> torch.Tensor:
        layer, heads, dim = self._layer, self._layer.num_heads, self._layer.head_dim
        qkv, decay, gate, beta = x.split((3 * heads * dim, dim, dim, heads), 1)
        q, k, v = (part.unflatten(1, (heads, dim)) for part in _convolved(qkv, layer.conv).chunk(3, 1))
        rates = F.softplus(F.linear(decay, layer.wide[0]) + layer.dt_bias).unflatten(1, (heads, dim))
        out = _delta_rule(q, k, v, (-layer.a_log.exp().unsqueeze(-1) * rates).exp(), beta.sigmoid())
        return _rms_norm(out, layer.norm, layer.eps).flatten(1) * F.linear(gate, layer.wide[1]).sigmoid()


class _Compressed:
    """DeepSeek-V4's attention. Its indexer chooses entries by these scores, which have no gradient."""

    def __init__(self, layer: CompressedLayer) -> None:
        self._layer = layer

    def attend(self, x: torch.Tensor, q: torch.Tensor, kv: torch.Tensor, plan: SequencePlan) -> torch.Tensor:
        layer, rows = self._layer, plan.positions
        heads, dim = layer.num_heads, layer.head_dim
        queries = q[:, : heads * dim].unflatten(1, (heads, dim))
        queries = self._turned(_rms_norm(queries, queries.new_ones(dim), layer.eps), rows)
        keys = self._turned(kv.unsqueeze(1), rows).squeeze(1)
        distance = rows[:, None] - rows
        seen = (distance >= 0) & (distance < layer.window)
        if layer.pooling is not None:
            assert layer.compress is not None, "pooling has values and gates"
            parts = F.linear(x, layer.compress.data)
            width = 2 * layer.pooling.bias.shape[1]
            entries = self._pooled(parts[:, :width], layer.pooling)
            ended = torch.arange(entries.shape[0], device=x.device) < ((rows + 1) // layer.pooling.ratio)[:, None]
            if layer.indexer is not None:
                with torch.no_grad():
                    ended = ended & self._chosen(parts[:, width:], q[:, heads * dim :], ended, rows)
            keys, seen = torch.cat((keys, entries)), torch.cat((seen, ended), 1)
        scores = torch.einsum("thd,nd->thn", queries, keys) * dim**-0.5
        scores = scores.masked_fill(~seen.unsqueeze(1), float("-inf"))
        sink = layer.sink.view(1, -1, 1).expand(rows.shape[0], -1, 1)
        weights = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
        out = self._turned(torch.einsum("thn,nd->thd", weights, keys), rows, back=True)
        groups = out.reshape(rows.shape[0], layer.o_a.shape[0], -1)
        return torch.einsum("tgi,gri->tgr", groups, layer.o_a).flatten(1)

    def _turned(self, x: torch.Tensor, positions: torch.Tensor, *, back: bool = False) -> torch.Tensor:
        """Rotate the last values of each head of x [T, heads, D] in pairs (2 i, 2 i + 1), or undo that."""
        cos, sin = self._layer.rope[positions].to(x.dtype).unsqueeze(1).chunk(2, -1)
        kept, turned = x.split((x.shape[2] - 2 * cos.shape[2], 2 * cos.shape[2]), -1)
        first, second = turned[..., 0::2], turned[..., 1::2]
        sin = -sin if back else sin
        pairs = torch.stack((first * cos - second * sin, second * cos + first * sin), -1)
        return torch.cat((kept, pairs.flatten(-2)), -1)

    def _pooled(self, parts: torch.Tensor, pooling: Pooling) -> torch.Tensor:
        """Return the entries [n, D] of all whole blocks of values and gates [T, 2 C]."""
        ratio, dim = pooling.ratio, pooling.norm.shape[0]
        count = parts.shape[0] // ratio
        values, gates = parts[: count * ratio].unflatten(0, (count, ratio)).chunk(2, 2)
        gates = gates + pooling.bias
        if pooling.overlaps:
            # The first half of a block's columns belongs to the next entry. The first entry has no block before.
            none = values.new_zeros(1, ratio, dim)
            before = torch.cat((none, values[:-1, :, :dim])), torch.cat((none - float("inf"), gates[:-1, :, :dim]))
            values, gates = (
                torch.cat((a[:count], b[..., dim:]), 1) for a, b in zip(before, (values, gates), strict=True)
            )
        entries = _rms_norm((gates.softmax(1) * values).sum(1), pooling.norm, self._layer.eps)
        return self._turned(entries.unsqueeze(1), torch.arange(count, device=parts.device) * ratio).squeeze(1)

    def _chosen(
        self, parts: torch.Tensor, q: torch.Tensor, ended: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Return bool [T, n]: the best of the entries that have `ended`, ties by lower index."""
        indexer = self._layer.indexer
        assert indexer is not None, "the caller has it"
        heads, width = indexer.num_heads, 2 * indexer.pooling.bias.shape[1]
        index = self._pooled(parts[:, :width], indexer.pooling)
        wanted = self._turned(q.unflatten(1, (heads, -1)), positions)
        scores = torch.einsum("thd,nd->thn", wanted, index).relu() * index.shape[1] ** -0.5
        total = (scores * parts[:, width:].unsqueeze(-1)).sum(1) * heads**-0.5
        best = total.masked_fill(~ended, float("-inf")).sort(dim=1, descending=True, stable=True).indices
        return torch.zeros_like(ended).scatter_(1, best[:, : indexer.top_k], True)


class _HyperSite:
    """`HyperSite` of streams [T, S, H]; `ops.hyper_connections` has the formulas."""

    def __init__(self, layer: HyperLayer) -> None:
        self._layer = layer

    def enter(self, streams: torch.Tensor) -> tuple[torch.Tensor, HyperMix | None]:
        site, count, flat = self._layer, streams.shape[1], streams.flatten(1)
        mixed = F.linear(flat, site.weight.data) * (flat.square().mean(-1, keepdim=True) + site.rms_eps).rsqrt()
        before = (mixed[:, :count] * site.scale[0] + site.base[:count]).sigmoid() + site.eps
        rows = _rms_norm((before.unsqueeze(-1) * streams).sum(1), site.norm, site.rms_eps)
        if mixed.shape[1] == count:
            return rows, None
        post = (mixed[:, count : 2 * count] * site.scale[1] + site.base[count : 2 * count]).sigmoid() * 2
        comb = (mixed[:, 2 * count :] * site.scale[2] + site.base[2 * count :]).unflatten(1, (count, count))
        comb = comb.softmax(-1) + site.eps
        comb = comb / (comb.sum(-2, keepdim=True) + site.eps)
        for _ in range(site.iterations - 1):
            comb = comb / (comb.sum(-1, keepdim=True) + site.eps)
            comb = comb / (comb.sum(-2, keepdim=True) + site.eps)
        return rows, HyperMix(post=post, comb=comb)


def _convolved(x: torch.Tensor, conv: torch.Tensor) -> torch.Tensor:
    """Return silu of the causal convolution of x [T, C] by conv [C, K], over zeros before the first row."""
    padded = F.pad(x, (0, 0, conv.shape[1] - 1, 0)).t().unsqueeze(0)
    return F.silu(F.conv1d(padded, conv.unsqueeze(1), groups=conv.shape[0])[0].t())


def _delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """Apply the gated delta rule position by position to q, k [T, H, Dk] and v [T, H, Dv] -> [T, H, Dv].

    decay [T, H, Dk or 1] are factors of the state's rows, beta [T, H]; `ops.gdn_recurrent` has the formula.
    """
    q, k = (x * (x.square().sum(-1, keepdim=True) + _L2_EPS).rsqrt() for x in (q, k))
    q = q * q.shape[2] ** -0.5
    state, out = v.new_zeros(k.shape[1], k.shape[2], v.shape[2]), []
    for t in range(q.shape[0]):
        state = state * decay[t].unsqueeze(-1)
        error = beta[t].unsqueeze(-1) * (v[t] - torch.einsum("hk,hkv->hv", k[t], state))
        state = state + k[t].unsqueeze(-1) * error.unsqueeze(1)
        out.append(torch.einsum("hk,hkv->hv", q[t], state))
    return torch.stack(out)


class _Gate:
    """The gate of MoE layer `index`. The plan has its choice."""

    computes_shared = False

    def __init__(self, layer: GateLayer, index: int) -> None:
        self._layer, self._index = layer, index

    def choose(self, x: torch.Tensor, plan: SequencePlan, *, defer: bool) -> Chosen:
        ids, shared_gate = plan.routed[:, self._index], self._layer.shared_gate
        weights = routing_weights(F.linear(x, self._layer.weight.data), ids, self._layer.rule)
        shared = None if shared_gate is None else F.linear(x, shared_gate.data)[:, 0]
        return Chosen(weights=weights, ids=ids, shared_gate=shared)


class FormulaBackend:
    """`Backend` for one model; see the module."""

    rms_norm = staticmethod(_rms_norm)
    silu_mul = staticmethod(_silu_mul)
    gqa = staticmethod(_Gqa)
    mla = staticmethod(_Mla)
    gdn = staticmethod(_Gdn)
    kda = staticmethod(_Kda)
    compressed = staticmethod(_Compressed)
    hyper_site = staticmethod(_HyperSite)

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._num_gates = 0

    def matrix(self, weight: Matrix) -> Matrix:
        return weight

    def gate(self, layer: GateLayer) -> _Gate:
        """Return the gate of the next MoE layer: a decoder makes them in order."""
        self._num_gates += 1
        return _Gate(layer, self._num_gates - 1)

    def linear(self, x: torch.Tensor, weight: Matrix, bias: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(x, weight.data, bias)

    def sigmoid_mul(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return x * gate.sigmoid()

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        return _rms_norm(total, weight, eps), total

    def mla_split_qkv_a_norm(
        self, qkv_a: torch.Tensor, q_weight: torch.Tensor, kv_weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        num_q, num_kv = q_weight.shape[0], kv_weight.shape[0]
        q, kv, rope = qkv_a.split((num_q, num_kv, qkv_a.shape[1] - num_q - num_kv), 1)
        return _rms_norm(q, q_weight, eps), _rms_norm(kv, kv_weight, eps), rope

    def beside(self, run: Callable[[], torch.Tensor], plan: SequencePlan) -> Callable[[], torch.Tensor]:
        return run

    def reduce_add_norm(
        self, parts: ExpertParts, residual: torch.Tensor, norm: torch.Tensor, eps: float, plan: SequencePlan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.add_rms_norm(_reduced(parts), residual, norm, eps)

    def hyper_leave(
        self, result: torch.Tensor | ExpertParts, streams: torch.Tensor, mix: HyperMix, site: Any, plan: SequencePlan
    ) -> tuple[torch.Tensor, torch.Tensor, HyperMix | None]:
        result = _reduced(result) if isinstance(result, ExpertParts) else result
        streams = mix.post.unsqueeze(-1) * result.unsqueeze(1) + torch.einsum("tjk,tjh->tkh", mix.comb, streams)
        return streams, *site.enter(streams)


def _reduced(parts: ExpertParts) -> torch.Tensor:
    """Return the sum of all results [T, H]."""
    total = (parts.routed * parts.weights.unsqueeze(-1)).sum(1)
    if parts.shared is None:
        return total
    gate = parts.shared_gate
    return total + (parts.shared if gate is None else parts.shared * gate.unsqueeze(1).sigmoid())


class FormulaExperts:
    """`Experts` whose matrices come from `load` when a row first needs them."""

    defers_choices = joins_shared = False
    all_resident = True

    def __init__(self, spec: ModelSpec, load: Callable[[Weight], Any]) -> None:
        self._spec, self._load, self._limit = spec, load, spec.config.swiglu_limit
        self._loaded: dict[tuple[int, int], tuple[Matrix, Matrix]] = {}

    def _matrices(self, layer: int, expert: int) -> tuple[Matrix, Matrix]:
        """Return gate_up [2 I, H] and down [H, I]."""
        if (layer, expert) not in self._loaded:
            names = self._spec.layers[layer].experts
            assert names is not None, f"layer {layer} has no experts"
            gate, up, down = self._spec.expert_parts(names, expert)
            width, hidden = gate.shape
            gate_up = Weight((2 * width, hidden), (gate, replace(up, row=width)), matrix=True)
            self._loaded[layer, expert] = self._load(gate_up), self._load(Weight(down.shape, (down,), matrix=True))
        return self._loaded[layer, expert]

    def run(self, layer: int, dispatched: Dispatched) -> torch.Tensor:
        rows, ids = dispatched.rows, dispatched.experts.flatten()
        order = ids.argsort(stable=True)
        outputs, top_k = [], dispatched.experts.shape[1]
        for expert, pairs in zip(*_groups(ids, order), strict=True):
            gate_up, down = self._matrices(layer, expert)
            x = rows.index_select(0, pairs // top_k)
            outputs.append(F.linear(_silu_mul(F.linear(x, gate_up.data), self._limit), down.data))
        return torch.cat(outputs).index_select(0, order.argsort()).view(rows.shape[0], top_k, -1)


def _groups(ids: torch.Tensor, order: torch.Tensor) -> tuple[list[int], tuple[torch.Tensor, ...]]:
    """Return the experts among ids [pairs], ascending, and the pairs of each, as `order` sorts them."""
    experts, counts = ids.unique(return_counts=True)
    return experts.tolist(), order.split(counts.tolist())
