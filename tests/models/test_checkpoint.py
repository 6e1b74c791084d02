"""Loading accounts for every key, names broken files, reads only the rank's experts, and bounds memory."""

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.checkpoints import edit_config, edit_tensors, make_checkpoint

from moeyard_kernels.cpu.backend import CpuBackend
from moeyard_kernels.types.matrix import blob_views
from moeyard_worker.checkpoint.check import CheckedCheckpoint
from moeyard_worker.checkpoint.index import open_index
from moeyard_worker.checkpoint.loading import CheckpointWeights, open_checkpoint
from moeyard_worker.config.checkpoint_error import CheckpointError
from moeyard_worker.config.placement import partition
from moeyard_worker.layers.weights import Weight
from moeyard_worker.models.families import load_model_config

LAYER = "model.layers.1."


def check(directory: Path) -> CheckedCheckpoint:
    return open_checkpoint(directory, load_model_config(directory))


def refused(directory: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        check(directory)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("served", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shards", ["1GB", "60KB"])
def test_dense_values(tmp_path: Path, dtype: torch.dtype, served: torch.dtype, shards: str) -> None:
    make_checkpoint(tmp_path, "deepseek_v3", dtype=dtype, max_shard_size=shards, attention_bias=True, q_lora_rank=None)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shards != "1GB")
    stored = {k: v for file in tmp_path.glob("*.safetensors") for k, v in load_file(file).items()}
    checkpoint = check(tmp_path)
    read: list[int] = []
    loader = CheckpointWeights(checkpoint, backend=CpuBackend(page_size=16), dtype=served, progress=read.append)
    num_tensors = 0
    for weight in checkpoint.spec.dense():
        num_tensors += len(weight.parts)
        found = loader.load(weight)
        loaded = found.data if weight.matrix else found
        plain = loaded.to_dense() if loaded.is_mkldnn else loaded
        wanted = torch.float32 if weight.fp32 else served
        rows = [stored[part.key].to(wanted).flatten() for part in weight.parts]
        missing = torch.zeros(loaded.numel() - sum(map(len, rows)), dtype=wanted)
        # Only the bias of the full query projection is absent, and it comes first.
        assert torch.equal(plain.flatten(), torch.cat([missing, *rows])), weight
        assert (missing.numel() > 0) == (
            "bias" in weight.parts[0].key and len(weight.shape) == 1 and weight.shape[0] == 136
        )
    assert sum(read) == checkpoint.dense_bytes()
    assert num_tensors == len([key for key in stored if ".experts." not in key])


@pytest.mark.parametrize("family", ["deepseek_v3", "mixtral", "olmoe"])
@pytest.mark.parametrize("fused", [False, True], ids=["per_expert", "fused"])
def test_expert_values(tmp_path: Path, family: str, fused: bool) -> None:
    plain = make_checkpoint(tmp_path / "plain", family)
    directory = make_checkpoint(tmp_path / "fused", family, fused_experts=True) if fused else plain
    stored = load_file(plain / "model.safetensors")
    at, names = {
        "deepseek_v3": ("mlp", ("gate_proj", "up_proj", "down_proj")),
        "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
        "olmoe": ("mlp", ("gate_proj", "up_proj", "down_proj")),
    }[family]
    weights = CheckpointWeights(check(directory), backend=CpuBackend(page_size=16), dtype=torch.float32)
    for expert in range(8):
        for matrix, name in zip(expert_of(weights, 1, expert), names, strict=True):
            assert torch.equal(matrix, stored[f"{LAYER}{at}.experts.{expert}.{name}.weight"])


def expert_of(weights: CheckpointWeights, layer: int, expert: int) -> tuple[torch.Tensor, ...]:
    form = weights._spec.config.expert_form("float32")
    out = blob_views(form, torch.full((form.blob_bytes,), 255, dtype=torch.uint8))
    weights.fill(layer, expert, out)
    return out.gate.data, out.up.data, out.down.data


def open_files(directory: Path) -> set[Path]:
    """Return the files under `directory` that this process holds open."""
    links = (str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink())
    return {Path(name) for name in links if name.startswith(f"{directory}/")}


def test_rank_opens_only_files_of_its_experts(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3_moe", max_shard_size="30KB", num_experts=6)
    checkpoint = check(tmp_path)
    owned = partition(6, 4)[0]
    weights = CheckpointWeights(checkpoint, backend=CpuBackend(page_size=16), dtype=torch.float32)
    assert open_files(tmp_path) == set()
    for layer in range(3):
        for expert in owned:
            expert_of(weights, layer, expert)
    holding = {
        entry.file
        for key, entry in checkpoint.index.entries.items()
        if any(f".experts.{expert}." in key for expert in owned)
    }
    assert open_files(tmp_path) == holding
    assert len(holding) < len({entry.file for entry in checkpoint.index.entries.values()})


def test_missing_tensors(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "deepseek_v3")
    edit_tensors(tmp_path, remove=[LAYER + "self_attn.q_b_proj.weight", LAYER + "mlp.experts.3.up_proj.weight"])
    message = refused(tmp_path)
    assert message.startswith(
        f"{tmp_path}/model.safetensors: no tensor {LAYER}self_attn.q_b_proj.weight of shape [96, 24]"
    )
    assert message.endswith("(and 1 more like this)")


def test_unexpected_tensor(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3_moe")
    edit_tensors(tmp_path, add={LAYER + "self_attn.sinks": torch.zeros(4)})
    assert refused(tmp_path) == f"{tmp_path}/model.safetensors: unexpected tensor {LAYER}self_attn.sinks of shape [4]"


def test_misshapen_tensor(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "mixtral")
    edit_tensors(tmp_path, add={"model.norm.weight": torch.zeros(65)})
    message = refused(tmp_path)
    assert message == f"{tmp_path}/model.safetensors: model.norm.weight has shape [65], config.json calls for [64]"


def test_unsupported_dtype(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "mixtral")
    edit_tensors(tmp_path, add={"model.norm.weight": torch.ones(64, dtype=torch.float16)})
    assert "model.safetensors: model.norm.weight is F16, which is not supported (supported: F32, BF16)" in refused(
        tmp_path
    )


def test_config_of_another_model(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "deepseek_v3")
    edit_config(tmp_path, n_routed_experts=12, n_group=4)
    message = refused(tmp_path)
    assert "mlp.experts.8.gate_proj.weight" in message
    assert "more like this" in message


def test_known_extras_are_skipped_and_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "deepseek_v3", tie_word_embeddings=True)
    extras = {
        "model.layers.3.eh_proj.weight": torch.zeros(64, 128),
        "model.layers.3.mlp.experts.0.up_proj.weight": torch.zeros(32, 64),
        LAYER + "self_attn.rotary_emb.inv_freq": torch.zeros(4),
        "lm_head.weight": torch.zeros(272, 64),
    }
    edit_tensors(tmp_path, add=extras)
    # The config does not count this layer yet.
    assert "unexpected tensor model.layers.3." in refused(tmp_path)
    edit_config(tmp_path, num_nextn_predict_layers=1)
    checkpoint = check(tmp_path)
    assert set(checkpoint.skipped) == set(extras)
    assert checkpoint.skipped["model.layers.3.eh_proj.weight"] == "multi-token prediction layer"
    assert checkpoint.skipped["lm_head.weight"] == "tied to the embedding"


def test_truncated_file(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "deepseek_v3")
    file = tmp_path / "model.safetensors"
    size = file.stat().st_size
    with file.open("r+b") as stream:
        stream.truncate(size - 1000)
    message = refused(tmp_path)
    assert message.startswith(f"{file}: truncated: model.")
    assert message.endswith(f"the file has {size - 1000}; download it again")


def test_truncated_header(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "deepseek_v3")
    file = tmp_path / "model.safetensors"
    for size in (0, 5, 100):
        with file.open("r+b") as stream:
            stream.truncate(size)
        assert refused(tmp_path).startswith(f"{file}: not a safetensors file, or truncated ({size} bytes")


def test_pointer_of_git_lfs(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "deepseek_v3")
    file = tmp_path / "model.safetensors"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 4976698672\n")
    assert refused(tmp_path) == f"{file}: a pointer of Git LFS, not the weights; run `git lfs pull` in {tmp_path}"


def rewrite_header(file: Path, change: Callable[[dict], None]) -> None:
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    raw = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(raw)) + raw + data[8 + length :])


