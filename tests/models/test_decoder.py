"""A decoder runs through all of its layers, or through one of each kind."""

from pathlib import Path
from typing import Any

import pytest
from tests.checkpoints import MLA, make_checkpoint
from tests.rank import Rank

from moeyard_worker.protocol import SamplingParams


@pytest.mark.parametrize(
    ("family", "fields", "kinds"),
    # In this Kimi-Linear the first and last layer have the same attention, and the first has no experts.
    [("kimi_linear", MLA, [0, 1, 2]), ("qwen3_5_moe", {}, [0, 1]), ("deepseek_v3", {}, [0, 1]), ("qwen3_moe", {}, [0])],
)
def test_one_layer_of_each_kind(
    family: str, fields: dict[str, Any], kinds: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_checkpoint(tmp_path, family, **fields)
    asked = {"a": (list(range(1, 20)), SamplingParams(max_tokens=2, temperature=0.0))}
    ran: list[int] = []
    with Rank(model) as rank:
        decoder = rank.worker.runner.model
        for i, layer in enumerate(decoder._layers):

            def forward(*args: Any, i: int = i, whole: Any = layer.forward) -> Any:
                ran.append(i)
                return whole(*args)

            monkeypatch.setattr(layer, "forward", forward)
        with decoder.one_layer_of_each_kind():
            rank.run(asked)
        assert sorted(set(ran)) == kinds
        ran.clear()
        rank.run(asked)
        # Prefill and decode.
        assert ran == [0, 1, 2, 0, 1, 2]
