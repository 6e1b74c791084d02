"""Several small experts in one product: the bits of each expert alone, for any rows, waves and places."""

import pytest
import torch
from tests.expert_fill import expert_fill

from moeyard_kernels.cpu import joint_experts
from moeyard_kernels.cpu.experts import CpuExpertSlots, grouped_mlp
from moeyard_kernels.cpu.joint_experts import FEW_PAIRS, joins, joint_mlp, pairs_mlp
from moeyard_kernels.cpu.linear import pack_weight
from moeyard_kernels.types.weight_form import plain_expert
from moeyard_worker.exchange.base import Dispatched

HIDDEN, INNER, EXPERTS, TOP_K = 192, 32, 32, 4
DTYPE = torch.bfloat16
FORM = plain_expert(hidden=HIDDEN, intermediate=INNER, dtype="bfloat16")

needs_joins = pytest.mark.skipif(
    not joins(hidden=HIDDEN, intermediate=INNER, dtype=DTYPE), reason="batched products have other bits here"
)


def experts() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return matrices whose sums cancel, so that rounding dominates the results."""
    made = []
    for _ in range(EXPERTS):
        gate_up, down = torch.randn(2 * INNER, HIDDEN // 2), torch.randn(HIDDEN, INNER // 2)
        made.append((torch.cat((gate_up, -gate_up), 1).to(DTYPE), torch.cat((down, -down), 1).to(DTYPE)))
    return made


def some_rows(count: int) -> torch.Tensor:
    return (torch.randn(count, HIDDEN // 2).repeat(1, 2) * 8).to(DTYPE)


def filled(made: list[tuple[torch.Tensor, torch.Tensor]], *, joint: bool) -> CpuExpertSlots:
    slots = CpuExpertSlots(num_slots=EXPERTS, form=FORM)
    slots.joint = joint
    for slot, (gate_up, down) in enumerate(made):
        slots.write(slot, expert_fill(gate_up[:INNER], gate_up[INNER:], down))
    return slots


def test_joins_only_small_experts_with_equal_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not joins(hidden=HIDDEN, intermediate=INNER, dtype=torch.float32), "another library sums in another order"
    assert not joins(hidden=2048, intermediate=768, dtype=DTYPE), "a copy of such matrices takes longer than calls"
    in_order = joint_experts._products

    def backwards(rows: torch.Tensor, matrices: list[torch.Tensor]) -> torch.Tensor:
        return in_order(rows.flip(-1), [matrix.flip(-1) for matrix in matrices])

    monkeypatch.setattr(joint_experts, "_products", backwards)
    assert not joins(hidden=HIDDEN, intermediate=INNER, dtype=DTYPE), "another order of the sums goes unnoticed"


def received(rows: torch.Tensor, experts: torch.Tensor) -> Dispatched:
    return Dispatched(rows=rows, experts=experts, prompt=None, handle=None)


@needs_joins
@pytest.mark.parametrize("remote", [False, True], ids=["local", "some remote"])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 4, 5, 16, 70, 300])
def test_bits_equal_each_expert_alone(num_rows: int, remote: bool) -> None:
    made, rows = experts(), some_rows(num_rows)
    ids = torch.rand(num_rows, EXPERTS).argsort(1)[:, :TOP_K].contiguous()
    if remote:
        ids[torch.rand(ids.shape) < 0.4] = -1
    results = []
    for joint in (True, False):
        slots = filled(made, joint=joint)
        run = slots.begin(received(rows, ids), num_experts=EXPERTS)
        # Odd experts first, as hits, and then the others, or all at once.
        waves = [[e if e % 2 == odd else -1 for e in range(EXPERTS)] for odd in (1, 0)]
        whole = slots.begin(received(rows, ids), num_experts=EXPERTS)
        whole.compute(range(EXPERTS))
        for wave in waves:
            run.compute(wave)
        assert whole.result().is_contiguous()
        assert whole.result().shape == (num_rows, TOP_K, HIDDEN)
        results += [run.result()[ids >= 0], whole.result()[ids >= 0]]
    assert all(torch.equal(result, results[-1]) for result in results)


@needs_joins
def test_places_and_pieces_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    made, rows = experts(), some_rows(90)
    gate_up, down = [a for a, _ in made], [b for _, b in made]
    packed = [pack_weight(a) for a in gate_up], [pack_weight(b) for b in down]
    sizes = [1, 2, 3, 40, 0, 16, 17, 1]
    groups = [(sum(sizes[:i]), size, i) for i, size in enumerate(sizes) if size]
    row_of_pair = torch.randint(0, 90, (sum(sizes),))
    wanted = grouped_mlp(rows, row_of_pair, groups, *packed, torch.empty(sum(sizes), HIDDEN, dtype=DTYPE))
    for piece in (1, 60 << 10, 512 << 10):
        monkeypatch.setattr(joint_experts, "_PIECE", piece)
        out = torch.full((sum(sizes) + 1, HIDDEN), 7.0, dtype=DTYPE)
        assert joint_mlp(rows, row_of_pair, groups, gate_up, down, out[:-1]).data_ptr() == out.data_ptr()
        assert torch.equal(out[:-1], wanted)
        assert (out[-1] == 7.0).all()
    # Each row beside NaN rows, with few pairs and with many.
    for pair, slot in ((0, 0), (2, 1), (6, 3), (45, 3), (46, 5)):
        row = rows[row_of_pair[pair]].unsqueeze(0)
        crowd = torch.cat((torch.full((2, HIDDEN), float("nan"), dtype=DTYPE), row))
        few = pairs_mlp(crowd, [5, 0, 1, 0, slot, 3], gate_up, down)
        assert torch.equal(few[2, 0], wanted[pair])
        out = torch.empty(3, HIDDEN, dtype=DTYPE)
        joint_mlp(crowd, torch.tensor([0, 2, 1]), [(0, 3, slot)], gate_up, down, out)
        assert torch.equal(out[1], wanted[pair])


@needs_joins
def test_slots_may_be_empty_and_matrices_move() -> None:
    made, rows = experts(), some_rows(2)
    slots = CpuExpertSlots(num_slots=4, form=FORM)
    slots.write(3, expert_fill(made[7][0][:INNER], made[7][0][INNER:], made[7][1]))
    ids = torch.full((2, TOP_K), 1)
    run = slots.begin(received(rows, ids), num_experts=2)
    run.compute([-1, 3])
    slots.rearrange([None, slots.pack(expert_fill(made[7][0][:INNER], made[7][0][INNER:], made[7][1])), 3])
    for slot in (1, 2):
        again = slots.begin(received(rows, ids), num_experts=2)
        again.compute([-1, slot])
        assert torch.equal(again.result(), run.result())
    many = slots.begin(received(some_rows(FEW_PAIRS), torch.full((FEW_PAIRS, 1), 1)), num_experts=2)
    many.compute([-1, 1])
    assert many.result().isfinite().all()
