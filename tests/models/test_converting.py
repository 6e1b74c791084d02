"""Conversions of checkpoints: what is written, runs that are continued, and refusals."""

import errno
import json
import os
import re
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tests.checkpoints import FAMILIES, add_drafts, edit_config, edit_tensors, make_checkpoint, write_tokenizer
from tests.quantised import PLAIN, SMALL, make_pair, make_served, quantise

from moeyard_kernels.types.matrix import dequantize
from moeyard_kernels.types.weight_form import WeightForm, fp8_form, int4_form
from moeyard_worker.checkpoint import reading, writing
from moeyard_worker.checkpoint.converting import dequantized, quantized
from moeyard_worker.checkpoint.loading import open_checkpoint
from moeyard_worker.checkpoint.quantizing import quantize
from moeyard_worker.checkpoint.writing import NewCheckpoint
from moeyard_worker.config.checkpoint_error import CheckpointError
from moeyard_worker.engine.assembly.verify import verify
from moeyard_worker.models.families import load_model_config

# The experts of a layer of multi-token prediction.
DRAFTS = "mtp.layers.0.mlp.experts"


def make(family: str, directory: Path) -> Path:
    return make_checkpoint(directory, family, dtype=torch.bfloat16)


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of the shards of a directory."""
    found: dict[str, torch.Tensor] = {}
    for file in directory.glob("*.safetensors"):
        found |= load_file(file)
    return found


def check_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Check that two sets of tensors have the same keys, dtypes and bytes."""
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert found[key].dtype == value.dtype, key
        assert torch.equal(found[key], value), key


def written(new: NewCheckpoint, out: Path) -> Path:
    """Write a checkpoint and return its directory."""
    done: list[int] = []
    new.write(out, done.append)
    assert sum(done) == new.num_bytes
    open_checkpoint(out, load_model_config(out))
    return out


