"""The short convolution of decode rows over windows in slots: reference and Triton kernel, row by row."""

import pytest
import torch
from tests.kernels.graphs import assert_replays
from tests.kernels.linear_attention_cases import relative, slots_of

from moeyard_kernels import ops
from moeyard_kernels.common.tuning import RowConfig
from moeyard_kernels.linear_attention import causal_conv1d as triton_kernel
from moeyard_kernels.types.state_slots import StateSlots

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
CHANNELS = 150


def make_inputs(count: int, dtype: torch.dtype, size: int = 4) -> tuple[torch.Tensor, ...]:
    """Return x, a slice of wider rows, weight, and a window of 9 slots."""
    x = torch.randn(count, CHANNELS + 10).to(dtype)[:, 5:-5]
    return x, torch.randn(CHANNELS, size).to(dtype), torch.randn(9, size - 1, CHANNELS).to(dtype)


def run_kernel(
    x: torch.Tensor, weight: torch.Tensor, window: torch.Tensor, slots: StateSlots, config: RowConfig | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and the new windows, computed from a copy of the windows."""
    kept = window.to(DEVICE, copy=True)
    where = StateSlots(read=slots.read.to(DEVICE), write=slots.write.to(DEVICE))
    wide = torch.zeros(len(x), CHANNELS + 3, dtype=x.dtype, device=DEVICE)
    wide[:, :CHANNELS] = x.to(DEVICE)
    out = triton_kernel.causal_conv1d_update(wide[:, :CHANNELS], weight.to(DEVICE), kept, slots=where, config=config)
    return out.cpu(), kept.cpu()


def run_reference(
    x: torch.Tensor, weight: torch.Tensor, window: torch.Tensor, slots: StateSlots
) -> tuple[torch.Tensor, torch.Tensor]:
    kept = window.clone()
    return ops.causal_conv1d_update(x, weight, kept, slots=slots), kept


@pytest.mark.parametrize("run", [run_reference, run_kernel], ids=["reference", "kernel"])
def test_last_query_may_overwrite_the_window_of_the_first(run) -> None:  # type: ignore[no-untyped-def]
    x, weight, window = make_inputs(8, torch.float32, 4)
    _, kept = run(x, weight, window, slots_of([1, 5], [[2, 3, 0, 1], [6, 7, 4, 5]]))
    for first, read, ring in ((0, 1, (2, 3, 0, 1)), (4, 5, (6, 7, 4, 5))):
        inputs = torch.cat((window[read], x[first : first + 4]))
        for j, slot in enumerate(ring):
            assert torch.equal(kept[slot], inputs[j + 1 : j + 4])


@DTYPES
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("run", [run_reference, run_kernel], ids=["reference", "kernel"])
def test_computes_the_convolution_and_moves_the_window(run, size: int, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    x, weight, window = make_inputs(6, dtype, size)
    out, kept = run(x, weight, window, slots_of([4, 6], [[0, -1, 1], [7, 6, -1]]))
    assert out.dtype == dtype
    for first, slot, written in ((0, 4, {0: 0, 2: 1}), (3, 6, {0: 7, 1: 6})):
        inputs = torch.cat((window[slot], x[first : first + 3]))
        exact = torch.nn.functional.conv1d(inputs.double().t()[None], weight.double()[:, None], groups=CHANNELS)[0].t()
        error = relative(out[first : first + 3], torch.nn.functional.silu(exact))
        assert error < (1e-6 if dtype == torch.float32 else 4e-3)
        for j, target in written.items():
            assert torch.equal(kept[target], inputs[j + 1 : j + size])
    assert torch.equal(kept[[2, 3, 4, 5, 8]], window[[2, 3, 4, 5, 8]])


@DTYPES
def test_rows_alone_and_together_have_the_same_bits(dtype: torch.dtype) -> None:
    x, weight, window = make_inputs(4, dtype)
    out, kept = run_kernel(x, weight, window, slots_of([3, 8], [[-1, 3], [-1, 8]]))
    for row, slot in ((0, 3), (2, 8)):
        here = window
        for j in range(2):
            one = slice(row + j, row + j + 1)
            alone, here = run_kernel(x[one], weight, here, slots_of([slot], [[slot]]))
            assert torch.equal(alone[0], out[row + j])
        assert torch.equal(here[slot], kept[slot])


@DTYPES
@pytest.mark.parametrize("channels", [CHANNELS, 128])
def test_weight_stored_by_tap_gives_the_same_bits(channels: int, dtype: torch.dtype) -> None:
    """Some rows can be read 16 bytes at a time, in tiles without a remainder."""
    x, weight, window = (part.contiguous() for part in make_inputs(2, dtype))
    x, weight, window = (
        x[:, :channels].contiguous(),
        weight[:channels].contiguous(),
        window[..., :channels].contiguous(),
    )
    taps, where = weight.to(DEVICE).t().contiguous().t(), slots_of([1, -1], [[1], [-1]], DEVICE)
    found = []
    for each in (weight.to(DEVICE), taps):
        kept = window.to(DEVICE, copy=True)
        found.append((triton_kernel.causal_conv1d_update(x.to(DEVICE), each, kept, slots=where), kept))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    wanted, kept = run_reference(x, weight, window, slots_of([1, -1], [[1], [-1]]))
    assert relative(found[0][0].cpu(), wanted) < (1e-6 if dtype == torch.float32 else 4e-3)
    assert torch.equal(found[0][1].cpu(), kept)
    with pytest.raises(ValueError, match="is contiguous in no order"):
        triton_kernel.causal_conv1d_update(x.to(DEVICE), taps[:, ::2], window.to(DEVICE), slots=where)


@pytest.mark.parametrize("config", triton_kernel.CONFIGS, ids=str)
def test_every_config_gives_the_same_bits(config: RowConfig) -> None:
    x, weight, window = make_inputs(1, torch.bfloat16)
    slots = slots_of([2], [[2]])
    wanted = run_kernel(x, weight, window, slots)
    for got, same in zip(run_kernel(x, weight, window, slots, config), wanted, strict=True):
        assert torch.equal(got, same)


@pytest.mark.parametrize("run", [run_reference, run_kernel], ids=["reference", "kernel"])
def test_padding_is_zero_and_writes_nothing(run) -> None:  # type: ignore[no-untyped-def]
    x, weight, window = make_inputs(2, torch.float32)
    x[1] = float("nan")
    out, kept = run(x, weight, window, slots_of([5, -1], [[5], [-1]]))
    assert torch.equal(out[1], torch.zeros(CHANNELS))
    assert not kept.isnan().any()
    assert torch.equal(kept[[0, 1, 2, 3, 4, 6, 7, 8]], window[[0, 1, 2, 3, 4, 6, 7, 8]])


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 64])
def test_graph_replay(batch: int) -> None:
    x, weight = (torch.randn(*shape, device=DEVICE).bfloat16() for shape in ((batch, 8192), (8192, 4)))
    windows = torch.randn(batch, 3, 8192, device=DEVICE).bfloat16()
    slots = StateSlots.in_place(torch.arange(batch, device=DEVICE))

    def step() -> tuple[torch.Tensor, ...]:
        window = windows.clone()
        return ops.causal_conv1d_update(x, weight, window, slots=slots), window

    assert_replays(step, lambda: (x.normal_(), windows.normal_()))


def test_bad_arguments_are_named() -> None:
    x, weight, window = make_inputs(2, torch.float32)
    slots = slots_of([0, 1], [[0], [1]])
    with pytest.raises(
        ValueError, match=r"T 1 of x float32 \[1, 150\], slots\.num_rows 2, expected T == slots\.num_rows"
    ):
        ops.causal_conv1d_update(x[:1], weight, window, slots=slots)
    with pytest.raises(
        ValueError, match=r"weight bfloat16 \[150, 4\], expected float32 \[150, K\] for x float32 \[2, 150\]"
    ):
        ops.causal_conv1d_update(x, weight.bfloat16(), window, slots=slots)
    with pytest.raises(ValueError, match=r"window float32 \[9, 2, 150\]"):
        ops.causal_conv1d_update(x, weight, window[:, 1:], slots=slots)
    with pytest.raises(ValueError, match=r"read int64 \[2\] holds 0 to 9, outside -1 to 8"):
        ops.causal_conv1d_update(x, weight, window, slots=slots_of([0, 9], [[0], [1]]))
