"""The merge of splits: against float64, one split unchanged, and empty splits."""

import pytest
import torch
from tests.kernels.decode_cases import DEVICE, assert_same, relative
from tests.kernels.graphs import assert_replays

from moeyard_kernels import ops
from moeyard_kernels.attention import attn_combine as kernel


def pieces(batch: int, splits: int, heads: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, splits, heads, dim, device=DEVICE), torch.randn(batch, splits, heads, device=DEVICE) * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("batch", "splits", "heads", "dim"),
    [(1, 1, 1, 16), (2, 2, 3, 40), (3, 9, 4, 128), (1, 160, 2, 64), (2, 33, 5, 512)],
    ids=lambda n: str(n),
)
def test_values(batch: int, splits: int, heads: int, dim: int, dtype: torch.dtype) -> None:
    partial, lse = pieces(batch, splits, heads, dim)
    lse[0, splits // 2 :: 3] = float("-inf")
    lse[0, 0] = 1.0
    got = kernel.attn_combine(partial, lse, dtype=dtype)
    out, out_lse = ops.attn_combine(partial, lse, dtype=dtype)
    assert got[0].dtype == out.dtype == dtype
    exact_lse = lse.double().logsumexp(1)
    exact = ((lse.double() - exact_lse[:, None]).exp()[..., None] * partial.double()).sum(1)
    for done, done_lse in (got, (out, out_lse)):
        assert relative(done, exact) <= (2e-6 if dtype == torch.float32 else 4e-3)
        torch.testing.assert_close(done_lse.double(), exact_lse, rtol=0, atol=2e-6)


def test_one_split_is_returned_unchanged() -> None:
    partial, lse = pieces(3, 1, 4, 96)
    for op in (kernel.attn_combine, ops.attn_combine):
        assert_same(op(partial, lse, dtype=torch.float32), (partial[:, 0], lse[:, 0]), "one split")


def test_empty_splits_change_no_bit() -> None:
    partial, lse = pieces(2, 5, 4, 64)
    padded, padded_lse = torch.zeros(2, 12, 4, 64, device=DEVICE), torch.full((2, 12, 4), float("-inf"), device=DEVICE)
    positions = [1, 2, 5, 8, 10]
    padded[:, positions], padded_lse[:, positions] = partial, lse
    for op in (kernel.attn_combine, ops.attn_combine):
        assert_same(
            op(padded, padded_lse, dtype=torch.bfloat16), op(partial, lse, dtype=torch.bfloat16), "empty splits"
        )
        nothing = torch.full_like(padded_lse, float("-inf"))
        out, out_lse = op(torch.zeros_like(padded), nothing, dtype=torch.bfloat16)
        assert (out == 0).all()
        assert (out_lse == float("-inf")).all()


def test_other_rows_change_no_bit() -> None:
    partial, lse = pieces(7, 12, 3, 64)
    whole = kernel.attn_combine(partial, lse, dtype=torch.bfloat16)
    for row in (0, 4):
        one = kernel.attn_combine(partial[row : row + 1], lse[row : row + 1], dtype=torch.bfloat16)
        assert_same(one, (whole[0][row : row + 1], whole[1][row : row + 1]), f"row {row}")
    none = kernel.attn_combine(partial[:0], lse[:0], dtype=torch.bfloat16)
    assert none[0].shape == (0, 3, 64)


def test_splits_are_summed_in_ascending_order() -> None:
    partial, lse = pieces(4, 9, 4, 64)
    turned = kernel.attn_combine(partial.flip(1).contiguous(), lse.flip(1).contiguous(), dtype=torch.float32)[0]
    whole = kernel.attn_combine(partial, lse, dtype=torch.float32)[0]
    assert not torch.equal(turned, whole)
    torch.testing.assert_close(turned, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 9])
def test_graph_replay(batch: int) -> None:
    partial, lse = pieces(batch, 12, 4, 128)
    assert_replays(
        lambda: ops.attn_combine(partial, lse, dtype=torch.bfloat16), lambda: (partial.normal_(), lse.normal_(0, 4))
    )


def test_bad_arguments_are_named() -> None:
    partial, lse = torch.zeros(2, 3, 4, 8), torch.zeros(2, 3, 4)
    with pytest.raises(ValueError, match=r"partial bfloat16 \[2, 3, 4, 8\], expected float32 \[B, S, H, D\]"):
        ops.attn_combine(partial.bfloat16(), lse)
    with pytest.raises(ValueError, match=r"lse float32 \[2, 4\], expected float32 \[2, 3, 4\]"):
        ops.attn_combine(partial, lse[:, 0])
    with pytest.raises(ValueError, match=r"dtype torch\.float16, expected dtype in FLOATS"):
        ops.attn_combine(partial, lse, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"partial float32 \[2, 3, 4, 8\] with strides .* is not contiguous"):
        ops.attn_combine(torch.zeros(2, 4, 3, 8).transpose(1, 2), lse)


def test_larger_of_two_distant_splits_is_the_result() -> None:
    partial, lse = pieces(1, 2, 3, 16)
    lse[:, 0], lse[:, 1] = 0.0, 200.0
    out, out_lse = kernel.attn_combine(partial, lse, dtype=torch.float32)
    assert torch.equal(out, partial[:, 1])
    assert torch.equal(out_lse, lse[:, 1])
