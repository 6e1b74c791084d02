"""A linear-attention decode step between its projections: two launches give the bits of three and of the reference."""

from typing import Any

import pytest
import torch
from tests.kernels.graphs import assert_replays
from tests.kernels.linear_attention_cases import Heads, make_rows, relative, slots_of

from moeyard_kernels import ops
from moeyard_kernels.linear_attention import delta_step as triton_kernel
from moeyard_kernels.linear_attention.delta_step import Chain, TwoLaunches
from moeyard_kernels.types.state_slots import StateSlots

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BY_ROW = pytest.mark.parametrize("by_row", [False, True], ids=["gdn", "kda"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
# Tiles without a remainder, keys that two heads share, and a shape that fits no tile.
HEADS = pytest.mark.parametrize("heads", [(1, 1, 128, 128), (1, 2, 16, 16), (1, 3, 18, 10)], ids=str)
TWO = [config for config in triton_kernel.CONFIGS if isinstance(config, TwoLaunches)]


def make_step(
    count: int, heads: Heads, *, by_row: bool, dtype: torch.dtype = torch.float32, size: int = 4
) -> dict[str, Any]:
    """Return the arguments of `gdn_step` or `kda_step` by name. Rows are slices of wider rows."""
    found = make_rows(count, heads, by_row=by_row, dtype=dtype)
    channels, (_, num_heads, _, dim) = found.qkv.shape[1], heads
    wide = torch.randn(count, 2 * num_heads * dim + 1).to(dtype)
    return {
        "qkv": found.qkv,
        "conv": torch.randn(size, channels).to(dtype).t(),
        "window": torch.randn(len(found.state), size - 1, channels).to(dtype),
        "b": found.b,
        "a": found.a,
        "a_log": found.a_log,
        "dt_bias": found.dt_bias,
        "state": found.state,
        "gate": wide[:, num_heads * dim : 2 * num_heads * dim],
        "norm": torch.rand(dim) + 0.5,
        "eps": 1e-6,
        "sigmoid": by_row,
    }


def run(op: Any, step: dict[str, Any], **named: Any) -> tuple[torch.Tensor, ...]:
    """Return out, states and windows of a call with copies of both."""
    given = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in step.items()}
    given |= {name: step[name].to(DEVICE, copy=True) for name in ("state", "window")}
    named = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in named.items()}
    slots = named.pop("slots")
    slots = StateSlots(read=slots.read.to(DEVICE), write=slots.write.to(DEVICE))
    if DEVICE == "cuda":
        # `static_state` promises that the copies are complete.
        torch.cuda.synchronize()
    out = op(*(given[name] for name in list(step)[:11]), slots=slots, sigmoid=step["sigmoid"], **named)
    return out.cpu(), given["state"].cpu(), given["window"].cpu()


def kernel(by_row: bool) -> Any:
    return triton_kernel.kda_step if by_row else triton_kernel.gdn_step


@pytest.mark.sampled(0)
@BY_ROW
@HEADS
@DTYPES
def test_two_launches_have_the_bits_of_three(heads: Heads, dtype: torch.dtype, by_row: bool) -> None:
    """States change in place or in another slot, beside padding rows that copy other rows."""
    step, slots = make_step(4, heads, by_row=by_row, dtype=dtype), slots_of([3, 8, -1, 1], [[3], [2], [-1], [1]])
    step["qkv"][2] = float("nan")
    rows = torch.tensor([0, 1, 0, 3])
    # 32 columns reach past the ends of the shapes.
    for config, chosen in ((TwoLaunches(BV=32, num_warps=1), rows), (TwoLaunches(BV=16, num_warps=1), None)):
        got = run(kernel(by_row), step, slots=slots, config=config, rows=chosen)
        wanted = run(kernel(by_row), step, slots=slots, config=Chain(), rows=chosen)
        for found, right in zip(got, wanted, strict=True):
            assert torch.equal(found, right)
        assert not got[1].isnan().any()
        assert not got[2].isnan().any()


@pytest.mark.sampled(0)
@BY_ROW
@pytest.mark.parametrize("config", TWO, ids=str)
def test_every_config_gives_the_same_bits(config: TwoLaunches, by_row: bool) -> None:
    """Some configs read states before the wait. On a GPU they are complete here."""
    step, slots = make_step(1, (1, 1, 128, 128), by_row=by_row, dtype=torch.bfloat16), slots_of([3], [[3]])
    wanted = run(kernel(by_row), step, slots=slots, config=Chain())
    got = run(kernel(by_row), step, slots=slots, config=config, static_state=True)
    for found, right in zip(got, wanted, strict=True):
        assert torch.equal(found, right)


