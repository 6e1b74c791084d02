"""When the choice of one row's experts is left to what computes them: only where nobody reads it before."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moeyard_kernels.types.gate import Chosen, GateRule, TokenChoice
from moeyard_worker.exchange.base import Dispatched
from moeyard_worker.exchange.local import LocalExchange
from moeyard_worker.exchange.nccl import NcclExchange
from moeyard_worker.exchange.nvlink import NvlinkExchange
from moeyard_worker.exchange.staged import StagedExchange
from moeyard_worker.exchange.zmq_exchange import ZmqExchange
from moeyard_worker.layers.moe import Moe

HIDDEN, EXPERTS = 8, 4
RULE = GateRule(top_k=2, scoring="softmax", renormalize=True)


class Gate:
    """Says what it was asked, and defers if it may."""

    asked: bool | None = None

    def norm(self, x: torch.Tensor, residual: torch.Tensor, plan: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return x, residual

    def choose(self, x: torch.Tensor, plan: Any, *, defer: bool) -> Chosen:
        self.asked = defer
        weights, ids = torch.ones(len(x), 2), torch.zeros(len(x), 2, dtype=torch.int64)
        later = TokenChoice(rule=RULE, logits=x, bias=None, weights=weights, ids=ids) if defer else None
        return Chosen(weights=weights, ids=ids, deferred=later)


class Experts:
    """Takes choices or not, and keeps what it was given."""

    given: Dispatched | None = None

    def __init__(self, *, takes_choices: bool) -> None:
        self.takes_choices = takes_choices

    def run(self, layer: int, dispatched: Dispatched) -> torch.Tensor:
        self.given = dispatched
        return dispatched.rows[:, None].expand(-1, 2, -1)


@pytest.mark.parametrize(
    ("num_rows", "stays", "takes_choices", "shared", "deferred"),
    [
        (1, True, True, False, True),
        (2, True, True, False, False),
        (1, False, True, False, False),
        (1, True, False, False, False),
        (1, True, True, True, False),
    ],
    ids=["one row", "two rows", "rows that travel", "somebody reads ids", "a shared expert beside"],
)
def test_who_chooses(num_rows: int, stays: bool, takes_choices: bool, shared: bool, deferred: bool) -> None:
    gate, experts, exchange = Gate(), Experts(takes_choices=takes_choices), LocalExchange()
    exchange.stays = stays
    backend: Any = SimpleNamespace(
        gate=lambda *_, **__: gate,
        linear=lambda x, weight: x @ weight.T,
        silu_mul=lambda x: x[:, : x.shape[1] // 2],
        beside=lambda run, _: run,
        reduce_add_norm=lambda routed, *_, **__: (routed[:, 0], routed[:, 0]),
    )
    weights: dict[str, Any] = {}
    if shared:
        weights = {"shared_gate_up": torch.ones(2 * HIDDEN, HIDDEN), "shared_down": torch.ones(HIDDEN, HIDDEN)}
    moe = Moe(
        backend, RULE, layer=0, norm=torch.ones(HIDDEN), eps=1e-6, exchange=exchange, experts=experts,
        gate=torch.ones(EXPERTS, HIDDEN), **weights,
    )  # fmt: skip
    plan: Any = SimpleNamespace(num_rows=num_rows, num_tokens=num_rows, num_prompt=0)
    x = torch.ones(num_rows, HIDDEN)
    moe.forward(x, x, torch.ones(HIDDEN), plan)
    assert gate.asked is deferred
    assert experts.given is not None
    assert (experts.given.choice is not None) == deferred
    if experts.given.choice is not None:
        assert experts.given.choice.ids is experts.given.experts, "they are written where the experts' ids are read"


def test_rows_stay_in_a_fleet_of_one_rank_only() -> None:
    kinds = (LocalExchange, ZmqExchange, StagedExchange, NvlinkExchange, NcclExchange)
    assert [kind.__name__ for kind in kinds if kind.stays] == ["LocalExchange"]
