"""Blocks of DeepSeek-V4 without attention: hyper-connections around experts, on the GPU's backend and on the CPU's.

On a machine without a GPU, ops of the GPU's backend run their references.
"""

from itertools import pairwise
from typing import Any

import pytest
import torch
from tests.expert_fill import expert_fill

from moeyard_kernels.cpu.backend import CpuBackend
from moeyard_kernels.cuda.backend import CudaBackend
from moeyard_kernels.types.gate import GateRule
from moeyard_kernels.types.matrix import Matrix
from moeyard_kernels.types.weight_form import ExpertForm, plain_form
from moeyard_worker.exchange.transports.local import LocalExchange
from moeyard_worker.layers.moe import Moe
from moeyard_worker.layers.residual import HyperConfig, HyperStreams
from moeyard_worker.scheduling.step import Chunk, Step

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCABULARY, HIDDEN, INNER, EXPERTS, TOP_K, STREAMS, BLOCKS = 50, 128, 64, 16, 3, 4, 4
LIMIT = 0.6
CONFIG = HyperConfig(streams=STREAMS, eps=1e-6, iterations=20)
RULE = GateRule(top_k=TOP_K, scoring="sqrtsoftplus", renormalize=True, scaling=1.5)


class Resident:
    """Experts that all have slots, in the order of their numbers."""

    all_resident, defers_choices, joins_shared = True, True, True

    def __init__(self, slots: Any) -> None:
        self._slots, self._table = slots, slots.slot_table(range(EXPERTS))

    def run(self, layer: int, dispatched: Any) -> torch.Tensor:
        run = self._slots.begin(dispatched, num_experts=EXPERTS)
        run.compute(self._table)
        found: torch.Tensor = run.result()
        return found


class Weights:
    """Random weights of a chain of blocks. They are drawn in the same order for each backend."""

    def __init__(self, backend: Any, dtype: torch.dtype) -> None:
        self._backend, self._dtype = backend, dtype
        self._generator = torch.Generator().manual_seed(3)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        drawn = torch.randn(shape, generator=self._generator).mul(shape[-1] ** -0.5)
        return drawn.to(self._dtype).to(dtype or self._dtype).to(self._backend.device)

    def matrix(self, *shape: int, dtype: torch.dtype | None = None) -> Matrix:
        found: Matrix = self._backend.matrix(Matrix.plain(self.normal(*shape, dtype=dtype)))
        return found

    def site(self, num_sums: int) -> dict[str, Any]:
        fp32 = torch.float32
        return {
            "connections": self.matrix(num_sums, STREAMS * HIDDEN, dtype=fp32),
            "base": self.normal(num_sums, dtype=fp32) * 2,
            "scale": self.normal(1 if num_sums == STREAMS else 3, dtype=fp32) + 1,
            "norm": self.normal(HIDDEN) + 1,
        }

    def block(self, layer: int, *, by_token: bool) -> Moe:
        name = str(self._dtype).removeprefix("torch.")
        form = ExpertForm(
            hidden=HIDDEN, intermediate=INNER, gate_up=plain_form(name), down=plain_form(name), limit=LIMIT
        )
        slots = self._backend.expert_slots(num_slots=EXPERTS, form=form)
        for slot in range(EXPERTS):
            up = (self.normal(INNER, HIDDEN), self.normal(INNER, HIDDEN))
            slots.write(slot, expert_fill(*up, self.normal(HIDDEN, INNER)))
        ids = torch.rand(VOCABULARY, EXPERTS, generator=self._generator).argsort(1)[:, :TOP_K]
        chooses: dict[str, Any] = {"gate_bias": self.normal(EXPERTS, dtype=torch.float32)}
        if by_token:
            chooses = {"gate_table": ids.int().contiguous().to(self._backend.device)}
        return Moe(
            self._backend,
            RULE,
            layer=layer,
            dtype=self._dtype,
            exchange=LocalExchange(),
            experts=Resident(slots),
            limit=LIMIT,
            gate=Matrix.plain(self.normal(EXPERTS, HIDDEN, dtype=torch.float32)),
            shared_gate_up=self.matrix(2 * INNER, HIDDEN),
            shared_down=self.matrix(HIDDEN, INNER),
            **chooses,
        )


