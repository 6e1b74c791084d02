"""GGUF files are read as the bfloat16 checkpoints that they stand for, or refused by name."""

import os
import random
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoints import MLA, edit_config, make_checkpoint
from tests.rank import Rank

from moeyard_kernels.cpu.backend import CpuBackend
from moeyard_kernels.types.matrix import Matrix, blob_views
from moeyard_worker.checkpoint.check import CheckedCheckpoint, check_checkpoint
from moeyard_worker.checkpoint.converting import dequantized
from moeyard_worker.checkpoint.ggml_blocks import BLOCK_TYPES
from moeyard_worker.checkpoint.gguf_header import TENSOR_TYPES, read_gguf_header
from moeyard_worker.checkpoint.gguf_index import ARCHITECTURES, open_gguf
from moeyard_worker.checkpoint.loading import CheckpointWeights, open_checkpoint
from moeyard_worker.config.checkpoint_error import CheckpointError
from moeyard_worker.engine.assembly.verify import verify
from moeyard_worker.models.families import load_model_config
from moeyard_worker.protocol import SamplingParams

# The package is needed to write files only. An environment without it cannot run these tests.
gguf = pytest.importorskip("gguf")
files = pytest.importorskip("tests.gguf_files")

FAMILIES = ("qwen3_moe", "deepseek_v2", "deepseek_v3", "kimi_k2", "olmoe", "mixtral")
TYPES = ("Q8_0", "Q4_0", "Q4_K", "Q6_K", "BF16", "F16", "F32")
MIXED = "mixed"


def choose(name: str, kind: str) -> str:
    return random.Random(name).choice(TYPES) if kind == MIXED else kind


def make(tmp_path: Path, family: str, kind: str = MIXED, **how: Any) -> tuple[Path, Path, Path]:
    """Return (directory of config.json, bfloat16 checkpoint, GGUF file)."""
    wide: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256}
    wide = {"hidden_size": 256, "intermediate_size": 256} if family in ("olmoe", "mixtral") else wide
    if family in ("deepseek_v2", "deepseek_v3", "kimi_k2"):
        wide |= MLA
    source, plain = make_checkpoint(tmp_path / "source", family, **wide), tmp_path / "plain"
    file = files.write_gguf(source, plain, tmp_path / "model.gguf", lambda name: choose(name, kind), **how)
    edit_config(source, dtype="bfloat16")
    (source / "model.safetensors").unlink()
    return source, plain, file


def open_file(source: Path, file: Path) -> CheckedCheckpoint:
    model = load_model_config(source, gguf=True)
    return check_checkpoint(open_gguf(file, source, model), model)


def loaded(checkpoint: CheckedCheckpoint) -> dict[str, torch.Tensor]:
    """Return every parameter and expert as the server holds it, by name."""
    weights = CheckpointWeights(checkpoint, backend=CpuBackend(page_size=16), dtype=torch.bfloat16)
    found, config = {}, checkpoint.spec.config
    for weight in checkpoint.spec.dense():
        value = weights.load(weight)
        value = value.data if isinstance(value, Matrix) else value
        found[weight.parts[0].key] = value.to_dense() if value.is_mkldnn else value
    form = config.expert_form("bfloat16")
    for layer in config.moe_layers:
        for expert in range(config.num_experts):
            views = blob_views(form, torch.empty(form.blob_bytes, dtype=torch.uint8))
            weights.fill(layer, expert, views)
            found[f"{layer}.{expert}"] = torch.cat([views.gate_up.data.flatten(), views.down.data.flatten()])
    return found


def check_equal(source: Path, plain: Path, file: Path) -> None:
    found = loaded(open_file(source, file))
    wanted = loaded(open_checkpoint(plain, load_model_config(plain)))
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_blocks_have_the_values_of_the_package(name: str) -> None:
    """Random codes with random finite scales: subnormal, negative and 0 too. Even the signs of zeros agree."""
    kind, found = gguf.GGMLQuantizationType[name], BLOCK_TYPES[name]
    blocks = files.random_blocks(name, 5000, files.np.random.default_rng(1), weights=False)
    wanted = torch.from_numpy(gguf.quants.dequantize(blocks, kind))
    values = found.dequantize(torch.from_numpy(blocks))
    assert torch.equal(values.view(torch.int32), wanted.view(torch.int32))
    assert torch.equal(values.bfloat16(), wanted.bfloat16())


def test_types_are_those_of_the_package() -> None:
    for number, found in TENSOR_TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (found.name, (found.elements, found.num_bytes)) == (kind.name, gguf.GGML_QUANT_SIZES[kind])
    for name, blocks in BLOCK_TYPES.items():
        assert (blocks.elements, blocks.num_bytes) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    assert {gguf.MODEL_ARCH_NAMES[each] for each in files.ARCHITECTURES.values()} == set(ARCHITECTURES)


