"""State that prompt chunks leave in slots: reference and Triton kernel."""

from collections.abc import Sequence

import pytest
import torch
from tests.kernels.compressed_cases import DEVICE, DTYPES, chunk, tables_of

from moeyard_kernels import ops
from moeyard_kernels.attention import keep_last as triton_kernel
from moeyard_worker.scheduling.step import Chunk

SIZE, WIDTH = 7, 5


def run_kernel(rows: torch.Tensor, slots: torch.Tensor, *more: torch.Tensor, chunks: Sequence[Chunk]) -> None:
    triton_kernel.keep_last(rows, slots, *more, tables=tables_of(*chunks))


def run_op(rows: torch.Tensor, slots: torch.Tensor, *more: torch.Tensor, chunks: Sequence[Chunk]) -> None:
    """Run the op, which is the reference without a GPU."""
    ops.keep_last(rows, slots, *more, tables=tables_of(*chunks))


def kept(slots: torch.Tensor, rows: torch.Tensor, start: int, end: int, before: int) -> torch.Tensor:
    """Return a slot after positions [start, end), one row after the other."""
    state = torch.zeros_like(slots[0]) if before < 0 else slots[before].clone()
    for position in range(start, end):
        state[position % SIZE] = rows[position - start, : slots.shape[2]]
    return state


@pytest.mark.parametrize("run", [run_op, run_kernel], ids=["op", "kernel"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_slots_hold_the_last_rows(run, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    """Short and long chunks, blank, own and restored states, snapshots that overwrite restored slots."""
    chunks = (
        chunk(0, 3, slot=0),
        chunk(128, 2, slot=1, snapshots=[(129, 7)]),
        chunk(128, 3, slot=2, restored=8, snapshots=[(130, 9), (131, 8)]),
        chunk(256, 20, slot=3, restored=9, snapshots=[(260, 5), (270, 6)]),
        chunk(0, 19, slot=4, snapshots=[(5, 10)]),
    )
    before = torch.randn(12, SIZE, WIDTH).to(dtype).to(DEVICE), torch.randn(12, SIZE, 3, device=DEVICE)
    rows = torch.randn(47, WIDTH).to(dtype).to(DEVICE), torch.randn(47, 6, device=DEVICE)
    before[0][8, 0, 0], rows[0][0, 1] = float("nan"), float("inf")
    after = [x.clone() for x in before]
    run(rows[0], after[0], rows[1], after[1], chunks=chunks)
    for x, old, got in zip(rows, before, after, strict=True):
        expected, first = old.clone(), 0
        for each in chunks:
            count, source = each.num_tokens, each.restored if each.restored >= 0 else each.state_slot
            some = x[first : first + count]
            for end, slot in (*each.snapshots, (each.end, each.state_slot)):
                expected[slot] = kept(old, some, each.start, end, source if each.start else -1)
            first += count
        assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("run", [run_op, run_kernel], ids=["op", "kernel"])
def test_several_blocks_of_columns(run) -> None:  # type: ignore[no-untyped-def]
    keys, recent = torch.randn(6, 8, device=DEVICE), torch.randn(3, 4, 8, device=DEVICE)
    slots, rows = torch.randn(3, 4, 1100, device=DEVICE), torch.randn(6, 1500, device=DEVICE)
    run(keys, recent, rows, slots, chunks=[chunk(0, 6, slot=1)])
    assert torch.equal(recent[1], keys[[4, 5, 2, 3]])
    assert torch.equal(slots[1], rows[[4, 5, 2, 3], :1100])


@pytest.mark.parametrize("run", [run_op, run_kernel], ids=["op", "kernel"])
def test_keys_alone(run) -> None:  # type: ignore[no-untyped-def]
    keys, recent = torch.randn(6, 5, device=DEVICE), torch.randn(3, 4, 5, device=DEVICE)
    run(keys, recent, chunks=[chunk(0, 6, slot=1)])
    assert torch.equal(recent[1], keys[[4, 5, 2, 3]])


def test_bad_arguments_are_named() -> None:
    recent, keys, pending, rows = torch.zeros(3, 4, 5), torch.zeros(6, 5), torch.zeros(3, 9, 7), torch.zeros(6, 8)
    for message, arguments, slot in (
        (r"tables.rows int32 \[6, 2\], expected int32 \[5, 2\]", (keys[:5], recent), 0),
        (r"recent bfloat16 \[3, 4, 5\], expected float32", (keys, recent.bfloat16()), 0),
        (r"W 7 of pending .* C 6 of compressed .*, expected W <= C", (keys, recent, rows[:, :6], pending), 0),
        (r"pending float32 \[2, 9, 7\], expected float32 \[3, _, W\]", (keys, recent, rows, pending[:2]), 0),
        (r"compressed .* expected \(compressed is None\) == \(pending is None\)", (keys, recent, rows), 0),
        (r"moves int32 \[1\] holds 3 to 3, outside 0 to 2", (keys, recent), 3),
    ):
        with pytest.raises(ValueError, match="keep_last: " + message):
            ops.keep_last(*arguments, tables=tables_of(chunk(0, 6, slot=slot), device="cpu"))
