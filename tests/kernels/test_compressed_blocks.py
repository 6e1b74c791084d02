"""DSpark's attention on a GPU's path, against the CPU's: stored keys of all kinds of rows, and blocks behind them."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from tests.kernels.compressed_cases import DEVICE, make_layer, with_own_state

from moeyard_kernels.cpu.compressed_attention import CpuBlockAttend
from moeyard_kernels.cpu.plan import CpuPlan, pad_rows
from moeyard_kernels.cuda.compressed_blocks import CudaBlockAttend
from moeyard_kernels.cuda.plan import CudaPlan
from moeyard_kernels.cuda.step_inputs import StepInputs
from moeyard_kernels.cuda.verified_rows import DraftRows, Tails, VerifiedRows
from moeyard_kernels.types.layers import CompressedLayer
from moeyard_kernels.types.step_size import StepSize
from moeyard_worker.scheduling.step import Chunk, Step

PAGE, PAGES, SIZE, NOISE = 16, 24, 5, 9
LIMIT = PAGE * PAGES
NEAR = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def layer_of(dtype: torch.dtype = torch.float32) -> CompressedLayer:
    return replace(make_layer(0, dtype=dtype), block=SIZE)


def rows_of(slot: int, start: int, count: int, *, prompt: bool = False, **options: object) -> Chunk:
    given = {"key": (b"", ""), "pages": tuple(range(slot * PAGES, (slot + 1) * PAGES)), "num_sampled": 0, **options}
    return Chunk(start=start, token_ids=(1,) * count, state_slot=slot, prompt=prompt, **given)  # type: ignore[arg-type]


def plan_of(step: Step) -> CudaPlan:
    return CudaPlan(step, page_size=PAGE, windows=(), flat=False, device=torch.device(DEVICE), compressed=True)


def blocks(*starts: tuple[int, int]) -> Step:
    """Return blocks of sequences (slot, start)."""
    return Step(decode=tuple(rows_of(slot, start, SIZE) for slot, start in starts))


def random(count: int, width: int, like: torch.Tensor) -> torch.Tensor:
    return torch.randn(count, width).to(DEVICE, like.dtype)


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether the rows are equal. A CPU's products with other numbers of rows round in another order."""
    return torch.equal(found, wanted) if DEVICE == "cuda" else relative(found, wanted) < 1e-6


# Prompts with chunks and a snapshot, recomputed output in waves beside them, and refused drafts that are overwritten.
STEPS = (
    Step(prefill=(rows_of(0, 0, 130, prompt=True, snapshots=((128, 7),)), rows_of(1, 0, 3, prompt=True))),
    Step(prefill=(rows_of(0, 130, 40, prompt=True),), decode=(rows_of(1, 3, 1), rows_of(2, 0, 40), rows_of(3, 9, 6))),
    Step(decode=(rows_of(0, 170, 6), rows_of(1, 4, 6), rows_of(2, 40, 1))),
    Step(decode=(rows_of(0, 172, 6), rows_of(1, 9, 2))),
)


@pytest.mark.skipif(DEVICE == "cuda", reason="the CPU's kernels read CPU tensors")
@DTYPES
def test_against_the_cpu(dtype: torch.dtype) -> None:
    mine = layer_of(dtype)
    other = with_own_state(mine)
    on_gpu, on_cpu = CudaBlockAttend(mine), CpuBlockAttend(other)
    # Blocks leave keys on a GPU only, so both begin with the same slots.
    for step in STEPS:
        kv, plan = random(step.num_tokens, mine.head_dim, mine.recent), CpuPlan(step, page_size=PAGE, windows=())
        on_gpu.store(kv, plan_of(step))
        on_cpu.store(pad_rows(kv, plan.num_rows), plan)
        assert relative(mine.recent, other.recent) < NEAR[dtype]
    step = blocks((0, 174), (1, 11), (2, 41), (3, 0))
    count, plan = step.num_tokens, CpuPlan(step, page_size=PAGE, windows=())
    q, kv = random(count, mine.num_heads * mine.head_dim, mine.recent), random(count, mine.head_dim, mine.recent)
    found = on_gpu.attend(q, kv, plan_of(step))
    wanted = on_cpu.attend(pad_rows(q, plan.num_rows), pad_rows(kv, plan.num_rows), plan)[:count]
    assert relative(found, wanted) < NEAR[dtype]
    # A block's keys take no row that a later block reads.
    again = on_gpu.attend(q, kv, plan_of(step))
    assert torch.equal(again, found)


