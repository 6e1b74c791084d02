"""Row scaling: reference and Triton kernel equal the formula, bit for bit."""

import pytest
import torch
from tests.kernels.graphs import assert_replays

from moeyard_kernels import ops
from moeyard_kernels.common.tuning import RowConfig
from moeyard_kernels.elementwise import scale_rows as triton_kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("scale_dtype", DTYPES, ids=["scale-fp32", "scale-bf16"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize(("num_tokens", "hidden"), [(3, 40), (5, 1), (1, 1025), (0, 7)], ids=lambda n: str(n))
def test_kernel_and_reference_equal_the_formula(
    num_tokens: int, hidden: int, dtype: torch.dtype, scale_dtype: torch.dtype
) -> None:
    x, scale = torch.randn(num_tokens, hidden).to(dtype), torch.rand(num_tokens).to(scale_dtype)
    on_device = x.to(DEVICE, copy=True)
    assert triton_kernel.scale_rows_(on_device, scale.to(DEVICE)) is on_device
    in_place = x.clone()
    assert ops.scale_rows_(in_place, scale) is in_place
    # The product of two fp32 values is exact in fp64.
    wanted = (x.double() * scale.double()[:, None]).float().to(dtype)
    assert torch.equal(on_device.cpu(), wanted)
    assert torch.equal(in_place, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
def test_sigmoid_of_a_scale(dtype: torch.dtype) -> None:
    x, scale = torch.randn(5, 70).to(dtype), (torch.randn(5) * 4).to(dtype)
    wanted = x.double() * scale.double().sigmoid()[:, None]
    on_device = triton_kernel.scale_rows_(x.to(DEVICE, copy=True), scale.to(DEVICE), sigmoid=True)
    for got in (on_device.cpu(), ops.scale_rows_(x.clone(), scale, sigmoid=True)):
        torch.testing.assert_close(got.double(), wanted, rtol=2.0**-8 if dtype == torch.bfloat16 else 1e-6, atol=1e-30)


@pytest.mark.parametrize("config", triton_kernel.CONFIGS, ids=str)
def test_every_config_gives_the_same_bits(config: RowConfig) -> None:
    x, scale = torch.randn(1, 700).bfloat16(), torch.rand(1)
    wanted = ops.scale_rows_(x.clone(), scale)
    on_device = x.to(DEVICE, copy=True)
    triton_kernel.scale_rows_(on_device, scale.to(DEVICE), config=config)
    assert torch.equal(on_device.cpu(), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 65])
def test_graph_replay(num_rows: int) -> None:
    x, scale = torch.randn(num_rows, 2048, device=DEVICE).bfloat16(), torch.rand(num_rows, device=DEVICE)
    assert_replays(lambda: (ops.scale_rows_(x.clone(), scale),), lambda: (x.normal_(), scale.uniform_()))


def test_bad_arguments_are_named() -> None:
    with pytest.raises(
        ValueError, match=r"scale float32 \[2\], expected float32 or bfloat16 \[3\] for x float32 \[3, 4\]"
    ):
        ops.scale_rows_(torch.zeros(3, 4), torch.zeros(2))
    with pytest.raises(ValueError, match=r"x int64 \[3, 4\], expected float32 or bfloat16 \[T, H\]"):
        ops.scale_rows_(torch.zeros(3, 4, dtype=torch.int64), torch.zeros(3))
    with pytest.raises(ValueError, match=r"x float32 \[3, 4\] with strides \(1, 3\) is not contiguous"):
        triton_kernel.scale_rows_(torch.zeros(4, 3).T, torch.zeros(3))
    with pytest.raises(ValueError, match=r"\[1, 268435456\] exceeds the grid"):
        triton_kernel.scale_rows_(torch.empty(1).expand(1, 65536 * 4096), torch.zeros(1))
