"""The Triton projections: the same bits for every number of rows and every config, for one weight or a pair.

The interpreter gets small integers, whose sums are exact in any order, so it tests indices and masks. A GPU gets random
inputs, and bits are compared. Configs of `linear_skinny`, which cannot be interpreted, run the kernel for other GPUs on
a CPU.
"""

from collections.abc import Callable

import pytest
import torch

from moeyard_kernels import ops
from moeyard_kernels.common import launch
from moeyard_kernels.linear import linear, linear_skinny
from moeyard_kernels.linear.linear_configs import (
    LinearConfig,
    Skinny,
    Stream,
    Tiles,
    Wide,
    default_config,
    head_and_tail,
)
from moeyard_kernels.linear.linear_schedule import Schedule, schedule

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
BF16, FP32 = torch.bfloat16, torch.float32
DTYPES = pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
COUNTS = (1, 2, 3, 8, 16, 17, 64, 65, 128, 300, 1024)
# N, K of Kimi-K2's q_a and kv_a, q_b and o, and two odd ones.
MODEL_SHAPES = [(2112, 7168), (12288, 1536), (7168, 8192), (5120, 2048), (576, 7168), (257, 200), (100, 72)]


def config_id(config: LinearConfig) -> str:
    return "-".join(f"{name}{value}" for name, value in config.as_dict().items())


