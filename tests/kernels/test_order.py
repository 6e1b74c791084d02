"""On a GPU tests that build for long begin first."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.kernels import conftest


def test_files_that_are_named_are_there() -> None:
    assert [name for name in conftest.BUILD_SECONDS if not Path(__file__).with_name(f"{name}.py").exists()] == []


@pytest.mark.parametrize(("gpu", "wanted"), [(False, "0123456"), (True, "3451260")])
def test_the_longest_begin_first(gpu: bool, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a file stay in order, and so do all others."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    stems = ("rope", "linear", "linear", "mla_decode", "gqa_decode", "sample", "linear")
    items: list[Any] = [SimpleNamespace(path=Path(f"test_{stem}.py"), name=str(i)) for i, stem in enumerate(stems)]
    conftest.pytest_collection_modifyitems(items)
    assert "".join(item.name for item in items) == wanted
