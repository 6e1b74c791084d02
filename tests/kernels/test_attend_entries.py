"""Attention over a window and entries: reference and Triton kernel."""

import pytest
import torch
from tests.kernels.compressed_cases import (
    DEVICE,
    DTYPES,
    PAGE,
    Rows,
    chunk,
    joined,
    make_layer,
    make_rows,
    tables_of,
)

from moeyard_kernels import ops
from moeyard_kernels.attention import attend_entries as triton_kernel
from moeyard_kernels.attention.attend_entries import CONFIGS, EntriesConfig
from moeyard_kernels.types.layers import CompressedLayer
from moeyard_kernels.types.plan_parts import entries_of
from moeyard_worker.scheduling.step import Chunk

NEAR = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def attended(
    layer: CompressedLayer,
    rows: Rows,
    chunks: list[Chunk],
    *,
    found: torch.Tensor | None = None,
    config: EntriesConfig | None = None,
    reference: bool = False,
) -> torch.Tensor:
    options = {"window": layer.window, "scale": 0.3, "tables": tables_of(*chunks), "pooling": layer.pooling}
    inputs = rows.queries, rows.keys, layer.recent, layer.sink
    if reference:
        return ops.attend_entries.reference(*inputs, **options, found=found)
    return triton_kernel.attend_entries(*inputs, **options, found=found, config=config)


def choices(chunks: list[Chunk], top_k: int = 8) -> torch.Tensor:
    """Return the places of a random choice for each row that chooses, and no places for all others."""
    tables = tables_of(*chunks)
    found = torch.full((tables.num_rows, top_k), -77, dtype=torch.int32)
    for row, (b, position) in enumerate(tables.rows.tolist()):
        if (position + 1) // 4 > top_k:
            chosen = torch.randperm((position + 1) // 4)[:top_k].sort().values
            found[row] = torch.from_numpy(entries_of(chunks[b].pages, chosen.numpy() * 4 + 3, PAGE) // 4).int()
    return found.to(DEVICE)


CHUNKS = [
    chunk(0, 6, slot=0),
    chunk(128, 3, slot=1, first_page=10),
    chunk(256, 2, slot=2, first_page=20, restored=3),
]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("ratio", [0, 4, 128])
@pytest.mark.parametrize("window", [128, 37])
def test_kernel_gives_the_result_of_the_reference(ratio: int, window: int, dtype: torch.dtype) -> None:
    layer = make_layer(ratio, dtype=dtype, heads=5, dim=32 if window == 128 else 24, window=window)
    rows = make_rows(layer, 11)
    found = choices(CHUNKS) if ratio == 4 else None
    got = attended(layer, rows, CHUNKS, found=found)
    wanted = attended(layer, rows, CHUNKS, found=found, reference=True)
    torch.testing.assert_close(got, wanted, rtol=NEAR[dtype], atol=NEAR[dtype])


def test_many_entries_without_choice() -> None:
    """More than one block of entries, the last of which is not full."""
    layer, chunks = make_layer(4), [chunk(512, 5, slot=0)]
    rows = make_rows(layer, 5)
    got, wanted = (attended(layer, rows, chunks, reference=reference) for reference in (False, True))
    torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_rows_do_not_depend_on_chunks_and_tiles(config: EntriesConfig) -> None:
    """Rows behind a cut read the keys before it from a slot. A neighbour is in the step."""
    layer = make_layer(4, heads=20)
    rows, other = make_rows(layer, 131), make_rows(layer, 2)
    at, size = torch.arange(0, 128), layer.recent.shape[1]
    layer.recent[3, at % size] = rows.keys[at]
    found = choices([chunk(0, 131, slot=0)])
    few = joined([other, rows], [(0, 2), (128, 131)])
    some = torch.cat((found[:2], found[128:]))
    cut = attended(layer, few, [chunk(0, 2, slot=1, first_page=9), chunk(128, 3, slot=0, restored=3)], found=some)
    # The last rows of the whole prompt only: its programs take long in the interpreter.
    whole = attended(layer, rows, [chunk(0, 131, slot=0)], found=found, config=config)
    assert torch.equal(cut[2:], whole[128:])


def test_choices_of_others_change_no_bit() -> None:
    """Rows that see at most top_k entries have the bits of rows of a layer without choices."""
    layer, chunks = make_layer(4), [chunk(128, 3, slot=0)]
    rows = make_rows(layer, 3)
    none = torch.full((3, 32), -77, dtype=torch.int32, device=DEVICE)
    assert torch.equal(attended(layer, rows, chunks, found=none), attended(layer, rows, chunks))


@pytest.mark.gpu
@pytest.mark.parametrize("ratio", [0, 4, 128])
@pytest.mark.parametrize("heads", [64, 80, 128])
def test_every_kernel_has_the_same_bits(ratio: int, heads: int) -> None:
    """The sizes that the Hopper kernels take (V4-Pro has 128 heads), with odd and even numbers of blocks."""
    layer = make_layer(ratio, heads=heads, dim=512, rope_dim=64)
    chunks = [*CHUNKS, chunk(1024, 70, slot=4, first_page=29)]
    rows = make_rows(layer, 81)
    found = choices(chunks) if ratio == 4 else None
    wanted = attended(layer, rows, chunks, found=found, reference=True)
    first = attended(layer, rows, chunks, found=found)
    torch.testing.assert_close(first, wanted, rtol=NEAR[torch.bfloat16], atol=NEAR[torch.bfloat16])
    for config in CONFIGS:
        assert torch.equal(attended(layer, rows, chunks, found=found, config=config), first), config


def test_bad_arguments_are_named() -> None:
    layer = make_layer(4, device="cpu")
    rows, tables = make_rows(layer, 6), tables_of(chunk(0, 6, slot=0), device="cpu")
    options = {"window": 128, "tables": tables, "pooling": layer.pooling}
    for message, keys, scale in (
        (r"keys bfloat16 \[5, 32\], expected bfloat16 \[6, 32\] for queries", rows.keys[:5], 1.0),
        (r"keys float32 \[6, 32\], expected bfloat16", rows.keys.float(), 1.0),
        (r"scale 0.0, expected scale > 0", rows.keys, 0.0),
    ):
        with pytest.raises(ValueError, match="attend_entries: " + message):
            ops.attend_entries(rows.queries, keys, layer.recent, layer.sink, scale=scale, **options)
