"""Entries of blocks: reference and Triton kernel."""

from dataclasses import replace

import pytest
import torch
from kernel_cases.compressed_prompts import poolings
from tests.kernels.compressed_cases import DTYPES, Rows, chunk, joined, make_layer, make_rows, tables_of

from moeyard_kernels import ops
from moeyard_kernels.attention import pool_blocks as triton_kernel
from moeyard_kernels.types.layers import CompressedLayer
from moeyard_worker.scheduling.step import Chunk

EXACT = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def pooled(layer: CompressedLayer, rows: Rows, chunks: list[Chunk], *, reference: bool = False) -> list[torch.Tensor]:
    """Return the pages of each pooling after the op. Places without a new entry are NaN."""
    found = []
    for pooling, column in poolings(layer):
        own = replace(pooling, entries=torch.full_like(pooling.entries, float("nan")))
        assert rows.compressed is not None and layer.pending is not None  # noqa: PT018
        run = ops.pool_blocks.reference if reference else triton_kernel.pool_blocks
        run(
            rows.compressed,
            layer.pending,
            pooling=own,
            rope=layer.rope,
            eps=layer.eps,
            column=column,
            tables=tables_of(*chunks),
        )
        found.append(own.entries)
    return found


@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_kernel_gives_the_entries_of_the_reference(ratio: int, dtype: torch.dtype) -> None:
    """Chunks at the start, behind the sequence's own state and behind a snapshot, with and without a last block."""
    layer = make_layer(ratio, dtype=dtype, dim=32 if ratio == 4 else 48)
    chunks = [
        chunk(0, 131 if ratio == 128 else 9, slot=0),
        chunk(128, 140 if ratio == 128 else 12, slot=1, first_page=10),
        chunk(0, 3, slot=2, first_page=20),
        chunk(256, 4, slot=3, first_page=30, restored=4),
    ]
    rows = make_rows(layer, sum(each.num_tokens for each in chunks))
    wanted = pooled(layer, rows, chunks, reference=True)
    for got, expected in zip(pooled(layer, rows, chunks), wanted, strict=True):
        assert torch.equal(got.isnan(), expected.isnan())
        torch.testing.assert_close(got, expected, rtol=EXACT[dtype], atol=EXACT[dtype], equal_nan=True)


@pytest.mark.parametrize("ratio", [4, 128])
def test_entries_do_not_depend_on_chunks(ratio: int) -> None:
    """The last rows before the cut come from a slot, and another sequence is in the step."""
    layer = make_layer(ratio)
    rows, other = make_rows(layer, 261), make_rows(layer, 7)
    assert rows.compressed is not None and layer.pending is not None  # noqa: PT018
    whole = pooled(layer, rows, [chunk(0, 261, slot=0)])
    at = torch.arange(256 - layer.pending.shape[1], 256)
    layer.pending[3, at % layer.pending.shape[1]] = rows.compressed[at, : layer.pending.shape[2]]
    later = [chunk(0, 7, slot=1, first_page=20), chunk(256, 5, slot=0, restored=3)]
    cut = pooled(layer, joined([other, rows], [(0, 7), (256, 261)]), later)
    pages = slice(0, 20 * 32 // min(ratio, 16))
    for got, expected in zip(cut, whole, strict=True):
        new = ~got[pages].isnan().all(1)
        assert int(new.sum()) == (1 if ratio == 4 else 0)
        assert torch.equal(got[pages][new], expected[pages][new])


def test_bad_arguments_are_named() -> None:
    layer = make_layer(4, device="cpu")
    rows = make_rows(layer, 8)
    assert layer.pooling is not None and layer.pending is not None and rows.compressed is not None  # noqa: PT018
    options = {"pooling": layer.pooling, "rope": layer.rope, "eps": 1e-6}
    tables = tables_of(chunk(0, 8, slot=0), device="cpu")
    with pytest.raises(ValueError, match=r"pool_blocks: tables.rows int32 \[8, 2\], expected int32 \[7, 2\]"):
        ops.pool_blocks(rows.compressed[:7], layer.pending, column=0, tables=tables, **options)
    with pytest.raises(ValueError, match="pool_blocks: column 999"):
        ops.pool_blocks(rows.compressed, layer.pending, column=999, tables=tables, **options)
    with pytest.raises(ValueError, match=r"chunks at \[2\] begin inside blocks of 4 positions"):
        tables_of(chunk(2, 8, slot=0), device="cpu").blocks(4)
    with pytest.raises(ValueError, match=r"prompt chunks of \[0\] rows"):
        tables_of(chunk(0, 0, slot=0), device="cpu")
