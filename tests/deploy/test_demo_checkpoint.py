"""The bundled demo checkpoint: DeepSeek-V3's layout, loadable by transformers, and as good as its card says.

`examples/demo_model/evaluate.py` measures it on all held-out text in minutes. Here a part of that text must meet the
same bounds, and evaluation.json must describe these very weights.
"""

import json
from pathlib import Path

import pytest
import torch
import transformers
from examples.demo_model import train
from examples.demo_model.evaluate import MAX_BITS_PER_BYTE, MIN_ACCEPTANCE, make_runner
from examples.demo_model.measure import DemoModel, Document, measure_heldout, read_documents, spread
from safetensors import safe_open

from moeyard_worker.engine.assembly.local import greedy_tokens

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "deploy" / "demo"
MAX_BYTES = 16_000_000
TOKENS = 64


@pytest.fixture(scope="module")
def model() -> DemoModel:
    return DemoModel(DEMO)


@pytest.fixture(scope="module")
def documents(model: DemoModel) -> list[Document]:
    return [d for d in read_documents(DEMO / "heldout.jsonl", model) if len(d.ids) > TOKENS + 1]


def test_size_and_shape_match_train_py() -> None:
    wanted = train.model_config(tiny=False)
    names = set(train.DemoModel(wanted).checkpoint())
    stored = transformers.AutoConfig.from_pretrained(DEMO)
    unlike = {key for key, value in wanted.to_dict().items() if stored.to_dict().get(key) != value}
    assert unlike <= {"_name_or_path", "transformers_version"}
    assert (DEMO / "model.safetensors").stat().st_size <= MAX_BYTES
    with safe_open(DEMO / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == names
        dtypes = {file.get_slice(name).get_dtype() for name in names if "e_score" not in name}
        head, shared = file.get_tensor("lm_head.weight"), file.get_tensor("model.layers.6.shared_head.head.weight")
    assert dtypes == {"BF16"}
    assert torch.equal(head, shared)
    ahead = {name.removeprefix("model.layers.6.") for name in names if name.startswith("model.layers.6.")}
    assert ahead >= {"eh_proj.weight", "enorm.weight", "hnorm.weight", "embed_tokens.weight", "shared_head.norm.weight"}


def test_figures_hold_on_a_part_of_the_held_out_text(model: DemoModel, documents: list[Document]) -> None:
    part = sorted(documents, key=lambda d: len(d.ids))[:14]
    found = measure_heldout(model, part)
    assert found["heldout"]["bits_per_byte"] <= MAX_BITS_PER_BYTE
    assert sum(row["dead"] for row in found["experts"]) == 0
    assert found["mtp"]["agrees_with_main"] >= MIN_ACCEPTANCE


def test_the_evaluation_met_every_bound() -> None:
    evaluation = json.loads((DEMO / "evaluation.json").read_text())
    assert len(evaluation["bounds"]) == 5
    assert all(row["met"] for row in evaluation["bounds"])


@pytest.mark.slow
def test_greedy_tokens_equal_those_of_transformers(model: DemoModel, documents: list[Document]) -> None:
    """Greedy tokens are equal if transformers chooses each of them after the tokens before it."""
    runner = make_runner(DEMO, 2 * TOKENS + 1)
    for document in spread(documents, 6):
        prompt = document.ids[: TOKENS + 1]
        written, _ = greedy_tokens(runner, prompt, TOKENS)
        chosen = model.forward(torch.tensor([prompt + written])).logits[0].argmax(-1)
        assert chosen[TOKENS:-1].tolist() == written, document.title


def test_tokenizer_covers_the_vocabulary_and_round_trips(model: DemoModel) -> None:
    tokenizer = model.tokenizer
    assert len(tokenizer) == model.config.vocab_size == 4096
    text = 'Why is the sky blue? 42 \N{SNOWMAN} "naïve" 你好\n\tdef f(): return 1'
    ids = tokenizer(text).input_ids
    assert ids[0] == tokenizer.bos_token_id == model.main.generation_config.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_chat_template_opens_the_assistant_turn(model: DemoModel) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = model.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|begin|><|system|>Be brief.<|turn|><|user|>Hi<|turn|><|assistant|>"
    assert model.tokenizer.convert_tokens_to_ids("<|turn|>") in model.main.generation_config.eos_token_id
