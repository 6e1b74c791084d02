"""A projection per head: right at odd shapes and strides, with the same bits for every config, batch and layout.

The interpreter gets small integers, whose sums are exact in any order, so it tests indices and masks. A GPU gets random
inputs, and bits are compared.
"""

import pytest
import torch
from tests.kernels.graphs import assert_replays

from moeyard_kernels import ops
from moeyard_kernels.common import launch
from moeyard_kernels.linear import head_linear as kernel
from moeyard_kernels.linear import linear
from moeyard_kernels.linear.linear_configs import Skinny, Stream, configs_for

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
BF16, FP32 = torch.bfloat16, torch.float32
DTYPES = pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
LAYOUTS = pytest.mark.parametrize("absorb", [True, False], ids=["absorb", "expand"])
# Heads, nope, rank, Dv of DeepSeek-V2-Lite, Kimi-K2 and DeepSeek-V3, and odd ones.
MODELS = [(16, 128, 512, 128), (64, 128, 512, 128), (128, 128, 512, 128), (3, 40, 200, 72)]


def draw(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype) if CUDA else torch.randint(-4, 5, shape).to(dtype)


def weight_of(kv_b: torch.Tensor, nope: int, absorb: bool) -> torch.Tensor:
    """Return the view [H, N, K] of kv_b [H, nope + Dv, R] that absorbs queries or expands values."""
    return kv_b[:, :nope].transpose(1, 2) if absorb else kv_b[:, nope:]


def run(x: torch.Tensor, weight: torch.Tensor, **options: object) -> torch.Tensor:
    """Return the kernel's result, written into poisoned memory."""
    return kernel.head_linear(x, weight, **options)  # type: ignore[arg-type]


