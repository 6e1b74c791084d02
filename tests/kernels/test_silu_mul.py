"""The gated activation against its formula, and row by row."""

import pytest
import torch
import torch.nn.functional as F
from tests.kernels.graphs import assert_replays

from moeyard_kernels import ops
from moeyard_kernels.common.tuning import RowConfig
from moeyard_kernels.elementwise import silu_mul as triton_kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("dim", [1, 5, 16, 33, 47, 512])
def test_values_and_rows(dim: int, dtype: torch.dtype) -> None:
    x = (torch.randn(70, 2 * dim) * 4).to(dtype)
    whole = ops.silu_mul(x)
    assert whole.dtype == dtype
    gate, up = x[:, :dim], x[:, dim:]
    exact = (F.silu(gate.double()).to(dtype) * up).double()
    torch.testing.assert_close(whole.double(), exact, rtol=2.0**-7 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)
    for count in (1, 2, 3, 16, 31, 69):
        for start in (0, 70 - count):
            assert torch.equal(ops.silu_mul(x[start : start + count].clone()), whole[start : start + count])
    assert ops.silu_mul(x[:0]).shape == (0, dim)


def run_kernel(x: torch.Tensor, config: RowConfig | None = None) -> torch.Tensor:
    return triton_kernel.silu_mul(x, config=config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("limit", [0.3, 2.0])
def test_kernel_clamps_gates_above_and_ups_on_both_sides(limit: float, dtype: torch.dtype) -> None:
    x = (torch.randn(5, 66) * 4).to(DEVICE, dtype)
    x[0, 0] = x[1, 33] = float("nan")
    y = triton_kernel.silu_mul(x, limit)
    gate, up = x[:, :33].clamp(max=limit), x[:, 33:].clamp(-limit, limit)
    assert torch.equal(y.nan_to_num(7.0), run_kernel(torch.cat((gate, up), 1)).nan_to_num(7.0))
    assert y[0, 0].isnan()
    assert y[1, 0].isnan()
    reference = ops.silu_mul(x.cpu(), limit)
    torch.testing.assert_close(y.cpu(), reference, rtol=2.0**-7, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("dim", [1, 33, 512])
def test_kernel_values_and_rows(dim: int, dtype: torch.dtype) -> None:
    count = 5 if DEVICE == "cpu" else 4096
    x = (torch.randn(count, 2 * dim) * 4).to(DEVICE, dtype)
    whole = run_kernel(x)
    assert whole.dtype == dtype
    exact = (F.silu(x[:, :dim].double()).to(dtype) * x[:, dim:]).double()
    torch.testing.assert_close(whole.double(), exact, rtol=2.0**-7 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)
    assert torch.equal(run_kernel(x[count - 1 :].clone()), whole[count - 1 :])
    assert torch.equal(run_kernel(F.pad(x, (0, 8))[:, : 2 * dim]), whole)
    assert run_kernel(x[:0]).shape == (0, dim)


def test_kernel_is_as_exact_as_torch() -> None:
    x = (torch.randn(32 if DEVICE == "cpu" else 4096, 4096) * 3).to(DEVICE, torch.bfloat16)
    gate, up = x[:, :2048], x[:, 2048:]
    exact = F.silu(gate.double()) * up.double()
    ours, theirs = ((y.double() - exact).norm() / exact.norm() for y in (run_kernel(x), F.silu(gate) * up))
    assert ours < 1e-2
    # Both round at the same two places. Their exponentials differ in the last place, so the few gates whose silu is
    # next to a midpoint (5.9375, for example) round differently. Either norm may be the smaller one, by about 1e-4.
    assert ours <= theirs * 1.0005


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 65])
def test_graph_replay(num_rows: int) -> None:
    x = torch.randn(num_rows, 4096).to(DEVICE, torch.bfloat16)
    assert_replays(lambda: (ops.silu_mul(x),), x.normal_)


@pytest.mark.parametrize("config", triton_kernel.CONFIGS, ids=str)
def test_every_config_gives_the_same_bits(config: RowConfig) -> None:
    x = torch.randn(1, 600).to(DEVICE, torch.bfloat16)
    assert torch.equal(run_kernel(x, config), run_kernel(x))


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"gate_up float32 \[2, 5\], expected float32 or bfloat16 \[M, 2 I\]"):
        ops.silu_mul(torch.zeros(2, 5))
    with pytest.raises(
        ValueError, match=r"gate_up float32 \[4, 2\] with strides \(1, 4\) is not contiguous in its last"
    ):
        triton_kernel.silu_mul(torch.zeros(2, 4).T)
