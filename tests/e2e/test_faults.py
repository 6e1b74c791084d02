"""Logits that are not finite: a token whose embedding is NaN ends the request, whose error names it."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.checkpoints import edit_tensors, make_checkpoint
from tests.fleet import ProcessPool, start_fleet

from moeyard_worker.config.engine_config import EngineConfig
from moeyard_worker.protocol import Done

BAD = 7
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "seed": 3, "top_p": 0.9},
    "edited": {"temperature": 0.8, "seed": 3, "repetition_penalty": 1.2, "logprobs": 2},
}


@pytest.fixture(scope="module")
def own_processes() -> Iterator[ProcessPool]:
    pool = ProcessPool()
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def spoilt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = make_checkpoint(tmp_path_factory.mktemp("spoilt") / "model", "qwen3_moe", dtype=torch.bfloat16)
    name = "model.embed_tokens.weight"
    embedding = load_file(model / "model.safetensors")[name]
    embedding[BAD] = float("nan")
    edit_tensors(model, add={name: embedding})
    return model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_request_with_non_finite_logits_is_named(
    device: str, eager: bool, kind: str, spoilt: Path, own_processes: ProcessPool
) -> None:
    config = EngineConfig(
        model_path=str(spoilt),
        device=device,
        page_size=64,
        kv_memory=1 << 22,
        max_model_len=512,
        max_batch_tokens=64,
        # A CPU has no graphs. There the cases are one and two steps in flight.
        max_num_seqs=4,
        prefill_chunk=64,
        async_scheduling=device == "cuda" or eager,
        enforce_eager=eager,
    )
    with start_fleet(own_processes, config) as fleet:
        client = fleet.client
        client.submit(0, "sound", (1, 2, 3), max_tokens=500, ignore_eos=True, **KINDS[kind])
        client.wait_for(lambda: len(client.answers["sound"].token_ids) > 3)
        client.submit(0, "spoilt", (1, BAD), max_tokens=8, ignore_eos=True, **KINDS[kind])
        (spoilt_one,) = client.wait("spoilt")
        assert client.answers["sound"].end is None, "another rank may continue this request"
    end = spoilt_one.end
    assert isinstance(end, Done)
    assert end.finish_reason == "error"
    assert re.fullmatch(r"rank 0: logits of step \d+ are not finite: request spoilt", end.error or "")