def assert_right(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    """Check that integer sums are exact, and other results near float64."""
    wanted = torch.einsum("thk,hnk->thn", x.double(), weight.double())
    assert y.dtype == x.dtype
    assert y.is_contiguous()
    if not CUDA:
        assert torch.equal(y, wanted.to(x.dtype))
    elif wanted.numel() and wanted.any():
        assert ((y.double() - wanted).norm() / wanted.norm()).item() < (1e-2 if x.dtype == BF16 else 3e-6)


@DTYPES
@LAYOUTS
@pytest.mark.parametrize(("rows", "heads", "nope", "rank", "dim_v"), [(1, 3, 16, 40, 24), (70, 2, 33, 65, 17)])
def test_both_views_of_one_weight(
    rows: int, heads: int, nope: int, rank: int, dim_v: int, absorb: bool, dtype: torch.dtype
) -> None:
    kv_b = draw(heads, nope + dim_v, rank, dtype=dtype)
    weight = weight_of(kv_b, nope, absorb)
    x = draw(rows, heads, weight.shape[2], dtype=dtype)
    y = run(x, weight)
    assert_right(y, x, weight)
    assert torch.equal(run(x, weight, static_weight=True), y)
    assert torch.equal(run(x, weight.contiguous()), y), "the layout of the weight changes bits"
    # A slice of a wider row, heads first, and one row for all heads.
    wide = torch.full((heads, rows, weight.shape[2] + 5), float("nan"), dtype=dtype, device=DEVICE)
    wide[..., 2:-3] = x.transpose(0, 1)
    assert torch.equal(run(wide[..., 2:-3].transpose(0, 1), weight), y)
    shared = x[:, :1].expand(-1, heads, -1)
    assert torch.equal(run(shared, weight), run(shared.contiguous(), weight))


@pytest.mark.sampled(0)
@LAYOUTS
@pytest.mark.parametrize("config", [c for c in kernel.CONFIGS if CUDA or isinstance(c, kernel.HeadConfig)], ids=str)
def test_every_config_is_right(config: kernel.HeadConfig | kernel.HopperHeads, absorb: bool) -> None:
    # More steps of K than are loaded at once, and fewer. Gluon's kernel needs whole steps and slices. Outputs may end
    # within a slice.
    shapes = [(17, 72, 40, 33)]
    if isinstance(config, kernel.HopperHeads):
        shapes += [(17, 128, 192, 128), (9, 64, 320, 192)]
    elif CUDA or config.AHEAD:
        shapes += [(5, 600, 48, 20)]
    for rows, nope, rank, dim_v in shapes:
        weight = weight_of(draw(2, nope + dim_v, rank, dtype=BF16), nope, absorb)
        x = draw(rows, 2, weight.shape[2], dtype=BF16)
        y = run(x, weight, config=config)
        assert_right(y, x, weight)
        assert torch.equal(y, run(x, weight))


@pytest.mark.parametrize("rows", [1, 17, 70, *(pytest.param(n, marks=pytest.mark.slow) for n in (5, 40, 64, 300))])
def test_long_groups_run_as_one_product(rows: int) -> None:
    """The kernels of `linear` take groups with a long K, with the same bits in every config, and ignore neighbours."""
    x, weight = draw(rows, 3, 1024, dtype=BF16), draw(3, 256, 1024, dtype=BF16)
    assert linear.takes_groups(x, weight)
    y = run(x, weight)
    assert_right(y, x, weight)
    heads = kernel.default_config(rows, 3, 256)
    assert torch.equal(run(x, weight, config=heads), y)
    assert torch.equal(run(x, weight, static_weight=True), y)
    for config in configs_for(rows, 3 * 256):
        if isinstance(config, Stream) or (
            CUDA and isinstance(config, Skinny) and 256 % config.BN + 1024 % config.BK == 0
        ):
            assert torch.equal(linear.linear_groups(x, weight, config=config), y), config
    others = torch.full_like(x, float("nan"))
    others[:, 1] = x[:, 1]
    assert torch.equal(run(others, weight)[:, 1], y[:, 1])


def test_short_or_cut_groups_run_by_head() -> None:
    x, weight = torch.zeros(2, 3, 1024).bfloat16(), torch.zeros(3, 256, 1024).bfloat16()
    assert not linear.takes_groups(x[..., :768], weight[..., :768])
    assert not linear.takes_groups(x, weight[:, :128])
    assert not linear.takes_groups(x[..., :768].contiguous(), weight[..., :768].contiguous())
    assert not linear.takes_groups(x, torch.zeros(3, 264, 1024).bfloat16())


@DTYPES
def test_empty_dimensions(dtype: torch.dtype) -> None:
    x, weight = draw(3, 2, 16, dtype=dtype), draw(2, 5, 16, dtype=dtype)
    assert run(x[:0], weight).shape == (0, 2, 5)
    assert run(x, weight[:, :0]).shape == (3, 2, 0)
    assert run(x[:, :0], weight[:0]).shape == (3, 0, 5)
    assert torch.equal(run(x[..., :0], weight[..., :0]), x.new_zeros(3, 2, 5))


def test_row_ignores_its_neighbours() -> None:
    x, weight = draw(20, 2, 64, dtype=BF16), draw(2, 40, 64, dtype=BF16)
    whole = run(x, weight)
    others = torch.full_like(x, float("nan"))
    others[7, 1] = x[7, 1]
    assert torch.equal(run(others, weight)[7, 1], whole[7, 1])


@DTYPES
@LAYOUTS
def test_reference_rounds_once(absorb: bool, dtype: torch.dtype) -> None:
    weight = weight_of(torch.randn(3, 60, 100).to(dtype), 24, absorb)
    x = torch.randn(5, 3, weight.shape[2]).to(dtype)
    y = ops.head_linear(x, weight)
    assert y.dtype == dtype
    assert y.is_contiguous()
    close = {"rtol": 2.0**-8, "atol": 1e-3} if dtype == BF16 else {"rtol": 1e-5, "atol": 1e-4}
    torch.testing.assert_close(y.double(), torch.einsum("thk,hnk->thn", x.double(), weight.double()), **close)
    assert torch.equal(ops.head_linear(x, weight, static_weight=True), y)


def test_shape_class_rounds_rows_up() -> None:
    assert kernel.shape_class(1, 16, 512, 128, False) == kernel.shape_class(16, 16, 512, 128, False)
    assert kernel.shape_class(17, 16, 128, 512, True) == "M32 H16 N128 K512 rows"
    assert kernel.shape_class(99999, 16, 512, 128, False) == "M4096 H16 N512 K128 columns"


@pytest.mark.parametrize("rows", [1, 16, 17, 64, 65, 512, 513, 5000])
def test_default_config_is_a_candidate(rows: int) -> None:
    for heads in (2, 16, 128):
        assert kernel.default_config(rows, heads, 512) in kernel.configs_for(rows)


def test_hopper_kernel_accepts_shapes_with_descriptors() -> None:
    kv_b, x = torch.zeros(3, 256, 512).bfloat16(), torch.zeros(2, 3, 512).bfloat16()
    narrow, wide = kernel.HopperHeads(BM=8, BN=32), kernel.HopperHeads(BM=64, BN=128)
    expand, absorb, q = kv_b[:, 128:], kv_b[:, :128].transpose(1, 2), x[..., :128]
    assert kernel.suits(narrow, x, expand)
    assert kernel.suits(wide, x, expand)
    assert kernel.suits(wide, q, absorb)
    # Slices of 64 bytes, more than shared memory holds, one row for all heads, half a step, heads of another stride.
    assert not kernel.suits(narrow, q, absorb)
    assert not kernel.suits(kernel.HopperHeads(BM=64, BN=256), x, torch.zeros(3, 256, 512).bfloat16())
    assert not kernel.suits(wide, x[:, :1].expand(-1, 3, -1), expand)
    assert not kernel.suits(wide, x[..., :96], expand[..., :96])
    assert not kernel.suits(wide, x, torch.zeros(3, 520 * 129).bfloat16()[:, : 512 * 128].view(3, 128, 512))


def test_bad_arguments_are_named() -> None:
    x, weight = torch.zeros(4, 2, 8), torch.zeros(2, 6, 8)
    for message, bad_x, bad_weight in (
        (
            r"weight float32 \[3, 6, 8\], expected float32 \[2, N, 8\] for x float32 \[4, 2, 8\]",
            x,
            torch.zeros(3, 6, 8),
        ),
        (
            r"weight float32 \[2, 8, 6\], expected float32 \[2, N, 8\] for x float32 \[4, 2, 8\]",
            x,
            weight.transpose(1, 2),
        ),
        (r"x float32 \[4, 8\], expected float32 or bfloat16 \[T, H, K\]", x[:, 0], weight),
        (r"weight bfloat16 \[2, 6, 8\], expected float32 \[2, N, 8\] for x float32 \[4, 2, 8\]", x, weight.bfloat16()),
        (r"x float16 \[4, 2, 8\], expected float32 or bfloat16 \[T, H, K\]", x.half(), weight.half()),
        (r"strides \(16, 1, 2\) is not contiguous in its last", x.transpose(1, 2).contiguous().transpose(1, 2), weight),
        (r"strides \(96, 16, 2\) is contiguous in none", x, torch.zeros(2, 6, 16)[..., ::2]),
    ):
        with pytest.raises(ValueError, match=rf"^head_linear: .*{message}"):
            ops.head_linear(bad_x, bad_weight)


def test_too_large_grids_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MAX_GRID_X", 3)
    x, weight = draw(1, 2, 16, dtype=FP32), draw(2, 40, 16, dtype=FP32)
    with pytest.raises(ValueError, match=r"head_linear: x \[1, 2, 16\] and weight \[2, 40, 16\] exceed the grid"):
        kernel.head_linear(x, weight)


@pytest.mark.gpu
@LAYOUTS
@pytest.mark.parametrize("model", MODELS, ids=str)
def test_row_alone_equals_the_row_in_any_batch(model: tuple[int, int, int, int], absorb: bool) -> None:
    heads, nope, rank, dim_v = model
    weight = weight_of(draw(heads, nope + dim_v, rank, dtype=BF16), nope, absorb)
    x = draw(1100, heads, weight.shape[2], dtype=BF16)
    whole = run(x, weight)
    assert_right(whole, x, weight)
    for count in (1, 2, 7, 16, 17, 32, 64, 65, 300, 513, 1024):
        for start in (0, 1100 - count):
            part = slice(start, start + count)
            for config in (None, *kernel.CONFIGS) if heads == 16 else (None,):
                y = run(x[part], weight, config=config)
                assert torch.equal(y, whole[part]), f"{count} rows from {start}, {config}"


@pytest.mark.gpu
@LAYOUTS
@pytest.mark.parametrize("static", [False, True], ids=["any", "static"])
@pytest.mark.parametrize("rows", [1, 17, 64, 300])
def test_rows_of_the_launch_before_are_complete(rows: int, static: bool, absorb: bool) -> None:
    weight = weight_of(draw(16, 256, 512, dtype=BF16), 128, absorb)
    x = draw(rows, 16, weight.shape[2], dtype=BF16)
    torch.cuda.synchronize()

    for config in (None, *(c for c in kernel.CONFIGS if isinstance(c, kernel.HopperHeads) and c.BN >= 64)):

        def step(config: kernel.HopperHeads | None = config) -> tuple[torch.Tensor, ...]:
            total = ops.sigmoid_mul(x.flatten(1), x.flatten(1))
            return total, kernel.head_linear(total.view_as(x), weight, static_weight=static, config=config)

        assert_replays(step, lambda: x.copy_(torch.randn_like(x)))
