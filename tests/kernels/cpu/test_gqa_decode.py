"""Decode attention over pages: values against float64, equal bits in every batch."""

import pytest
import torch
from tests.kernels.decode_cases import exact
from transformers.models.mixtral.modeling_mixtral import eager_attention_forward

from moeyard_kernels.cpu.attention import gqa_decode
from moeyard_kernels.cpu.plan import plan_decode

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
LENS = [1, 64, 65, 200, 17, 300, 63, 128, 129, 300]


def pages_of(cache: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    """Return [Hkv, length, D] of one row."""
    return cache[:, table].flatten(1, 2)[:, :length]


@DTYPES
@pytest.mark.parametrize("window", [None, 1, 20, 64, 130], ids=lambda w: f"window-{w}")
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page"),
    [(8, 2, 64, 16), (8, 8, 24, 64), (6, 2, 40, 4), (5, 1, 33, 16)],
    ids=lambda v: str(v),
)
def test_batches_change_no_bit(
    heads: int, kv_heads: int, dim: int, page: int, window: int | None, dtype: torch.dtype
) -> None:
    per_row = -(-max(LENS) // page)
    num_pages = per_row * len(LENS) + 3
    k = torch.randn(kv_heads, num_pages, page, dim).to(dtype)
    v = torch.randn(kv_heads, num_pages, page, dim).to(dtype)
    q = torch.randn(len(LENS), heads, dim).to(dtype)
    table = torch.randperm(num_pages)[: per_row * len(LENS)].view(len(LENS), per_row)
    # Two rows are positions of one sequence.
    table[9] = table[5]
    before = k.clone()

    def run(rows: list[int]) -> torch.Tensor:
        plan = plan_decode(table[rows], [LENS[r] for r in rows], page_size=page, window=window)
        return gqa_decode(q[rows], k, v, plan=plan, scale=dim**-0.5)

    whole = run(list(range(len(LENS))))
    assert whole.shape == q.shape
    assert whole.dtype == dtype
    worst, theirs_worst = 0.0, 0.0
    module = torch.nn.Module()
    module.num_key_value_groups = heads // kv_heads
    for row, length in enumerate(LENS):
        keys, values = pages_of(k, table[row], length), pages_of(v, table[row], length)
        wanted, _ = exact(q[row], keys, values, scale=dim**-0.5, window=window)
        worst = max(worst, (whole[row].double() - wanted).abs().max().item())
        low = max(0, length - (window or length))
        theirs, _ = eager_attention_forward(
            module.eval(), q[row, None, :, None], keys[None, :, low:], values[None, :, low:], None, dim**-0.5
        )
        theirs_worst = max(theirs_worst, (theirs[0, 0].double() - wanted).abs().max().item())
    assert worst <= (5e-6 if dtype == torch.float32 else theirs_worst)

    for row in range(len(LENS)):
        assert torch.equal(run([row])[0], whole[row]), f"row {row} alone"
    for rows in ([3, 2, 1, 0], [5, 5, 9], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0] * 3):
        assert torch.equal(run(rows), whole[rows])
    # Pages of other rows, and positions past the row's end, may hold anything finite.
    row = 3
    seen = pages_of(k, table[row], LENS[row]).clone()
    k.fill_(77.0)
    for position in range(LENS[row]):
        k[:, table[row, position // page], position % page] = seen[:, position]
    assert torch.equal(run([row])[0], whole[row])
    assert torch.equal(run([0, row])[1], whole[row])
    assert not torch.equal(k, before)


@DTYPES
def test_pieces_change_no_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    k = torch.randn(2, 60, 16, 32).to(dtype)
    q, table = torch.randn(3, 6, 32).to(dtype), torch.arange(60).view(3, 20)
    plan = plan_decode(table, [290, 33, 320], page_size=16)
    whole = gqa_decode(q, k, k, plan=plan, scale=0.3)
    for values in (1, 2 * 64 * 32 * 3):
        monkeypatch.setattr("moeyard_kernels.cpu.attention._PIECE", values)
        assert torch.equal(gqa_decode(q, k, k, plan=plan, scale=0.3), whole)


def test_no_rows() -> None:
    plan = plan_decode(torch.zeros(0, 5, dtype=torch.int64), [], page_size=16)
    cache = torch.zeros(2, 3, 16, 8)
    assert gqa_decode(torch.zeros(0, 4, 8), cache, cache, plan=plan, scale=1.0).shape == (0, 4, 8)


def test_plans_are_checked() -> None:
    table = torch.zeros(2, 5, dtype=torch.int64)
    with pytest.raises(ValueError, match="page_size 24 does not divide 64"):
        plan_decode(table, [1, 2], page_size=24)
    with pytest.raises(ValueError, match="kv_lens: 0 to 4, outside 1 to 80"):
        plan_decode(table, [4, 0], page_size=16)
    with pytest.raises(ValueError, match="kv_lens: 1 to 81, outside 1 to 80"):
        plan_decode(table, [81, 1], page_size=16)
    with pytest.raises(ValueError, match=r"page_table: expected int64 \[3, pages\], got torch.int64 \(2, 5\)"):
        plan_decode(table, [1, 2, 3], page_size=16)
    with pytest.raises(ValueError, match="window 0 is not positive"):
        plan_decode(table, [1, 2], page_size=16, window=0)


def test_plan_lists_blocks_in_order() -> None:
    table = torch.arange(100, 116).view(2, 8)
    plan = plan_decode(table, [70, 9], page_size=16)
    assert plan.row_of_block.tolist() == [0, 0, 1]
    # Row 0 has 5 pages, then its last one again; row 1 has one.
    assert plan.page_ids.tolist() == [100, 101, 102, 103, 104, 104, 104, 104, 108, 108, 108, 108]
    assert plan.blocks_of_row.tolist() == [0, 1, 2, 2]
    assert (plan.mask == 0).sum(-1).squeeze(1).tolist() == [64, 6, 9]
    # A window of 5 starts in the second block of a row of 70.
    assert plan_decode(table, [70, 9], page_size=16, window=5).row_of_block.tolist() == [0, 1]
