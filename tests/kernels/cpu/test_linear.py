"""Linear layers: a row's bits do not depend on the number of rows, its place or its neighbours."""

import pytest
import torch

from moeyard_kernels.cpu.linear import linear, pack_weight, padded_rows

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
PACKED = pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
COUNTS = (1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 31, 48, 65, 100)


@PACKED
@DTYPES
@pytest.mark.parametrize(
    ("k", "n"),
    [
        (16, 8),
        (24, 33),
        (65, 9),
        (18, 11),
        (100, 64),
        (257, 255),
        (512, 512),
        (768, 16),
        (1408, 100),
        (2048, 256),
        (7168, 33),
    ],
    ids=lambda v: str(v),
)
def test_rows_are_independent(k: int, n: int, dtype: torch.dtype, packed: bool) -> None:
    x, weight, bias = torch.randn(160, k).to(dtype), torch.randn(n, k).to(dtype), torch.randn(n).to(dtype)
    weight = pack_weight(weight) if packed else weight
    whole = linear(x, weight, bias)
    for count in COUNTS:
        for start in (0, 1, 23, 160 - count):
            part = linear(x[start : start + count].contiguous(), weight, bias)
            assert torch.equal(part, whole[start : start + count]), f"{count} rows from {start}"
    other = torch.full_like(x, 3.0)
    other[7] = x[7]
    assert torch.equal(linear(other[:9].contiguous(), weight, bias)[7], whole[7])


@PACKED
@DTYPES
def test_values(dtype: torch.dtype, packed: bool) -> None:
    x, weight, bias = torch.randn(5, 300).to(dtype), torch.randn(70, 300).to(dtype), torch.randn(70).to(dtype)
    exact = x.double() @ weight.double().T
    weight = pack_weight(weight) if packed else weight
    # bf16 accumulates in fp32 and rounds once: half a unit of 2^-8.
    close = {"rtol": 2.0**-8, "atol": 1e-3} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-4}
    y = linear(x, weight)
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), exact, **close)
    torch.testing.assert_close(linear(x, weight, bias).double(), exact + bias.double(), **close)
    assert linear(x[:0], weight, bias).shape == (0, 70)


def test_packed_weight_keeps_shape_and_dtype() -> None:
    packed = pack_weight(torch.zeros(6, 4, dtype=torch.bfloat16))
    assert packed.shape == (6, 4)
    assert packed.dtype == torch.bfloat16


@DTYPES
def test_padded_step_is_not_copied_again(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = pack_weight(torch.randn(24, 16).to(dtype))
    monkeypatch.setattr(torch.Tensor, "new_zeros", None)
    for count in (1, 2, 5, 16, 17, 100, 1000):
        rows = padded_rows(count)
        assert rows >= max(count, 2)
        assert linear(torch.randn(rows, 16).to(dtype), weight).shape == (rows, 24)
    assert padded_rows(0) == 0
