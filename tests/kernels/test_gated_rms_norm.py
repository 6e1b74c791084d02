"""The norm after linear attention: Triton kernel and reference against float64, head by head."""

import pytest
import torch
from tests.kernels.graphs import assert_replays
from tests.kernels.linear_attention_cases import relative

from moeyard_kernels import ops
from moeyard_kernels.elementwise import gated_rms_norm as triton_kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
SIGMOID = pytest.mark.parametrize("sigmoid", [False, True], ids=["silu", "sigmoid"])


def run_kernel(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, *, sigmoid: bool) -> torch.Tensor:
    wide = torch.zeros(len(gate), gate.shape[1] + 9, dtype=gate.dtype, device=DEVICE)
    wide[:, 7:-2] = gate.to(DEVICE)
    return triton_kernel.gated_rms_norm(x.to(DEVICE), wide[:, 7:-2], weight.to(DEVICE), 1e-6, sigmoid=sigmoid).cpu()


@DTYPES
@SIGMOID
@pytest.mark.parametrize("fp32_weight", [False, True])
def test_computes_the_gated_norm(fp32_weight: bool, sigmoid: bool, dtype: torch.dtype) -> None:
    x, gate = (torch.randn(5, *shape).to(dtype) for shape in ((3, 24), (72,)))
    weight = torch.rand(24).to(torch.float32 if fp32_weight else dtype)
    wide, opened = x.double(), gate.double().sigmoid() * (1 if sigmoid else gate.double())
    exact = (wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()).flatten(1) * opened
    got, reference = (
        run_kernel(x, gate, weight, sigmoid=sigmoid),
        ops.gated_rms_norm(x, gate, weight, 1e-6, sigmoid=sigmoid),
    )
    assert got.dtype == reference.dtype == dtype
    assert got.shape == reference.shape == (5, 72)
    for found in (got, reference):
        assert relative(found, exact) < (1e-6 if dtype == torch.float32 else 5e-3)


@DTYPES
@pytest.mark.parametrize("dim", [24, 128])
def test_rows_are_independent(dim: int, dtype: torch.dtype) -> None:
    x, gate = torch.randn(19, 2, dim).to(dtype), torch.randn(19, 2 * dim).to(dtype)
    weight = torch.rand(dim).to(dtype)
    whole = run_kernel(x, gate, weight, sigmoid=False)
    for rows in (slice(0, 1), slice(7, 12), slice(18, 19)):
        assert torch.equal(run_kernel(x[rows], gate[rows], weight, sigmoid=False), whole[rows])
    assert run_kernel(x[:0], gate[:0], weight, sigmoid=False).shape == (0, 2 * dim)


@DTYPES
@pytest.mark.parametrize("fp32_weight", [False, True])
def test_rows_may_copy_other_rows(fp32_weight: bool, dtype: torch.dtype) -> None:
    """Padding rows of a step take the heads of another row, with their own gate."""
    x, gate = torch.randn(5, 3, 24).to(dtype), torch.randn(5, 72).to(dtype)
    weight = torch.rand(24).to(torch.float32 if fp32_weight else dtype)
    rows = torch.tensor([0, 1, 4, 0, 0])
    wanted = run_kernel(x[rows], gate, weight, sigmoid=True)
    on_device = [t.to(DEVICE) for t in (x, gate, weight)]
    got = triton_kernel.gated_rms_norm(*on_device, 1e-6, sigmoid=True, rows=rows.to(DEVICE))
    assert torch.equal(got.cpu(), wanted)
    reference = ops.gated_rms_norm(x, gate, weight, 1e-6, sigmoid=True, rows=rows)
    assert torch.equal(reference, ops.gated_rms_norm(x[rows], gate, weight, 1e-6, sigmoid=True))
    with pytest.raises(ValueError, match=r"rows int64 \[5\] holds 0 to 5, outside 0 to 4"):
        ops.gated_rms_norm(x, gate, weight, 1e-6, rows=rows + (rows == 4))


def test_fp32_weight_rounds_once() -> None:
    """Kimi-Linear's module computes all in fp32, and the bits are its bits."""
    x, gate, weight = torch.randn(9, 2, 32).bfloat16(), torch.randn(9, 64).bfloat16(), torch.rand(32)
    wide = x.float()
    normed = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight
    wanted = (normed.flatten(1) * gate.float().sigmoid()).bfloat16()
    assert torch.equal(ops.gated_rms_norm(x, gate, weight, 1e-6, sigmoid=True), wanted)
    assert relative(run_kernel(x, gate, weight, sigmoid=True), wanted) < 5e-4


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 65])
def test_graph_replay(num_rows: int) -> None:
    x, gate = (torch.randn(num_rows, *shape, device=DEVICE).bfloat16() for shape in ((32, 128), (4096,)))
    weight = torch.rand(128, device=DEVICE).bfloat16()
    assert_replays(lambda: (ops.gated_rms_norm(x, gate, weight, 1e-6),), lambda: (x.normal_(), gate.normal_()))


def test_bad_arguments_are_named() -> None:
    x, gate, weight = torch.zeros(2, 3, 4), torch.zeros(2, 12), torch.zeros(4)
    with pytest.raises(
        ValueError, match=r"gated_rms_norm: x float32 \[3, 4\], expected float32 or bfloat16 \[T, H, D\]"
    ):
        ops.gated_rms_norm(x[0], gate, weight, 1e-6)
    with pytest.raises(
        ValueError, match=r"gate float32 \[2, 11\], expected float32 or bfloat16 \[2, 12\] for x float32 \[2, 3, 4\]"
    ):
        ops.gated_rms_norm(x, gate[:, 1:], weight, 1e-6)
    with pytest.raises(ValueError, match=r"weight bfloat16 \[4\], expected float32 \[4\] for x float32 \[2, 3, 4\]"):
        ops.gated_rms_norm(x, gate, weight.bfloat16(), 1e-6)
