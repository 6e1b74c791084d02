"""Prompt rows of compressed attention on a GPU's path, against the CPU's: results and the state they leave."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_cases.compressed_prompts import state_of
from tests.kernels.compressed_cases import (
    DEVICE,
    DTYPES,
    PAGE,
    Rows,
    chunk,
    joined,
    make_layer,
    make_rows,
    with_own_state,
)

from moeyard_kernels.cpu import compressed_attention as on_cpu
from moeyard_kernels.cpu.plan import CpuPlan
from moeyard_kernels.cuda.compressed_prompts import CompressedPrompts
from moeyard_kernels.cuda.plan import CudaPlan
from moeyard_kernels.types.layers import CompressedLayer
from moeyard_worker.scheduling.step import Chunk, Step

# Launches read the interpreter's tensors, so this file runs the references without a GPU, and the kernels with one.
NEAR = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def run(layer: CompressedLayer, rows: Rows, chunks: list[Chunk]) -> torch.Tensor:
    plan = CudaPlan(
        Step(prefill=tuple(chunks)),
        page_size=PAGE,
        windows=(),
        flat=False,
        device=torch.device(DEVICE),
        compressed=True,
    )
    return CompressedPrompts(layer).attend(*rows.parts(), plan)  # type: ignore[arg-type]


def run_on_cpu(layer: CompressedLayer, rows: Rows, chunks: list[Chunk]) -> torch.Tensor:
    cpu, plan = on_cpu.CpuCompressed(layer), CpuPlan(Step(prefill=tuple(chunks)), page_size=PAGE, windows=())
    inputs = on_cpu._Rows(*rows.parts())  # type: ignore[arg-type]
    return torch.cat([cpu._prompt(inputs, part, plan) for part in plan.segments])


# Chunks of one step: blank, behind the sequence's own slot, behind a snapshot that the step overwrites.
STEP = [
    chunk(0, 150, slot=0, snapshots=[(128, 6)]),
    chunk(128, 9, slot=1, first_page=10),
    chunk(256, 131, slot=2, first_page=20, restored=7, snapshots=[(384, 7), (387, 8)]),
    chunk(0, 2, slot=3, first_page=40),
    chunk(128, 1, slot=4, first_page=50, restored=9),
]


@pytest.mark.skipif(DEVICE == "cuda", reason="the CPU's kernels read CPU tensors")
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_step_gives_the_cpus_result_and_state(ratio: int, dtype: torch.dtype) -> None:
    layer = make_layer(ratio, dtype=dtype, index_heads=16)
    other, rows = with_own_state(layer), make_rows(layer, sum(each.num_tokens for each in STEP))
    wanted = run_on_cpu(other, rows, STEP)
    torch.testing.assert_close(run(layer, rows, STEP), wanted, rtol=NEAR[dtype], atol=NEAR[dtype])
    for got, expected in zip(state_of(layer), state_of(other), strict=True):
        if got.dim() == 3:
            assert torch.equal(got, expected)
        else:
            torch.testing.assert_close(got, expected, rtol=NEAR[dtype], atol=NEAR[dtype])


@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_chunks_continue_each_other(ratio: int) -> None:
    """A prompt in one chunk, in two, and behind a snapshot with a neighbour: equal results and state."""
    layer = make_layer(ratio, dtype=torch.float32, index_heads=16, device=DEVICE)
    rows, other = make_rows(layer, 270), make_rows(layer, 3)
    first, second = with_own_state(layer), with_own_state(layer)
    whole = run(layer, rows, [chunk(0, 270, slot=0)])

    def part(start: int, length: int, **options: Any) -> Chunk:
        """Return a chunk over the pages of the whole prompt."""
        return replace(chunk(start, length, slot=0, **options), pages=chunk(0, 270, slot=0).pages)

    cut = [run(first, rows.at(0, 128), [part(0, 128)]), run(first, rows.at(128, 270), [part(128, 142)])]
    torch.testing.assert_close(torch.cat(cut), whole, rtol=1e-6, atol=1e-6)
    run(second, rows.at(0, 270), [part(0, 270, snapshots=[(256, 5)])])
    second.recent[0] = float("nan")
    both = joined([other, rows], [(0, 3), (256, 270)])
    again = run(second, both, [chunk(0, 3, slot=1, first_page=30), part(256, 14, restored=5)])
    torch.testing.assert_close(again[3:], whole[256:], rtol=1e-6, atol=1e-6)
    for got, cut_state, expected in zip(state_of(second), state_of(first), state_of(layer), strict=True):
        where = 0 if got.dim() == 3 else slice(0, 9 * PAGE // (4 if ratio == 4 else 16))
        assert torch.equal(got[where], expected[where])
        assert torch.equal(cut_state[where], expected[where])
