"""The short convolution over prompts: reference and Triton kernel, for every batch, tile and chunking."""

from dataclasses import replace

import pytest
import torch
from tests.kernels.linear_attention_cases import relative, slots_of

from moeyard_kernels import ops
from moeyard_kernels.linear_attention import causal_conv1d
from moeyard_kernels.linear_attention import causal_conv1d_prefill as triton_kernel
from moeyard_kernels.linear_attention.causal_conv1d_prefill import ConvConfig
from moeyard_kernels.types.state_slots import PADDING, PromptChunks, chunks_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CHANNELS = 150
# Lengths, starts, slots: some shorter than the window, from position 0 and from the content of a slot.
PROMPTS = ([70, 1, 2, 64, 1], [0, 64, 128, 64, 0], [4, 0, 7, 2, 8])
WHOLE = ConvConfig(ROWS=32, BC=256, num_warps=2)


def make_inputs(count: int, dtype: torch.dtype, size: int = 4) -> tuple[torch.Tensor, ...]:
    """Return x, a slice of wider rows, weight, and a window of 9 slots."""
    x = torch.randn(count, CHANNELS + 10, device=DEVICE).to(dtype)[:, 5:-5]
    return x, torch.randn(CHANNELS, size).to(DEVICE, dtype), torch.randn(9, size - 1, CHANNELS).to(DEVICE, dtype)


