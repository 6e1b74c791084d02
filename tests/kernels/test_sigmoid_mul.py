"""An output's gate: Triton kernel and reference against the formula in float64, with independent rows."""

import pytest
import torch
from tests.kernels.graphs import assert_replays

from moeyard_kernels import ops
from moeyard_kernels.common.tuning import RowConfig
from moeyard_kernels.elementwise import sigmoid_mul as triton_kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def halves(count: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x and a gate that is a slice of wider rows, as from one product."""
    gate, x, _ = (torch.randn(count, 2 * width + 3) * 3).to(DEVICE, dtype).split((width, width, 3), 1)
    return x, gate


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("count", "width"), [(3, 40), (5, 1), (1, 1025), (0, 7)], ids=lambda n: str(n))
def test_kernel_and_reference_match_the_formula(count: int, width: int, dtype: torch.dtype) -> None:
    x, gate = halves(count, width, dtype)
    exact = (x.double() * gate.double().sigmoid()).cpu()
    for got in (triton_kernel.sigmoid_mul(x, gate).cpu(), ops.sigmoid_mul(x.cpu(), gate.cpu())):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), exact, rtol=2.0**-8 if dtype == torch.bfloat16 else 1e-6, atol=1e-30)


@pytest.mark.parametrize("config", triton_kernel.CONFIGS, ids=str)
def test_every_config_gives_the_same_bits_and_rows_are_independent(config: RowConfig) -> None:
    x, gate = halves(3, 700, torch.bfloat16)
    wanted = triton_kernel.sigmoid_mul(x, gate)
    assert torch.equal(triton_kernel.sigmoid_mul(x, gate, config=config), wanted)
    assert torch.equal(triton_kernel.sigmoid_mul(x[1:2], gate[1:2], config=config), wanted[1:2])


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 65])
def test_graph_replay(num_rows: int) -> None:
    x, gate = (torch.randn(num_rows, 4096, device=DEVICE).bfloat16() for _ in range(2))
    assert_replays(lambda: (ops.sigmoid_mul(x, gate),), lambda: (x.normal_(), gate.normal_()))


def test_bad_arguments_are_named() -> None:
    with pytest.raises(
        ValueError,
        match=r"sigmoid_mul: gate float32 \[3, 1\], expected float32 or bfloat16 \[3, 4\] for x float32 \[3, 4\]",
    ):
        ops.sigmoid_mul(torch.zeros(3, 4), torch.zeros(3, 1))
    with pytest.raises(ValueError, match=r"x int64 \[3, 4\], expected float32 or bfloat16 \[M, N\]"):
        ops.sigmoid_mul(torch.zeros(3, 4, dtype=torch.int64), torch.zeros(3, 4))
    with pytest.raises(ValueError, match=r"gate float32 \[3, 4\] with strides \(1, 3\) is not contiguous in its last"):
        triton_kernel.sigmoid_mul(torch.zeros(3, 4), torch.zeros(4, 3).T)
