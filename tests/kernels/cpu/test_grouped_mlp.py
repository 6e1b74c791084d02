"""The routed experts: values, and bits that depend only on the input row and the expert."""

import pytest
import torch
import torch.nn.functional as F

from moeyard_kernels.cpu.experts import grouped_mlp
from moeyard_kernels.cpu.linear import pack_weight

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
PACKED = pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
HIDDEN, INNER, SLOTS = 96, 40, 6


def weights(dtype: torch.dtype, packed: bool) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """(gate_up, down as `grouped_mlp` takes them, float64 gate_up and down of slot s stacked as [S, 3 I, H])."""
    gate_up = (torch.randn(SLOTS, 2 * INNER, HIDDEN) / HIDDEN**0.5).to(dtype)
    down = (torch.randn(SLOTS, HIDDEN, INNER) / INNER**0.5).to(dtype)
    exact = torch.cat((gate_up, down.transpose(1, 2)), 1).double()
    if packed:
        return [pack_weight(w) for w in gate_up], [pack_weight(w) for w in down], exact
    return gate_up, down, exact


@PACKED
@DTYPES
def test_values(dtype: torch.dtype, packed: bool) -> None:
    gate_up, down, exact = weights(dtype, packed)
    rows, row_of_pair = torch.randn(9, HIDDEN).to(dtype), torch.randint(0, 9, (40,))
    groups = [(0, 3, 5), (3, 0, 1), (3, 20, 2), (23, 1, 0), (24, 16, 4)]
    out = torch.full((40, HIDDEN), float("nan"), dtype=dtype)
    assert grouped_mlp(rows, row_of_pair, groups, gate_up, down, out) is out
    for start, count, slot in groups:
        x = rows.double()[row_of_pair[start : start + count]]
        gate, up = (x @ exact[slot, : 2 * INNER].T).chunk(2, -1)
        wanted = (F.silu(gate) * up) @ exact[slot, 2 * INNER :]
        error = (out[start : start + count].double() - wanted).abs().max() if count else torch.zeros(())
        assert error < (2e-5 if dtype == torch.float32 else 6e-2)


@PACKED
@DTYPES
def test_groups_calls_and_neighbours_change_no_bit(dtype: torch.dtype, packed: bool) -> None:
    gate_up, down, _ = weights(dtype, packed)
    rows, row_of_pair = torch.randn(50, HIDDEN).to(dtype), torch.randint(0, 50, (130,))
    sizes = [1, 2, 3, 40, 0, 84]
    groups, start = [], 0
    for slot, size in enumerate(sizes):
        groups.append((start, size, slot))
        start += size
    whole = grouped_mlp(rows, row_of_pair, groups, gate_up, down, torch.full((130, HIDDEN), 7.0, dtype=dtype))
    # Hits first, then misses, into one tensor. Rows that are not computed yet stay unchanged.
    out = torch.full((130, HIDDEN), 7.0, dtype=dtype)
    grouped_mlp(rows, row_of_pair, groups[1::2], gate_up, down, out)
    assert (out[0] == 7.0).all()
    assert (out[3:6] == 7.0).all()
    grouped_mlp(rows, row_of_pair, groups[0::2], gate_up, down, out)
    assert torch.equal(out, whole)
    # Each pair alone, and with other rows around it.
    for pair, slot in ((0, 0), (2, 1), (5, 2), (6, 3), (45, 3), (46, 5), (129, 5)):
        row = rows[row_of_pair[pair]].unsqueeze(0)
        alone = torch.empty(1, HIDDEN, dtype=dtype)
        grouped_mlp(row, torch.zeros(1, dtype=torch.int64), [(0, 1, slot)], gate_up, down, alone)
        assert torch.equal(alone[0], whole[pair])
        crowd = torch.cat((torch.full((3, HIDDEN), float("nan"), dtype=dtype), row))
        few = torch.empty(5, HIDDEN, dtype=dtype)
        grouped_mlp(crowd, torch.tensor([0, 1, 2, 3, 0]), [(0, 5, slot)], gate_up, down, few)
        assert torch.equal(few[3], whole[pair])


def test_nothing_to_do() -> None:
    gate_up, down, _ = weights(torch.float32, False)
    none = torch.zeros(0, dtype=torch.int64)
    assert grouped_mlp(torch.zeros(0, HIDDEN), none, [], gate_up, down, torch.zeros(0, HIDDEN)).shape == (0, HIDDEN)
