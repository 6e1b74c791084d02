"""RMS normalisation against the Hugging Face modules, and row by row."""

import pytest
import torch
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm
from transformers.models.mixtral.modeling_mixtral import MixtralRMSNorm

from moeyard_kernels import ops

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@DTYPES
@pytest.mark.parametrize("dim", [1, 7, 64, 129, 512])
@pytest.mark.parametrize("module", [MixtralRMSNorm, DeepseekV3RMSNorm])
@torch.no_grad()
def test_equals_the_module(module: type[torch.nn.Module], dim: int, dtype: torch.dtype) -> None:
    norm = module(dim, eps=1e-5).to(dtype)
    norm.weight.copy_(torch.randn(dim))
    x, residual = torch.randn(6, 3, dim).to(dtype), torch.randn(6, 3, dim).to(dtype)
    before = x.clone()
    assert torch.equal(ops.rms_norm(x, norm.weight, 1e-5), norm(x))
    normed, total = ops.add_rms_norm(x, residual, norm.weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, norm(x + residual))
    assert torch.equal(x, before), "the input was written to"


@DTYPES
@pytest.mark.parametrize("dim", [5, 64, 511, 512, 7168])
def test_rows_are_independent(dim: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(70, dim).to(dtype), torch.randn(dim).to(dtype)
    whole = ops.rms_norm(x, weight, 1e-6)
    for count in (1, 2, 3, 16, 33, 69):
        for start in (0, 70 - count):
            part = ops.rms_norm(x[start : start + count].clone(), weight, 1e-6)
            assert torch.equal(part, whole[start : start + count])
    assert ops.rms_norm(x[:0], weight, 1e-6).shape == (0, dim)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"rms_norm: weight float32 \[3\] does not fit x float32 \[2, 4\]"):
        ops.rms_norm(torch.zeros(2, 4), torch.zeros(3), 1e-6)
    with pytest.raises(ValueError, match=r"x torch.float32 and weight torch.bfloat16 must share a dtype"):
        ops.rms_norm(torch.zeros(2, 4), torch.zeros(4).bfloat16(), 1e-6)
    with pytest.raises(ValueError, match=r"residual float32 \[1, 4\] is not like x float32 \[2, 4\]"):
        ops.add_rms_norm(torch.zeros(2, 4), torch.zeros(1, 4), torch.zeros(4), 1e-6)