@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", SMALL)
def test_dequantized_is_the_bfloat16_checkpoint(layout: str, family: str, tmp_path: Path) -> None:
    quantised, plain = make_pair(partial(make, family), tmp_path, layout, excluded=(*PLAIN, "visual", "vision_tower"))
    out = written(dequantized(quantised), tmp_path / "out")
    # The family's checkpoint has one stray tensor of a layer of multi-token prediction.
    check_equal(tensors(out), {key: value for key, value in tensors(plain).items() if key != "mtp.fc.weight"})
    config = json.loads((out / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert not [key for key in config if "quant" in key]
    assert load_model_config(out) == load_model_config(plain)


def test_dequantized_ids_of_experts_stay_integers(tmp_path: Path) -> None:
    """bfloat16 does not hold all numbers above 256."""
    kinds = {
        "layer_types": ["sliding_attention", "compressed_sparse_attention"],
        "mlp_layer_types": ["hash_moe", "moe"],
    }
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "n_routed_experts": 384, "num_hidden_layers": 2}
    quantised, plain = make_served("fp4", tmp_path, **sizes, **kinds)
    check_equal(tensors(written(dequantized(quantised), tmp_path / "out")), tensors(plain))
    assert verify(quantised) == 0


@pytest.mark.parametrize("name", ["fp8", "int4-g32"])
def test_codes_of_a_release_become_other_codes(name: str, tmp_path: Path) -> None:
    """DeepSeek-V4's config.json says outside of the quantisation settings that experts are fp4."""
    released, _ = make_served("fp4", tmp_path, hidden_size=64, moe_intermediate_size=32)
    plain = written(dequantized(released), tmp_path / "plain")
    out = written(quantized(plain, name), tmp_path / "out")
    for directory in (plain, out):
        assert "expert_dtype" not in json.loads((directory / "config.json").read_text())


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    return make("qwen3_moe", tmp_path / "qwen")


def test_the_layer_of_multi_token_prediction_is_dequantised(tmp_path: Path) -> None:
    def with_drafts(directory: Path) -> Path:
        cut = {"layer_types": ["linear_attention", "full_attention"]}
        make_checkpoint(directory, "qwen3_next", dtype=torch.bfloat16, num_hidden_layers=2, **cut)
        add_drafts(directory)
        edit_config(directory, mtp_num_hidden_layers=1)
        return directory

    quantised, plain = make_pair(with_drafts, tmp_path, "fp8")
    assert f"{DRAFTS}.0.up_proj.weight_scale_inv" in tensors(quantised)
    found = tensors(written(dequantized(quantised), tmp_path / "out"))
    assert f"{DRAFTS}.0.up_proj.weight" in found
    check_equal(found, tensors(plain))


def test_a_damaged_value_is_refused_with_its_file(qwen: Path, tmp_path: Path) -> None:
    quantise(qwen, "fp8")
    stored = load_file(qwen / "model.safetensors")
    key = "model.layers.0.self_attn.q_proj.weight"
    stored[f"{key}_scale_inv"][0, 0] = float("nan")
    save_file(stored, qwen / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"^{re.escape(str(qwen))}/model.safetensors: {key}_scale_inv holds a"):
        written(dequantized(qwen), tmp_path / "out")


def test_other_files_and_scales(qwen: Path, tmp_path: Path) -> None:
    """The tokenizer is copied. Scales of activations and of the cache, and float16, are not."""
    quantise(qwen, "fp8-tensor")
    stored = load_file(qwen / "model.safetensors")
    stored["model.layers.0.self_attn.k_scale"] = torch.ones(1)
    stored["model.norm.weight"] = stored["model.norm.weight"].half()
    writing.save_file(stored, qwen / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(qwen)
    (qwen / "quantize_config.json").write_text("{}")
    (qwen / "pytorch_model.bin").write_text("")
    edit_config(qwen, torch_dtype="float16")
    out = written(dequantized(qwen), tmp_path / "out")
    names = [
        "config.json",
        "generation_config.json",
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
    ]
    assert sorted(file.name for file in out.iterdir()) == [
        "chat_template.jinja",
        *names,
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    found = tensors(out)
    assert not [key for key in found if "scale" in key]
    assert torch.equal(found["model.norm.weight"], stored["model.norm.weight"].float())


@pytest.fixture
def new(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], NewCheckpoint]:
    """Return a function that returns a checkpoint of several shards."""
    quantise(qwen, "fp8")
    monkeypatch.setattr(writing, "SHARD_BYTES", 100_000)
    return lambda: dequantized(qwen)


def test_an_interrupted_run_is_continued(new: Callable[[], NewCheckpoint], tmp_path: Path) -> None:
    whole = written(new(), tmp_path / "whole")
    files = sorted(file.name for file in whole.glob("*.safetensors"))
    assert len(files) > 3
    done = 0

    def interrupt(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if done > 250_000:
            raise KeyboardInterrupt

    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        new().write(out, interrupt)
    assert not out.exists()
    kept = {file: file.stat().st_ino for file in (tmp_path / "out.partial").glob("*.safetensors")}
    assert 0 < len(kept) < len(files)
    # A damaged shard without its name is written again.
    (tmp_path / "out.partial" / files[-1]).with_suffix(".tmp").write_bytes(b"half")
    written(new(), out)
    assert all((out / file.name).stat().st_ino == inode for file, inode in kept.items())
    check_equal(tensors(out), tensors(whole))
    assert sorted(f.name for f in out.iterdir()) == sorted(f.name for f in whole.iterdir())
    assert all((out / name).read_bytes() == (whole / name).read_bytes() for name in files)


FORMS = {
    "fp8": fp8_form(128, 128, scales="bfloat16"),
    "int4-g32": int4_form(32, scales="bfloat16", zeros=False),
    "int4-g128": int4_form(128, scales="bfloat16", zeros=False),
}


def rounded(plain: dict[str, torch.Tensor], names: str, form: WeightForm) -> dict[str, torch.Tensor]:
    """Return tensors with the values of their codes for those whose key matches `names`."""
    return {
        key: dequantize(quantize(value, form)) if re.search(names, key) and value.dim() == 2 else value
        for key, value in plain.items()
    }


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["fp8", "int4-g32"])
def test_quantized_holds_the_nearest_codes(name: str, family: str, tmp_path: Path) -> None:
    plain = make(family, tmp_path / "plain")
    out = written(quantized(plain, name), tmp_path / "out")
    projections = (
        r"\b(self_attn|attn|mlp|ffn|block_sparse_moe)\.(?!.*(compressor|weights_proj|\bb_proj|[fg]_[ab]_proj))"
        r".*(_proj(_with_mqa)?|w[123]|wq_[ab]|wkv|wo_[ab])\.weight$"
    )
    names = r"experts\.\d+\." if name.startswith("int4") else projections
    wanted = {key: value for key, value in tensors(plain).items() if key != "mtp.fc.weight"}
    back = written(dequantized(out), tmp_path / "back")
    check_equal(tensors(back), rounded(wanted, names, FORMS[name]))
    assert len(tensors(out)) > len(wanted)
    packed = [key for key in tensors(out) if key.endswith(".weight_packed")]
    assert bool(packed) == name.startswith("int4")
    assert all(".experts." in key for key in packed)
    with pytest.raises(CheckpointError, match="is quantised already"):
        quantized(out, name)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "config.json", None])
