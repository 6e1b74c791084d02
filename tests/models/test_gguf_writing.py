"""`moeyard quantize --to q8_0`: the file is that of llama.cpp's converter, and it serves without further flags."""

import errno
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.checkpoints import DEMO, MLA, edit_config, edit_tensors, make_checkpoint
from tests.models.test_converting import fail_with, largest_file, limit_disk, refusal
from tests.models.test_gguf_metadata import CASES, ORIGINALS, original, texts
from tests.rank import Rank

from moeyard.cli.commands import main
from moeyard.local import gguf_description
from moeyard_router.text.chat import TextCodec
from moeyard_worker.checkpoint.gguf_header import read_gguf_header
from moeyard_worker.checkpoint.gguf_tokenizer import TOKENIZER_ARRAYS
from moeyard_worker.config.checkpoint_error import CheckpointError
from moeyard_worker.config.fields import read_json
from moeyard_worker.models.families import load_model_config
from moeyard_worker.protocol import SamplingParams
from moeyard_worker.tokenizer import read_tokenizer

# The package writes the files. An environment without it cannot run these tests.
gguf = pytest.importorskip("gguf")
files = pytest.importorskip("tests.gguf_files")
writing = pytest.importorskip("moeyard_worker.checkpoint.gguf_writing")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_description, "CACHE", tmp_path / "cache")


def make(tmp_path: Path, family: str, **settings: Any) -> Path:
    """Return a bfloat16 checkpoint with the demo's tokenizer."""
    sizes: dict[str, Any] = {"vocab_size": 4112, "bos_token_id": 0, "eos_token_id": 1}
    sizes |= MLA if "deepseek" in family or "kimi" in family else {}
    directory = make_checkpoint(tmp_path / "source", family, dtype=torch.bfloat16, **{**sizes, **settings})
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (directory / name).write_text((DEMO / name).read_text())
    return directory


def write(directory: Path, out: Path) -> Path:
    """Return the GGUF file of a checkpoint."""
    new = writing.q8_0(directory, read_tokenizer(directory), {"default": "T"})
    done: list[int] = []
    file = new.write(out, done.append)
    assert sum(done) == new.num_bytes
    assert list(out.iterdir()) == [file]
    assert file.name == f"{out.name}.gguf"
    return file


def expected(directory: Path) -> dict[str, tuple[str, bytes]]:
    """Return type and bytes of every tensor as the converter writes them, by name (`tests/gguf_files.py`)."""
    config = read_json(directory / "config.json")
    found = {}
    for name, tensor in files.convert(load_file(directory / "model.safetensors"), config).items():
        fp32 = tensor.dim() == 1 or "ffn_gate_inp" in name
        kind = gguf.GGMLQuantizationType.F32 if fp32 else gguf.GGMLQuantizationType.Q8_0
        kind = gguf.GGMLQuantizationType.F16 if not fp32 and tensor.shape[-1] % 32 else kind
        found[name] = (kind.name, gguf.quants.quantize(tensor.float().contiguous().numpy(), kind).tobytes())
    return found


@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe", "mixtral", "deepseek_v2", "deepseek_v3", "kimi_k2"])
def test_tensors_are_those_of_the_converter(family: str, tmp_path: Path) -> None:
    """The matrices of latent attention with 24 columns are not whole blocks."""
    directory = make(tmp_path, family)
    file = write(directory, tmp_path / "out")
    wanted, reader = expected(directory), gguf.GGUFReader(file)
    found = {each.name: (each.tensor_type.name, each.data.tobytes()) for each in reader.tensors}
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name] == value, name
    assert {kind for kind, _ in wanted.values()} == {
        "F32",
        "Q8_0",
        *(["F16"] if family[:4] in ("deep", "kimi") else []),
    }


@pytest.mark.parametrize("case", CASES)
def test_keys_give_the_settings_of_the_model(case: str, tmp_path: Path) -> None:
    family, settings = CASES[case]
    directory = make(tmp_path, family, **settings)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [6, 1], "temperature": 0.6}))
    file = write(directory, tmp_path / "out")
    made = gguf_description.gguf_description(file, config=None, tokenizer=None)
    found, wanted = load_model_config(made, gguf=True), load_model_config(directory, gguf=True)
    assert found == replace(wanted, family=wanted.family.replace("kimi_k2", "deepseek_v3"), eos_token_ids=(1, 6))
    assert read_json(made / "generation_config.json") == {"temperature": 0.6}


