"""Copies of a layer's state between slots: reference and Triton kernel."""

import pytest
import torch

from moeyard_kernels import ops
from moeyard_kernels.linear_attention import restore_slots as triton_kernel
from moeyard_kernels.linear_attention.restore_slots import RestoreConfig
from moeyard_kernels.types.state_slots import SlotMoves

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_SLOTS = 9
# Few programs, and blocks that no array fills.
WHOLE = RestoreConfig(BYTES=4096)


def make_slots(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return state and window with infinities and NaNs, which are copied like any value."""
    state, window = torch.randn(NUM_SLOTS, 3, 18, 10), torch.randn(NUM_SLOTS, 3, 86).to(dtype)
    state[:, 0, 0, :3] = torch.tensor([float("inf"), float("nan"), -0.0])
    return state.to(DEVICE), window.to(DEVICE)


def run_kernel(state: torch.Tensor, window: torch.Tensor, moves: SlotMoves) -> None:
    triton_kernel.restore_slots(state, window, moves=moves, config=WHOLE)


def run_op(state: torch.Tensor, window: torch.Tensor, moves: SlotMoves) -> None:
    """Run the op, which is the reference without a GPU."""
    ops.restore_slots(state, window, moves=moves)


RUNS = pytest.mark.parametrize("run", [run_op, run_kernel], ids=["op", "kernel"])


def same(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Compare byte by byte."""
    return torch.equal(got.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))


@RUNS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "moves",
    [
        [],
        [(-1, 0)],
        [(7, 2)],
        [(8, 0), (-1, 3), (8, 1), (5, 4), (-1, 0)],
    ],
    ids=str,
)
def test_copies_the_listed_slots(run, moves: list[tuple[int, int]], dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    """One slot may be copied to several. A source of -1 is skipped, whatever its target."""
    before = make_slots(dtype)
    after = [x.clone() for x in before]
    run(*after, SlotMoves.plan(moves, device=DEVICE))
    taken = {target: source for source, target in moves if source >= 0}
    for got, old in zip(after, before, strict=True):
        for slot in range(NUM_SLOTS):
            assert same(got[slot], old[taken.get(slot, slot)]), slot


@pytest.mark.parametrize("config", triton_kernel.CONFIGS, ids=str)
def test_every_config_copies_all(config: RestoreConfig) -> None:
    """The state has several blocks, and there are more moves than usual."""
    state, window = torch.randn(140, 2, 64, 65, device=DEVICE), torch.randn(140, 3, 3000, device=DEVICE)
    wanted = state.clone(), window.clone()
    moves = [(-1, 0)] * 130 + [(139, 2)]
    triton_kernel.restore_slots(state, window, moves=SlotMoves.plan(moves, device=DEVICE), config=config)
    for got, x in zip((state, window), wanted, strict=True):
        x[2] = x[139]
        assert torch.equal(got, x)


def test_bad_arguments_are_named() -> None:
    state, window = (x.cpu() for x in make_slots(torch.float32))
    for message, arguments, moves in (
        (
            r"state bfloat16 \[9, 3, 18, 10\], expected float32 \[num_slots, Hv, Dk, Dv\]",
            (state.bfloat16(), window),
            [(1, 0)],
        ),
        (r"window float32 \[8, 3, 86\]", (state, window[:8]), [(1, 0)]),
        (r"source int64 \[1\] holds 9 to 9, outside -1 to 8", (state, window), [(9, 0)]),
        (r"target int64 \[1\] holds -1 to -1, outside 0 to 8", (state, window), [(1, -1)]),
    ):
        with pytest.raises(ValueError, match="restore_slots: " + message):
            ops.restore_slots(*arguments, moves=SlotMoves.plan(moves, device="cpu"))
    one, two = torch.zeros(1, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"target: \[2\] on cpu, source \[1\] on cpu"):
        SlotMoves(source=one, target=two)
    with pytest.raises(ValueError, match=r"source: expected contiguous int64 \[moves\], got torch.int32 \[1\]"):
        SlotMoves(source=one.int(), target=one)
