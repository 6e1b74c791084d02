"""The reduce with the next norm behind it: one launch against the chain, bit for bit, alone and in every batch."""

import pytest
import torch
from tests.kernels.graphs import assert_replays

from moeyard_kernels import ops
from moeyard_kernels.bench.case import assert_bits
from moeyard_kernels.elementwise import rms_norm as norm_kernel
from moeyard_kernels.elementwise import scale_rows
from moeyard_kernels.experts import moe_reduce_add_norm as kernel
from moeyard_kernels.experts import moe_weighted_reduce as reduce_kernel

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
EPS = 1e-6
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
SHARED = pytest.mark.parametrize("with_shared", [False, True], ids=["routed", "shared"])
# Several rows of a program, rows at odd places, one row of a program, experts in two and three parts.
SHAPES = [(37, 3, 48), (5, 8, 300), (2, 8, 2048), (1, 6, 7168), (1, 9, 5120)]


def inputs(num_rows: int, top_k: int, hidden: int, dtype: torch.dtype, *, with_shared: bool = True):  # type: ignore[no-untyped-def]
    """partial, weights, shared, residual, norm on the device."""
    partial, shared, residual, norm = (
        torch.randn(*shape).to(DEVICE, dtype)
        for shape in ((num_rows, top_k, hidden), (num_rows, hidden), (num_rows, hidden), (hidden,))
    )
    return partial, torch.rand(num_rows, top_k, device=DEVICE), shared if with_shared else None, residual, norm


def chain(partial, weights, shared, residual, norm, *, joined: bool = False):  # type: ignore[no-untyped-def]
    reduced = reduce_kernel.moe_weighted_reduce(partial, weights, shared, joined=joined)
    return norm_kernel.add_rms_norm(reduced, residual, norm, EPS)


