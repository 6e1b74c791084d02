"""RMS normalisation against the Hugging Face modules, and row by row."""

import pytest
import torch
from tests.kernels.graphs import assert_replays
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm
from transformers.models.mixtral.modeling_mixtral import MixtralRMSNorm

from moeyard_kernels import ops
from moeyard_kernels.elementwise import rms_norm as triton_kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@DTYPES
@pytest.mark.parametrize("dim", [1, 7, 64, 129, 512])
@pytest.mark.parametrize("module", [MixtralRMSNorm, DeepseekV3RMSNorm])
@torch.no_grad()
def test_equals_the_module(module: type[torch.nn.Module], dim: int, dtype: torch.dtype) -> None:
    norm = module(dim, eps=1e-5).to(dtype)
    norm.weight.copy_(torch.randn(dim))
    x, residual = torch.randn(6, 3, dim).to(dtype), torch.randn(6, 3, dim).to(dtype)
    before = x.clone()
    assert torch.equal(ops.rms_norm(x, norm.weight, 1e-5), norm(x))
    normed, total = ops.add_rms_norm(x, residual, norm.weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, norm(x + residual))
    assert torch.equal(x, before), "the input changed"


@DTYPES
@pytest.mark.parametrize("dim", [5, 64, 511, 512, 7168])
def test_rows_are_independent(dim: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(70, dim).to(dtype), torch.randn(dim).to(dtype)
    whole = ops.rms_norm(x, weight, 1e-6)
    for count in (1, 2, 3, 16, 33, 69):
        for start in (0, 70 - count):
            part = ops.rms_norm(x[start : start + count].clone(), weight, 1e-6)
            assert torch.equal(part, whole[start : start + count])
    assert ops.rms_norm(x[:0], weight, 1e-6).shape == (0, dim)


def run_kernel(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return triton_kernel.rms_norm(x, weight, 1e-6)


@DTYPES
@pytest.mark.parametrize("dim", [1, 7, 64, 129, 512, 1536, 7168])
def test_kernel_equals_the_formula(dim: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, dim).to(dtype), torch.randn(dim).to(dtype)
    y = run_kernel(x.to(DEVICE), weight.to(DEVICE)).cpu()
    assert y.dtype == dtype
    x64 = x.double()
    normed = (x64 / (x64.square().mean(-1, keepdim=True) + 1e-6).sqrt()).to(dtype).double()
    tolerance = 2.0**-7 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(y.double(), normed * weight.double(), rtol=tolerance, atol=1e-30)


def error(x: torch.Tensor, exact: torch.Tensor) -> float:
    return ((x.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize(("num_rows", "dim"), [(512, 64), (48, 1536)], ids=lambda n: str(n))
def test_kernel_is_as_exact_as_torch(num_rows: int, dim: int) -> None:
    num_rows = num_rows if DEVICE == "cpu" else 4096
    x, weight = torch.randn(num_rows, dim).to(DEVICE, torch.bfloat16), torch.randn(dim).to(DEVICE, torch.bfloat16)
    x64 = x.double()
    exact = x64 / (x64.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    ours, theirs = error(run_kernel(x, weight), exact), error(ops.rms_norm.reference(x, weight, 1e-6), exact)
    assert ours < 1e-2
    # Both round at the same two places. Their sums of squares differ in order, so that about one normed value in 2^14,
    # next to a midpoint, rounds differently. Either norm may be the smaller one, by 1e-4 for this number of values.
    assert ours <= theirs * 1.0005


@DTYPES
@pytest.mark.parametrize("dim", [48, 512, 2048])
def test_kernel_rows_are_independent_and_fused_equals_the_chain(dim: int, dtype: torch.dtype) -> None:
    count = 9 if DEVICE == "cpu" else 4096
    x, residual = torch.randn(count, dim).to(DEVICE, dtype), torch.randn(count, dim).to(DEVICE, dtype)
    weight = torch.randn(dim).to(DEVICE, dtype)
    normed, total = triton_kernel.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, run_kernel(total, weight))
    for t in (0, 3, count - 1):
        assert torch.equal(run_kernel(total[t : t + 1].clone(), weight), normed[t : t + 1])
    assert run_kernel(x[:0], weight).shape == (0, dim)


@pytest.mark.parametrize("dim", [48, 256, 2048])
def test_fp32_weight_comes_before_the_rounding(dim: int) -> None:
    """Families that store norms minus one have such a weight, for the fused kernel too."""
    x, residual = (torch.randn(4, dim).to(DEVICE, torch.bfloat16) for _ in range(2))
    weight = torch.randn(dim, device=DEVICE)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    got, reference = run_kernel(x, weight), ops.rms_norm(x.cpu(), weight.cpu(), 1e-6)
    assert got.dtype == reference.dtype == torch.bfloat16
    for found in (got.cpu(), reference):
        # They differ by single roundings, since a fp32 sum in another order changes few of them.
        assert (found.double() - exact.cpu().bfloat16().double()).norm() < 2e-4 * exact.norm()
    normed, total = triton_kernel.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(normed, run_kernel(total, weight))
    assert torch.equal(total, x + residual)


@DTYPES
def test_kernel_accepts_slices_of_wider_rows(dtype: torch.dtype) -> None:
    x, weight = torch.randn(3, 7, 64).to(DEVICE, dtype), torch.randn(64).to(DEVICE, dtype)
    assert torch.equal(run_kernel(x[:, 2:5], weight), run_kernel(x[:, 2:5].contiguous(), weight))
    flat = x.view(3, 448)
    assert torch.equal(run_kernel(flat[:, 64:128], weight), run_kernel(flat[:, 64:128].contiguous(), weight))
    assert torch.equal(run_kernel(x[:, 0], weight), run_kernel(x, weight)[:, 0])
    assert torch.equal(run_kernel(x[0, 1], weight), run_kernel(x, weight)[0, 1])


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [128, 1536, 5120, 7168])
def test_row_is_the_same_in_every_batch(dim: int) -> None:
    x, weight = torch.randn(4096, dim).to(DEVICE, torch.bfloat16), torch.randn(dim).to(DEVICE, torch.bfloat16)
    whole = run_kernel(x, weight)
    for rows in (slice(0, 1), slice(17, 18), slice(4095, 4096), slice(100, 163)):
        assert torch.equal(run_kernel(x[rows].clone(), weight), whole[rows])


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 65])
def test_graph_replay_of_both_ops(num_rows: int) -> None:
    x, residual = (torch.randn(num_rows, 1536).to(DEVICE, torch.bfloat16) for _ in range(2))
    weight = torch.randn(1536).to(DEVICE, torch.bfloat16)

    def step() -> tuple[torch.Tensor, ...]:
        return ops.rms_norm(x, weight, 1e-6), *ops.add_rms_norm(x, residual, weight, 1e-6)

    assert_replays(step, lambda: (x.normal_(), residual.normal_(), weight.normal_()))


def test_bad_arguments_are_named() -> None:
    with pytest.raises(
        ValueError, match=r"rms_norm: weight float32 \[3\], expected float32 \[4\] for x float32 \[2, 4\]"
    ):
        ops.rms_norm(torch.zeros(2, 4), torch.zeros(3), 1e-6)
    with pytest.raises(ValueError, match=r"weight bfloat16 \[4\], expected float32 \[4\] for x float32 \[2, 4\]"):
        ops.rms_norm(torch.zeros(2, 4), torch.zeros(4).bfloat16(), 1e-6)
    with pytest.raises(
        ValueError, match=r"residual float32 \[1, 4\], expected float32 \[2, 4\] for x float32 \[2, 4\]"
    ):
        ops.add_rms_norm(torch.zeros(2, 4), torch.zeros(1, 4), torch.zeros(4), 1e-6)
    with pytest.raises(ValueError, match=r"x float32 \[4, 2\] with strides \(1, 4\) is not contiguous in its last"):
        triton_kernel.rms_norm(torch.zeros(2, 4).T, torch.zeros(2), 1e-6)
    with pytest.raises(ValueError, match=r"residual float32 \[4, 2\] with strides \(1, 4\) is not contiguous"):
        triton_kernel.add_rms_norm(torch.zeros(4, 2), torch.zeros(2, 4).T, torch.zeros(2), 1e-6)
