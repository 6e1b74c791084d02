"""Kernel tests: seeds from the test's name, and a Triton interpreter that rounds and sums as a GPU does."""

import zlib

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

# Where tests of a GPU build most, in seconds of one core with an empty cache: counted by tests whose builds were taken
# down, times what one build of each kernel takes (Triton 3.7.1; 3500 builds of 1800 s in all).
BUILD_SECONDS = {
    "test_mla_decode": 410, "test_gqa_decode": 300, "test_sample": 260, "test_linear": 160, "test_stored_configs": 100,
    "test_rope_cache_write": 100, "test_grouped_gemm": 80, "test_dependent": 60, "test_delta_chunk": 60,
    "test_head_linear": 50, "test_rope_gqa_decode": 45, "test_attn_prefill_varlen": 45, "test_delta_recurrent": 30,
}  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On a GPU the longest first, as they are dealt out to processes: one that begins last is waited for."""
    if torch.cuda.is_available():
        items.sort(key=lambda item: -BUILD_SECONDS.get(item.path.stem, 0))


@pytest.fixture(autouse=True)
def seed_from_name(request: pytest.FixtureRequest) -> None:
    torch.manual_seed(zlib.crc32(request.node.name.encode()))


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def fused_multiply_add(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the interpreter's fp32 `tl.fma` round once, as a GPU's does: triton 3.7 rounds the product too."""
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
def sequential_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the interpreter's products sum over K one after the other, as a GPU's do, whatever the tile.

    numpy's follow the tile with some of OpenBLAS's kernels: its Haswell ones do, which 0.3.31 chooses for an EPYC of
    family 26, its SkylakeX ones do not.
    """

    def create_dot(
        self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, d: TensorHandle, *_: object
    ) -> TensorHandle:
        x, y, acc = a.data.astype(d.data.dtype), b.data.astype(d.data.dtype), d.data.copy()
        for k in range(x.shape[-1]):
            acc += x[..., :, k, None] * y[..., k, None, :]
        return TensorHandle(acc, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
