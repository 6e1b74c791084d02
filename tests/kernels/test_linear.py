"""Linear layers: a row's bits do not depend on how many rows there are, on its place or on its neighbours."""

import pytest
import torch

from moeyard_kernels import ops

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
    weight = ops.pack_weight(weight) if packed else weight
    whole = ops.linear(x, weight, bias)
    for count in COUNTS:
        for start in (0, 1, 23, 160 - count):
            part = ops.linear(x[start : start + count].contiguous(), weight, bias)
            assert torch.equal(part, whole[start : start + count]), f"{count} rows from {start}"
    other = torch.full_like(x, 3.0)
    other[7] = x[7]
    assert torch.equal(ops.linear(other[:9].contiguous(), weight, bias)[7], whole[7])


@PACKED
@DTYPES
def test_values(dtype: torch.dtype, packed: bool) -> None:
    x, weight, bias = torch.randn(5, 300).to(dtype), torch.randn(70, 300).to(dtype), torch.randn(70).to(dtype)
    exact = x.double() @ weight.double().T
    weight = ops.pack_weight(weight) if packed else weight
    # bf16 accumulates in fp32 and rounds once: half a unit of 2^-8.
    close = {"rtol": 2.0**-8, "atol": 1e-3} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-4}
    y = ops.linear(x, weight)
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), exact, **close)
    torch.testing.assert_close(ops.linear(x, weight, bias).double(), exact + bias.double(), **close)
    assert torch.equal(ops.linear(x, weight, static_weight=True), y)
    assert ops.linear(x[:0], weight, bias).shape == (0, 70)


def test_a_packed_weight_keeps_shape_and_dtype() -> None:
    packed = ops.pack_weight(torch.zeros(6, 4, dtype=torch.bfloat16))
    assert packed.shape == (6, 4)
    assert packed.dtype == torch.bfloat16


def test_bad_arguments_are_named() -> None:
    x, weight = torch.zeros(2, 3), torch.zeros(4, 3)
    with pytest.raises(ValueError, match=r"x float32 \[2, 3\] does not fit weight float32 \[4, 5\]"):
        ops.linear(x, torch.zeros(4, 5))
    with pytest.raises(ValueError, match=r"x float32 \[2, 3\] and weight bfloat16 \[4, 3\] must share a dtype"):
        ops.linear(x, weight.bfloat16())
    with pytest.raises(ValueError, match=r"bias float32 \[3\] does not fit weight float32 \[4, 3\]"):
        ops.linear(x, weight, torch.zeros(3))
    # A product with a weight of no memory would not fail by itself: its result is what the allocator left.
    with pytest.raises(ValueError, match=r"linear: weight is on meta, x on cpu"):
        ops.linear(x, weight.to("meta"))
    with pytest.raises(ValueError, match=r"linear: bias is on meta, x on cpu"):
        ops.linear(x, weight, torch.zeros(4, device="meta"))
    with pytest.raises(ValueError, match=r"linear_pair: weight_b is on meta, x on cpu"):
        ops.linear_pair(x, weight, weight.to("meta"))
    with pytest.raises(ValueError, match=r"weight must be fp32 or bf16 \[N, K\], got float32 \[3\]"):
        ops.pack_weight(torch.zeros(3))


@DTYPES
def test_a_step_padded_once_is_not_copied_again(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = ops.pack_weight(torch.randn(24, 16).to(dtype))
    monkeypatch.setattr(torch.Tensor, "new_zeros", None)
    for count in (1, 2, 5, 16, 17, 100, 1000):
        rows = ops.padded_rows(count)
        assert rows >= max(count, 2)
        assert ops.linear(torch.randn(rows, 16).to(dtype), weight).shape == (rows, 24)
    assert ops.padded_rows(0) == 0


@PACKED
@DTYPES
def test_a_pair_is_two_projections(dtype: torch.dtype, packed: bool) -> None:
    x, a, b = torch.randn(5, 64).to(dtype), torch.randn(24, 64).to(dtype), torch.randn(17, 64).to(dtype)
    if packed:
        a, b = ops.pack_weight(a), ops.pack_weight(b)
    y_a, y_b = ops.linear_pair(x, a, b)
    assert torch.equal(y_a, ops.linear(x, a))
    assert torch.equal(y_b, ops.linear(x, b))
    with pytest.raises(ValueError, match=r"linear_pair: x \w+ \[5, 64\] does not fit weight_b \w+ \[17, 3\]"):
        ops.linear_pair(x, a, torch.zeros(17, 3, dtype=dtype))
