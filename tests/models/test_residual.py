"""A residual of several streams works without changes to any layer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoints import MLA, make_checkpoint
from tests.rank import Rank

from moeyard_kernels.types.gate import ExpertParts
from moeyard_worker.models import decoder
from moeyard_worker.protocol import SamplingParams

STREAMS = 4
HEADS = {"deepseek_v3": MLA}


class Mixed:
    """Streams [num_rows, S, H]. A block reads their mean. `shares` scale a block's result for each stream."""

    def __init__(self, backend: Any, eps: float, shares: tuple[float, ...]) -> None:
        self._backend, self._eps, self._shares = backend, eps, torch.tensor(shares)

    def site(self, weights: Any) -> torch.Tensor:
        return weights["norm"]

    def last(self, weights: Any) -> tuple[torch.Tensor, Any]:
        return weights["norm"], lambda rows: rows

    def begin(self, rows: torch.Tensor, plan: Any) -> "MixedResidual":
        return MixedResidual(self._backend, self._eps, rows[:, None].repeat(1, STREAMS, 1), plan, self._shares)


class MixedResidual:
    def __init__(self, backend: Any, eps: float, streams: torch.Tensor, plan: Any, shares: torch.Tensor) -> None:
        self._backend, self._eps, self._streams, self._plan, self._shares = backend, eps, streams, plan, shares

    def enter(self, site: torch.Tensor) -> torch.Tensor:
        return self._backend.rms_norm(self._streams.mean(1), site, self._eps)

    def leave(self, result: torch.Tensor | ExpertParts, site: torch.Tensor) -> torch.Tensor:
        if isinstance(result, ExpertParts):
            # A zero stream gives the sum alone.
            zeros = self._streams.new_zeros(len(self._streams), self._streams.shape[2])
            _, result = self._backend.reduce_add_norm(result, zeros, site, self._eps, self._plan)
        self._streams = self._streams + result[:, None] * self._shares[:, None]
        return self.enter(site)


def answers(model: Path, **flags: Any) -> dict[str, Any]:
    asked = {"a": (list(range(1, 20)), SamplingParams(max_tokens=6, temperature=0.0))}
    with Rank(model, **flags) as rank:
        return {key: done.token_ids for key, done in rank.run(asked)[0].items()}


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next"])
def test_equal_streams_act_like_one_stream(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32 the mean of 4 equal streams is exact, so the tokens equal those of one stream."""
    model = make_checkpoint(tmp_path, family, **HEADS.get(family, {}))
    plain = answers(model)
    monkeypatch.setattr(decoder, "AddNormStreams", lambda backend, eps: Mixed(backend, eps, (1.0,) * STREAMS))
    assert answers(model) == plain
    monkeypatch.setattr(decoder, "AddNormStreams", lambda backend, eps: Mixed(backend, eps, (9.0, 0.0, 0.0, -7.0)))
    assert answers(model) != plain, "the streams have no effect"