@DTYPES
def test_a_row_depends_on_its_block_alone(dtype: torch.dtype) -> None:
    """Neighbours, other rows' memory limits and the rest of the slot change no bit."""
    layer = layer_of(dtype)
    step = blocks((0, 174), (1, 11), (2, 41))
    count = step.num_tokens
    q, kv = random(count, layer.num_heads * layer.head_dim, layer.recent), random(count, layer.head_dim, layer.recent)
    wanted = CudaBlockAttend(with_own_state(layer)).attend(q, kv, plan_of(step))
    turns = plan_of(step)
    turns.outputs = tuple(replace(wave, rows=replace(wave.rows, most=3000)) for wave in turns.outputs)
    assert same(CudaBlockAttend(with_own_state(layer)).attend(q, kv, turns), wanted)
    for b, chunk in enumerate(step.decode):
        own, rows = with_own_state(layer), slice(b * SIZE, (b + 1) * SIZE)
        ring = own.recent.shape[1]
        seen = [position % ring for position in range(max(0, chunk.start - own.window), chunk.start)]
        hidden = torch.ones(ring, dtype=torch.bool)
        hidden[seen] = False
        own.recent[:, hidden.to(DEVICE)] = 1e4
        alone = CudaBlockAttend(own).attend(q[rows], kv[rows], plan_of(Step(decode=(chunk,))))
        assert same(alone, wanted[rows])


def captured(count: int) -> tuple[StepInputs, VerifiedRows, Tails]:
    tails = Tails(max_sequences=4, num_drafts=SIZE, limit=LIMIT, device=torch.device(DEVICE))
    size = StepSize(sequences=count, queries=1 + SIZE, width=PAGES)
    last = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    inputs = StepInputs(size, page_size=PAGE, windows=(), last_ids=last, compressed=True, tails=tails)
    assert inputs.verified is not None
    return inputs, inputs.verified, tails


def block_rows(verified: VerifiedRows, ends: Sequence[int]) -> tuple[DraftRows, list[bool]]:
    rows, fits = verified.block_rows(torch.tensor(ends, device=DEVICE), size=SIZE, noise_token=NOISE)
    return rows, fits.tolist()


def test_blocks_of_a_captured_step() -> None:
    """Room for four sequences, three with blocks. The last of these would end behind the last position."""
    inputs, verified, tails = captured(4)
    inputs.fill(Step(decode=(rows_of(3, 170, 6), rows_of(1, 0, 1), rows_of(2, LIMIT - 8, 6))))
    inputs.begin()
    tails.state[:, 1] = torch.tensor([6, 7, 8, 6], device=DEVICE)
    rows, fits = block_rows(verified, [173, 1, LIMIT - SIZE + 1, 173])
    assert fits == [True, True, False, True]
    starts = [173, 1, LIMIT - SIZE, 173]
    assert rows.positions.tolist() == [start + row for start in starts for row in range(SIZE)]
    assert rows.token_ids.tolist() == [t for first in (6, 7, 8, 6) for t in (first, *[NOISE] * (SIZE - 1))]
    assert rows.entries.tolist() == [entry for entry in (0, 0, -1, -1) for _ in range(SIZE)]
    layer = layer_of()
    other = with_own_state(layer)
    count, dims = rows.num_rows, (layer.num_heads * layer.head_dim, layer.head_dim)
    q, kv = (random(count, dim, layer.recent) for dim in dims)
    q[15:], kv[15:] = q[:SIZE], kv[:SIZE]
    found = CudaBlockAttend(layer).attend(q, kv, rows)  # type: ignore[arg-type]
    wanted = CudaBlockAttend(other).attend(q[:10], kv[:10], plan_of(blocks((3, 173), (1, 1))))
    assert same(found[:10], wanted)
    assert same(found[15:], found[:SIZE])
    assert torch.equal(layer.recent, other.recent), "only blocks that fit store keys"


def test_verified_rows_store_their_keys() -> None:
    """Copies of rows and of sequences store nothing, and neither does a step without rows, as at the capture."""
    layer = layer_of()
    other = with_own_state(layer)
    inputs, _, _ = captured(3)
    inputs.begin()
    CudaBlockAttend(layer).store(random(18, layer.head_dim, layer.recent), inputs)  # type: ignore[arg-type]
    assert torch.equal(layer.recent, other.recent)
    step = Step(decode=(rows_of(4, 126, 6), rows_of(8, 81, 3)))
    inputs.fill(step)
    inputs.begin()
    kv = random(18, layer.head_dim, layer.recent)
    CudaBlockAttend(layer).store(kv, inputs)  # type: ignore[arg-type]
    CudaBlockAttend(other).store(kv[:9], plan_of(step))
    assert torch.equal(layer.recent, other.recent)
