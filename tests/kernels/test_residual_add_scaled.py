"""Residual, shared and scaled routed experts: reference and Triton kernel against exact arithmetic, bit for bit."""

from fractions import Fraction

import pytest
import torch
from tests.kernels.graphs import assert_replays

from moeyard_kernels import ops
from moeyard_kernels.common.tuning import RowConfig
from moeyard_kernels.elementwise import residual_add_scaled as triton_kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def run_kernel(*tensors: torch.Tensor, scale: float, config: RowConfig | None = None) -> torch.Tensor:
    on_device = [x.to(DEVICE) for x in tensors]
    # What the allocator hands out next is this block, full of NaN.
    poison = torch.full(tensors[0].shape, float("nan"), device=DEVICE)
    del poison
    return triton_kernel.residual_add_scaled(*on_device, scale, config=config).cpu()


def nearest_fp32(exact: Fraction) -> float:
    """The fp32 value nearest to `exact`: of a first guess and its neighbours."""
    guess = torch.tensor(float(exact), dtype=torch.float64).float()
    around = [guess, *(torch.nextafter(guess, torch.tensor(end)) for end in (float("-inf"), float("inf")))]
    return min((x.item() for x in around), key=lambda x: abs(Fraction(x) - exact))


@DTYPES
@pytest.mark.parametrize(("num_rows", "hidden"), [(2, 1), (1, 700), (3, 96)], ids=lambda n: str(n))
def test_kernel_and_reference_equal_the_chain(num_rows: int, hidden: int, dtype: torch.dtype) -> None:
    a, b, c = (torch.randn(num_rows, hidden).to(dtype) for _ in range(3))
    scale = 2.827
    fused = run_kernel(a, b, c, scale=scale)
    factor = Fraction(torch.tensor(scale).item())
    exact = [
        nearest_fp32(factor * Fraction(x) + Fraction(y))
        for x, y in zip(c.flatten().tolist(), b.flatten().tolist(), strict=True)
    ]
    wanted = a + torch.tensor(exact).view(num_rows, hidden).to(dtype)
    assert fused.dtype == dtype
    assert torch.equal(fused, wanted)
    assert torch.equal(ops.residual_add_scaled(a, b, c, scale), wanted)
    assert run_kernel(a[:0], b[:0], c[:0], scale=scale).shape == (0, hidden)


def test_sums_a_hair_off_the_middle_round_once() -> None:
    # 1 + 2^-24 is half way between two fp32 values; the product adds or takes off less than fp64 can hold.
    shared = torch.tensor([[1.0, 1.0, -1.0]])
    routed = torch.tensor([[1 + 2.0**-23, 1 - 2.0**-24, -1 - 2.0**-23]]) * 2.0**-12
    scale = torch.tensor(2.0**-12 * (1 - 2.0**-23)).item()
    hidden = torch.zeros(1, 3)
    exact = [
        nearest_fp32(Fraction(scale) * Fraction(x) + Fraction(y))
        for x, y in zip(routed[0].tolist(), shared[0].tolist(), strict=True)
    ]
    assert ops.residual_add_scaled(hidden, shared, routed, scale).tolist() == [exact]
    assert run_kernel(hidden, shared, routed, scale=scale).tolist() == [exact]


@pytest.mark.parametrize("config", triton_kernel.CONFIGS, ids=str)
def test_every_config_gives_the_same_bits(config: RowConfig) -> None:
    a, b, c = (torch.randn(1, 700).bfloat16() for _ in range(3))
    assert torch.equal(run_kernel(a, b, c, scale=0.3, config=config), ops.residual_add_scaled(a, b, c, 0.3))


@pytest.mark.skipif(DEVICE == "cpu", reason="two launches of a GPU")
def test_equals_two_launches_and_a_row_alone() -> None:
    a, b, c = (torch.randn(4096, 7168, device=DEVICE).bfloat16() for _ in range(3))
    fused = triton_kernel.residual_add_scaled(a, b, c, 2.5)
    assert torch.equal(fused, a + torch.add(b, c, alpha=2.5))
    for row in (slice(0, 1), slice(17, 18), slice(4095, 4096), slice(100, 164), slice(3000, 4025)):
        assert torch.equal(triton_kernel.residual_add_scaled(a[row], b[row], c[row], 2.5), fused[row])


@pytest.mark.skipif(DEVICE == "cpu", reason="graphs are a GPU's")
@pytest.mark.parametrize("num_rows", [1, 65])
def test_a_graph_replays_it(num_rows: int) -> None:
    a, b, c = (torch.randn(num_rows, 7168, device=DEVICE).bfloat16() for _ in range(3))
    assert_replays(lambda: (ops.residual_add_scaled(a, b, c, 2.5),), lambda: (a.normal_(), b.normal_(), c.normal_()))


def test_bad_arguments_are_named() -> None:
    x = torch.zeros(2, 4)
    with pytest.raises(ValueError, match=r"hidden must be fp32 or bf16 \[T, H\], got float32 \[4\]"):
        ops.residual_add_scaled(x[0], x, x, 1.0)
    with pytest.raises(ValueError, match=r"routed bfloat16 \[2, 4\] is not like hidden float32 \[2, 4\]"):
        ops.residual_add_scaled(x, x, x.bfloat16(), 1.0)
    with pytest.raises(ValueError, match=r"shared float32 \[2, 3\] is not like hidden"):
        ops.residual_add_scaled(x, x[:, :3], x, 1.0)
    with pytest.raises(ValueError, match=r"routed float32 \[4, 2\] with strides \(1, 4\) is not contiguous"):
        triton_kernel.residual_add_scaled(torch.zeros(4, 2), torch.zeros(4, 2), x.T, 1.0)
