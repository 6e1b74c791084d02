"""Refusals of names that are neither a directory nor an id of the hub."""

import argparse
import re
from pathlib import Path

import pytest

from moeyard.local import model_source
from moeyard.local.model_source import bundled_model, foreign_form, gguf_source, hub_id, local_directory

ID = "Qwen/Qwen3-30B-A3B"


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("/models/qwen3.gguf", "is a GGUF file, which only serve, doctor, verify and dequantize read; name the"),
        ("models/qwen3.Q4_K_M.gguf", "is a GGUF file"),  # like an id
        ("pytorch_model.bin", "is a PyTorch file, which is not read; name the directory or the id"),
        (f"hf.co/{ID}", f"give `{ID}`"),
        (f"https://huggingface.co/{ID}", f"give `{ID}`"),
        (f"HTTPS://HuggingFace.co/{ID}/", f"give `{ID}`"),
        (f"huggingface.co/{ID}/tree/main", f"give `{ID}`"),
        (f"https://huggingface.co/{ID}/tree/v1.0?x=1#files", f"give `{ID} --revision v1.0`"),
        (f"https://huggingface.co/{ID}/blob/abc/config.json", f"give `{ID} --revision abc`"),
        (f"hf://{ID}", f"give `{ID}`"),
        ("hf.co/unsloth/Qwen3-30B-A3B-GGUF:Q4_K_M", "names GGUF files; for serve, doctor, "),
        ("https://huggingface.co/unsloth/Q/resolve/main/q.gguf", "names GGUF files"),
        ("https://huggingface.co/datasets/a/b", "names no model"),
        ("https://example.com/model.gguf", "is a URL"),
        ("s3://bucket/model", "is a URL"),
        ("qwen3:30b", "Ollama"),
        ("qwen3:30b-a3b-q4_K_M", "Ollama"),
        ("registry.ollama.ai/library/qwen3:30b", "Ollama"),
        (f"{ID}:Q4_K_M", "names a GGUF file by its tag"),
        (f"{ID}:main", f"`{ID} --revision main`"),
        (f"{ID}@v1", f"`{ID} --revision v1`"),
        ("qwen3", "no directory 'qwen3' here; a MODEL is a directory or an id"),
    ],
)
def test_forms_of_other_programs(model: str, says: str) -> None:
    assert hub_id(model) is None
    assert says in foreign_form(model)
    with pytest.raises(ValueError, match=re.escape(says)):
        local_directory(argparse.Namespace(model=model, revision=None))


@pytest.mark.parametrize("model", ["/no/such", "./no/such", "no/such/directory", "../no"])
def test_paths_are_not_ids(model: str) -> None:
    assert foreign_form(model) == ""
    assert local_directory(argparse.Namespace(model=model, revision=None)) == str(Path(model).resolve())


def test_empty_variable_is_not_the_demo() -> None:
    """`moeyard serve "$MODEL"` without that variable must not answer with another model."""
    with pytest.raises(ValueError, match="MODEL is an empty text; name a model"):
        local_directory(argparse.Namespace(model="", revision=None))
    assert local_directory(argparse.Namespace(model=None, revision=None)) == bundled_model()


def test_weights_in_other_formats(tmp_path: Path) -> None:
    args = argparse.Namespace(model=str(tmp_path), revision=None)
    (tmp_path / "config.json").write_text("{}")
    assert local_directory(args) == str(tmp_path)
    (tmp_path / "model-Q4_K_M.gguf").touch()
    (tmp_path / "imatrix.bin").touch()
    file = tmp_path / "model-Q4_K_M.gguf"
    with pytest.raises(ValueError, match=rf"as GGUF files \({file.name}\); for serve, .* name the file {file}$"):
        local_directory(args)
    file.rename(tmp_path / "model.onnx")
    with pytest.raises(ValueError, match=r"as PyTorch files \(imatrix\.bin\), which are not read; name the directory"):
        local_directory(args)
    (tmp_path / "model.safetensors").touch()
    assert local_directory(args) == str(tmp_path)
    args.model = str(tmp_path / "config.json")
    with pytest.raises(ValueError, match="is a file; name the directory that it is in"):
        local_directory(args)


def test_demo_is_found_in_a_checkout_and_in_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout, wheel = model_source._DEMO_PLACES
    assert bundled_model() == str(checkout)
    assert wheel.parts[-3:] == ("moeyard", "bundled", "demo")
    monkeypatch.setattr(model_source, "_DEMO_PLACES", (tmp_path / "none", tmp_path))
    with pytest.raises(ValueError, match="the demo checkpoint is not part of this installation"):
        bundled_model()
    (tmp_path / "config.json").touch()
    assert bundled_model() == str(tmp_path)


def test_directories_of_a_gguf_file(tmp_path: Path) -> None:
    file, directory = tmp_path / "m-00001-of-00002.gguf", tmp_path / "config"
    args = argparse.Namespace(model=str(file), hf_config_path=None, tokenizer=None)
    with pytest.raises(ValueError, match=r"m-00001-of-00002\.gguf: no such file"):
        gguf_source(args)
    (tmp_path / "blob").touch()
    file.symlink_to(tmp_path / "blob")
    with pytest.raises(ValueError, match=r"00002-of-00002\.gguf: no such file"):
        gguf_source(args)
    args.hf_config_path = str(directory)
    with pytest.raises(ValueError, match=r"--hf-config-path .*config: no such directory"):
        gguf_source(args)
    directory.mkdir()
    (directory / "tokenizer.json").touch()
    assert gguf_source(args) == (str(file), str(directory))
    args.model = ID
    with pytest.raises(ValueError, match=rf"--hf-config-path .*: only a GGUF file needs it, and {ID} is none"):
        gguf_source(args)
    args.hf_config_path, args.tokenizer = None, str(directory)
    with pytest.raises(ValueError, match=rf"--tokenizer .*: only a GGUF file needs it, and {ID} is none"):
        gguf_source(args)
    args.model = None
    with pytest.raises(ValueError, match="only a GGUF file needs it, and the demo is none"):
        gguf_source(args)
    args.model = ID
    args.tokenizer = None
    assert gguf_source(args) is None