def test_full_disk(
    name: str | None,
    new: Callable[[], NewCheckpoint],
    qwen: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The run says where room is missing, in a small file or in a shard, and is continued when there is some."""
    (qwen / "tokenizer_config.json").write_text("{}")
    partial = tmp_path / "out.partial"

    def fill(num_bytes: int) -> None:
        if name is not None and not (partial / name).exists():
            (partial / name).symlink_to("/dev/full")

    def fail(*args: object, **options: object) -> None:
        # The error of safetensors 0.8 on a full tmpfs.
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patch:
        if name is None:
            patch.setattr(writing, "save_file", fail)
        with pytest.raises(ValueError, match=re.escape(f"{partial}: the disk is full")):
            new().write(tmp_path / "out", fill)
    if name is not None:
        (partial / name).unlink()
    written(new(), tmp_path / "out")


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Let the operating system refuse to write larger files, with a part of the last write."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def fail_with(number: int) -> Callable[..., None]:
    """Return a function that fails with an error of the operating system."""

    def fail(*args: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def refusal(partial: Path, reason: str) -> str:
    """Return the pattern of the whole message."""
    return f"^{re.escape(str(partial))}: {reason} and run the command again, which keeps the files that are whole$"


def test_other_errors_of_writing_are_named(
    new: Callable[[], NewCheckpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    with largest_file(50_000), pytest.raises(ValueError, match=refusal(partial, "File too large; remove the cause")):
        new().write(out, lambda num_bytes: None)
    for number, reason in ((errno.EDQUOT, "Disk quota exceeded"), (errno.EIO, "Input/output error")):
        with monkeypatch.context() as patch:
            patch.setattr(writing.os, "fsync", fail_with(number))
            with pytest.raises(ValueError, match=refusal(partial, f"{reason}; remove the cause")):
                new().write(out, lambda num_bytes: None)
    written(new(), out)


def test_errors_of_reading_name_the_source(
    new: Callable[[], NewCheckpoint], qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = new()
    monkeypatch.setattr(reading.os, "preadv", fail_with(errno.EIO))
    with pytest.raises(CheckpointError, match=rf"^{qwen}/model.safetensors: Input/output error while reading model\."):
        whole.write(tmp_path / "out", lambda num_bytes: None)


def test_bytes_of_unfinished_files_count_as_free(
    new: Callable[[], NewCheckpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed process leaves a file of safetensors, and a failed one a shard without its name."""
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    with monkeypatch.context() as patch:
        patch.setattr(writing.os, "fsync", fail_with(errno.EIO))
        with pytest.raises(ValueError, match="Input/output error"):
            new().write(out, lambda num_bytes: None)
    assert [file.stem for file in partial.glob("*.tmp")] == ["model-00001-of-00005"]
    (partial / ".tmpAbCdEf").write_bytes(b"half")
    limit_disk(monkeypatch, new().num_bytes)
    written(new(), out)
    assert not [file.name for file in out.iterdir() if ".tmp" in file.name]


def limit_disk(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """Let a disk have room for `num_bytes` in weight files."""

    def usage(path: Path) -> Any:
        used = sum(file.stat().st_size for file in path.iterdir() if file.suffix != ".json")
        return writing.shutil._ntuple_diskusage(num_bytes, used, num_bytes - used)

    monkeypatch.setattr(writing.shutil, "disk_usage", usage)


def test_sizes_of_groups_and_partial_blocks(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "intermediate_size": 320, "head_dim": 48}
    plain = make_checkpoint(tmp_path / "plain", "qwen3_moe", **sizes)
    with pytest.raises(CheckpointError, match=r"experts\.0\.gate_proj\.weight cannot be written as int4-g128: its 64"):
        quantized(make("qwen3_moe", tmp_path / "small"), "int4-g128")
    stored = tensors(written(quantized(plain, "int4-g128"), tmp_path / "int4"))
    up = "model.layers.1.mlp.experts.3.up_proj"
    assert stored[f"{up}.weight_packed"].shape == (128, 32)
    assert stored[f"{up}.weight_scale"].dtype == torch.bfloat16
    assert stored[f"{up}.weight_shape"].tolist() == [128, 256]
    stored = tensors(written(quantized(plain, "fp8"), tmp_path / "fp8"))
    q = "model.layers.1.self_attn.q_proj.weight"
    scales = stored[f"{q}_scale_inv"]
    assert (stored[q].dtype, scales.dtype, scales.shape) == (torch.float8_e4m3fn, torch.bfloat16, (2, 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "package"),
    [("fp8", "accelerate"), ("int4-g32", "compressed_tensors"), ("int4-g128", "compressed_tensors")],
)
def test_transformers_reads_the_codes(name: str, package: str, tmp_path: Path) -> None:
    """All blocks are whole: transformers 5.17 dequantises partial ones wrongly."""
    pytest.importorskip(package)
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "num_attention_heads": 4, "head_dim": 64}
    plain = make_checkpoint(tmp_path / "plain", "qwen3_moe", dtype=torch.bfloat16, **sizes)
    out = written(quantized(plain, name), tmp_path / "out")
    back = written(dequantized(out), tmp_path / "back")
    prompt = torch.arange(1, 40)[None]
    logits = []
    for directory in (out, back, plain):
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
        with torch.inference_mode():
            logits.append(model(prompt).logits)
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])


