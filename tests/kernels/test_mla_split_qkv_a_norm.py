"""The split of latent attention's down projection: one launch equals norms and a copy, bit for bit."""

import pytest
import torch
from tests.kernels.graphs import assert_replays

from moeyard_kernels import ops
from moeyard_kernels.elementwise import mla_split_qkv_a_norm as triton_kernel
from moeyard_kernels.elementwise import rms_norm as norm_kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
ROWS = 3 if DEVICE == "cpu" else 4096


def run_kernel(x: torch.Tensor, q_weight: torch.Tensor, kv_weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return triton_kernel.mla_split_qkv_a_norm(x, q_weight, kv_weight, 1e-6)


@DTYPES
@pytest.mark.parametrize(("q", "kv", "rope"), [(1536, 512, 64), (40, 129, 10), (1, 7, 1)], ids=lambda n: str(n))
def test_equals_the_three_launches(q: int, kv: int, rope: int, dtype: torch.dtype) -> None:
    x = torch.randn(ROWS, q + kv + rope).to(DEVICE, dtype)
    q_weight, kv_weight = torch.randn(q).to(DEVICE, dtype), torch.randn(kv).to(DEVICE, dtype)
    fused = run_kernel(x, q_weight, kv_weight)
    assert torch.equal(fused[0], norm_kernel.rms_norm(x[:, :q], q_weight, 1e-6))
    assert torch.equal(fused[1], norm_kernel.rms_norm(x[:, q : q + kv], kv_weight, 1e-6))
    assert torch.equal(fused[2], x[:, q + kv :])
    assert all(part.is_contiguous() and part.dtype == dtype for part in fused)
    last = run_kernel(torch.nn.functional.pad(x, (0, 3))[-1:, : x.shape[1]], q_weight, kv_weight)
    assert all(torch.equal(alone, part[-1:]) for alone, part in zip(last, fused, strict=True))
    for some in [slice(1, 2)] if DEVICE == "cpu" else [slice(0, 1), slice(17, 18), slice(100, 164), slice(2000, 3025)]:
        few = run_kernel(x[some].clone(), q_weight, kv_weight)
        assert all(torch.equal(alone, part[some]) for alone, part in zip(few, fused, strict=True)), some
    assert [part.shape for part in run_kernel(x[:0], q_weight, kv_weight)] == [(0, q), (0, kv), (0, rope)]


@DTYPES
def test_reference_is_two_norms_and_a_copy(dtype: torch.dtype) -> None:
    x, q_weight, kv_weight = torch.randn(5, 50).to(dtype), torch.randn(24).to(dtype), torch.randn(16).to(dtype)
    q_a, kv_a, k_rope = ops.mla_split_qkv_a_norm(x, q_weight, kv_weight, 1e-6)
    assert torch.equal(q_a, ops.rms_norm(x[:, :24], q_weight, 1e-6))
    assert torch.equal(kv_a, ops.rms_norm(x[:, 24:40], kv_weight, 1e-6))
    assert torch.equal(k_rope, x[:, 40:])


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 65])
def test_graph_replay(num_rows: int) -> None:
    x, q_weight, kv_weight = (
        torch.randn(*shape, device=DEVICE).bfloat16() for shape in ((num_rows, 2112), (1536,), (512,))
    )
    assert_replays(
        lambda: ops.mla_split_qkv_a_norm(x, q_weight, kv_weight, 1e-6), lambda: (x.normal_(), q_weight.normal_())
    )


def test_bad_arguments_are_named() -> None:
    x, w = torch.zeros(2, 12), torch.zeros(6)
    with pytest.raises(
        ValueError, match=r"Rq 6 of q_weight float32 \[6\], R 6 of kv_weight float32 \[6\], W 12 of qkv_a float32"
    ):
        ops.mla_split_qkv_a_norm(x, w, w, 1e-6)
    with pytest.raises(
        ValueError, match=r"kv_weight bfloat16 \[6\], expected float32 \[R\] for qkv_a float32 \[2, 12\]"
    ):
        ops.mla_split_qkv_a_norm(x, w, w.bfloat16(), 1e-6)
    with pytest.raises(ValueError, match=r"qkv_a float32 \[12\], expected float32 or bfloat16 \[T, W\]"):
        ops.mla_split_qkv_a_norm(x[0], w, w, 1e-6)
    with pytest.raises(
        ValueError, match=r"qkv_a float32 \[12, 2\] with strides \(1, 12\) is not contiguous in its last"
    ):
        triton_kernel.mla_split_qkv_a_norm(x.T, w[:1], w[:0], 1e-6)
