"""The gated delta rule of decode rows, over states in slots."""

import torch
import torch.nn.functional as F

from moeyard_kernels.common.checks import check_indices
from moeyard_kernels.ref.gated_delta_rule import gated_delta_rule
from moeyard_kernels.ref.rows_apart import rows_apart
from moeyard_kernels.types.state_slots import StateSlots

# Beside the sum of squares of a query or key.
L2_EPS = 1e-6


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
    """See `moeyard_kernels.ops.gdn_recurrent`: in the dtype of the state. Nothing is launched ahead on a CPU."""
    return _recurrent("gdn_recurrent", qkv, b, a, a_log, dt_bias, state, slots)


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
    """See `moeyard_kernels.ops.kda_recurrent`: in the dtype of the state. Nothing is launched ahead on a CPU."""
    gates = a.unflatten(1, tuple(state.shape[1:3]))
    return _recurrent("kda_recurrent", qkv, b, gates, a_log.unsqueeze(1), dt_bias, state, slots)


def rule_inputs(
    qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """What `gated_delta_rule` takes: q, k [T, Hk, Dk] of length 1, queries scaled, v, g and beta, in state's dtype.

    A row's bits are its own.
    """
    _, num_heads, k_dim, v_dim = state.shape
    keys = (qkv.shape[1] - num_heads * v_dim) // 2
    q, k, v = qkv.to(state.dtype).split((keys, keys, num_heads * v_dim), 1)
    q, k = (x.reshape(x.shape[0], -1, k_dim) for x in (q, k))
    q, k = (x * x.square().sum(-1, keepdim=True).add(L2_EPS).rsqrt() for x in (q, k))
    gates = rows_apart((a.to(state.dtype) + dt_bias.to(state.dtype)).flatten(1))
    g = -a_log.to(state.dtype).exp() * F.softplus(gates).view(a.shape)
    beta = rows_apart(b.to(state.dtype)).sigmoid()
    return q * k_dim**-0.5, k, v.reshape(v.shape[0], num_heads, v_dim), g, beta


def _recurrent(
    op: str, qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor,
    state: torch.Tensor, slots: StateSlots,
) -> torch.Tensor:  # fmt: skip
    check_indices(op, low=-1, high=state.shape[0], read=slots.read, write=slots.write)
    inputs = rule_inputs(qkv, b, a, a_log, dt_bias, state)
    out = torch.zeros_like(inputs[2])
    for n, slot in enumerate(slots.read.tolist()):
        if slot < 0:
            continue
        kept = state[slot].clone()
        for row, target in enumerate(slots.write[n].tolist(), n * slots.num_queries):
            q, k, v, g, beta = (x[row : row + 1] for x in inputs)
            done, kept = gated_delta_rule(q, k, v, g, beta, kept)
            out[row] = done[0]
            if target >= 0:
                state[target] = kept
    return out.to(qkv.dtype)