def test_keys_are_those_of_the_converter(tmp_path: Path) -> None:
    directory = make(tmp_path, "deepseek_v3", **CASES["deepseek_v3"][1])
    header = read_gguf_header(write(directory, tmp_path / "out"), TOKENIZER_ARRAYS)
    wanted = files.described(read_json(directory / "config.json")) | files.tokenizer_keys(directory, "gpt-2", 4112)
    found = {**header.metadata, **header.arrays, "tokenizer.chat_template": wanted["tokenizer.chat_template"]}
    for key, value in wanted.items():
        same = pytest.approx(value, rel=1e-7) if isinstance(value, float) else value
        assert (list(found[key]) if isinstance(value, list) else found[key]) == same, key
    assert {key: found[key] for key in found if key.startswith("general.")} == {
        "general.architecture": "deepseek2",
        "general.type": "model",
        "general.file_type": 7,
        "general.quantization_version": 2,
        "general.name": "out",
    }


@pytest.mark.parametrize("pre", ORIGINALS)
def test_tokenizer_of_the_file_is_that_of_the_checkpoint(pre: str, tmp_path: Path) -> None:
    directory = make(tmp_path, "qwen3_moe")
    for each in original(tmp_path / "original", pre).iterdir():
        if "config.json" not in (each.name, each.name.removeprefix("generation_")):
            (directory / each.name).write_text(each.read_text())
    made = gguf_description.gguf_description(write(directory, tmp_path / "out"), config=None, tokenizer=None)
    wanted, found = TextCodec(directory), TextCodec(made)
    for special in (True, False):
        for text in texts()[:400]:
            assert found.encode(text, add_special_tokens=special) == wanted.encode(text, add_special_tokens=special)
    assert found.spell(range(4112)) == wanted.spell(range(4112))
    assert found.token_bytes.table(skip_special_tokens=True) == wanted.token_bytes.table(skip_special_tokens=True)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "mixtral"])
