"""Fleets and checkpoints that the end-to-end tests share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.checkpoints import make_checkpoint
from tests.fleet import ProcessPool


@pytest.fixture(scope="session")
def processes() -> Iterator[ProcessPool]:
    """Rank processes, started when first asked for."""
    pool = ProcessPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One checkpoint per attention kind, with a tokenizer: mla (DeepSeek-V3, grouped gate) and gqa (Qwen3-MoE)."""
    root = tmp_path_factory.mktemp("checkpoints")
    return {
        "mla": make_checkpoint(root / "mla", "deepseek_v3", tokenizer=True),
        "gqa": make_checkpoint(root / "gqa", "qwen3_moe", tokenizer=True),
    }