def shift(header: dict) -> None:
    begin, end = header["model.norm.weight"]["data_offsets"]
    header["model.norm.weight"]["data_offsets"] = [begin + 4, end + 4]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (shift, "model.norm.weight starts at byte"),
        (
            lambda header: header["model.norm.weight"].update(shape=[63]),
            "model.norm.weight has a malformed header entry",
        ),
        (
            lambda header: header["model.norm.weight"].update(dtype="F4"),
            "model.norm.weight has a malformed header entry",
        ),
        (lambda header: header["model.norm.weight"].update(data_offsets=[-4, 252]), "malformed header entry"),
        (lambda header: header["model.norm.weight"].pop("dtype"), "malformed header entry"),
        (lambda header: header["model.norm.weight"].update(dtype=[]), "malformed header entry"),
        (lambda header: header.pop("model.norm.weight"), "bytes follow the last tensor"),
    ],
)
def test_bad_headers(tmp_path: Path, change: Callable[[dict], None], message: str) -> None:
    make_checkpoint(tmp_path, "mixtral")
    rewrite_header(tmp_path / "model.safetensors", change)
    error = refused(tmp_path)
    assert error.startswith(f"{tmp_path}/model.safetensors: ")
    assert message in error


@pytest.mark.parametrize("header", [b"\xff" * 64, b"[" * 100_000], ids=["bytes", "nesting"])
def test_garbage_header(tmp_path: Path, header: bytes) -> None:
    make_checkpoint(tmp_path, "mixtral")
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    assert "the header is not JSON" in refused(tmp_path)


