"""The reduce with the next norm: one launch equals the chain, bit for bit, alone and in every batch."""

import pytest
import torch
from kernel_cases.case import assert_bits
from tests.kernels.graphs import assert_replays

from moeyard_kernels import ops
from moeyard_kernels.elementwise import rms_norm as norm_kernel
from moeyard_kernels.elementwise.scale_rows import scale_rows_
from moeyard_kernels.experts import moe_reduce_add_norm as kernel
from moeyard_kernels.experts import moe_weighted_reduce as reduce_kernel

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
EPS = 1e-6
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
SHARED = pytest.mark.parametrize("with_shared", [False, True], ids=["routed", "shared"])
# Several rows per program, rows at odd places, one row per program, experts in two and three parts.
SHAPES = [(37, 3, 48), (5, 8, 300), (2, 8, 2048), (1, 6, 7168), (1, 9, 5120)]


def inputs(num_rows: int, top_k: int, hidden: int, dtype: torch.dtype, *, with_shared: bool = True):  # type: ignore[no-untyped-def]
    """Return partial, weights, shared, residual and norm on the device."""
    partial, shared, residual, norm = (
        torch.randn(*shape).to(DEVICE, dtype)
        for shape in ((num_rows, top_k, hidden), (num_rows, hidden), (num_rows, hidden), (hidden,))
    )
    return partial, torch.rand(num_rows, top_k, device=DEVICE), shared if with_shared else None, residual, norm


def chain(partial, weights, shared, residual, norm):  # type: ignore[no-untyped-def]
    return norm_kernel.add_rms_norm(reduce_kernel.moe_weighted_reduce(partial, weights, shared), residual, norm, EPS)


