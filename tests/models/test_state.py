"""State of a sequence in the layers: arrays match their descriptions, and the page size changes no result."""

from pathlib import Path

import pytest
import torch
from tests.checkpoints import VOCAB_SIZE, make_checkpoint

from moeyard_worker.engine.assembly.local import greedy_tokens, local_runner
from moeyard_worker.models.families import load_model_config
from moeyard_worker.state.layout import LayerState, PagedArray, SlotArray, paged, state_spec
from moeyard_worker.state.pools import allocate

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_array_sizes_match_the_spec(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    config = load_model_config(make_checkpoint(tmp_path, family))
    tensors = [
        tensor
        for attention in config.attention
        for tensor in allocate(
            attention.state(), num_pages=6, page_size=8, num_slots=0, dtype=dtype, device=CPU
        ).values()
    ]
    assert sum(t.numel() * t.itemsize for t in tensors) == 48 * config.state_spec(dtype.itemsize).bytes_per_token
    assert all(not t.any() for t in tensors)


def test_slots_and_pages_of_one_model() -> None:
    """The spec of a recurrent layer and an attention has the sums and the stricter rules."""
    recurrent = LayerState(
        paged={},
        slots={"state": SlotArray(shape=(2, 4, 8), fp32=True), "window": SlotArray(shape=(3, 5), fp32=False)},
        chunk_alignment=64,
    )
    attention = paged(k=PagedArray(heads=2, width=4), v=PagedArray(heads=None, width=3))
    spec = state_spec([recurrent, attention, recurrent], 2)
    assert spec.bytes_per_token == (8 + 3) * 2
    assert spec.bytes_per_sequence == 2 * (64 * 4 + 15 * 2)
    assert (spec.chunk_alignment, spec.prefix_reusable) == (64, False)
    assert state_spec([attention], 2).prefix_reusable
    arrays = allocate(recurrent, num_pages=9, page_size=4, num_slots=5, dtype=torch.bfloat16, device=CPU)
    assert {n: (tuple(t.shape), t.dtype) for n, t in arrays.items()} == {
        "state": ((5, 2, 4, 8), torch.float32),
        "window": ((5, 3, 5), torch.bfloat16),
    }
    pages = allocate(attention, num_pages=9, page_size=4, num_slots=5, dtype=torch.bfloat16, device=CPU)
    assert {n: tuple(t.shape) for n, t in pages.items()} == {"k": (2, 9, 4, 4), "v": (9, 4, 3)}


@pytest.mark.parametrize("family", ["deepseek_v3", "mixtral"])
def test_page_size_changes_no_bit(tmp_path: Path, family: str) -> None:
    directory = make_checkpoint(tmp_path, family)
    prompt = torch.randint(VOCAB_SIZE, (90,), generator=torch.Generator().manual_seed(3)).tolist()
    results = [
        greedy_tokens(
            local_runner(directory, dtype=torch.float32, num_pages=128 // size, page_size=size),
            prompt,
            10,
            chunk_size=40,
        )
        for size in (1, 8, 64)
    ]
    for tokens, logits in results[1:]:
        assert tokens == results[0][0]
        assert torch.equal(logits, results[0][1])
