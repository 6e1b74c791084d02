"""Scores of entries: reference and Triton kernel."""

import pytest
import torch
from tests.kernels.compressed_cases import DTYPES, Rows, chunk, make_layer, make_rows, tables_of

from moeyard_kernels import ops
from moeyard_kernels.attention import index_scores as triton_kernel
from moeyard_kernels.attention.index_scores import CONFIGS, ScoresConfig
from moeyard_kernels.types.layers import CompressedLayer
from moeyard_worker.scheduling.step import Chunk

RATIO = 4


def scores_of(
    layer: CompressedLayer,
    rows: Rows,
    chunks: list[Chunk],
    *,
    most: int = 1 << 20,
    config: ScoresConfig | None = None,
    reference: bool = False,
) -> dict[int, torch.Tensor]:
    """Return the scores of each row that chooses."""
    indexer, tables = layer.indexer, tables_of(*chunks)
    assert indexer is not None and rows.wanted is not None and rows.compressed is not None  # noqa: PT018
    weights, found = rows.compressed[:, -indexer.num_heads :], {}
    for chosen in tables.chosen(RATIO, indexer.top_k, most=most):
        options = {"pooling": indexer.pooling, "chosen": chosen, "tables": tables}
        if reference:
            scores = ops.index_scores.reference(rows.wanted, weights, **options)
        else:
            scores = triton_kernel.index_scores(rows.wanted, weights, config=config, **options)
        for i, row in enumerate(chosen.rows.tolist()):
            found[row] = scores[i, : (int(tables.rows[row, 1]) + 1) // RATIO]
    return found


CHUNKS = [chunk(128, 9, slot=0), chunk(0, 40, slot=1, first_page=20), chunk(0, 20, slot=2, first_page=30)]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_kernel_gives_the_scores_of_the_reference(dtype: torch.dtype) -> None:
    layer = make_layer(RATIO, dtype=dtype)
    rows = make_rows(layer, 69)
    got, wanted = scores_of(layer, rows, CHUNKS), scores_of(layer, rows, CHUNKS, reference=True)
    # 9 rows, and the five of 40 that see more than 8 entries.
    assert list(got) == list(wanted) == [*range(9), *range(9 + 35, 9 + 40)]
    for row in wanted:
        torch.testing.assert_close(got[row], wanted[row], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_scores_do_not_depend_on_tiles_and_parts(config: ScoresConfig) -> None:
    layer = make_layer(RATIO)
    rows = make_rows(layer, 69)
    whole = scores_of(layer, rows, CHUNKS)
    for row, scores in scores_of(layer, rows, CHUNKS, most=1, config=config).items():
        assert torch.equal(scores, whole[row]), row


def test_no_row_chooses() -> None:
    assert scores_of(make_layer(RATIO), make_rows(make_layer(RATIO), 20), CHUNKS[2:]) == {}


def test_parts_hold_whole_tiles() -> None:
    """Parts are cut by their scores, with the width of their longest row."""
    tables = tables_of(chunk(1024, 300, slot=0), chunk(0, 200, slot=1), device="cpu")
    parts = tables.chosen(4, 8, most=128 * 384)
    assert [part.width for part in parts] == [384, 384, 384, 128]
    assert [part.tiles.tolist() for part in parts] == [[[0, 128]], [[0, 128]], [[0, 44]], [[0, 128], [128, 165]]]
    assert torch.cat([part.rows for part in parts]).tolist() == [*range(300), *range(335, 500)]
    assert tables.chosen(4, 8) is parts
    assert tables.chosen(4, 400) == ()