@BY_ROW
@DTYPES
@pytest.mark.parametrize("size", [2, 4])
def test_equals_the_reference(size: int, dtype: torch.dtype, by_row: bool) -> None:
    step, slots = (
        make_step(3, (1, 2, 16, 16), by_row=by_row, dtype=dtype, size=size),
        slots_of([0, 5, -1], [[0], [6], [-1]]),
    )
    op = ops.kda_step if by_row else ops.gdn_step
    given = {**step, "state": step["state"].clone(), "window": step["window"].clone()}
    wanted = op(**given, slots=slots, rows=torch.tensor([0, 1, 1]))
    for config in (Chain(), TWO[0]):
        out, state, window = run(kernel(by_row), step, slots=slots, config=config, rows=torch.tensor([0, 1, 1]))
        assert relative(out, wanted) < (1e-5 if dtype == torch.float32 else 6e-3)
        assert relative(state, given["state"]) < (1e-5 if dtype == torch.float32 else 4e-3)
        assert torch.equal(window, given["window"])


@BY_ROW
def test_rows_alone_and_together_have_the_same_bits(by_row: bool) -> None:
    step, slots = (
        make_step(3, (1, 2, 16, 16), by_row=by_row, dtype=torch.bfloat16),
        slots_of([4, 7, 2], [[4], [7], [2]]),
    )
    out, state, window = run(kernel(by_row), step, slots=slots, config=TWO[0])
    for i, slot in enumerate((4, 7, 2)):
        alone = {**step, **{name: step[name][i : i + 1] for name in ("qkv", "b", "a", "gate")}}
        found = run(kernel(by_row), alone, slots=slots_of([slot], [[slot]]), config=TWO[1])
        assert torch.equal(found[0][0], out[i])
        assert torch.equal(found[1][slot], state[slot])
        assert torch.equal(found[2][slot], window[slot])


@BY_ROW
def test_several_queries_or_other_weights_need_three_launches(by_row: bool) -> None:
    """This holds for every config, because two launches would convolve several queries from each other's results."""
    step = make_step(4, (1, 2, 16, 16), by_row=by_row)
    for slots, change in (
        (slots_of([4, 7], [[-1, 4], [7, 6]]), {}),
        (slots_of([4, 7, 1, 0], [[4], [7], [1], [0]]), {"conv": step["conv"].contiguous()}),
    ):
        given = {**step, **change}
        for found, right in zip(
            run(kernel(by_row), given, slots=slots, config=TWO[0]),
            run(kernel(by_row), given, slots=slots, config=Chain()),
            strict=True,
        ):
            assert torch.equal(found, right)


@pytest.mark.gpu
@BY_ROW
@pytest.mark.parametrize("batch", [1, 64])
def test_graph_replay(batch: int, by_row: bool) -> None:
    step = make_step(batch, (32 if by_row else 16, 32, 128, 128), by_row=by_row, dtype=torch.bfloat16)
    given = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in step.items()}
    states, windows = (torch.randn(batch, *given[name].shape[1:], device=DEVICE) for name in ("state", "window"))
    slots = StateSlots.in_place(torch.randperm(batch, device=DEVICE))

    def replayed() -> tuple[torch.Tensor, ...]:
        own = {**given, "state": states.clone(), "window": windows.bfloat16()}
        out = kernel(by_row)(*list(own.values())[:11], slots=slots, sigmoid=by_row, config=TWO[1])
        return out, own["state"], own["window"]

    assert_replays(replayed, lambda: (given["qkv"].normal_(), slots.read.copy_(slots.read.flip(0))))


def test_bad_arguments_are_named() -> None:
    step, slots = make_step(2, (1, 2, 16, 16), by_row=False), slots_of([0, 1], [[0], [1]])
    for message, change in (
        (r"gdn_step: a float32 \[2, 1\]", {"a": step["a"][:, :1]}),
        (
            r"gdn_step: window float32 \[9, 3, 64\], expected float32 \[9, 8, 64\] for conv float32 \[64, 9\]",
            {"conv": torch.zeros(64, 9)},
        ),
        (r"gdn_step: window float32 \[8, 3, 64\]", {"window": step["window"][1:]}),
        (r"gdn_step: gate float32 \[2, 31\]", {"gate": step["gate"][:, 1:]}),
        (
            r"gdn_step: norm float32 \[15\], expected float32 \[16\] for state float32 \[9, 2, 16, 16\]",
            {"norm": step["norm"][1:]},
        ),
        (r"gdn_step: rows int64 \[1\], expected int64 \[2\]", {"rows": torch.zeros(1, dtype=torch.int64)}),
    ):
        with pytest.raises(ValueError, match=message):
            ops.gdn_step(**(step | change), slots=slots)
    with pytest.raises(
        ValueError, match=r"kda_step: T 2 of qkv float32 \[2, 64\], slots\.num_rows 1, expected T == slots\.num_rows"
    ):
        ops.kda_step(**make_step(2, (1, 2, 16, 16), by_row=True), slots=slots_of([0], [[0]]))