def run_kernel(
    x: torch.Tensor, weight: torch.Tensor, window: torch.Tensor, chunks: PromptChunks, config: ConvConfig = WHOLE
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and the new windows, computed from a copy of the windows."""
    kept = window.clone()
    return triton_kernel.causal_conv1d_prefill(x, weight, kept, chunks=chunks, config=config), kept


def run_op(
    x: torch.Tensor, weight: torch.Tensor, window: torch.Tensor, chunks: PromptChunks
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the op, which is the reference without a GPU."""
    kept = window.clone()
    return ops.causal_conv1d_prefill(x, weight, kept, chunks=chunks), kept


@pytest.mark.sampled(0)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("run", [run_op, run_kernel], ids=["op", "kernel"])
def test_computes_the_convolution(run, size: int, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    x, weight, window = make_inputs(sum(PROMPTS[0]), dtype, size)
    out, kept = run(x, weight, window, PromptChunks.plan(*PROMPTS, device=DEVICE))
    assert out.dtype == dtype
    begin = 0
    for length, start, slot in zip(*PROMPTS, strict=True):
        rows = slice(begin, begin := begin + length)
        inputs = torch.cat((window[slot] if start else torch.zeros_like(window[slot]), x[rows]))
        exact = torch.nn.functional.conv1d(inputs.double().t()[None], weight.double()[:, None], groups=CHANNELS)[0].t()
        wanted = torch.nn.functional.silu(exact)
        assert relative(out[rows], wanted) < (1e-6 if dtype == torch.float32 else 4e-3)
        assert torch.equal(kept[slot], inputs[1 - size :])
    others = [1, 3, 5, 6]
    assert torch.equal(kept[others], window[others])


def test_batch_chunking_and_formula_change_no_bit() -> None:
    x, weight, window = make_inputs(67, torch.float32)
    whole, kept = run_kernel(x, weight, window, PromptChunks.plan([67], [0], [5], device=DEVICE))
    both = torch.cat((x[:9], x))
    out, left = run_kernel(both, weight, window, PromptChunks.plan([9, 67], [64, 0], [1, 5], device=DEVICE))
    assert torch.equal(out[9:], whole)
    assert torch.equal(left[5], kept[5])
    first, here = run_kernel(x[:64], weight, window, PromptChunks.plan([64], [0], [5], device=DEVICE))
    assert torch.equal(first, whole[:64])
    then, last = run_kernel(x[64:], weight, here, PromptChunks.plan([3], [64], [5], device=DEVICE))
    assert torch.equal(then, whole[64:])
    assert torch.equal(last[5], kept[5])
    # Output positions go through the windows one by one.
    steps = causal_conv1d.causal_conv1d_update(x[64:], weight, here, slots=slots_of([5], [[-1, -1, 5]], DEVICE))
    assert torch.equal(steps, whole[64:])
    assert torch.equal(here[5], kept[5])


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("run", [run_op, run_kernel], ids=["op", "kernel"])
def test_snapshot_holds_the_inputs_before_it(run, size: int) -> None:  # type: ignore[no-untyped-def]
    x, weight, window = make_inputs(192 + 5 + 70, torch.bfloat16, size)
    lengths, starts, slots = [192, 5, 70], [64, 0, 0], [4, 0, 7]
    snapshots = [[(128, 1), (256, 3)], [], [(64, 8)]]
    out, kept = run(x, weight, window, PromptChunks.plan(lengths, starts, slots, snapshots, device=DEVICE))
    whole, left = run(x, weight, window, PromptChunks.plan(lengths, starts, slots, device=DEVICE))
    assert torch.equal(out, whole)
    for slot, row in ((1, 64), (3, 192), (8, 197 + 64)):
        assert torch.equal(kept[slot], x[row + 1 - size : row])
    others = [0, 2, 4, 5, 6, 7]
    assert torch.equal(kept[others], left[others])


@pytest.mark.parametrize("channels", [CHANNELS, 128])
def test_weight_stored_by_tap_gives_the_same_bits(channels: int) -> None:
    """Some rows can be read 16 bytes at a time, in tiles without a remainder."""
    x, weight, window = make_inputs(98, torch.bfloat16)
    x, window = x[:, :channels].contiguous(), window[..., :channels].contiguous()
    weight, chunks = weight[:channels].contiguous(), PromptChunks.plan([30, 68], [64, 0], [1, 5], device=DEVICE)
    config = ConvConfig(ROWS=16, BC=128, num_warps=1)
    wanted = run_kernel(x, weight, window, chunks)
    for found, same in zip(run_kernel(x, weight.t().contiguous().t(), window, chunks, config), wanted, strict=True):
        assert torch.equal(found, same)


@pytest.mark.sampled(0)
@pytest.mark.parametrize("config", triton_kernel.CONFIGS, ids=str)
def test_every_config_gives_the_same_bits(config: ConvConfig) -> None:
    x, weight, window = make_inputs(98, torch.bfloat16)
    chunks = PromptChunks.plan([2, 96], [64, 0], [3, 1], [[], [(64, 5)]], device=DEVICE)
    for got, same in zip(
        run_kernel(x, weight, window, chunks, config), run_kernel(x, weight, window, chunks), strict=True
    ):
        assert torch.equal(got, same)


def test_chunks_are_counted_from_the_start_of_each_prompt() -> None:
    chunks = PromptChunks.plan([130, 64], [64, 0], [7, 3], device="cpu")
    # Without a snapshot each prompt has its first row in that place.
    first, second = [0, 0, -1, 0, -1, 130, 7], [130, 130, -1, 130, -1, 194, 3]
    assert chunks.table.tolist() == [[0, *first], [64, *first], [128, *first], [130, *second]]
    assert chunks.fresh.tolist() == [False, False, False, True]
    assert chunks.heads.tolist() == [0, 3]
    assert PromptChunks.plan([3, 65], [0, 0], [1, 2], device="cpu").heads.tolist() == [1, 0]
    assert PromptChunks.plan([], [], [], device="cpu").table.shape == (0, 8)
    taking = PromptChunks.plan([130, 64], [64, 0], [7, 3], [[(128, 2)], [(64, 5)]], device="cpu")
    assert taking.table[[0, 3]].tolist() == [[0, 0, 0, -1, 64, 2, 130, 7], [130, 130, 130, -1, 194, 5, 194, 3]]
    assert taking.parts == ((7, 0, 130, False, ((64, 2),)), (3, 130, 194, True, ((194, 5),)))
    assert replace(taking, planned=None).parts == taking.parts
    assert (taking.last_slot, chunks.last_slot) == (7, 7)


def test_bad_arguments_are_named() -> None:
    x, weight, window = (y.cpu() for y in make_inputs(3, torch.float32))
    chunks = PromptChunks.plan([3], [0], [9], device="cpu")
    with pytest.raises(ValueError, match=r"chunks\.last_slot 9, num_slots 9 of window float32 \[9, 3, 150\]"):
        ops.causal_conv1d_prefill(x, weight, window, chunks=chunks)
    with pytest.raises(
        ValueError, match=r"T 2 of x float32 \[2, 150\], chunks\.num_rows 3, expected T == chunks\.num_rows"
    ):
        ops.causal_conv1d_prefill(x[:2], weight, window, chunks=chunks)
    for message, arguments in (
        (r"a prompt of 3 positions from 7 on: at least one, from a multiple of 64", ([3], [7], [0])),
        (r"a prompt of 0 positions from 0 on", ([0], [0], [0])),
        (r"slots \[1, 1\]: each prompt has one of its own", ([1, 1], [0, 0], [1, 1])),
        (r"slots \[1, 1\]: each prompt has one of its own", ([64], [0], [1], [[(64, 1)]])),
        (r"snapshots at \[64\] of positions 64 to 192: 2 at most", ([128], [64], [1], [[(64, 2)]])),
        (r"snapshots at \[60\] of positions 0 to 64", ([64], [0], [1], [[(60, 2)]])),
        (r"snapshots at \[128\] of positions 0 to 64", ([64], [0], [1], [[(128, 2)]])),
        (r"snapshots at \[128, 64\] of positions", ([128], [0], [1], [[(128, 2), (64, 3)]])),
        (r"snapshots at \[64, 128, 192\] of", ([192], [0], [1], [[(64, 2), (128, 3), (192, 4)]])),
        (r"1 lengths, 1 starts, 1 slots, 2 snapshots", ([64], [0], [1], [[], []])),
    ):
        with pytest.raises(ValueError, match=message):
            PromptChunks.plan(*arguments, device="cpu")


def test_table_with_spare_rows_touches_only_used_slots() -> None:
    """A captured step has the plan's bits, and leaves unused rows and slots alone."""
    prompts = ([86, 33], [64, 0], [3, 1], [[(128, 5)], []])
    x, weight, window = make_inputs(192, torch.float32)
    wanted, left = run_kernel(x[:119], weight, window, PromptChunks.plan(*prompts, device=DEVICE))
    _, rows, fresh, heads = chunks_of(*prompts)
    table = torch.tensor([*rows, *[PADDING] * 3], device=DEVICE)
    chunks = PromptChunks(
        table=table,
        fresh=torch.tensor([*fresh, *[True] * 3], device=DEVICE),
        heads=torch.tensor([*heads, 5, 5], device=DEVICE),
        planned=None,
        num_rows=192,
    )
    got, kept = run_kernel(x, weight, window, chunks)
    assert torch.equal(got[:119], wanted)
    assert torch.equal(kept, left)
    assert torch.equal(kept[[0, 2, 4]], window[[0, 2, 4]])
    assert chunks.parts == (() if DEVICE == "cuda" else ((3, 0, 86, False, ((64, 5),)), (1, 86, 119, True, ())))
