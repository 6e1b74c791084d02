"""Fleets and checkpoints that the end-to-end tests share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.checkpoints import DEMO, add_drafts, add_v4_drafts, make_checkpoint, publish_v4
from tests.fleet import ProcessPool
from tests.quantised import SERVED, make_served


@pytest.fixture(scope="session")
def processes() -> Iterator[ProcessPool]:
    """Rank processes, started on first use."""
    pool = ProcessPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return one checkpoint per attention kind and dtype, with 8 experts each, and the bundled model.

    Fp32 with a tokenizer: mla (DeepSeek-V3, grouped gate) and gqa (Qwen3-MoE). The model of mla_bf16 is DeepSeek-V3.
    The model of gqa_bf16 is Mixtral with a window shorter than most prompts. The model of hybrid and hybrid_bf16 is
    Qwen3-Next, and two of its three layers have state. In hybrid_mla (Kimi-Linear) the third has latent attention.
    The models of compressed, compressed_bf16, compressed_drafts and compressed_dspark are DeepSeek-V4. The bundled
    model is demo. Its MTP layer is usually right, as are those of hybrid_drafts (Qwen3.5) and compressed_drafts, and
    the drafter DSpark of compressed_dspark. Those of `tests.quantised.SERVED` are quantised. The bfloat16 checkpoints
    that they stand for are fp8_plain, int4_plain and fp4_plain.
    """
    root = tmp_path_factory.mktemp("checkpoints")
    bf16 = torch.bfloat16
    drafts = make_checkpoint(root / "hybrid_drafts", "qwen3_5_moe_text")
    add_drafts(drafts)
    compressed = publish_v4(make_checkpoint(root / "compressed_drafts", "deepseek_v4"))
    add_v4_drafts(compressed)
    dspark = publish_v4(make_checkpoint(root / "compressed_dspark", "deepseek_v4"))
    add_v4_drafts(dspark, dspark=True)
    quantised = dict[str, Path]()
    for kind in SERVED:
        quantised[kind], quantised[f"{kind}_plain"] = make_served(kind, root / kind)
    return quantised | {
        "demo": DEMO,
        "mla": make_checkpoint(root / "mla", "deepseek_v3", tokenizer=True),
        "gqa": make_checkpoint(root / "gqa", "qwen3_moe", tokenizer=True),
        "mla_bf16": make_checkpoint(root / "mla_bf16", "deepseek_v3", dtype=bf16),
        "hybrid": make_checkpoint(root / "hybrid", "qwen3_next", tokenizer=True),
        "hybrid_mla": make_checkpoint(root / "hybrid_mla", "kimi_linear"),
        "hybrid_bf16": make_checkpoint(root / "hybrid_bf16", "qwen3_next", dtype=bf16),
        "hybrid_drafts": drafts,
        "compressed_drafts": compressed,
        "compressed_dspark": dspark,
        "compressed": make_checkpoint(root / "compressed", "deepseek_v4", tokenizer=True),
        "compressed_bf16": make_checkpoint(root / "compressed_bf16", "deepseek_v4", dtype=bf16),
        "gqa_bf16": make_checkpoint(root / "gqa_bf16", "mixtral", dtype=bf16, sliding_window=24),
    }