@pytest.mark.parametrize("kind", TYPES)
def test_weights_of_each_type_equal_the_bfloat16_checkpoint(kind: str, tmp_path: Path) -> None:
    check_equal(*make(tmp_path, "qwen3_moe", kind))


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_of_each_family_equal_the_bfloat16_checkpoint(family: str, tmp_path: Path) -> None:
    """A matrix has any of the types, so that a permutation and a split meet quantised rows."""
    check_equal(*make(tmp_path, family))


def test_weights_of_a_split_file(tmp_path: Path) -> None:
    source, plain, file = make(tmp_path, "qwen3_moe", shards=3)
    assert len(list(tmp_path.glob("model-*.gguf"))) == 3
    check_equal(source, plain, file)


def test_kv_b_in_one_tensor(tmp_path: Path) -> None:
    """Files of deepseek2 from before the converter split it."""
    check_equal(*make(tmp_path, "deepseek_v3", whole_kv=True))


def test_tied_embeddings(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "qwen3_moe", tie_word_embeddings=True)
    file = files.write_gguf(source, tmp_path / "plain", tmp_path / "model.gguf", lambda _: "Q8_0")
    edit_config(source, dtype="bfloat16")
    check_equal(source, tmp_path / "plain", file)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2", "mixtral"])
def test_answers_equal_the_bfloat16_checkpoint(family: str, tmp_path: Path) -> None:
    source, plain, file = make(tmp_path, family)
    requests = {
        name: (list(range(i, 20 + i)), SamplingParams(max_tokens=8, temperature=0.0))
        for i, name in ((1, "a"), (7, "b"))
    }
    found = []
    for directory, options in ((source, {"gguf": str(file)}), (plain, {})):
        with Rank(directory, expert_slots=3, **options) as rank:
            found.append({name: reply.token_ids for name, reply in rank.run(requests)[0].items()})
    assert found[0] == found[1]


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "mixtral"])
def test_dequantized_has_the_same_weights(family: str, tmp_path: Path) -> None:
    source, _, file = make(tmp_path, family)
    dequantized(source, str(file)).write(tmp_path / "out", lambda num_bytes: None)
    found = loaded(open_checkpoint(tmp_path / "out", load_model_config(tmp_path / "out")))
    for name, value in loaded(open_file(source, file)).items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_verify_agrees_with_transformers(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, _, file = make(tmp_path, family)
    assert verify(source, gguf=str(file)) == 0
    assert f"{file}: {family}" in capsys.readouterr().out


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return (directory of config.json, GGUF file) of a small model."""
    tmp_path = tmp_path_factory.mktemp("small")
    source = make_checkpoint(tmp_path / "source", "qwen3_moe", num_hidden_layers=1, vocab_size=32, **IDS)
    return source, files.write_gguf(source, tmp_path / "plain", tmp_path / "model.gguf", lambda _: "Q8_0")


IDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"GGUF", b"GGML", "not a GGUF file"),
        (b"GGUF\x03\0\0\0", b"GGUF\x01\0\0\0", "GGUF version 1 is not supported"),
        (b"GGUF\x03\0\0\0", b"GGUF\0\0\0\x03", "GGUF version 50331648 is not supported"),
        (b"qwen3moe", b"qwen9moe", "general.architecture 'qwen9moe' is not supported .supported: qwen3moe, deepseek2"),
        (b"blk.0.attn_q.", b"blk.0.attn_z.", r"blk\.0\.attn_z\.weight is a tensor that is not known"),
        (b"blk.0.attn_q.", b"blk.7.attn_q.", r"blk\.7\.attn_q\.weight is of a layer that config\.json does not have"),
        (b"blk.0.attn_q.", b"blk.0.attn_k.", r"blk\.0\.attn_k\.weight occurs twice"),
        (b"ffn_gate_exps.weight", b"ffn_gate_exps.weighs", r"ffn_gate_exps\.weighs is a tensor that is not known"),
        (b"blk.0.attn_q.", b"blk.0\0attn_q.", "a tensor is named b'blk.0.x00attn_q"),
    ],
)
def test_a_damaged_header_is_refused(
    old: bytes, new: bytes, message: str, small: tuple[Path, Path], tmp_path: Path
) -> None:
    raw = small[1].read_bytes()
    assert old in raw
    refuse(small[0], raw.replace(old, new), message, tmp_path)


def refuse(source: Path, raw: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "changed.gguf"
    file.write_bytes(raw)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_file(source, file)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(file))


@pytest.mark.parametrize(("keep", "message"), [(-40, "truncated: "), (100, "truncated or damaged"), (3, "truncated")])
def test_a_file_that_is_cut_short_is_refused(keep: int, message: str, small: tuple[Path, Path], tmp_path: Path) -> None:
    refuse(small[0], small[1].read_bytes()[:keep], message, tmp_path)


def test_bytes_behind_the_last_tensor_are_refused(small: tuple[Path, Path], tmp_path: Path) -> None:
    refuse(small[0], small[1].read_bytes() + bytes(64), "bytes follow the last tensor", tmp_path)


@pytest.mark.parametrize(("at", "message"), [(8, f"names {1 << 60} tensors"), (16, f"names {1 << 60} key-value pairs")])
def test_counts_are_bounded(at: int, message: str, small: tuple[Path, Path], tmp_path: Path) -> None:
    raw = bytearray(small[1].read_bytes())
    raw[at : at + 8] = struct.pack("<Q", 1 << 60)
    refuse(small[0], bytes(raw), message, tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("qwen3moe.rope.freq_base", 1234.0, r"qwen3moe\.rope\.freq_base is 1234\.0, but .*config\.json says 10000"),
        ("qwen3moe.expert_used_count", 3, r"expert_used_count is 3, but .*config\.json says 2"),
        ("qwen3moe.embedding_length", "64", r"embedding_length is '64', but"),
        ("general.alignment", 33, r"general\.alignment is 33, expected a power of two"),
        ("split.count", 2, r"split\.count is 2, but the file's name tells of 1"),
    ],
)
def test_settings_that_differ_are_refused(key: str, value: Any, message: str, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "qwen3_moe", num_hidden_layers=1)
    metadata = {key: value}
    file = files.write_gguf(source, tmp_path / "plain", tmp_path / "m.gguf", lambda _: "F16", metadata=metadata)
    with pytest.raises(CheckpointError, match=message):
        open_file(source, file)


def test_a_file_of_another_family_is_refused(small: tuple[Path, Path], tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "olmoe", num_hidden_layers=1)
    with pytest.raises(CheckpointError, match=r"architecture is qwen3moe, but .*config\.json describes olmoe"):
        open_file(source, small[1])


def test_a_type_that_is_not_read_is_refused(small: tuple[Path, Path], tmp_path: Path) -> None:
    raw, name = bytearray(small[1].read_bytes()), b"blk.0.attn_q.weight"
    at = raw.index(name) + len(name) + 4 + 16
    assert raw[at : at + 4] == struct.pack("<I", 8)
    raw[at] = 13
    refuse(small[0], bytes(raw), r"attn_q\.weight is Q5_K, which is not supported .supported: F32, F16, Q4_0", tmp_path)


def test_a_scale_that_is_not_finite_is_refused(small: tuple[Path, Path], tmp_path: Path) -> None:
    file, raw = tmp_path / "changed.gguf", bytearray(small[1].read_bytes())
    start = read_gguf_header(small[1]).tensors["blk.0.attn_q.weight"].start
    raw[start : start + 2] = struct.pack("<e", float("nan"))
    file.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"q_proj\.weight holds a scale that is not finite"):
        loaded(open_file(small[0], file))


def test_shards_must_be_complete(tmp_path: Path) -> None:
    source, _, file = make(tmp_path, "qwen3_moe", shards=3)
    second, third = (tmp_path / f"model-0000{number}-of-00003.gguf" for number in (2, 3))
    kept = second.read_bytes()
    shutil.copy(third, second)
    with pytest.raises(CheckpointError, match=r"00002-of-00003\.gguf: split\.no is 2, but the file's name says 1"):
        open_file(source, file)
    second.write_bytes(kept)
    open_file(source, second)
    third.unlink()
    with pytest.raises(CheckpointError, match=r"00003-of-00003\.gguf: no such file"):
        open_file(source, file)


def test_only_regular_files_are_opened(small: tuple[Path, Path], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    for file, what in ((tmp_path / "pipe.gguf", "a FIFO"), (tmp_path, "a directory"), (Path("/dev/zero"), "a device")):
        with pytest.raises(CheckpointError, match=what):
            open_file(small[0], file)


def test_damaged_headers_give_one_line(small: tuple[Path, Path], tmp_path: Path) -> None:
    """Headers with random changes: a file is read, or refused in one line, and soon."""
    source, original = small
    header, model = read_gguf_header(original), load_model_config(small[0], gguf=True)
    end = min(entry.start for entry in header.tensors.values())
    raw, file, draw = original.read_bytes(), tmp_path / "fuzz.gguf", random.Random(0)
    messages = []
    for _ in range(2000):
        changed = bytearray(raw)
        for _ in range(draw.randint(1, 3)):
            at = draw.randrange(end)
            if draw.random() < 0.5:
                changed[at] = draw.randrange(256)
            else:
                changed[at : at + 8] = struct.pack("<Q", draw.choice((0, 1, 1 << 31, 1 << 32, 1 << 63, (1 << 64) - 1)))
        if draw.random() < 0.1:
            del changed[draw.randrange(end) :]
        file.write_bytes(changed)
        try:
            check_checkpoint(open_gguf(file, source, model), model)
        except CheckpointError as error:
            messages.append(str(error))
    assert len(messages) > 1000
    assert all("\n" not in message and len(message) < 1000 for message in messages)
