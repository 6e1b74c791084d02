"""Compressed attention of output positions on a GPU's path, against the CPU's, in every kind of plan."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from kernel_cases.compressed_prompts import state_of
from tests.kernels.compressed_cases import DEVICE, make_layer, with_own_state

from moeyard_kernels.cpu.compressed_attention import CpuCompressed
from moeyard_kernels.cpu.plan import CpuPlan, pad_rows
from moeyard_kernels.cuda.compressed import CudaCompressed
from moeyard_kernels.cuda.plan import CudaPlan
from moeyard_kernels.cuda.step_inputs import StepInputs
from moeyard_kernels.cuda.verified_rows import Tails
from moeyard_kernels.types.layers import CompressedLayer
from moeyard_kernels.types.step_size import StepSize
from moeyard_worker.scheduling.step import Chunk, Step

PAGE, PAGES, SLOTS, HIDDEN = 16, 20, 5, 48
BY_RATIO = pytest.mark.parametrize("ratio", [0, 4, 128])
NEAR = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


def layer_of(ratio: int, dtype: torch.dtype) -> CompressedLayer:
    """Return a layer whose random state may be that of a sequence at any position."""
    return make_layer(ratio, dtype=dtype, window=64, index_heads=16, top_k=20, hidden=HIDDEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The inputs of a layer at every position of every sequence, [SLOTS, positions, ...]."""

    parts: list[torch.Tensor]

    def at(self, chunks: Sequence[Chunk], num_rows: int | None = None) -> list[torch.Tensor]:
        """Return the rows of a step; padding rows are copies of its first row, as in captured steps."""
        found = [torch.cat([x[c.state_slot, c.start : c.start + c.num_tokens] for c in chunks]) for x in self.parts]
        if num_rows is None:
            return found
        return [torch.cat((x, x[:1].expand(num_rows - len(x), -1))) for x in found]


def make_rows(layer: CompressedLayer) -> Rows:
    def random(width: int) -> torch.Tensor:
        return torch.randn(SLOTS, PAGES * PAGE, width).to(DEVICE, layer.recent.dtype)

    width = layer.num_heads * layer.head_dim
    if layer.indexer is not None:
        width += layer.indexer.num_heads * layer.indexer.pooling.norm.shape[0]
    return Rows(parts=[random(HIDDEN), random(width), random(layer.head_dim)])


def chunk(slot: int, start: int, count: int = 1) -> Chunk:
    """Return output rows of a sequence, whose pages are in a mixed order."""
    pages = tuple(slot * PAGES + (7 * page) % PAGES for page in range(PAGES))
    return Chunk(
        key=(b"", ""),
        start=start,
        token_ids=(1,) * count,
        pages=pages,
        state_slot=slot,
        prompt=False,
        num_sampled=count,
    )


def plan_of(*chunks: Chunk) -> CudaPlan:
    return CudaPlan(
        Step(decode=chunks), page_size=PAGE, windows=(), flat=False, device=torch.device(DEVICE), compressed=True
    )


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether the rows are equal. A CPU's products with other numbers of rows round in another order."""
    return torch.equal(found, wanted) if DEVICE == "cuda" else relative(found, wanted) < 1e-6


def check_state(found: CompressedLayer, wanted: CompressedLayer, near: float) -> None:
    for got, expected in zip(state_of(found), state_of(wanted), strict=True):
        assert relative(got, expected) < near


@pytest.mark.skipif(DEVICE == "cuda", reason="the CPU's kernels read CPU tensors")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@BY_RATIO
def test_against_the_cpu(ratio: int, dtype: torch.dtype) -> None:
    """Steps over every kind of border: blocks of 4, 64 and 128, and the first position with a choice (80)."""
    mine = layer_of(ratio, dtype)
    other, rows = with_own_state(mine), make_rows(mine)
    on_gpu, on_cpu = CudaCompressed(mine), CpuCompressed(other)
    for shift in range(9):
        chunks = tuple(chunk(slot, start + shift) for slot, start in enumerate((0, 60, 76, 123, 250)))
        found = on_gpu.attend(*rows.at(chunks), plan_of(*chunks))
        plan = CpuPlan(Step(decode=chunks), page_size=PAGE, windows=())
        wanted = on_cpu.attend(*(pad_rows(x, plan.num_rows) for x in rows.at(chunks)), plan)
        assert relative(found, wanted[: len(chunks)]) < NEAR[dtype], shift
        check_state(mine, other, NEAR[dtype])


