"""Linear attention: short convolution, the gated delta rule over states in slots, and both in one decode step.

Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464) has a gate per head. Kimi Delta Attention (Kimi Team 2025, arXiv
2510.26692) has a gate per row of the state.
"""

from types import MappingProxyType

import torch
import torch.nn.functional as F

from moeyard_kernels.common.checks import check_indices
from moeyard_kernels.ops.elementwise import gated_rms_norm, rows_apart
from moeyard_kernels.ops.op import op
from moeyard_kernels.types.state_slots import PromptChunks, SlotMoves, StateSlots

# Added to the sum of squares of a query or key.
L2_EPS = 1e-6

_CONV = MappingProxyType({"weight": "x [C, K]", "window": "x [num_slots, K - 1, C]"})
_TAPS = "2 <= K <= 8"
_HEADS = "W > Hv * Dv and (W - Hv * Dv) % (2 * Dk) == 0 and Hv % ((W - Hv * Dv) // (2 * Dk)) == 0"
_RULE = MappingProxyType({"state": "fp32 [num_slots, Hv, Dk, Dv]", "b": "float [T, Hv]", "a_log": "fp32 [Hv]"})
_GDN = MappingProxyType({**_RULE, "a": "float [T, Hv]", "dt_bias": "fp32 [Hv]"})
_KDA = MappingProxyType({**_RULE, "a": "float [T, Hv*Dk]", "dt_bias": "fp32 [Hv, Dk]"})
_SLOTS = MappingProxyType({"slots.read": "int64 [_]"})
_CHUNKS = MappingProxyType({"chunks.table": "int64 [_, _]"})
_OWN_SLOTS, _OWN_CHUNKS = "T == slots.num_rows", ("T == chunks.num_rows", "chunks.last_slot < num_slots")
_STEP = MappingProxyType(
    {"conv": "qkv [W, K]", "window": "qkv [num_slots, K - 1, W]", "gate": "float [T, Hv*Dv]", "norm": "qkv|fp32 [Dv]"}
    | {"rows": "int64 [T]?", **_SLOTS}
)