def test_experts_in_one_tensor_are_quantised_one_by_one(tmp_path: Path) -> None:
    separate = make("qwen3_moe", tmp_path / "separate")
    fused = make_checkpoint(tmp_path / "fused", "qwen3_moe", dtype=torch.bfloat16, fused_experts=True)
    found = [tensors(written(quantized(each, "int4-g32"), tmp_path / f"of {each.name}")) for each in (separate, fused)]
    check_equal(found[1], found[0])


def test_values_that_have_no_codes_are_refused(qwen: Path, tmp_path: Path) -> None:
    key = "model.layers.1.mlp.experts.3.up_proj.weight"
    edit_tensors(qwen, add={key: torch.full((32, 64), float("inf"), dtype=torch.bfloat16)})
    with pytest.raises(CheckpointError, match=f"{key} holds values that are not finite"):
        quantized(qwen, "fp8").write(tmp_path / "out", lambda num_bytes: None)
    assert not (tmp_path / "out").exists()


def test_refusals(
    new: Callable[[], NewCheckpoint], qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(out: Path, match: str) -> None:
        with pytest.raises(ValueError, match=match):
            new().write(out, lambda num_bytes: None)

    refused(qwen, "exists already")
    foreign = tmp_path / "out.partial"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("")
    refused(tmp_path / "out", "holds other files")
    (foreign / "notes.txt").unlink()
    (foreign / "moeyard-conversion.json").write_text("{}")
    refused(tmp_path / "out", "begun with another model")
    with (foreign / "moeyard-conversion.json").open() as record:
        writing.fcntl.flock(record, writing.fcntl.LOCK_EX)
        refused(tmp_path / "out", "another process")
    monkeypatch.setattr(writing.shutil, "disk_usage", lambda path: writing.shutil._ntuple_diskusage(1, 1, 0))
    refused(tmp_path / "new", r" are to be written, but 0 B are free")
    with pytest.raises(CheckpointError, match="not quantised"):
        dequantized(make("qwen3_moe", tmp_path / "plain"))