@BY_RATIO
def test_rows_of_a_sequence_together(ratio: int) -> None:
    """Recomputed output runs in waves, and leaves what steps of one row leave."""
    alone = layer_of(ratio, torch.float32)
    together, rows = with_own_state(alone), make_rows(alone)
    chunks = (chunk(0, 118, 40), chunk(1, 0, 3), chunk(2, 77, 17))
    found = CudaCompressed(together).attend(*rows.at(chunks), plan_of(*chunks))
    layer, first = CudaCompressed(alone), 0
    for each in chunks:
        for row in range(each.num_tokens):
            one = chunk(each.state_slot, each.start + row)
            wanted = layer.attend(*rows.at([one]), plan_of(one))
            assert relative(found[first : first + 1], wanted) < 1e-6, (each.start, row)
            first += 1
    check_state(together, alone, 1e-6)


def replay(layer: CudaCompressed, inputs: StepInputs, rows: Rows, step: Step, num_rows: int) -> torch.Tensor:
    inputs.fill(step)
    inputs.begin()
    return layer.attend(*rows.at(step.decode, num_rows), inputs)  # type: ignore[arg-type]


def inputs_of(size: StepSize, tails: Tails | None = None) -> StepInputs:
    last_ids = torch.zeros(16, dtype=torch.int64, device=DEVICE)
    return StepInputs(size, page_size=PAGE, windows=(), last_ids=last_ids, compressed=True, tails=tails)


@BY_RATIO
def test_captured_rows(ratio: int) -> None:
    """Padding rows store nothing, and neither does a step without rows, as at the capture."""
    mine = layer_of(ratio, torch.float32)
    other, rows = with_own_state(mine), make_rows(mine)
    layer, inputs = CudaCompressed(mine), inputs_of(StepSize(sequences=5, width=PAGES))
    inputs.begin()
    assert bool(layer.attend(*(x[0, :5] for x in rows.parts), inputs).isfinite().all())  # type: ignore[arg-type]
    check_state(mine, other, 1e-6)
    for chunks in ((chunk(3, 131), chunk(1, 87)), (chunk(1, 88), chunk(3, 132), chunk(0, 3))):
        found = replay(layer, inputs, rows, Step(decode=chunks), 5)
        wanted = CudaCompressed(other).attend(*rows.at(chunks), plan_of(*chunks))
        assert same(found[: len(chunks)], wanted)
        assert same(found[len(chunks) :], wanted[:1].expand(5 - len(chunks), -1))
        check_state(mine, other, 1e-6)


@BY_RATIO
def test_verified_and_drafted_rows(ratio: int) -> None:
    """Room for three sequences of four rows. The second has three and the third none. A draft's rows follow."""
    mine = layer_of(ratio, torch.float32)
    other, rows = with_own_state(mine), make_rows(mine)
    tails = Tails(max_sequences=3, num_drafts=3, limit=PAGES * PAGE, device=torch.device(DEVICE))
    layer, inputs = CudaCompressed(mine), inputs_of(StepSize(sequences=3, queries=4, width=PAGES), tails)
    chunks = (chunk(2, 126, 4), chunk(4, 81, 3))
    inputs.fill(Step(decode=chunks))
    inputs.begin()
    copies = [0, 1, 2, 3, 4, 5, 6, 6, 0, 1, 2, 3]
    found = layer.attend(*(x[copies] for x in rows.at(chunks)), inputs)  # type: ignore[arg-type]
    wanted = CudaCompressed(other).attend(*rows.at(chunks), plan_of(*chunks))
    assert same(found, wanted[copies])
    check_state(mine, other, 1e-6)
    assert inputs.verified is not None
    ends = [chunk(2, 130), chunk(4, 84)]
    drafts = inputs.verified.draft_rows(torch.tensor([130, 84, 130], device=DEVICE))
    found = layer.attend(*(x[[0, 1, 0]] for x in rows.at(ends)), drafts)  # type: ignore[arg-type]
    assert same(found[:2], CudaCompressed(other).attend(*rows.at(ends), plan_of(*ends)))
    assert same(found[2], found[0])
    check_state(mine, other, 1e-6)


def test_turns_have_the_same_bits() -> None:
    """Rows whose partial results exceed the memory for them run in turns."""
    mine = layer_of(4, torch.bfloat16)
    other, rows = with_own_state(mine), make_rows(mine)
    chunks = tuple(chunk(slot, 100 + slot) for slot in range(SLOTS))
    wanted = CudaCompressed(mine).attend(*rows.at(chunks), plan_of(*chunks))
    plan: Any = plan_of(*chunks)
    plan.outputs = tuple(replace(wave, rows=replace(wave.rows, most=5000)) for wave in plan.outputs)
    found = CudaCompressed(other).attend(*rows.at(chunks), plan)
    assert relative(found, wanted) < NEAR[torch.bfloat16] if DEVICE == "cpu" else torch.equal(found, wanted)
