"""The expert layout: kernel and reference follow its rules, checked pair by pair."""

from collections.abc import Callable

import pytest
import torch
from tests.kernels.graphs import assert_replays

from moeyard_kernels import ops
from moeyard_kernels.common import launch
from moeyard_kernels.experts import expert_layout as triton_kernel
from moeyard_kernels.types.expert_layout import ExpertLayout

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def routing(num_tokens: int, top_k: int, num_experts: int) -> torch.Tensor:
    """Return [T, K] int64 with distinct experts per token."""
    return torch.rand(num_tokens, num_experts).argsort(1)[:, :top_k].contiguous()


def run_kernel(topk_ids: torch.Tensor, slot_of_expert: torch.Tensor, num_slots: int, block_rows: int) -> ExpertLayout:
    return triton_kernel.expert_layout(
        topk_ids.to(DEVICE), slot_of_expert.to(DEVICE), num_slots=num_slots, block_rows=block_rows
    )


def check(
    layout: ExpertLayout, topk_ids: torch.Tensor, slot_of_expert: torch.Tensor, num_slots: int, block_rows: int
) -> None:
    """Check the rules in the docstring of ExpertLayout with plain lists."""
    experts = topk_ids.flatten().tolist()
    pairs, names = layout.pairs.tolist(), layout.slot_of_block.tolist()
    row = 0
    for expert, slot in enumerate(slot_of_expert.tolist()):
        wanted = [p for p, e in enumerate(experts) if e == expert and slot >= 0]
        assert int(layout.counts[expert]) == len(wanted)
        blocks = -(-len(wanted) // block_rows)
        padding = [-1] * (blocks * block_rows - len(wanted))
        assert pairs[row : row + blocks * block_rows] == wanted + padding, f"expert {expert}"
        assert names[row // block_rows : row // block_rows + blocks] == [slot] * blocks
        row += blocks * block_rows
    assert layout.num_blocks.tolist() == [row // block_rows]
    assert len(names) * block_rows == len(pairs) >= row
    assert (layout.block_rows, layout.num_pairs, layout.num_slots) == (block_rows, topk_ids.numel(), num_slots)
    for x in (layout.counts, layout.pairs, layout.slot_of_block, layout.num_blocks):
        assert x.dtype == torch.int32


def some_slots(num_experts: int, num_slots: int) -> torch.Tensor:
    """Return [E] int32: experts in random slots, and -1 for experts without one."""
    slots = torch.full((num_experts,), -1, dtype=torch.int32)
    used = min(num_experts, num_slots)
    slots[torch.randperm(num_experts)[:used]] = torch.randperm(num_slots)[:used].int()
    return slots


SHAPES = [
    (1, 1, 1, 1, 16),
    (1, 8, 128, 128, 16),
    (3, 2, 5, 4, 32),
    (64, 8, 384, 384, 16),
    (64, 8, 256, 31, 64),
    (5, 3, 7, 11, 128),
    (130, 8, 10, 9, 16),
    (4, 8, 64, 6144, 16),
    (161, 8, 64, 64, 128),
    # The most for one launch, with many experts and with few, and the least for two.
    (128, 8, 257, 257, 16),
    (256, 8, 256, 256, 32),
    (129, 8, 257, 240, 16),
    (257, 8, 256, 200, 32),
    (4100, 8, 40, 30, 64),
]
if DEVICE == "cuda":
    SHAPES += [
        (4096, 8, 128, 128, 64),
        (4096, 8, 384, 48, 128),
        (16384, 6, 160, 160, 16),
        (32768, 8, 384, 96, 128),
        (1, 8, 1024, 1024, 16),
    ]


@pytest.mark.sampled(0)
@pytest.mark.parametrize(("num_tokens", "top_k", "num_experts", "num_slots", "block_rows"), SHAPES, ids=str)
def test_kernel_and_reference_follow_the_rules(
    num_tokens: int, top_k: int, num_experts: int, num_slots: int, block_rows: int
) -> None:
    topk_ids, slot_of_expert = routing(num_tokens, top_k, num_experts), some_slots(num_experts, num_slots)
    layout = run_kernel(topk_ids, slot_of_expert, num_slots, block_rows)
    check(layout, topk_ids, slot_of_expert, num_slots, block_rows)
    reference = ops.expert_layout(topk_ids, slot_of_expert, num_slots=num_slots, block_rows=block_rows)
    check(reference, topk_ids, slot_of_expert, num_slots, block_rows)
    assert layout.pairs.shape == reference.pairs.shape


@pytest.mark.sampled(1)
@pytest.mark.parametrize("num_tokens", [9, 600, 8300], ids=["one-launch", "two-launches", "three-launches"])
@pytest.mark.parametrize("which", ["all-to-one", "none-here", "one-here", "some-masked", "all-masked", "padding"])
def test_unbalanced_and_masked(which: str, num_tokens: int) -> None:
    topk_ids, slot_of_expert = routing(num_tokens, 4, 12), torch.arange(12, dtype=torch.int32)
    if which == "all-to-one":
        topk_ids[:] = 7
    elif which == "some-masked":
        topk_ids[torch.rand(topk_ids.shape) < 0.4] = -1
        slot_of_expert[3] = -1
    elif which == "all-masked":
        topk_ids[:] = -1
    elif which == "padding":
        topk_ids[num_tokens // 2 :] = -1
    else:
        slot_of_expert[:] = -1
        slot_of_expert[5] = 3 if which == "one-here" else -1
    for ids in (topk_ids, topk_ids.int()):
        check(run_kernel(ids, slot_of_expert, 12, 32), ids, slot_of_expert, 12, 32)
        reference = ops.expert_layout(ids, slot_of_expert, num_slots=12, block_rows=32)
        check(reference, ids, slot_of_expert, 12, 32)


@pytest.mark.parametrize("make", [run_kernel, None], ids=["kernel", "reference"])
def test_no_tokens_and_int32_ids(make: Callable[..., ExpertLayout] | None) -> None:
    slots = torch.arange(8, dtype=torch.int32)
    for topk_ids in (torch.zeros(0, 4, dtype=torch.int64), routing(6, 2, 8).int()):
        if make:
            layout = make(topk_ids, slots, 8, 16)
        else:
            layout = ops.expert_layout(topk_ids, slots, num_slots=8, block_rows=16)
        check(layout, topk_ids, slots, 8, 16)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [9, 300, 4100], ids=["one-launch", "two-launches", "three-launches"])
def test_graph_replay(num_tokens: int) -> None:
    topk_ids, slot_of_expert = routing(num_tokens, 8, 64).to(DEVICE), some_slots(64, 40).to(DEVICE)

    def step() -> tuple[torch.Tensor, ...]:
        layout = ops.expert_layout(topk_ids, slot_of_expert, num_slots=40, block_rows=16)
        used = torch.arange(layout.slot_of_block.shape[0], device=DEVICE) < layout.num_blocks
        pairs = layout.pairs.view(-1, 16).where(used[:, None], -2)
        return layout.counts, layout.num_blocks, layout.slot_of_block.where(used, -2), pairs

    def refill() -> None:
        topk_ids.copy_(routing(num_tokens, 8, 64)).masked_fill_(torch.rand(num_tokens, 1, device=DEVICE) < 0.2, -1)
        slot_of_expert.copy_(some_slots(64, 40))

    assert_replays(step, refill)


def test_bad_arguments_are_named() -> None:
    ids, slots = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(4, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"topk_ids float32 \[2, 3\], expected int64 or int32 \[T, K\]"):
        ops.expert_layout(ids.float(), slots, num_slots=4, block_rows=16)
    with pytest.raises(ValueError, match=r"slot_of_expert int64 \[4\], expected int32 \[E\]"):
        ops.expert_layout(ids, slots.long(), num_slots=4, block_rows=16)
    with pytest.raises(ValueError, match=r"block_rows 24, expected block_rows in \(16, 32, 64, 128\)"):
        ops.expert_layout(ids, slots, num_slots=4, block_rows=24)
    with pytest.raises(ValueError, match="not contiguous"):
        triton_kernel.expert_layout(ids.T.to(DEVICE), slots.to(DEVICE), num_slots=4, block_rows=16)
    for run in (ops.expert_layout, triton_kernel.expert_layout):
        device = "cpu" if run is ops.expert_layout else DEVICE
        with launch.checked():
            with pytest.raises(ValueError, match=r"topk_ids .*holds 0 to 4, outside -1 to 3"):
                run((ids + torch.tensor([0, 1, 4])).to(device), slots.to(device), num_slots=4, block_rows=16)
            with pytest.raises(ValueError, match=r"topk_ids .*holds -2 to 0, outside -1 to 3"):
                run((ids - torch.tensor([0, 1, 2])).to(device), slots.to(device), num_slots=4, block_rows=16)
            with pytest.raises(ValueError, match=r"slot_of_expert .*holds 0 to 4, outside -1 to 3"):
                run(ids.to(device), (slots + torch.tensor([0, 1, 4, 0]).int()).to(device), num_slots=4, block_rows=16)