class Chain:
    """An embedding, blocks of experts between sites, and the way to the head. The first block chooses by token."""

    def __init__(self, backend: Any, dtype: torch.dtype) -> None:
        weights = Weights(backend, dtype)
        self._streams = HyperStreams(backend, CONFIG, 1e-6)
        self._embed = weights.normal(VOCABULARY, HIDDEN)
        self._sites = [self._streams.site(weights.site(STREAMS * (STREAMS + 2))) for _ in range(BLOCKS)]
        self._last, self._head = self._streams.last(weights.site(STREAMS))
        self._blocks = [weights.block(i, by_token=i == 0) for i in range(BLOCKS)]

    def run(self, plan: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the streams [T, S H] behind the last block, and the rows [T, H] that the head reads."""
        residual = self._streams.begin(self._embed[plan.token_ids], plan)
        rows = residual.enter(self._sites[0])
        for block, (_, following) in zip(self._blocks, pairwise([*self._sites, self._last]), strict=True):
            rows = residual.leave(block.forward(rows, plan), following)
        return rows[: plan.num_tokens], self._head(rows)[: plan.num_tokens]


def hidden_states(backend: Any, dtype: torch.dtype, step: Step) -> list[torch.Tensor]:
    """Return the results of a chain on the CPU."""
    return [x.cpu() for x in Chain(backend, dtype).run(backend.plan(step))]


def step_of(*prompts: int, decode: int = 0) -> Step:
    """Return a step of prompts of these lengths and of some decode rows, with tokens that differ."""

    def chunk(which: int, length: int, *, prompt: bool) -> Chunk:
        tokens = tuple((7 * which + 3 * i) % VOCABULARY for i in range(length))
        return Chunk(key=(b"", ""), start=0, token_ids=tokens, pages=(which,), prompt=prompt, num_sampled=1)

    return Step(
        prefill=tuple(chunk(i, length, prompt=True) for i, length in enumerate(prompts)),
        decode=tuple(chunk(10 + i, 1, prompt=False) for i in range(decode)),
    )


def backends() -> tuple[Any, Any]:
    return CudaBackend(page_size=64, device=DEVICE), CpuBackend(page_size=64)


@pytest.mark.parametrize("step", [step_of(decode=1), step_of(decode=5), step_of(9, 4, decode=2)], ids=["1", "5", "15"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=["fp32", "bf16"])
def test_backends_agree(dtype: torch.dtype, bound: float, step: Step) -> None:
    found, wanted = (hidden_states(backend, dtype, step) for backend in backends())
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype == theirs.dtype == dtype
        assert float((ours.double() - theirs.double()).norm() / theirs.double().norm()) < bound


def test_a_step_without_rows() -> None:
    backend = backends()[0]
    streams, head = hidden_states(backend, torch.bfloat16, step_of())
    assert streams.shape == (0, STREAMS * HIDDEN)
    assert head.shape == (0, HIDDEN)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 5])
def test_a_graph_looks_up_new_tokens(rows: int) -> None:
    backend = backends()[0]
    chain, plan = Chain(backend, torch.bfloat16), backend.plan(step_of(decode=rows))
    chain.run(plan)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain.run(plan)
    for first in (0, 11, 23):
        plan.token_ids.copy_(torch.arange(first, first + rows))
        graph.replay()
        for ours, theirs in zip(captured, chain.run(plan), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.gpu
def test_a_row_has_one_answer() -> None:
    """The rows of a prompt, of decode steps and of one step with both."""
    backend = backends()[0]
    chain = Chain(backend, torch.bfloat16)
    whole = chain.run(backend.plan(step_of(9, 4, decode=2)))
    for part, step in ((slice(9), step_of(9)), (slice(13, 15), step_of(decode=2)), (slice(13, 14), step_of(decode=1))):
        for ours, theirs in zip(chain.run(backend.plan(step)), whole, strict=True):
            assert torch.equal(ours, theirs[part])


def test_choices_by_token_are_counted() -> None:
    backend = backends()[0]
    hidden_states(backend, torch.float32, step_of(6, decode=2))
    # On a GPU, the first call begins a copy to the host.
    while (counts := backend.choices.read()) is None:
        pass
    assert [sum(layer) for layer in counts] == [8 * TOP_K] * BLOCKS