def run(*args: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the kernel's results, written into poisoned memory."""
    residual = args[3]
    assert residual is not None
    return kernel.moe_reduce_add_norm(*args, EPS)  # type: ignore[arg-type]


@pytest.mark.sampled(1)
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


@pytest.mark.parametrize(("num_rows", "top_k", "hidden"), SHAPES[:3], ids=lambda n: str(n))
def test_a_norm_in_fp32_equals_the_chain(num_rows: int, top_k: int, hidden: int) -> None:
    """Families that store norms minus one have such a weight."""
    *args, norm = inputs(num_rows if not GPU else 500, top_k, hidden, torch.bfloat16)
    fp32 = norm.float() + 0.01
    got = run(*args, fp32)
    assert_bits("one launch", got, chain(*args, fp32))
    assert not torch.equal(got[0], run(*args, fp32.bfloat16())[0])


@pytest.mark.sampled(0)
@pytest.mark.parametrize("config", kernel.CONFIGS, ids=str)
@pytest.mark.parametrize(("top_k", "hidden"), [(1, 2048), (8, 7168), (9, 320)], ids=lambda n: str(n))
def test_every_config_gives_the_same_bits(top_k: int, hidden: int, config: kernel.ReduceConfig) -> None:
    args = inputs(3 if hidden == 320 else 1, top_k, hidden, torch.bfloat16)
    assert_bits(str(config), kernel.moe_reduce_add_norm(*args, EPS, config=config), chain(*args))


@DTYPES
def test_reference_is_the_chain(dtype: torch.dtype) -> None:
    partial, weights, shared, residual, norm = (x.cpu() for x in inputs(6, 4, 24, dtype))
    total = ops.moe_weighted_reduce(partial, weights, shared) + residual
    wanted = ops.rms_norm(total, norm, EPS), total
    assert_bits("reference", ops.moe_reduce_add_norm(partial, weights, shared, residual, norm, EPS), wanted)


def test_no_rows() -> None:
    assert [x.shape for x in run(*inputs(0, 4, 32, torch.bfloat16))] == [(0, 32), (0, 32)]


@pytest.mark.sampled(1)
@DTYPES
@pytest.mark.parametrize("gate_dtype", [torch.float32, torch.bfloat16], ids=["gate fp32", "gate bf16"])
@pytest.mark.parametrize(("num_rows", "top_k", "hidden"), [*SHAPES[:4], (37, 2, 32)], ids=lambda n: str(n))
def test_shared_gate_equals_a_separate_launch(
    num_rows: int, top_k: int, hidden: int, gate_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    """The gate is a column of the router's logits, whose rows are longer."""
    partial, weights, shared, residual, norm = inputs(num_rows if not GPU else 500, top_k, hidden, dtype)
    logits = (torch.randn(partial.shape[0], 24, device=DEVICE) * 4).to(gate_dtype)
    logits[0] = 200.0
    gate = logits[:, 17]
    unscaled = shared.clone()
    got = kernel.moe_reduce_add_norm(partial, weights, shared, residual, norm, EPS, shared_gate=gate)
    assert torch.equal(shared, unscaled)
    gated = scale_rows_(shared, gate.contiguous(), sigmoid=True)
    wanted = chain(partial, weights, gated, residual, norm)
    assert_bits("one launch", got, wanted)
    for config in kernel.CONFIGS if hidden <= 300 else ():
        args = partial, weights, unscaled, residual, norm, EPS
        assert_bits(str(config), kernel.moe_reduce_add_norm(*args, shared_gate=gate, config=config), wanted)
    alone = (x[-1:].clone() for x in (partial, weights, unscaled, residual))
    last = kernel.moe_reduce_add_norm(*alone, norm, EPS, shared_gate=gate[-1:])
    assert_bits("a row alone", last, tuple(x[-1:] for x in wanted))
    on_cpu = [x.cpu() for x in (partial, weights, unscaled, residual, norm)]
    reference = ops.moe_reduce_add_norm(*on_cpu, EPS, shared_gate=gate.cpu())
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for x, y in zip(got, reference, strict=True):
        torch.testing.assert_close(x.cpu(), y, **tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize(("top_k", "hidden"), [(8, 2048), (8, 4096), (6, 2048), (2, 4096), (8, 7168)])
def test_row_is_the_same_in_every_batch(top_k: int, hidden: int) -> None:
    args = inputs(4096, top_k, hidden, torch.bfloat16)
    whole = run(*args)
    assert_bits("chain", whole, chain(*args))
    for rows in (slice(0, 1), slice(17, 18), slice(4095, 4096), slice(100, 163)):
        part = [None if x is None else x[rows].clone() for x in args[:4]]
        assert_bits(f"{rows}", run(*part, args[4]), tuple(x[rows] for x in whole))


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 65])
def test_graph_replay(num_rows: int) -> None:
    args = inputs(num_rows, 8, 2048, torch.bfloat16)
    assert_replays(lambda: ops.moe_reduce_add_norm(*args, EPS), lambda: [x.normal_() for x in args if x is not None])


def test_bad_arguments_are_named() -> None:
    partial, weights, shared, residual, norm = (x.cpu() for x in inputs(2, 3, 4, torch.float32))
    for message, given in (
        (
            r"partial float32 \[3, 4\], expected float32 or bfloat16 \[T, K, H\]",
            (partial[0], weights, shared, residual, norm),
        ),
        (
            r"weights float32 \[2, 2\], expected float32 \[2, 3\] for partial float32 \[2, 3, 4\]",
            (partial, weights[:, :2], shared, residual, norm),
        ),
        (r"shared float32 \[1, 4\], expected", (partial, weights, shared[:1], residual, norm)),
        (r"residual float32 \[2, 3\], expected", (partial, weights, None, residual[:, :3], norm)),
        (
            r"norm float32 \[3\], expected float32 \[4\] for partial float32 \[2, 3, 4\]",
            (partial, weights, None, residual, norm[:3]),
        ),
    ):
        with pytest.raises(ValueError, match=f"^moe_reduce_add_norm: {message}"):
            ops.moe_reduce_add_norm(*given, EPS)
    for message, gate in (
        (r"shared_gate float32 \[1\]", torch.zeros(1)),
        (r"shared_gate int64 \[2\], expected float32 or bfloat16 \[2\]", torch.zeros(2, dtype=torch.int64)),
    ):
        with pytest.raises(ValueError, match=f"^moe_reduce_add_norm: {message}"):
            ops.moe_reduce_add_norm(partial, weights, shared, residual, norm, EPS, shared_gate=gate)
    with pytest.raises(ValueError, match=r"shared_gate float32 \[2\], shared None"):
        ops.moe_reduce_add_norm(partial, weights, None, residual, norm, EPS, shared_gate=torch.zeros(2))
    args = inputs(2, 3, 16, torch.float32)
    with pytest.raises(ValueError, match=r"residual float32 \[2, 16\] with strides \(1, 2\) is not contiguous"):
        kernel.moe_reduce_add_norm(*args[:3], args[3].T.contiguous().T, args[4], EPS)
