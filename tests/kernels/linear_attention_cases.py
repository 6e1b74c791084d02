"""Inputs for tests of linear attention: rows of a step, state slots, and the rule in float64."""

from dataclasses import dataclass

import torch

from moeyard_kernels.ops.linear_attention import gated_delta_rule
from moeyard_kernels.types.state_slots import StateSlots

# Key heads, value heads, Dk, Dv.
Heads = tuple[int, int, int, int]
NUM_SLOTS = 9


@dataclass(frozen=True, slots=True)
class Rows:
    """The arguments of `gdn_recurrent` and `kda_recurrent` in order. The state has `NUM_SLOTS` slots."""

    qkv: torch.Tensor
    b: torch.Tensor
    a: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    state: torch.Tensor

    def at(self, rows: slice) -> "Rows":
        """Return some of the rows with a copy of the state."""
        return Rows(self.qkv[rows], self.b[rows], self.a[rows], self.a_log, self.dt_bias, self.state.clone())

    def to(self, device: str) -> "Rows":
        return Rows(*(getattr(self, name).to(device) for name in self.__slots__))

    @property
    def args(self) -> tuple[torch.Tensor, ...]:
        return tuple(getattr(self, name) for name in self.__slots__)


def make_rows(count: int, heads: Heads, *, by_row: bool, dtype: torch.dtype = torch.float32) -> Rows:
    """Return rows that are slices of wider rows, as from one product. Some heads forget at once, some hardly."""
    num_k, num_v, k_dim, v_dim = heads
    width, rates = 2 * num_k * k_dim + num_v * v_dim, num_v * (k_dim if by_row else 1)
    wide = torch.randn(count, width + num_v + rates + 3).to(dtype)
    qkv, b, a, _ = wide.split((width, num_v, rates, 3), 1)
    return Rows(
        qkv,
        b,
        a,
        torch.linspace(-6, 2, num_v),
        torch.randn(num_v, k_dim) if by_row else torch.randn(num_v),
        torch.randn(NUM_SLOTS, num_v, k_dim, v_dim),
    )


def exact_rule(rows: Rows, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out [T, Hv, Dv] and the new state of the rule in float64, over rows from a state [Hv, Dk, Dv]."""
    _, num_v, k_dim, v_dim = rows.state.shape
    keys = (rows.qkv.shape[1] - num_v * v_dim) // 2
    q, k, v = rows.qkv.double().split((keys, keys, num_v * v_dim), 1)
    q, k = (x.unflatten(1, (-1, k_dim)) for x in (q, k))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    a, rate = rows.a.double(), rows.a_log.double().exp()
    if rows.dt_bias.dim() == 2:
        a, rate = a.unflatten(1, (num_v, k_dim)), rate.unsqueeze(1)
    g = -rate * (a + rows.dt_bias).exp().log1p()
    beta = 1 / (1 + (-rows.b.double()).exp())
    return gated_delta_rule(q * k_dim**-0.5, k, v.unflatten(1, (num_v, v_dim)), g, beta, state.double())


def relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the norm of the difference, relative to the norm of `wanted`."""
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


def slots_of(read: list[int], write: list[list[int]], device: str = "cpu") -> StateSlots:
    return StateSlots(read=torch.tensor(read, device=device), write=torch.tensor(write, device=device))
