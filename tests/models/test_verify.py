"""`moeyard verify`: the table, the verdict, and its errors."""

import re
from pathlib import Path

import pytest
import torch
from tests.checkpoints import edit_config, edit_tensors, make_checkpoint
from tests.quantised import PLAIN, quantise

from moeyard_worker.config.checkpoint_error import CheckpointError
from moeyard_worker.engine.assembly import verify as module
from moeyard_worker.engine.assembly.local import local_runner
from moeyard_worker.engine.assembly.verify import sample_prompts, verify


@pytest.mark.sampled(0)
@pytest.mark.parametrize(
    "family", ["deepseek_v3", "kimi_k2", "kimi_k25", "qwen3_next", "qwen3_5_moe", "kimi_linear", "mixtral", "olmoe"]
)
def test_agrees(tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str) -> None:
    hybrid = family in ("qwen3_next", "qwen3_5_moe", "kimi_linear")
    cut = {"layer_types": ["linear_attention", "full_attention"]} if hybrid else {}
    make_checkpoint(tmp_path, family, num_hidden_layers=2, **cut)
    assert verify(tmp_path) == 0
    out = capsys.readouterr().out
    assert out.count("32 of 32") == 4
    assert out.endswith("agrees with transformers\n")


def test_bfloat16(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(tmp_path, "qwen3_moe", num_hidden_layers=2, dtype=torch.bfloat16)
    assert verify(tmp_path, dtype="bfloat16") == 0
    assert ", bfloat16\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("layout", "family"),
    [
        ("fp8", "deepseek_v3"),
        ("ct-int4", "qwen3_5_moe"),
        ("ct-int4", "kimi_k25"),
        ("gptq-v2", "qwen3_moe"),
        ("fp8-128", "mixtral"),
    ],
)
def test_quantised(layout: str, family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Blocks of 24 and 128 rows are partial."""
    make_checkpoint(tmp_path, family, dtype=torch.bfloat16)
    quantise(tmp_path, layout, excluded=(*PLAIN, "visual", "vision_tower"))
    assert verify(tmp_path) == 0
    assert capsys.readouterr().out.count("32 of 32") == 4


def test_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference is another checkpoint, so the verdict depends only on the numbers."""
    make_checkpoint(tmp_path / "ours", "qwen3_moe")
    make_checkpoint(tmp_path / "theirs", "qwen3_moe", seed=1)
    other = module.reference_model(tmp_path / "theirs", "qwen3_moe", dtype=torch.float32)
    monkeypatch.setattr(module, "reference_model", lambda *args, **kwargs: other)
    assert verify(tmp_path / "ours") == 1
    assert "DIFFERS" in capsys.readouterr().out


def test_tensors_that_transformers_lacks_are_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3_moe")
    edit_tensors(tmp_path, remove=["model.norm.weight", "model.layers.1.mlp.gate.weight"])
    message = f"{tmp_path}: transformers does not find model.layers.1.mlp.gate.weight, model.norm.weight"
    with pytest.raises(CheckpointError, match=f"^{re.escape(message)}$"):
        module.reference_model(tmp_path, "qwen3_moe", dtype=torch.float32)


def test_prompts_are_texts_with_a_tokenizer(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3_moe", tokenizer=True)
    runner = local_runner(tmp_path, dtype=torch.float32, num_pages=1)
    prompts = sample_prompts(tmp_path, runner.config)
    assert [len(prompt) for prompt in prompts] == [len(text) for text in module.PROMPT_TEXTS]


def test_refusals(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3_moe")
    with pytest.raises(ValueError, match="dtype 'float16'"):
        verify(tmp_path, dtype="float16")
    with pytest.raises(ValueError, match="page_size 24 does not divide 64"):
        local_runner(tmp_path, dtype=torch.float32, num_pages=1, page_size=24)
    edit_config(tmp_path, model_type="llama")
    with pytest.raises(CheckpointError, match="'llama' is not supported"):
        verify(tmp_path)