def run(*args: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel's results, into memory that held NaN before."""
    residual = args[3]
    assert residual is not None
    poison = [torch.full(residual.shape, float("nan"), device=DEVICE) for _ in range(2)]
    del poison
    return kernel.moe_reduce_add_norm(*args, EPS)  # type: ignore[arg-type]


@DTYPES
@SHARED
@pytest.mark.parametrize(("num_rows", "top_k", "hidden"), SHAPES, ids=lambda n: str(n))
def test_one_launch_equals_the_chain(
    num_rows: int, top_k: int, hidden: int, with_shared: bool, dtype: torch.dtype
) -> None:
    args = inputs(num_rows if not GPU else 500, top_k, hidden, dtype, with_shared=with_shared)
    got = run(*args)
    assert_bits("one launch", got, chain(*args))
    last = [None if x is None else x[-1:].clone() for x in args[:4]]
    assert_bits("a row alone", run(*last, args[4]), tuple(x[-1:] for x in got))


@DTYPES
@pytest.mark.parametrize("config", [None, *kernel.CONFIGS], ids=str)
@pytest.mark.parametrize(("num_rows", "top_k", "hidden"), SHAPES, ids=lambda n: str(n))
def test_a_joined_expert_is_the_shared_one(
    num_rows: int, top_k: int, hidden: int, config: kernel.ReduceConfig | None, dtype: torch.dtype
) -> None:
    """Scaled by its weight, rounded, and added behind the routed ones: in one launch, in two and as oracles."""
    partial, weights, _, residual, norm = inputs(num_rows, top_k, hidden, dtype, with_shared=False)
    shared = scale_rows.scale_rows_(partial[:, -1].clone(), weights[:, -1].contiguous())
    routed = partial[:, :-1].contiguous(), weights[:, :-1].contiguous()
    wanted = chain(*routed, shared, residual, norm)
    assert_bits("chain", chain(partial, weights, None, residual, norm, joined=True), wanted)
    got = kernel.moe_reduce_add_norm(partial, weights, None, residual, norm, EPS, joined=True, config=config)
    assert_bits("one launch", got, wanted)
    if config is None:
        on_cpu = [x.cpu() for x in (partial, weights, residual)]
        reduced = ops.moe_weighted_reduce(*on_cpu[:2], joined=True)
        assert torch.equal(reduced, reduce_kernel.moe_weighted_reduce(*routed, shared).cpu())
        with pytest.raises(ValueError, match="joined wants no shared"):
            ops.moe_weighted_reduce(*on_cpu[:2], on_cpu[2], joined=True)


@pytest.mark.parametrize(("num_rows", "top_k", "hidden"), SHAPES[:3], ids=lambda n: str(n))
def test_a_norm_in_fp32_equals_the_chain(num_rows: int, top_k: int, hidden: int) -> None:
    """As in families that store norms less one."""
    *args, norm = inputs(num_rows if not GPU else 500, top_k, hidden, torch.bfloat16)
    fp32 = norm.float() + 0.01
    got = run(*args, fp32)
    assert_bits("one launch", got, chain(*args, fp32))
    assert not torch.equal(got[0], run(*args, fp32.bfloat16())[0])


@pytest.mark.parametrize("config", kernel.CONFIGS, ids=str)
@pytest.mark.parametrize(("top_k", "hidden"), [(1, 2048), (8, 7168), (9, 320)], ids=lambda n: str(n))
def test_every_config_gives_the_same_bits(top_k: int, hidden: int, config: kernel.ReduceConfig) -> None:
    args = inputs(3 if hidden == 320 else 1, top_k, hidden, torch.bfloat16)
    assert_bits(str(config), kernel.moe_reduce_add_norm(*args, EPS, config=config), chain(*args))


@DTYPES
def test_the_oracle_is_the_chain(dtype: torch.dtype) -> None:
    partial, weights, shared, residual, norm = (x.cpu() for x in inputs(6, 4, 24, dtype))
    total = ops.moe_weighted_reduce(partial, weights, shared) + residual
    wanted = ops.rms_norm(total, norm, EPS), total
    assert_bits("oracle", ops.moe_reduce_add_norm(partial, weights, shared, residual, norm, EPS), wanted)


def test_no_rows() -> None:
    assert [x.shape for x in run(*inputs(0, 4, 32, torch.bfloat16))] == [(0, 32), (0, 32)]


@pytest.mark.skipif(not GPU, reason="sizes for a GPU")
@pytest.mark.parametrize(("top_k", "hidden"), [(8, 2048), (8, 4096), (6, 2048), (2, 4096), (8, 7168)])
def test_a_row_is_the_same_in_every_batch(top_k: int, hidden: int) -> None:
    args = inputs(4096, top_k, hidden, torch.bfloat16)
    whole = run(*args)
    assert_bits("chain", whole, chain(*args))
    for rows in (slice(0, 1), slice(17, 18), slice(4095, 4096), slice(100, 163)):
        part = [None if x is None else x[rows].clone() for x in args[:4]]
        assert_bits(f"{rows}", run(*part, args[4]), tuple(x[rows] for x in whole))


@pytest.mark.skipif(not GPU, reason="graphs are a GPU's")
@pytest.mark.parametrize("num_rows", [1, 65])
def test_a_graph_replays_it(num_rows: int) -> None:
    args = inputs(num_rows, 8, 2048, torch.bfloat16)
    assert_replays(
        lambda: ops.moe_reduce_add_norm(*args, EPS), lambda: [x.normal_() for x in args if x is not None]
    )  # fmt: skip


def test_bad_arguments_are_named() -> None:
    partial, weights, shared, residual, norm = (x.cpu() for x in inputs(2, 3, 4, torch.float32))
    for message, given in (
        (r"partial must be fp32 or bf16 \[T, K, H\], got float32", (partial[0], weights, shared, residual, norm)),
        (r"weights float32 \[2, 2\], expected fp32", (partial, weights[:, :2], shared, residual, norm)),
        (r"shared float32 \[1, 4\], expected", (partial, weights, shared[:1], residual, norm)),
        (r"residual float32 \[2, 3\], expected", (partial, weights, None, residual[:, :3], norm)),
        (r"weight float32 \[3\] does not fit x", (partial, weights, None, residual, norm[:3])),
    ):
        with pytest.raises(ValueError, match=f"^moe_reduce_add_norm: {message}"):
            ops.moe_reduce_add_norm(*given, EPS)
    args = inputs(2, 3, 16, torch.float32)
    with pytest.raises(ValueError, match=r"residual float32 \[2, 16\] with strides \(1, 2\) is not contiguous"):
        kernel.moe_reduce_add_norm(*args[:3], args[3].T.contiguous().T, args[4], EPS)
