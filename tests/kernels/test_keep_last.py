"""State that prompt chunks leave in slots: reference and Triton kernel."""

import pytest
import torch
from tests.kernels.compressed_cases import DEVICE, DTYPES, chunk, tables_of

from moeyard_kernels import ops
from moeyard_kernels.attention import keep_last as triton_kernel

SIZE, WIDTH = 7, 5


def run_kernel(rows: torch.Tensor, slots: torch.Tensor, *chunks: object) -> None:
    triton_kernel.keep_last(rows, slots, tables=tables_of(*chunks))  # type: ignore[arg-type]


def run_op(rows: torch.Tensor, slots: torch.Tensor, *chunks: object) -> None:
    """Run the op, which is the reference without a GPU."""
    ops.keep_last(rows, slots, tables=tables_of(*chunks))  # type: ignore[arg-type]


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
    before = torch.randn(12, SIZE, WIDTH).to(dtype).to(DEVICE)
    rows = torch.randn(47, WIDTH + 2).to(dtype).to(DEVICE)
    before[8, 0, 0], rows[0, 1] = float("nan"), float("inf")
    expected, after, first = before.clone(), before.clone(), 0
    for each in chunks:
        count, source = len(each.token_ids), each.restored if each.restored >= 0 else each.state_slot
        some = rows[first : first + count]
        for end, slot in (*each.snapshots, (each.start + count, each.state_slot)):
            expected[slot] = kept(before, some, each.start, end, source if each.start else -1)
        first += count
    run(rows, after, *chunks)
    assert torch.equal(after.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("run", [run_op, run_kernel], ids=["op", "kernel"])
def test_several_blocks_of_columns(run) -> None:  # type: ignore[no-untyped-def]
    slots, rows = torch.randn(3, 4, 1100, device=DEVICE), torch.randn(6, 1500, device=DEVICE)
    run(rows, slots, chunk(0, 6, slot=1))
    assert torch.equal(slots[1], rows[[4, 5, 2, 3], :1100])


def test_bad_arguments_are_named() -> None:
    slots, rows = torch.zeros(3, 4, 5), torch.zeros(6, 5)
    for message, arguments, slot in (
        (r"tables.rows int32 \[6, 2\], expected int32 \[5, 2\]", (rows[:5], slots), 0),
        (r"slots bfloat16 \[3, 4, 5\], expected float32", (rows, slots.bfloat16()), 0),
        (r"W 5 of slots .* C 4 of rows .*, expected W <= C", (rows[:, :4], slots), 0),
        (r"moves int32 \[1\] holds 3 to 3, outside 0 to 2", (rows, slots), 3),
    ):
        with pytest.raises(ValueError, match="keep_last: " + message):
            ops.keep_last(*arguments, tables=tables_of(chunk(0, 6, slot=slot), device="cpu"))
