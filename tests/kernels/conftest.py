"""Set-up of kernel tests: seeds from test names, and a Triton interpreter that rounds and sums like a GPU."""

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

# Seconds of one core that a GPU test's kernels need to build with an empty cache, for the slowest files. They are the
# number of builds that the tests request, times the seconds of one build (Triton 3.7.1: 3500 builds, 1800 s in all).
BUILD_SECONDS = {
    "test_mla_decode": 410,
    "test_gqa_decode": 300,
    "test_sample": 260,
    "test_linear": 160,
    "test_stored_configs": 100,
    "test_rope_cache_write": 100,
    "test_grouped_gemm": 80,
    "test_dependent": 60,
    "test_delta_chunk": 60,
    "test_head_linear": 50,
    "test_rope_gqa_decode": 45,
    "test_attn_prefill_varlen": 45,
    "test_delta_recurrent": 30,
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest files first on a GPU, because the last test to start delays the end of a parallel run."""
    if torch.cuda.is_available():
        items.sort(key=lambda item: -BUILD_SECONDS.get(item.path.stem, 0))


@pytest.fixture(autouse=True)
def seed_from_name(request: pytest.FixtureRequest) -> None:
    torch.manual_seed(zlib.crc32(request.node.name.encode()))


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill memory that torch allocates: an output that no kernel wrote is NaN, or -77 for integers."""
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


def poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return an allocating function that also fills the memory, except within a capture, which would record it."""

    def filled(*args: Any, **kwargs: Any) -> torch.Tensor:
        memory = allocate(*args, **kwargs)
        if memory.is_cuda and torch.cuda.is_current_stream_capturing():
            return memory
        if memory.is_floating_point():
            return memory.fill_(float("nan"))
        return memory if memory.dtype in (torch.bool, torch.uint8) else memory.fill_(-77)

    return filled


@pytest.fixture(autouse=True)
def fused_multiply_add(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the interpreter's fp32 `tl.fma` round once, as on a GPU. Triton 3.7 also rounds the product."""
    rounds_twice = InterpreterBuilder.create_fma

    def create_fma(self: InterpreterBuilder, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
        if z.data.dtype != np.float32:
            return rounds_twice(self, x, y, z)
        p, c = x.data.astype(np.float64) * y.data.astype(np.float64), z.data.astype(np.float64)
        s = p + c
        t = s - p
        error = (p - (s - t)) + (c - t)
        # Round the fp64 sum to odd, then to fp32.
        outward = np.nan_to_num(np.where(s > 0, np.sign(error), -np.sign(error))).astype(np.int64)
        bits = s.view(np.int64)
        bits = bits + outward * (1 - (bits & 1))
        return TensorHandle(bits.view(np.float64).astype(np.float32), z.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_fma", create_fma)


@pytest.fixture(autouse=True)
def comparisons_are_booleans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give comparisons of scalars the type that Triton 3.9's interpreter asks of masks; it keeps the operands' type."""
    operate = InterpreterBuilder.binary_op

    def binary_op(self: InterpreterBuilder, lhs: TensorHandle, rhs: TensorHandle, op: object) -> TensorHandle:
        found = operate(self, lhs, rhs, op)
        return TensorHandle(found.data, tl.int1) if found.data.dtype == np.bool_ else found

    monkeypatch.setattr(InterpreterBuilder, "binary_op", binary_op)


def sum_in_order(x: np.ndarray, y: np.ndarray, acc: np.ndarray) -> np.ndarray:
    """Return acc [M, N] + x [M, K] @ y [K, N], summed in the order of K with rounding after each product."""
    if acc.ndim == 2 and acc.size <= 2048:
        # numpy adds along the first axis in order, which is four times as fast for small products.
        products = np.empty((x.shape[1] + 1, *acc.shape), acc.dtype)
        products[0] = acc
        np.multiply(x.T[:, :, None], y[:, None, :], out=products[1:])
        return np.add.reduce(products, axis=0)
    acc = acc.copy()
    for k in range(x.shape[-1]):
        acc += x[..., :, k, None] * y[..., k, None, :]
    return acc


@pytest.fixture(autouse=True)
def sequential_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the interpreter's products sum over K in order, like a GPU, for every tile.

    numpy's sums depend on the tile with some OpenBLAS kernels: with the Haswell kernels, which 0.3.31 chooses for an
    EPYC of family 26, but not with the SkylakeX kernels.
    """

    def create_dot(
        self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, d: TensorHandle, *_: object
    ) -> TensorHandle:
        return TensorHandle(
            sum_in_order(a.data.astype(d.data.dtype), b.data.astype(d.data.dtype), d.data), d.dtype.scalar
        )

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
