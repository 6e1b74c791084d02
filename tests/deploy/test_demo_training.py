"""examples/demo_model/train.py in miniature: it learns, resumes, and its model equals transformers' DeepSeek-V3."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from examples.demo_model import train as script
from safetensors.torch import load_file
from transformers.modeling_layers import MtpModel

DEMO = Path(__file__).resolve().parents[2] / "deploy" / "demo"
STEPS, LENGTH = 24, 32


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some held-out documents as training data, because only the program is under test."""
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    path.write_text("\n".join((DEMO / "heldout.jsonl").read_text().splitlines()[:8]) + "\n")
    return path


def train(data: Path, folder: Path, *options: str) -> int:
    """Run the script's command line in this process, because a new one would spend seconds on imports."""
    command = ["--tiny", "--data", data, "--heldout", data, "--run", folder / "run", "--out", folder / "out"]
    command += ["--steps", STEPS, "--batch", 4, "--length", LENGTH, "--log-every", 4, *options]
    return script.main(list(map(str, command)))


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    assert train(data, folder) == 0
    return folder / "out"


def test_the_losses_fall_and_are_recorded(trained: Path) -> None:
    record = json.loads((trained / "training.json").read_text())
    curve = record["curve"]
    assert [row["step"] for row in curve] == list(range(4, STEPS + 1, 4))
    assert curve[-1]["loss"] < curve[0]["loss"] - 0.2
    assert curve[-1]["mtp_loss"] < curve[0]["mtp_loss"] - 0.2
    assert curve[-1]["heldout_bpb"] > 0
    assert record["tokens"] == STEPS * 4 * LENGTH
    assert "--seed 20261120" in record["command"]


@pytest.mark.slow
def test_resumed_run_gives_the_same_bytes(trained: Path, data: Path, tmp_path: Path) -> None:
    # A time limit of 0 stops the first call at its first report.
    assert train(data, tmp_path, "--minutes", "1e-9") == 3
    assert not (tmp_path / "out" / "model.safetensors").exists()
    assert train(data, tmp_path) == 0
    names = ("model.safetensors", "tokenizer.json", "config.json")
    assert [n for n in names if (tmp_path / "out" / n).read_bytes() != (trained / n).read_bytes()] == []


def test_transformers_computes_the_same_logits_and_drafts(trained: Path) -> None:
    transformers.utils.logging.disable_progress_bar()
    reference = transformers.DeepseekV3ForCausalLM.from_pretrained(trained, dtype=torch.float32).eval()
    config = reference.config
    reference._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{config.num_hidden_layers}\..*"]
    drafter = MtpModel.from_pretrained(reference)

    stored = load_file(trained / "model.safetensors")
    model = script.DemoModel(config).eval()
    experts = range(config.n_routed_experts)
    tensors = {}
    for name in model.state_dict():
        stem, _, part = name.rpartition(".")
        parts = [stored[f"{stem}.experts.{i}.{part}.weight"] for i in experts] if name not in stored else []
        tensors[name] = torch.stack(parts).float() if parts else stored[name].float()
    model.load_state_dict(tensors)

    ids = torch.randint(7, config.vocab_size, (2, LENGTH + 2))
    with torch.no_grad():
        logits, draft, load = model(ids)
        expected = reference(ids[:, :-2], output_hidden_states=True)
        embedded = drafter.embed_tokens(ids[:, 1:-1])
        positions = torch.arange(1, LENGTH + 1)[None]
        rotary = drafter.rotary_emb(embedded, position_ids=positions)
        hidden = drafter.layers[0](embedded, expected.hidden_states[-1], rotary, None, positions, None)
    assert load.sum(-1).tolist() == [ids[:, 2:].numel() * config.num_experts_per_tok] * 2
    assert (logits - expected.logits).abs().max() < 1e-5
    assert (draft - drafter.shared_head(hidden)).abs().max() < 1e-5


def test_the_bias_moves_against_the_load() -> None:
    model = script.DemoModel(script.model_config(tiny=True))
    load = torch.tensor([[9, 1, 5, 5, 5, 5, 5, 5]] * 2)
    model.balance(load, 0.5)
    for gate in (m for m in model.modules() if isinstance(m, script.Gate)):
        assert gate.e_score_correction_bias.tolist() == [-0.5, 0.5, 0, 0, 0, 0, 0, 0]


def test_chat_examples_cut_at_whole_sentences() -> None:
    assert script.passage(["One. Two. Three."], limit=10) == "One. Two."
    assert script.passage(["One.", "Two.", "Three is long."], limit=12) == "One.\n\nTwo."
    assert script.passage(["no stop at all in here"], limit=12) == "no stop at"