def draw(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    if CUDA:
        return torch.randn(*shape, device=DEVICE).to(dtype)
    return torch.randint(-4, 5, shape).to(dtype)


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    y = x.double() @ weight.double().T
    return y if bias is None else y + bias.double()


def assert_right(y: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    """Check that integer sums are exact, and other results near float64."""
    assert y.dtype == dtype
    if not CUDA:
        assert torch.equal(y, wanted.to(dtype))
    elif wanted.numel():
        error = ((y.double() - wanted).norm() / wanted.norm()).item()
        # An fp32 chain of 7168 sums has an error of 1.5e-6.
        assert error < (1e-2 if dtype == BF16 else 3e-6), error


@pytest.mark.sampled(0)
@pytest.mark.parametrize("config", linear.CONFIGS, ids=config_id)
def test_every_config_is_right_at_odd_shapes(config: LinearConfig) -> None:
    dtypes = [FP32, BF16] if config in linear.FP32_CONFIGS else [BF16]
    for dtype in dtypes:
        # The last shape has enough tiles for a tail. In the interpreter the number of programs sets the cost.
        shapes = [(5, 70, 19, 72), (17, 33, 40, 100), (140, 330, 8, 16)]
        for num_rows, num_a, num_b, dim in shapes if CUDA or config.BM > 64 else shapes[:2]:
            x, bias = draw(num_rows, dim, dtype=dtype), draw(num_a, dtype=dtype)
            a, b = draw(num_a, dim, dtype=dtype), draw(num_b, dim, dtype=dtype)
            y = linear.linear(x, a, bias, config=config)
            assert_right(y, exact(x, a, bias), dtype)
            y_a, y_b = linear.linear_pair(x, a, b, config=config)
            assert_right(y_a, exact(x, a), dtype)
            assert_right(y_b, exact(x, b), dtype)


@DTYPES
@pytest.mark.parametrize(("num_rows", "num_out", "dim"), [(1, 24, 16), (70, 130, 65), (130, 40, 128), (65, 1, 33)])
def test_default_config_with_and_without_bias(num_rows: int, num_out: int, dim: int, dtype: torch.dtype) -> None:
    x, weight, bias = draw(num_rows, dim, dtype=dtype), draw(num_out, dim, dtype=dtype), draw(num_out, dtype=dtype)
    y = linear.linear(x, weight)
    assert_right(y, exact(x, weight), dtype)
    assert_right(linear.linear(x, weight, bias), exact(x, weight, bias), dtype)
    y_a, y_b = linear.linear_pair(x, weight, weight[: num_out // 2])
    assert torch.equal(y_a, y)
    assert torch.equal(y_b, y[:, : num_out // 2])


@DTYPES
def test_empty_dimensions(dtype: torch.dtype) -> None:
    x, weight, bias = draw(3, 16, dtype=dtype), draw(5, 16, dtype=dtype), draw(5, dtype=dtype)
    assert linear.linear(x[:0], weight, bias).shape == (0, 5)
    assert linear.linear(x, weight[:0]).shape == (3, 0)
    assert [y.shape for y in linear.linear_pair(x[:0], weight, weight[:2])] == [(0, 5), (0, 2)]
    assert torch.equal(linear.linear_pair(x, weight[:0], weight)[1], linear.linear(x, weight))
    empty = linear.linear(x[:, :0].contiguous(), weight[:, :0].contiguous(), bias)
    assert torch.equal(empty, bias.expand(3, 5))


def test_row_ignores_its_neighbours() -> None:
    x, weight = draw(20, 64, dtype=BF16), draw(40, 64, dtype=BF16)
    whole = linear.linear(x, weight)
    others = torch.full_like(x, float("nan"))
    others[7] = x[7]
    assert torch.equal(linear.linear(others, weight)[7], whole[7])


@pytest.mark.parametrize("kind", [Stream, Skinny, Wide])
def test_misaligned_rows_take_a_kernel_that_can_read_them(kind: type[LinearConfig]) -> None:
    config = next(c for c in linear.CONFIGS if isinstance(c, kind))
    x, weight = draw(40, 60, dtype=BF16), draw(33, 60, dtype=BF16)
    assert_right(linear.linear(x, weight, config=config), exact(x, weight), BF16)
    store = draw(1 + 40 * 64, dtype=BF16)
    x, weight = store[1:].view(40, 64), draw(33, 64, dtype=BF16)
    assert_right(linear.linear(x, weight, config=config), exact(x, weight), BF16)


def cut(whole: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """Return columns of one row: contiguous for torch, with the stride of the whole."""
    part = whole[:, begin:end]
    assert part.is_contiguous()
    assert part.stride(0) == whole.shape[1]
    return part


@pytest.mark.parametrize("kind", [Tiles, Stream, Skinny, Wide])
def test_one_row_of_a_wider_result(kind: type[LinearConfig]) -> None:
    """Kimi Delta Attention cuts its first product so. Its number of columns may be odd, so no stride is aligned."""
    config = next(c for c in linear.CONFIGS if isinstance(c, kind))
    whole, weight = draw(1, 83, dtype=BF16), draw(33, 64, dtype=BF16)
    # The last one's first byte is not at a multiple of 16 either.
    for begin in (0, 8, 3):
        x = cut(whole, begin, begin + 64)
        wanted = exact(x, weight)
        assert_right(linear.linear(x, weight, config=config), wanted, BF16)
        narrow = cut(draw(1, 75, dtype=BF16), 8, 72)
        y_a, y_b = linear.linear_pair(x, narrow, weight, config=config)
        assert_right(y_a, exact(x, narrow), BF16)
        assert_right(y_b, wanted, BF16)


def test_descriptors_of_one_row_in_the_hopper_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel cannot be interpreted, so its launch is recorded. Everything before it is as on a GPU."""
    launches = []

    class Kernel:
        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            return lambda *args, **flags: launches.append(args)

    monkeypatch.setattr(launch, "on_hopper", lambda x: True)
    monkeypatch.setattr(linear_skinny, "linear_skinny_kernel", Kernel())
    config = next(c for c in linear.CONFIGS if isinstance(c, Skinny))
    whole, weight = draw(1, 83, dtype=BF16), draw(33, 64, dtype=BF16)
    x, narrow = cut(whole, 8, 72), cut(whole, 16, 80)
    linear.linear_pair(x, narrow, weight, config=config)
    [(rows, *blocks)] = [[arg for arg in args if hasattr(arg, "block_shape")] for args in launches]
    assert rows.base.data_ptr() == x.data_ptr()
    assert [(*each.shape, *each.strides) for each in (rows, *blocks)] == [(1, 64, 64, 1)] * 3 + [(33, 64, 64, 1)] * 2
    # A row that begins in between does not use this kernel.
    linear.linear(cut(whole, 3, 67), weight, config=config)
    linear.linear(x, draw(33 * 64 + 1, dtype=BF16)[1:].view(33, 64), config=config)
    assert len(launches) == 1


def test_reference_rounds_once() -> None:
    x, weight, bias = torch.randn(5, 300).bfloat16(), torch.randn(70, 300).bfloat16(), torch.randn(70).bfloat16()
    y = ops.linear(x, weight, bias)
    torch.testing.assert_close(y.double(), exact(x, weight, bias), rtol=2.0**-8, atol=1e-3)
    y_a, y_b = ops.linear_pair(x, weight, weight[:17], static_weight=True)
    assert torch.equal(y_a, ops.linear(x, weight))
    assert torch.equal(y_b, ops.linear(x, weight[:17]))
    assert ops.linear(x[:0], weight, bias).shape == (0, 70)


def test_bad_arguments_are_named() -> None:
    x, weight = torch.zeros(2, 3), torch.zeros(4, 3)
    with pytest.raises(ValueError, match=r"weight float32 \[4, 5\], expected float32 \[N, 3\] for x float32 \[2, 3\]"):
        ops.linear(x, torch.zeros(4, 5))
    with pytest.raises(ValueError, match=r"weight bfloat16 \[4, 3\], expected float32 \[N, 3\] for x float32 \[2, 3\]"):
        ops.linear(x, weight.bfloat16())
    with pytest.raises(ValueError, match=r"bias float32 \[3\], expected float32 \[4\] for weight float32 \[4, 3\]"):
        ops.linear(x, weight, torch.zeros(3))
    # A product with a weight on meta would not fail: its result would be whatever the allocator left.
    with pytest.raises(ValueError, match=r"linear: weight is on meta, x on cpu"):
        ops.linear(x, weight.to("meta"))
    with pytest.raises(ValueError, match=r"linear: bias is on meta, x on cpu"):
        ops.linear(x, weight, torch.zeros(4, device="meta"))
    with pytest.raises(ValueError, match=r"linear_pair: weight_b is on meta, x on cpu"):
        ops.linear_pair(x, weight, weight.to("meta"))
    with pytest.raises(
        ValueError, match=r"linear_pair: weight_b float32 \[17, 2\], expected float32 \[Nb, 3\] for x float32 \[2, 3\]"
    ):
        ops.linear_pair(x, weight, torch.zeros(17, 2))


def test_layouts_are_checked_before_any_launch() -> None:
    x, weight = draw(4, 8, dtype=FP32), draw(6, 8, dtype=FP32)
    with pytest.raises(ValueError, match=r"linear: weight float32 \[6, 8\] with strides \(1, 6\) is not contiguous"):
        linear.linear(x, weight.T.contiguous().T)
    with pytest.raises(ValueError, match=r"linear: weight_b float32 \[3, 8\] with strides \(16, 1\) is not contiguous"):
        linear.linear_pair(x, weight, weight[::2])


def test_shape_class_rounds_rows_up() -> None:
    assert linear.shape_class(1, 7168, 2112) == "M1 N2112 K7168"
    assert linear.shape_class(2, 7168, 2112) == linear.shape_class(8, 7168, 2112) == "M8 N2112 K7168"
    assert linear.shape_class(9, 7168, 1536, 576) == "M16 N1536+576 K7168"
    assert linear.shape_class(100_000, 6, 5) == "M8192 N5 K6"


def test_untuned_shapes_take_tiles_of_one_wave_if_possible() -> None:
    # Slices are as narrow as 132 multiprocessors need, and 64 columns wide if there are many.
    assert [default_config(8, columns).BN for columns in (2112, 2113, 4223, 4224)] == [16, 32, 32, 64]
    assert {(default_config(rows, 2304).BM, default_config(rows, 2304).BN) for rows in (16, 33)} == {(16, 32), (64, 32)}
    # The smallest tiles with at most 132 of them.
    shapes = ((128, 2112), (256, 2048), (512, 2048), (512, 2112), (1024, 2048), (512, 7168))
    tiles = [(64, 32), (64, 64), (64, 128), (128, 64), (128, 128), (128, 256)]
    assert [(c.BM, c.BN) for c in (default_config(*shape) for shape in shapes)] == tiles
    assert default_config(1024, 128) == default_config(256, 64) == default_config(65, 1024)
    # Two tiles of 128 x 80 share a multiprocessor. 396 tiles of 128 x 128 are three waves, and 200 of 128 x 256 two.
    assert [default_config(512, columns).BN for columns in (5120, 5632, 12576)] == [80, 256, 128]
    # 160 tiles of 128 x 256 are two waves of 132 multiprocessors, and 128 of 128 x 320 are one.
    assert default_config(1024, 5120).BN == 320
    assert default_config(1024, 7168).BN == 256
    assert default_config(1024, 2560, 2560).BN == 256
    assert default_config(8500, 300).BN == 256
    assert default_config(64, 2112).BN < default_config(64, 7168).BN


def test_tile_is_the_sum_of_two_powers_of_two() -> None:
    assert [head_and_tail(columns) for columns in (16, 40, 48, 320)] == [(16, 0), (32, 8), (32, 16), (256, 64)]
    with pytest.raises(ValueError, match="56 columns"):
        head_and_tail(56)


def test_skinny_configs_satisfy_their_kernel() -> None:
    for config in (c for c in linear.CONFIGS if isinstance(c, Skinny)):
        head, tail = head_and_tail(config.BN)
        assert 1 <= config.EARLY <= config.num_stages
        assert config.BM in (8, 16, 32, 64)
        assert head >= 8
        assert tail == 0 or tail >= 8
        assert config.BK % linear_skinny.COLUMNS == 0


@pytest.mark.parametrize("tail_cost", [0.5, 0.73])
def test_schedule_covers_every_column_once(tail_cost: float) -> None:
    for num_rows, num_out in [(1, 1), (1024, 2112), (4096, 2112), (1024, 5120), (300, 700)]:
        plan = schedule(num_rows, num_out, main=(128, 256), tail=(256, 64), tail_cost=tail_cost, programs=132)
        assert plan.cut == num_out or (plan.cut % 256 == 0 and plan.cut < num_out and plan.repeat >= 1)
    # 256 main tiles leave 8 of 132 programs with one less. These share the 16 tiles of the last 64 columns.
    assert schedule(4096, 2112, main=(128, 256), tail=(256, 64), tail_cost=0.6, programs=132) == Schedule(2048, 2)
    assert schedule(4096, 7168, main=(128, 256), tail=(256, 64), tail_cost=0.6, programs=132) == Schedule(7168, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", MODEL_SHAPES, ids=str)
def test_row_alone_equals_the_row_in_any_batch(shape: tuple[int, int]) -> None:
    num_out, dim = shape
    x, weight = draw(4096, dim, dtype=BF16), draw(num_out, dim, dtype=BF16)
    whole = linear.linear(x, weight)
    assert_right(whole, exact(x, weight), BF16)
    for count in COUNTS:
        for start in (0, 4096 - count):
            part = linear.linear(x[start : start + count], weight)
            assert torch.equal(part, whole[start : start + count]), f"{count} rows from {start}"


@pytest.mark.gpu
@pytest.mark.parametrize("config", linear.CONFIGS, ids=config_id)
def test_every_config_gives_the_same_bits(config: LinearConfig) -> None:
    for num_out, dim in MODEL_SHAPES:
        x, weight, bias = draw(300, dim, dtype=BF16), draw(num_out, dim, dtype=BF16), draw(num_out, dtype=BF16)
        half = num_out // 2
        biased, plain = linear.linear(x, weight, bias), linear.linear(x, weight)
        for count in (1, 16, 64, 300):
            what = f"{count} rows, {num_out} x {dim}"
            assert torch.equal(linear.linear(x[:count], weight, bias, config=config), biased[:count]), what
            y_a, y_b = linear.linear_pair(x[:count], weight[:half], weight[half:], config=config)
            assert torch.equal(y_a, plain[:count, :half]), what
            assert torch.equal(y_b, plain[:count, half:]), what


@pytest.mark.gpu
@pytest.mark.parametrize(("num_out", "dim"), [(256, 7168), (100, 300)])
def test_fp32_rows_and_configs_are_equal(num_out: int, dim: int) -> None:
    x, weight = draw(300, dim, dtype=FP32), draw(num_out, dim, dtype=FP32)
    wanted = linear.linear(x, weight)
    assert_right(wanted, exact(x, weight), FP32)
    for count in (1, 2, 17, 64, 65, 300):
        for config in (None, *linear.FP32_CONFIGS):
            assert torch.equal(linear.linear(x[:count], weight, config=config), wanted[:count]), f"{count}, {config}"


@pytest.mark.gpu
@pytest.mark.parametrize("shape", MODEL_SHAPES, ids=str)
def test_no_worse_than_torch(shape: tuple[int, int]) -> None:
    x, weight = draw(64, shape[1], dtype=BF16), draw(*shape, dtype=BF16)
    wanted = exact(x, weight)
    ours, torchs = ((y.double() - wanted).norm() for y in (linear.linear(x, weight), x @ weight.T))
    # Both round an fp32 sum once. Another order of that sum changes the norm of 100 k errors by less than this.
    assert ours <= torchs * 1.01


@pytest.mark.gpu
def test_graph_replay() -> None:
    x, weight = draw(8, 256, dtype=BF16), draw(96, 256, dtype=BF16)
    for config in (None, *linear.CONFIGS):
        linear.linear_pair(x, weight, weight, config=config)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y, _ = linear.linear_pair(x, weight, weight, config=config)
        x.copy_(draw(8, 256, dtype=BF16))
        graph.replay()
        assert torch.equal(y, linear.linear(x, weight))


@pytest.mark.gpu
def test_op_runs_the_triton_kernel() -> None:
    x, weight = draw(8, 256, dtype=BF16), draw(96, 256, dtype=BF16)
    with launch.checked():
        assert torch.equal(ops.linear(x, weight), linear.linear(x, weight))


@pytest.mark.sampled(0)
@pytest.mark.parametrize("config", [c for c in linear.CONFIGS if c not in linear.FP32_CONFIGS], ids=config_id)
def test_fp32_results_are_the_sums_before_rounding(config: LinearConfig) -> None:
    """DeepSeek's gate needs such logits. Rounded, they equal the bf16 results."""
    x, weight = draw(5, 64, dtype=BF16), draw(40, 64, dtype=BF16)
    y = linear.linear(x, weight, out_dtype=FP32, config=config)
    assert y.dtype == FP32
    assert torch.equal(y.to(BF16), linear.linear(x, weight, config=config))
    assert (y.double() - exact(x, weight)).abs().max() < 1e-4
    assert torch.equal(ops.linear(x.cpu(), weight.cpu(), out_dtype=FP32).to(BF16), ops.linear(x.cpu(), weight.cpu()))
    half = weight[: weight.shape[0] // 2].contiguous()
    for both, one in zip(linear.linear_pair(x, weight, half, out_dtype=FP32), (weight, half), strict=True):
        assert torch.equal(both, linear.linear(x, one, out_dtype=FP32))
    with pytest.raises(ValueError, match=r"out_dtype torch\.bfloat16, x\.dtype torch\.float32"):
        ops.linear(x.float(), weight.float(), out_dtype=BF16)
    with pytest.raises(ValueError, match=r"linear_pair: out_dtype torch\.bfloat16, x\.dtype torch\.float32"):
        ops.linear_pair(x.float(), weight.float(), half.float(), out_dtype=BF16)
