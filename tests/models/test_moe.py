"""When the choice of one row's experts is deferred to the experts' kernel: only if no code reads it earlier."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.expert_fill import expert_fill

from moeyard_kernels.cuda.backend import CudaBackend
from moeyard_kernels.cuda.experts import CudaExpertSlots
from moeyard_kernels.types.gate import Chosen, GateRule, SharedRow, TokenChoice
from moeyard_kernels.types.matrix import Matrix
from moeyard_kernels.types.weight_form import plain_expert
from moeyard_worker.exchange.base import Dispatched, ExchangeTraits
from moeyard_worker.exchange.transports.local import LocalExchange
from moeyard_worker.exchange.transports.nccl.exchange import NcclExchange
from moeyard_worker.exchange.transports.nvlink.exchange import NvlinkExchange
from moeyard_worker.exchange.transports.zmq_exchange import ZmqExchange
from moeyard_worker.layers.moe import Moe
from moeyard_worker.layers.residual import AddNormStreams

HIDDEN, EXPERTS, WIDE_EXPERTS = 8, 4, 16
RULE = GateRule(top_k=2, scoring="softmax", renormalize=True)


class Gate:
    """A gate that records what it was asked, and defers if it may."""

    asked: bool | None = None

    def __init__(self, *, computes_shared: bool) -> None:
        self.computes_shared = computes_shared

    def choose(self, x: torch.Tensor, plan: Any, *, defer: bool) -> Chosen:
        self.asked = defer
        weights, ids = torch.ones(len(x), 2), torch.zeros(len(x), 2, dtype=torch.int64)
        shared = SharedRow(gate_up=x, down=x, out=-x) if self.computes_shared else None
        later = TokenChoice(rule=RULE, logits=x, bias=None, weights=weights, ids=ids, shared=shared) if defer else None
        return Chosen(weights=weights, ids=ids, deferred=later)


class Experts:
    """Experts that accept deferred choices or not, and record their input."""

    given: Dispatched | None = None

    all_resident = joins_shared = True

    def __init__(self, *, defers_choices: bool) -> None:
        self.defers_choices = defers_choices

    def run(self, layer: int, dispatched: Dispatched) -> torch.Tensor:
        self.given = dispatched
        return dispatched.rows[:, None].expand(-1, 2, -1)


@pytest.mark.parametrize(
    ("num_rows", "local", "defers_choices", "shared", "deferred"),
    [
        (1, True, True, None, True),
        (2, True, True, None, False),
        (1, False, True, None, False),
        (1, True, False, None, False),
        (1, True, True, "separate", False),
        (1, True, True, "fused", True),
        (2, True, True, "fused", False),
        (1, True, False, "fused", False),
    ],
    ids=[
        "one row",
        "two rows",
        "rows that travel",
        "ids are read",
        "separate shared expert",
        "fused shared expert",
        "two rows, shared expert",
        "ids are read, shared expert",
    ],
)
def test_when_a_choice_is_deferred(
    num_rows: int, local: bool, defers_choices: bool, shared: str | None, deferred: bool
) -> None:
    gate, exchange = Gate(computes_shared=shared == "fused"), LocalExchange()
    experts, exchange.traits = Experts(defers_choices=defers_choices), ExchangeTraits(local=local)
    backend: Any = SimpleNamespace(
        gate=lambda *_, **__: gate,
        linear=lambda x, weight: x @ weight.data.T,
        silu_mul=lambda x, limit: x[:, : x.shape[1] // 2],
        beside=lambda run, _: run,
    )
    weights: dict[str, Any] = {}
    if shared:
        ones = torch.ones(2 * HIDDEN, HIDDEN)
        weights = {"shared_gate_up": Matrix.plain(ones), "shared_down": Matrix.plain(ones[:HIDDEN])}
    moe = Moe(
        backend,
        RULE,
        layer=0,
        dtype=torch.float32,
        exchange=exchange,
        experts=experts,
        gate=Matrix.plain(torch.ones(EXPERTS, HIDDEN)),
        **weights,
    )
    plan: Any = SimpleNamespace(num_rows=num_rows, num_tokens=num_rows, num_prompt=0)
    parts = moe.forward(torch.ones(num_rows, HIDDEN), plan)
    assert gate.asked is deferred
    assert experts.given is not None
    assert (experts.given.deferred_choice is not None) == deferred
    # A shared result that came with a deferred choice is negative.
    sign = None if parts.shared is None else parts.shared.sign().unique().item()
    assert sign == (None if shared is None else -1 if deferred else 1)
    if experts.given.deferred_choice is not None:
        assert experts.given.deferred_choice.ids is experts.given.experts, (
            "the choice is written where the ids are read"
        )


def test_only_the_local_exchange_keeps_rows_local() -> None:
    kinds = (LocalExchange, ZmqExchange, NvlinkExchange, NcclExchange)
    assert [kind.__name__ for kind in kinds if kind.traits.local] == ["LocalExchange"]


class Slots:
    """Experts that all have slots, in order of their numbers, computed as on a GPU."""

    all_resident = joins_shared = True

    def __init__(self, slots: CudaExpertSlots, *, defers_choices: bool) -> None:
        self._slots, self.defers_choices = slots, defers_choices

    def run(self, layer: int, dispatched: Dispatched) -> torch.Tensor:
        run = self._slots.begin(dispatched, num_experts=WIDE_EXPERTS)
        run.compute(self._slots.slot_table(range(WIDE_EXPERTS)))
        return run.result()


@pytest.mark.parametrize("gated", [False, True], ids=["", "gated"])
@pytest.mark.parametrize("inner", [64, 48], ids=["fused", "separate"])
@pytest.mark.parametrize("logits", [torch.float32, torch.bfloat16], ids=str)
def test_fused_and_separate_shared_experts_agree(logits: torch.dtype, inner: int, gated: bool) -> None:
    torch.manual_seed(inner)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape).mul(shape[-1] ** -0.5).bfloat16().to(device)

    backend = CudaBackend(page_size=64, device=device)
    slots = backend.expert_slots(
        num_slots=WIDE_EXPERTS, form=plain_expert(hidden=128, intermediate=64, dtype="bfloat16")
    )
    for slot in range(WIDE_EXPERTS):
        slots.write(slot, expert_fill(normal(64, 128), normal(64, 128), normal(128, 64)))
    gate = Matrix.plain(normal(WIDE_EXPERTS, 128).to(logits))
    norm, following = (normal(128) + 1 for _ in range(2))
    sizes = {"shared_gate_up": (2 * inner, 128), "shared_down": (128, inner)}
    if gated:
        sizes["shared_gate"] = (1, 128)
    shared: Any = {name: Matrix.plain(normal(*size)) for name, size in sizes.items()}
    x, stream = normal(1, 128), normal(1, 128)
    plan: Any = SimpleNamespace(num_rows=1, num_tokens=1, num_prompt=0, entries=torch.zeros(1, dtype=torch.int64))
    plan.entries = plan.entries.to(device)
    results = []
    for defers_choices in (True, False):
        exchange: Any = LocalExchange()
        chosen_late = Slots(slots, defers_choices=defers_choices)
        moe = Moe(backend, RULE, layer=0, dtype=x.dtype, exchange=exchange, gate=gate, experts=chosen_late, **shared)
        assert moe._gate.computes_shared == (inner == 64)
        residual = AddNormStreams(backend, 1e-6).begin(stream, plan)
        rows = residual.leave(moe.forward(residual.leave(x, norm), plan), following)
        results.append((rows, residual.leave(x, norm)))
    for fused, separate in zip(*results, strict=True):
        assert torch.equal(fused, separate)
