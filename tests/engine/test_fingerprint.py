"""A rank's fingerprint: it changes with everything that may change bits, and with nothing else."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tests.checkpoints import DEMO, add_v4_drafts, make_checkpoint, publish_v4

from moeyard_worker.checkpoint.check import check_weights
from moeyard_worker.config.engine_config import EngineConfig
from moeyard_worker.engine.assembly import fingerprint as module
from moeyard_worker.engine.assembly.fingerprint import fingerprint
from moeyard_worker.models.shapes import served_model


def of(directory: Path | None, device: str = "a CPU", **settings: Any) -> str:
    config = EngineConfig(model_path=None if directory is None else str(directory), **settings)
    model = served_model(config)
    return fingerprint(config, check_weights(config, model), model, device=device)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("one"), "qwen3_moe")


def test_settings_that_keep_the_bits(checkpoint: Path) -> None:
    one = of(checkpoint)
    kept: list[dict[str, Any]] = [
        {"num_workers": 2, "exchange": "zmq"},
        {"max_num_seqs": 3, "max_batch_tokens": 64, "prefill_chunk": 16},
        {"expert_slots": 2, "expert_policy": "lru"},
        {"threads": 2, "page_size": 8, "prefix_caching": False},
    ]
    assert {of(checkpoint, **settings) for settings in kept} == {one}
    assert len(one) == 16
    assert int(one, 16)


@pytest.mark.parametrize("model", ["demo", "deepseek_v4", "dspark"])
def test_drafts_keep_the_bits(model: str, tmp_path: Path) -> None:
    directory = DEMO
    if model != "demo":
        directory = publish_v4(make_checkpoint(tmp_path / model, "deepseek_v4"))
        add_v4_drafts(directory, dspark=model == "dspark")
    drafter = "dspark" if model == "dspark" else "mtp"
    assert of(directory, speculate=drafter, draft_tokens=2) == of(directory)


@pytest.mark.parametrize("kind", [".self_attn.", ".experts."])
def test_some_weights_change_it(kind: str, tmp_path: Path) -> None:
    other = Path(shutil.copytree(DEMO, tmp_path / "other"))
    weights = {key: x * 1.2 if kind in key else x for key, x in load_file(DEMO / "model.safetensors").items()}
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    assert of(other) != of(DEMO)


def test_another_process_agrees(checkpoint: Path) -> None:
    """Hashes of strings differ between processes."""
    code = (
        "import sys; from pathlib import Path; from tests.engine.test_fingerprint import of; "
        "print(of(Path(sys.argv[1])))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "7"}
    command = [sys.executable, "-c", code, str(checkpoint)]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert run.stdout.strip() == of(checkpoint)


def test_what_may_change_bits(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [of(checkpoint), of(checkpoint, device="another CPU"), of(checkpoint, dtype="bfloat16")]
    assert of(make_checkpoint(tmp_path / "copy", "qwen3_moe")) == found[0]
    found.append(of(make_checkpoint(tmp_path / "other", "qwen3_moe", seed=1)))
    for settings in ({}, {"num_layers": 1}, {"quantization": "fp8"}):
        found.append(of(None, load_format="dummy", shape="Qwen3-30B-A3B", **settings))
    monkeypatch.setattr(module, "_code", lambda: "other code")
    found.append(of(checkpoint))
    assert len(set(found)) == len(found)