def test_missing_shard(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "mixtral", max_shard_size="300KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    message = refused(tmp_path)
    assert message.startswith(f"{shard}: no such file, but model.safetensors.index.json puts ")


def test_index_and_shards_disagree(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "mixtral", max_shard_size="300KB")
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.extra"] = index["weight_map"]["model.norm.weight"]
    path.write_text(json.dumps(index))
    assert "no tensor model.extra, but model.safetensors.index.json puts it there" in refused(tmp_path)
    index["weight_map"] = {"model.norm.weight": "../elsewhere.safetensors"}
    path.write_text(json.dumps(index))
    assert "no such file" in refused(tmp_path)
    path.write_text("{}")
    assert "weight_map is missing" in refused(tmp_path)


def test_no_safetensors(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        open_index(tmp_path)
    with pytest.raises(CheckpointError, match="no such directory"):
        open_index(tmp_path / "absent")
    (tmp_path / "model.GGUF").touch()
    with pytest.raises(CheckpointError, match=r"model\.GGUF: a file, .*`moeyard dequantize` writes one"):
        open_index(tmp_path / "model.GGUF")


def test_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "mixtral")
    checkpoint = check(tmp_path)
    with (tmp_path / "model.safetensors").open("r+b") as stream:
        stream.truncate(checkpoint.index.entries["model.norm.weight"].start + 3)
    loader = CheckpointWeights(checkpoint, backend=CpuBackend(page_size=16), dtype=torch.float32)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: now has \d+ bytes instead of \d+ since"):
        loader.load(checkpoint.spec.head_site["norm"])


_PEAK = r"""
import re, sys, torch
from pathlib import Path
from moeyard_kernels.cpu.backend import CpuBackend
from moeyard_kernels.cpu.linear import pack_weight
from moeyard_worker.checkpoint.loading import CheckpointWeights, open_checkpoint
from moeyard_worker.models.families import load_model_config
directory, dtype = sys.argv[1], getattr(torch, sys.argv[2])
checkpoint = open_checkpoint(directory, load_model_config(directory))
pack_weight(torch.zeros(64, 64, dtype=dtype))
def status(key):
    return int(re.search(key + r":\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
before = status("VmRSS")
loader = CheckpointWeights(checkpoint, backend=CpuBackend(page_size=16), dtype=dtype)
kept = [loader.load(weight) for weight in checkpoint.spec.dense()]
print(status("VmHWM") - before)
"""


@pytest.mark.sampled(0)
@pytest.mark.parametrize("served", ["float32", "bfloat16"])
def test_peak_memory(tmp_path: Path, served: str) -> None:
    """The peak is the loaded weights, one parameter while it is packed, and one scratch block."""
    make_checkpoint(
        tmp_path,
        "qwen3_moe",
        hidden_size=512,
        vocab_size=8192,
        num_hidden_layers=4,
        intermediate_size=2048,
        mlp_only_layers=[0, 1, 2],
    )
    checkpoint = check(tmp_path)
    size = checkpoint.dense_bytes() * (4 if served == "float32" else 2) // 4
    largest = 8192 * 512 * 4
    run = subprocess.run(
        [sys.executable, "-c", _PEAK, str(tmp_path), served],
        check=True,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"},
    )
    peak = int(run.stdout)
    assert 0.9 * size < peak < size + largest + (16 << 20) + (8 << 20), (peak, size)


def test_weight_rows_are_counted_in_parts(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3_moe")
    layer = check(tmp_path).spec.layers[0]
    qkv: Weight = layer.attention["qkv"]
    assert qkv.shape == (128, 64)
    assert [(part.shape, part.row) for part in qkv.parts] == [((64, 64), 0), ((32, 64), 64), ((32, 64), 96)]
