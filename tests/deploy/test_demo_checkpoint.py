"""The bundled demo checkpoint: reproducible, loadable by transformers, and routed to many experts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "deploy" / "demo"
MAX_BYTES = 4 * 1024 * 1024


@pytest.fixture(scope="module")
def model() -> transformers.PreTrainedModel:
    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.bfloat16).eval()


@pytest.fixture(scope="module")
def tokenizer() -> transformers.PreTrainedTokenizerFast:
    return transformers.AutoTokenizer.from_pretrained(DEMO)


def test_regenerating_gives_the_same_bytes(tmp_path: Path) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, DEMO / "make_random.py", "--out", tmp_path], check=True, env=env)
    written = sorted(p.name for p in tmp_path.iterdir())
    assert "model.safetensors" in written
    assert "tokenizer.json" in written
    differing = [name for name in written if (tmp_path / name).read_bytes() != (DEMO / name).read_bytes()]
    assert differing == []


def test_is_small_and_complete() -> None:
    names = {p.name for p in DEMO.iterdir()}
    assert names >= {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "README.md"}
    assert (DEMO / "model.safetensors").stat().st_size <= MAX_BYTES
    config = json.loads((DEMO / "config.json").read_text())
    assert config["model_type"] == "deepseek_v3"
    assert config["q_lora_rank"]
    assert (config["n_routed_experts"], config["num_experts_per_tok"], config["n_shared_experts"]) == (32, 4, 1)


def test_transformers_loads_it_and_routes_to_every_expert(model: transformers.PreTrainedModel, tokenizer) -> None:
    chosen: list[torch.Tensor] = []
    for module in model.modules():
        if type(module).__name__ == "DeepseekV3TopkRouter":
            module.register_forward_hook(lambda _module, _args, output: chosen.append(output[2]))
    ids = tokenizer((DEMO / "corpus.txt").read_text(), return_tensors="pt").input_ids[:, :512]
    with torch.no_grad():
        logits = model(ids).logits
    assert torch.isfinite(logits).all()
    assert len(chosen) == 3
    for topk_ids in chosen:
        load = torch.bincount(topk_ids.flatten(), minlength=32).float()
        assert load.min() > 0
        assert load.max() / load.mean() < 4


def test_tokenizer_covers_the_vocabulary_and_round_trips(model: transformers.PreTrainedModel, tokenizer) -> None:
    assert len(tokenizer) == model.config.vocab_size == 1024
    text = 'Why is the sky blue? 42 \N{SNOWMAN} "naïve" 你好\n\tdef f(): return 1'
    ids = tokenizer(text).input_ids
    assert ids[0] == tokenizer.bos_token_id == model.generation_config.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_chat_template_opens_the_assistant_turn(model: transformers.PreTrainedModel, tokenizer) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|begin|><|system|>Be brief.<|turn|><|user|>Hi<|turn|><|assistant|>"
    assert tokenizer.convert_tokens_to_ids("<|turn|>") in model.generation_config.eos_token_id
