"""Choice of entries by score: reference and Triton kernel."""

import pytest
import torch
from tests.kernels.compressed_cases import DEVICE, chunk, make_layer, tables_of

from moeyard_kernels import ops
from moeyard_kernels.attention import choose_entries as triton_kernel
from moeyard_kernels.attention.choose_entries import CONFIGS, ChoiceConfig

TOP_K = 8
SMALL = ChoiceConfig(BLOCK=64)


def make_scores(kind: str, num_rows: int, width: int) -> torch.Tensor:
    scores = torch.randn(num_rows, width)
    if kind == "zeros of both signs":
        scores = torch.where(torch.rand(num_rows, width) < 0.1, scores, scores.sign() * 0.0)
    elif kind == "few values":
        scores = torch.randint(-2, 3, (num_rows, width)).float() / 3
    elif kind == "close values":
        scores = torch.nextafter(torch.ones(()), torch.full((), 2.0)).pow(torch.randint(0, 4, (num_rows, width)))
    elif kind == "infinities":
        scores[:, ::3], scores[:, 1::3] = float("inf"), float("-inf")
    return scores.to(DEVICE)


@pytest.mark.parametrize("config", [SMALL, *CONFIGS[:2]], ids=str)
@pytest.mark.parametrize("kind", ["random", "zeros of both signs", "few values", "close values", "infinities"])
def test_kernel_chooses_like_the_reference(kind: str, config: ChoiceConfig) -> None:
    tables = tables_of(chunk(0, 37, slot=0), chunk(512, 3, slot=1), chunk(1024, 1, slot=2))
    pooling = make_layer(4).pooling
    [chosen] = tables.chosen(4, TOP_K)
    scores = make_scores(kind, len(chosen.rows), chosen.width)
    # A row does not read scores of entries that it does not see.
    for i, row in enumerate(chosen.rows.tolist()):
        scores[i, (int(tables.rows[row, 1]) + 1) // 4 :] = float("nan")
    got, wanted = (torch.full((41, TOP_K), -1, dtype=torch.int32, device=DEVICE) for _ in range(2))
    options = {"pooling": pooling, "top_k": TOP_K, "chosen": chosen, "tables": tables}
    triton_kernel.choose_entries(scores, got, config=config, **options)
    ops.choose_entries.reference(scores, wanted, **options)
    assert torch.equal(got, wanted)
    assert (got[:35] == -1).all()


def test_odd_numbers_of_entries() -> None:
    """A choice of 5 from 6 is one past a block, and every score may win."""
    tables = tables_of(chunk(0, 24, slot=0))
    [chosen] = tables.chosen(4, 5)
    assert chosen.rows.tolist() == [23]
    for lowest in range(6):
        scores = torch.ones(1, chosen.width, device=DEVICE)
        scores[0, lowest] = -1.0
        found = torch.empty(24, 5, dtype=torch.int32, device=DEVICE)
        options = {"pooling": make_layer(4).pooling, "top_k": 5, "chosen": chosen, "tables": tables}
        triton_kernel.choose_entries(scores, found, config=SMALL, **options)
        assert found[23].tolist() == [each for each in range(6) if each != lowest]
