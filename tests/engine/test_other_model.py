"""New weights whose config.json describes another model are refused, and the innermost field that differs is named."""

import re
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoints import edit_config, make_checkpoint

from moeyard_worker.config.engine_config import EngineConfig
from moeyard_worker.config.worker_spec import ServedWeights
from moeyard_worker.engine.assembly.worker import check_model, first_difference
from moeyard_worker.models.shapes import served_model


@pytest.mark.parametrize(
    ("family", "change", "named"),
    [
        ("deepseek_v4", {"index_topk": 5}, r"attention\[1\]\.indexer\.top_k is 5, and 8 is served"),
        ("deepseek_v4", {"sliding_window": 64}, r"attention\[0\]\.window is 64, and 128 is served"),
        ("deepseek_v3", {"num_experts_per_tok": 3}, "gate.rule.top_k is 3, and 2 is served"),
        ("deepseek_v3", {"num_hidden_layers": 2}, "num_layers is 2, and 3 is served"),
        ("qwen3_moe", {"rms_norm_eps": 0.5}, "rms_eps is 0.5, and 1e-06 is served"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, r"moe_layers\[1\] is 2, and 1 is served"),
        ("qwen3_moe", {"mlp_only_layers": [2]}, "the length of moe_layers is 2, and 3 is served"),
    ],
)
def test_field_that_differs_is_named(family: str, change: dict[str, Any], named: str, tmp_path: Path) -> None:
    served, other = (make_checkpoint(tmp_path / name, family) for name in ("served", "other"))
    config = EngineConfig(model_path=str(served))
    weights = ServedWeights(version="new", directory=str(other))
    check_model(config, served_model(config), weights)
    edit_config(other, **change)
    place = re.escape(f"{other}/config.json")
    with pytest.raises(ValueError, match=f"^{place} describes another model: {named}; start the server with it$"):
        check_model(config, served_model(config), weights)


def test_entries_of_one_set_are_named() -> None:
    common = frozenset(f"model.layers.{i}.mlp.gate" for i in range(40))
    found = first_difference("", (1, common | {"lm_head"}), (1, common))
    assert found == ("[1], without common entries,", ["lm_head"], [])
