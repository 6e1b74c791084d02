"""The gated activation against its formula, and row by row."""

import pytest
import torch
import torch.nn.functional as F

from moeyard_kernels import ops


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("dim", [1, 5, 16, 33, 47, 512])
def test_values_and_rows(dim: int, dtype: torch.dtype) -> None:
    x = (torch.randn(70, 2 * dim) * 4).to(dtype)
    whole = ops.silu_mul(x)
    assert whole.dtype == dtype
    gate, up = x[:, :dim], x[:, dim:]
    exact = (F.silu(gate.double()).to(dtype) * up).double()
    torch.testing.assert_close(whole.double(), exact, rtol=2.0**-7 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)
    for count in (1, 2, 3, 16, 31, 69):
        for start in (0, 70 - count):
            assert torch.equal(ops.silu_mul(x[start : start + count].clone()), whole[start : start + count])
    assert ops.silu_mul(x[:0]).shape == (0, dim)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"gate_up must be \[M, 2 I\], got float32 \[2, 5\]"):
        ops.silu_mul(torch.zeros(2, 5))