def causal_conv1d(x: torch.Tensor, weight: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """x [T, C], weight [C, K], before [K - 1, C] (the inputs before x, zeros at a sequence's start) -> [T, C] fp32.

    out[t] = sum over i of weight[:, i] * x[t - K + 1 + i], added in the order of i. Each product and each sum is
    rounded, so that the bits of a position depend only on its K inputs.
    """
    num_tokens, size = x.shape[0], weight.shape[1]
    inputs, factors = torch.cat((before, x)).float(), weight.float().t().contiguous()
    out = inputs[:num_tokens] * factors[0]
    for i in range(1, size):
        out += inputs[i : i + num_tokens] * factors[i]
    return out


@op("linear_attention.causal_conv1d", _TAPS, _OWN_SLOTS, x="float [T, C]", **_CONV, **_SLOTS)
def causal_conv1d_update(
    x: torch.Tensor, weight: torch.Tensor, window: torch.Tensor, *, slots: StateSlots
) -> torch.Tensor:
    """silu of the convolution of decode rows x [B Q, C] by weight [C, K] -> [B Q, C], rounded once, to x's dtype.

    window [num_slots, K - 1, C] holds the inputs before a sequence's next position. Slot `slots.read` has the inputs
    before the first query. Slot `slots.write` receives the last inputs after query j. x, weight and window share a
    dtype, fp32 or bf16, and K is at most 8. Products and sums are fp32, each rounded, in the order of the positions.
    Rows of x may be slices of wider rows. The weight or its transpose is contiguous; the transpose is faster. Padding
    sequences give zeros. Slots must lie in [-1, num_slots). This is checked on a CPU, and on a GPU within
    `launch.checked()`.
    """
    check_indices("causal_conv1d_update", low=-1, high=window.shape[0], read=slots.read, write=slots.write)
    out, before = torch.zeros_like(x, memory_format=torch.contiguous_format), weight.shape[1] - 1
    for n, slot in enumerate(slots.read.tolist()):
        if slot < 0:
            continue
        rows = slice(n * slots.num_queries, (n + 1) * slots.num_queries)
        inputs = torch.cat((window[slot], x[rows]))
        out[rows] = F.silu(rows_apart(causal_conv1d(x[rows], weight, window[slot]))).to(x.dtype)
        for j, target in enumerate(slots.write[n].tolist(), 1):
            if target >= 0:
                window[target] = inputs[j : j + before]
    return out


@op("linear_attention.causal_conv1d_prefill", _TAPS, *_OWN_CHUNKS, x="float [T, C]", **_CONV, **_CHUNKS)
def causal_conv1d_prefill(
    x: torch.Tensor, weight: torch.Tensor, window: torch.Tensor, *, chunks: PromptChunks
) -> torch.Tensor:
    """`causal_conv1d_update` over whole prompts: rows x [T, C] of `chunks` -> [T, C], the same bits at each position.

    The inputs before a prompt's first row come from its slot, or are zeros if it begins at position 0. The slot
    receives its last K - 1 inputs. Each snapshot's slot receives those before the snapshot. K is at most 8.
    """
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    for part in chunks.parts:
        before = torch.zeros_like(window[part.slot]) if part.fresh else window[part.slot].clone()
        rows = slice(part.begin, part.end)
        out[rows] = F.silu(rows_apart(causal_conv1d(x[rows], weight, before))).to(x.dtype)
        inputs = torch.cat((before, x[rows]))
        for end, slot in part.stops:
            window[slot] = inputs[end - part.begin :][: weight.shape[1] - 1]
    return out


@op("linear_attention.delta_recurrent", _HEADS, _OWN_SLOTS, qkv="float [T, W]", **_GDN, **_SLOTS)
def gdn_recurrent(
    qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    *,
    slots: StateSlots,
    static_state: bool = False,
) -> torch.Tensor:
    """Gated DeltaNet (arXiv 2412.06464) of decode rows -> [B Q, Hv, Dv] in qkv's dtype; states change in place.

    qkv [B Q, 2 Hk Dk + Hv Dv] holds queries, keys and values after the convolution. b and a are [B Q, Hv]. These three
    are fp32 or bf16 with contiguous rows. a_log, dt_bias [Hv] and state [num_slots, Hv, Dk, Dv] are fp32. In fp32,
    queries and keys are normalised (with 1e-6 added to the sum of squares), queries are scaled by Dk^-0.5, and for each
    row

        S <- exp(-exp(a_log) softplus(a + dt_bias)) S;  S <- S + k (sigmoid(b) (v - k S));  out = q S

    Value head h uses key head h // (Hv // Hk). A sequence starts from slot `slots.read`, and slot `slots.write`
    receives the state after query j. Queries in one call or in several give the same bits. Padding sequences give
    zeros. Slots must lie in [-1, num_slots). This is checked on a CPU, and on a GPU within `launch.checked()`.
    static_state: no launch in flight writes `slots` or a state that they name, as when the previous step wrote these
    and a product ran since. A GPU may then read them before the previous launch has ended.
    """
    return _recurrent("gdn_recurrent", slots, qkv, b, a, a_log, dt_bias, state)


@op("linear_attention.delta_recurrent", _HEADS, _OWN_SLOTS, qkv="float [T, W]", **_KDA, **_SLOTS)
def kda_recurrent(
    qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    *,
    slots: StateSlots,
    static_state: bool = False,
) -> torch.Tensor:
    """Kimi Delta Attention (arXiv 2510.26692) of decode rows: `gdn_recurrent` with a gate per row of the state.

    a is [B Q, Hv Dk] and dt_bias is [Hv, Dk]. Row d of head h decays by exp(-exp(a_log[h]) softplus(a + dt_bias)).
    """
    return _recurrent("kda_recurrent", slots, qkv, b, a, a_log, dt_bias, state)


@op("linear_attention.delta_step", _HEADS, _OWN_SLOTS, _TAPS, qkv="float [T, W]", **_GDN, **_STEP)
def gdn_step(
    qkv: torch.Tensor,
    conv: torch.Tensor,
    window: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    gate: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    *,
    slots: StateSlots,
    sigmoid: bool = False,
    rows: torch.Tensor | None = None,
    static_state: bool = False,
) -> torch.Tensor:
    """`causal_conv1d_update`, `gdn_recurrent` and `gated_rms_norm` of decode rows, bit for bit -> [B Q, Hv Dv].

    conv [C, K] convolves qkv [B Q, C] over window [num_slots, K - 1, C]. The rule takes b, a, a_log, dt_bias and state.
    Its results, or those of `rows`, are normalised by norm [Dv] and eps, times silu or sigmoid of gate [B Q, Hv Dv].
    Arguments are those of the three ops. Rows of qkv, b, a and gate may be slices of wider rows. A GPU takes three
    launches. It takes two if a stored config says so, each sequence has one query, and conv's transpose is contiguous.
    static_state: as in `gdn_recurrent`, and for the windows too.
    """
    mixed = causal_conv1d_update.reference(qkv, conv, window, slots=slots)
    mixed = gdn_recurrent.reference(mixed, b, a, a_log, dt_bias, state, slots=slots)
    return gated_rms_norm.reference(mixed, gate, norm, eps, sigmoid=sigmoid, rows=rows)


@op("linear_attention.delta_step", _HEADS, _OWN_SLOTS, _TAPS, qkv="float [T, W]", **_KDA, **_STEP)
def kda_step(
    qkv: torch.Tensor,
    conv: torch.Tensor,
    window: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    gate: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    *,
    slots: StateSlots,
    sigmoid: bool = False,
    rows: torch.Tensor | None = None,
    static_state: bool = False,
) -> torch.Tensor:
    """`gdn_step` with the rule of `kda_recurrent`."""
    inputs = (qkv, conv, window, b, a, a_log, dt_bias, state, gate, norm, eps)
    return gdn_step.reference(*inputs, slots=slots, sigmoid=sigmoid, rows=rows)


@op("linear_attention.delta_chunk", _HEADS, *_OWN_CHUNKS, qkv="float [T, W]", **_GDN, **_CHUNKS)
def gdn_chunk_prefill(
    qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    *,
    chunks: PromptChunks,
) -> torch.Tensor:
    """`gdn_recurrent` over whole prompts, in chunks of 64 positions: rows [T, ...] of `chunks` -> [T, Hv, Dv].

    The rule and its arguments are the same, but each chunk is a linear system (arXiv 2412.06464), so the bits differ
    from `gdn_recurrent`. A prompt starts from the state in its slot, or from zeros if it begins at position 0. The slot
    receives the state after its last row. Each snapshot's slot receives the state of a prompt that ends there. The bits
    of a row and of the state depend neither on other prompts nor on the division of the prompt into steps. On a GPU the
    products of bf16 rows run on tensor cores with bf16 operands and fp32 sums. Gates, their sums and the state between
    chunks are fp32. Relative error of the outputs against float64: at most 5e-3. The reference goes position by
    position, in the dtype of the state.
    """
    inputs = rule_inputs(qkv, b, a, a_log, dt_bias, state)
    out = torch.empty_like(inputs[2])
    for part in chunks.parts:
        current = torch.zeros_like(state[part.slot]) if part.fresh else state[part.slot]
        begin = part.begin
        for end, slot in part.stops:
            q, k, v, g, beta = (x[begin:end] for x in inputs)
            out[begin:end], current = gated_delta_rule(q, k, v, g, beta, current)
            state[slot], begin = current, end
    return out.to(qkv.dtype)


@op("linear_attention.delta_chunk", _HEADS, *_OWN_CHUNKS, qkv="float [T, W]", **_KDA, **_CHUNKS)
def kda_chunk_prefill(
    qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    *,
    chunks: PromptChunks,
) -> torch.Tensor:
    """`gdn_chunk_prefill` of Kimi Delta Attention (arXiv 2510.26692), with the arguments of `kda_recurrent`."""
    return gdn_chunk_prefill.reference(qkv, b, a, a_log, dt_bias, state, chunks=chunks)


@op(
    "linear_attention.restore_slots",
    state="fp32 [num_slots, Hv, Dk, Dv]",
    window="float [num_slots, _, _]",
    **{"moves.source": "int64 [_]"},
)
def restore_slots(state: torch.Tensor, window: torch.Tensor, *, moves: SlotMoves) -> None:
    """Copy slot `moves.source[n]` of a layer's state and window to slot `moves.target[n]`, unless the source is -1.

    state [num_slots, Hv, Dk, Dv] is fp32, window [num_slots, K - 1, C] fp32 or bf16, both contiguous. Slots must lie in
    [0, num_slots). This is checked on a CPU, and on a GPU within `launch.checked()`.
    """
    num_slots = state.shape[0]
    check_indices("restore_slots", low=-1, high=num_slots, source=moves.source)
    check_indices("restore_slots", low=0, high=num_slots, target=moves.target)
    for source, target in zip(moves.source.tolist(), moves.target.tolist(), strict=True):
        if source >= 0:
            state[target], window[target] = state[source], window[source]


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q, k [T, Hk, Dk], v [T, Hv, Dv], beta [T, Hv], state [Hv, Dk, Dv] -> (out [T, Hv, Dv], final state).

    g is the logarithm of the decay at each position, [T, Hv] for the state or [T, Hv, Dk] for each of its rows. Value
    head h uses key head h // (Hv // Hk). The caller normalises queries and keys and scales queries. In the dtype of the
    state, position by position: S <- exp(g) S; S <- S + k (beta (v - k S)); out = q S.
    """
    num_tokens, num_heads = v.shape[:2]
    q, k = (x.to(state.dtype).repeat_interleave(num_heads // x.shape[1], 1) for x in (q, k))
    decay = g.to(state.dtype).exp()
    if decay.dim() == 2:
        decay = decay.unsqueeze(-1)
    out = state.new_empty(num_tokens, num_heads, v.shape[2])
    for t in range(num_tokens):
        state = state * decay[t].unsqueeze(-1)
        read = torch.einsum("hd,hdv->hv", k[t], state)
        change = (v[t].to(state.dtype) - read) * beta[t].to(state.dtype).unsqueeze(-1)
        state = state + k[t].unsqueeze(-1) * change.unsqueeze(-2)
        out[t] = torch.einsum("hd,hdv->hv", q[t], state)
    return out, state


def rule_inputs(
    qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return q, k, v, g and beta for `gated_delta_rule`, in the state's dtype.

    q and k [T, Hk, Dk] have length 1, and queries are scaled. The bits of a row do not depend on other rows.
    """
    _, num_heads, k_dim, v_dim = state.shape
    keys = (qkv.shape[1] - num_heads * v_dim) // 2
    q, k, v = qkv.to(state.dtype).split((keys, keys, num_heads * v_dim), 1)
    q, k = (x.reshape(x.shape[0], -1, k_dim) for x in (q, k))
    q, k = (x * x.square().sum(-1, keepdim=True).add(L2_EPS).rsqrt() for x in (q, k))
    if dt_bias.dim() == 2:
        a, a_log = a.unflatten(1, (num_heads, k_dim)), a_log.unsqueeze(1)
    gates = rows_apart((a.to(state.dtype) + dt_bias.to(state.dtype)).flatten(1))
    g = -a_log.to(state.dtype).exp() * F.softplus(gates).view(a.shape)
    beta = rows_apart(b.to(state.dtype)).sigmoid()
    return q * k_dim**-0.5, k, v.reshape(v.shape[0], num_heads, v_dim), g, beta


def _recurrent(op: str, slots: StateSlots, qkv: torch.Tensor, *gates_and_state: torch.Tensor) -> torch.Tensor:
    state = gates_and_state[-1]
    check_indices(op, low=-1, high=state.shape[0], read=slots.read, write=slots.write)
    inputs = rule_inputs(qkv, *gates_and_state)
    out = torch.zeros_like(inputs[2])
    for n, slot in enumerate(slots.read.tolist()):
        if slot < 0:
            continue
        current = state[slot].clone()
        for row, target in enumerate(slots.write[n].tolist(), n * slots.num_queries):
            q, k, v, g, beta = (x[row : row + 1] for x in inputs)
            result, current = gated_delta_rule(q, k, v, g, beta, current)
            out[row] = result[0]
            if target >= 0:
                state[target] = current
    return out.to(qkv.dtype)