def test_the_file_serves_with_the_answers_of_its_bfloat16_checkpoint(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All commands, without any further flag."""
    directory, out, plain = make(tmp_path, family), tmp_path / "out", tmp_path / "plain"
    assert main(["quantize", str(directory), "--to", "q8_0", "--out", str(out)]) == 0
    file = out / "out.gguf"
    assert re.search(rf"^{file}: .* of weights$", capsys.readouterr().out, re.MULTILINE)
    assert main(["verify", str(file)]) == 0
    assert "agrees with transformers" in capsys.readouterr().out
    assert main(["dequantize", str(file), "--out", str(plain)]) == 0
    made = gguf_description.gguf_description(file, config=None, tokenizer=None)
    requests = {"a": (list(range(1, 20)), SamplingParams(max_tokens=8, temperature=0.0))}
    answers = []
    for model, options in ((made, {"gguf": str(file)}), (plain, {})):
        with Rank(model, expert_slots=3, **options) as rank:
            answers.append(rank.run(requests)[0]["a"].token_ids)
    assert answers[0] == answers[1]


def test_the_directory_of_the_file_is_refused_with_its_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(make(tmp_path, "qwen3_moe"), tmp_path / "out")
    reason = (
        f"{file.parent} has its weights as GGUF files (out.gguf); for serve, doctor, verify and dequantize name the"
    )
    for command in (["serve"], ["verify"], ["dequantize", "--out", str(tmp_path / "plain")]):
        with pytest.raises(SystemExit):
            main([*command, str(file.parent)])
        assert capsys.readouterr().err == f"moeyard: {reason} file {file}\n"
    assert main(["doctor", str(file.parent)]) == 1
    assert f"{reason} file {file}\n" in capsys.readouterr().out


def test_other_layouts_of_experts_give_the_same_file(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one, other = make(tmp_path / "a", "mixtral"), make(tmp_path / "b", "mixtral", fused_experts=True)
    assert write(one, tmp_path / "1" / "m").read_bytes() == write(other, tmp_path / "2" / "m").read_bytes()


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("qwen3_next", {}, r"model_type is qwen3_next, which has no GGUF form here .supported: qwen3_moe, deepseek_v2"),
        ("qwen3_moe", {"norm_topk_prob": False}, "cannot be stored in a GGUF file, which has no keys for gate"),
        ("mixtral", {"sliding_window": 64}, "cannot be stored in a GGUF file, which has no keys for attention"),
        ("qwen3_moe", {"rms_norm_eps": 1.23456789e-6}, "has no keys for attention, rms_eps|has no keys for rms_eps"),
    ],
)
def test_models_without_a_file_are_refused(family: str, settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    directory = make(tmp_path, family, **settings)
    with pytest.raises(CheckpointError, match=message):
        writing.q8_0(directory, read_tokenizer(directory), {})


def test_values_that_have_no_codes_are_refused(tmp_path: Path) -> None:
    directory, key = make(tmp_path, "qwen3_moe"), "model.layers.1.mlp.experts.3.up_proj.weight"
    for number, value in enumerate((float("inf"), float("nan"), 1e7)):
        edit_tensors(directory, add={key: torch.full((32, 64), value, dtype=torch.bfloat16)})
        with pytest.raises(CheckpointError, match=rf"{key} holds values that .* cannot be written as Q8_0"):
            write(directory, tmp_path / f"out{number}")
        assert not (tmp_path / f"out{number}").exists()


def test_errors_of_writing_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, partial = make(tmp_path, "qwen3_moe"), tmp_path / "out.partial"
    with largest_file(300_000), pytest.raises(ValueError, match=refusal(partial, "File too large; remove the cause")):
        write(directory, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with monkeypatch.context() as patch:
        patch.setattr(writing.os, "fsync", fail_with(errno.ENOSPC))
        with pytest.raises(ValueError, match=refusal(partial, "the disk is full; make room")):
            write(directory, tmp_path / "out")


def test_bytes_of_an_interrupted_run_count_as_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = make(tmp_path, "qwen3_moe")
    with largest_file(300_000), pytest.raises(ValueError, match="File too large"):
        write(directory, tmp_path / "out")
    assert (tmp_path / "out.partial" / "out.gguf").stat().st_size == 300_000
    limit_disk(monkeypatch, writing.q8_0(directory, None, {}).num_bytes)
    write(directory, tmp_path / "out")


@pytest.mark.parametrize("change", [None, "header", "record", "empty record", "cut"])
def test_an_interrupted_run_is_continued(change: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its whole tensors are not made again, unless the header differs or no record of them is there."""
    directory = make(tmp_path, "qwen3_moe")
    whole = write(directory, tmp_path / "whole" / "out").read_bytes()
    made: list[str] = []
    make_tensor = writing.NewGguf._make

    def interrupted(self: Any, tensor: Any) -> Any:
        made.append(tensor.parts[0][0].key)
        if len(made) == 9:
            raise KeyboardInterrupt
        return make_tensor(self, tensor)

    monkeypatch.setattr(writing.NewGguf, "_make", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(directory, tmp_path / "out")
    partial = tmp_path / "out.partial"
    if change == "record":
        (partial / "written.json").unlink()
    elif change == "empty record":
        (partial / "written.json").write_bytes(b"")
    elif change is not None:
        (partial / "out.gguf").write_bytes(bytes(len(whole)) if change == "header" else whole[:9999])

    def again(self: Any, tensor: Any) -> Any:
        made.append("again")
        return make_tensor(self, tensor)

    monkeypatch.setattr(writing.NewGguf, "_make", again)
    assert write(directory, tmp_path / "out").read_bytes() == whole
    num_tensors = len(writing.q8_0(directory, None, {}).tensors)
    assert made.count("again") == num_tensors - (8 if change is None else 0)


def test_a_tokenizer_without_a_gguf_form_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory, out = make(tmp_path, "qwen3_moe"), tmp_path / "out"
    spec = read_json(directory / "tokenizer.json")
    spec["pre_tokenizer"] = {"type": "Digits", "individual_digits": True}
    (directory / "tokenizer.json").write_text(json.dumps(spec))
    assert main(["quantize", str(directory), "--to", "q8_0", "--out", str(out)]) == 0
    assert f"serve it with --tokenizer {directory}" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match="--tokenizer DIR"):
        gguf_description.gguf_description(out / "out.gguf", config=None, tokenizer=None)
    made = gguf_description.gguf_description(out / "out.gguf", config=None, tokenizer=directory)
    edit_config(directory, dtype="bfloat16")
    assert load_model_config(made, gguf=True) == load_model_config(directory, gguf=True)


def test_the_package_is_named_if_it_is_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("moeyard.clients.convert.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        main(["quantize", str(DEMO), "--to", "q8_0", "--out", str(tmp_path / "out")])
    assert "pip install 'moeyard[gguf]'" in capsys.readouterr().err
