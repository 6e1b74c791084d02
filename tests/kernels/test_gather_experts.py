"""Gathering from host memory copies exactly the experts of the table and touches nothing else."""

import pytest
import torch
from kernel_cases.case import assert_bits

from moeyard_kernels import ops
from moeyard_kernels.experts import gather_experts as triton_kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(2, 5, 24, 20, 7), (3, 40, 64, 16, 11), (1, 3, 256, 96, 3)]
if DEVICE == "cuda":
    SHAPES += [(2, 16, 2048, 768, 20)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("config", triton_kernel.CONFIGS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("num_layers", "num_experts", "hidden", "inner", "num_slots"), SHAPES, ids=str)
def test_experts_of_the_table_are_copied(
    num_layers: int,
    num_experts: int,
    hidden: int,
    inner: int,
    num_slots: int,
    dtype: torch.dtype,
    config: triton_kernel.GatherConfig,
) -> None:
    store = torch.randn(num_layers * num_experts, 3 * inner * hidden).to(dtype)
    if DEVICE == "cuda":
        store = store.pin_memory()
    gate_up = torch.full((num_slots, 2 * inner, hidden), torch.nan, dtype=dtype, device=DEVICE)
    down = torch.full((num_slots, hidden, inner), torch.nan, dtype=dtype, device=DEVICE)
    wanted = gate_up.clone().cpu(), down.clone().cpu()
    for layer in range(num_layers):
        table = torch.full((num_experts,), -1, dtype=torch.int32)
        count = (0, 1, min(num_slots, num_experts))[layer]
        table[torch.randperm(num_experts)[:count]] = torch.randperm(num_slots)[:count].int()
        triton_kernel.gather_experts(store, table.to(DEVICE), gate_up, down, layer=layer, config=config)
        ops.gather_experts(store, table, *wanted, layer=layer)
        assert_bits(f"layer {layer}", (gate_up.cpu(), down.cpu()), wanted)
        for expert, slot in enumerate(table.tolist()):
            if slot >= 0:
                blob = torch.cat((gate_up[slot].flatten(), down[slot].flatten())).cpu()
                assert_bits(f"expert {expert}", blob, store[layer * num_experts + expert])


@pytest.mark.parametrize("config", triton_kernel.CONFIGS[:2], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_slots_and_places_exchange_experts(dtype: torch.dtype, config: triton_kernel.GatherConfig) -> None:
    num_experts, hidden, inner, num_slots, num_places = 5, 24, 20, 4, 3
    store = torch.randn(num_places, 3 * inner * hidden).to(dtype)
    slots = torch.randn(num_slots, 3 * inner * hidden).to(dtype)
    store = store.pin_memory() if DEVICE == "cuda" else store
    before, split = store.clone(), 2 * inner * hidden
    gate_up = slots[:, :split].reshape(num_slots, 2 * inner, hidden).contiguous().to(DEVICE)
    down = slots[:, split:].reshape(num_slots, hidden, inner).contiguous().to(DEVICE)
    table, places = torch.tensor([[-1, 2, -1, 0, -1], [-1, 1, -1, 2, -1]], dtype=torch.int32)
    wanted = gate_up.clone().cpu(), down.clone().cpu()
    theirs = before.clone()
    given = {"places": places.to(DEVICE), "config": config}
    triton_kernel.gather_experts(store, table.to(DEVICE), gate_up, down, layer=7, **given)
    ops.gather_experts(theirs, table, *wanted, layer=7, places=places)
    after = torch.cat((gate_up.flatten(1), down.flatten(1)), 1).cpu()
    assert_bits("slots", after, torch.cat((wanted[0].flatten(1), wanted[1].flatten(1)), 1))
    assert_bits("places", store, theirs)
    assert_bits(
        "the exchange",
        (after[[2, 0, 1, 3]], store[[1, 2, 0]]),
        (torch.cat((before[[1, 2]], slots[[1, 3]])), torch.cat((slots[[2, 0]], before[[0]]))),
    )
    assert num_experts == len(table)


def test_bad_arguments_are_named() -> None:
    store, table = torch.zeros(4, 12), torch.zeros(2, dtype=torch.int32)
    gate_up, down = torch.zeros(3, 4, 2), torch.zeros(3, 2, 2)
    ops.gather_experts(store, table, gate_up, down, layer=1)
    with pytest.raises(ValueError, match=r"counts int64 \[3\], expected int64"):
        ops.gather_experts(store, table, gate_up, down, layer=1, counts=torch.zeros(3, dtype=torch.int64))
    with pytest.raises(
        ValueError, match=r"layer 2, places None, E 2 of table int32 \[2\], rows 4 of store float32 \[4, 12\]"
    ):
        ops.gather_experts(store, table, gate_up, down, layer=2)
    with pytest.raises(ValueError, match=r"table int64 \[2\], expected int32 \[E\]"):
        ops.gather_experts(store, table.long(), gate_up, down, layer=0)
    with pytest.raises(
        ValueError, match=r"store bfloat16 \[4, 12\], expected float32 \[rows, 12\] for gate_up float32 \[3, 4, 2\]"
    ):
        ops.gather_experts(store.bfloat16(), table, gate_up, down, layer=0)
    with pytest.raises(
        ValueError, match=r"down float32 \[2, 2, 2\], expected float32 \[3, X, Y\] for gate_up float32 \[3, 4, 2\]"
    ):
        ops.gather_experts(store, table, gate_up, down[:2], layer=0)
