"""The set-up of kernel tests: order on a GPU, poisoned memory, sums in order."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.kernels import conftest


def test_listed_files_exist() -> None:
    assert [name for name in conftest.BUILD_SECONDS if not Path(__file__).with_name(f"{name}.py").exists()] == []


@pytest.mark.parametrize(("gpu", "wanted"), [(False, "0123456"), (True, "3451260")])
def test_longest_files_run_first(gpu: bool, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests of one file keep their order, and so do all others."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    stems = ("rope", "linear", "linear", "mla_decode", "gqa_decode", "sample", "linear")
    items: list[Any] = [SimpleNamespace(path=Path(f"test_{stem}.py"), name=str(i)) for i, stem in enumerate(stems)]
    conftest.pytest_collection_modifyitems(items)
    assert "".join(item.name for item in items) == wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.int64], ids=str)
def test_new_memory_is_poisoned(dtype: torch.dtype) -> None:
    like = torch.zeros(5, dtype=dtype)
    new = (torch.empty(5, dtype=dtype), torch.empty_like(like), torch.empty_strided((5,), (1,), dtype=dtype))
    for memory in (*new, like.new_empty(5)):
        assert torch.all(memory.isnan() if dtype.is_floating_point else memory == -77)


@pytest.mark.parametrize("shape", [(16, 32, 16), (16, 64, 128), (64, 7, 64), (1, 1, 1)], ids=str)
def test_products_are_summed_in_order(shape: tuple[int, int, int]) -> None:
    """Both forms give the bits of a loop over K. The shapes are on both sides of the size that switches forms."""
    rows, inner, columns = shape
    draw = np.random.default_rng(5).standard_normal
    x, y, acc = (draw(size, dtype=np.float32) for size in ((rows, inner), (inner, columns), (rows, columns)))
    wanted = acc.copy()
    for k in range(inner):
        wanted = wanted + x[:, k, None] * y[None, k]
    assert np.array_equal(conftest.sum_in_order(x, y, acc).view(np.int32), wanted.view(np.int32))
