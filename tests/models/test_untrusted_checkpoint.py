"""Malicious or damaged checkpoints: one line names file and key, without allocating or waiting."""

import json
import os
import random
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoints import edit_config, make_checkpoint

from moeyard_kernels.cpu.backend import CpuBackend
from moeyard_worker.checkpoint import reading
from moeyard_worker.checkpoint.index import TensorEntry, open_index, read_header
from moeyard_worker.checkpoint.loading import CheckpointWeights, open_checkpoint
from moeyard_worker.config.checkpoint_error import CheckpointError
from moeyard_worker.config.fields import MAX_IDS, MAX_LAYERS, MAX_VOCAB, Fields
from moeyard_worker.config.files import open_regular
from moeyard_worker.experts.cache import ExpertCache
from moeyard_worker.models.families import FAMILIES, load_model_config, parse_model_config
from moeyard_worker.models.shapes import SHAPES

SIZES = [
    *("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads", "intermediate_size"),
    *("num_experts_per_tok", "max_position_embeddings"),
]
OF_SHAPES = {
    "DeepSeek-V3": ["kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "v_head_dim", "n_routed_experts", "n_group"],
    "Qwen3-30B-A3B": ["num_experts", "head_dim", "num_key_value_heads", "moe_intermediate_size"],
    "Mixtral-8x7B": ["num_local_experts"],
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("value", [10**9, 10**400, -1, 0, 1.5, True, "8", [8], {"a": 1}])
@pytest.mark.parametrize(("shape", "key"), [(s, k) for s, keys in OF_SHAPES.items() for k in (*SIZES, *keys)])
def test_sizes_are_bounded(shape: str, key: str, value: Any) -> None:
    config = {**SHAPES[shape], key: value}
    with pytest.raises(CheckpointError) as error:
        parse_model_config(Fields("config.json", config), Fields("generation_config.json", {}))
    assert str(error.value).startswith(f"config.json: {key} is ")
    assert len(str(error.value)) < 200


def test_experts_of_all_layers_are_bounded() -> None:
    config = {**SHAPES["Qwen3-30B-A3B"], "num_hidden_layers": MAX_LAYERS, "num_experts": 1 << 20}
    with pytest.raises(CheckpointError, match=r"config\.json: num_hidden_layers gives 1048576 experts in each of 2048"):
        parse_model_config(Fields("config.json", config), Fields("generation_config.json", {}))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("ids", "text"),
    [
        (300_000_000, f"is 300000000, expected one or more integers below {MAX_VOCAB}"),
        ([1, 151936], "names token 151936, which is outside the vocabulary of 151936"),
        (list(range(MAX_IDS + 1)), f"has {MAX_IDS + 1} entries, at most {MAX_IDS} are expected"),
    ],
)
def test_ids_outside_the_vocabulary(name: str, ids: Any, text: str) -> None:
    files: dict[str, dict[str, Any]] = {"config.json": dict(SHAPES["Qwen3-30B-A3B"]), "generation_config.json": {}}
    files[name]["eos_token_id"] = ids
    with pytest.raises(CheckpointError) as error:
        parse_model_config(*(Fields(name, values) for name, values in files.items()))
    assert str(error.value) == f"{name}: eos_token_id {text}"


@pytest.mark.parametrize("key", sorted({key for shape in SHAPES.values() for key in shape}))
def test_values_of_the_wrong_kind(key: str) -> None:
    """Any value is served or gives a CheckpointError of one short line."""
    wrong = [
        [],
        {},
        [[]],
        {"a": {}},
        "x" * 100_000,
        10**4000,
        -5,
        1e308,
        True,
        [None],
        {"type": "yarn", "factor": 1e308},
    ]
    for name, shape in SHAPES.items():
        for value in wrong:
            text = ""
            try:
                parse_model_config(Fields(name, {**shape, key: value}), Fields("", {}))
            except CheckpointError as error:
                text = str(error)
            assert len(text) < 400, key
            assert "\n" not in text


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"a":' * 100_000, '{"num_hidden_layers": ' + "9" * 5000 + "}", "\xff", "null", "", "[]", "NaN"],
    ids=["lists", "objects", "digits", "latin", "null", "empty", "list", "nan"],
)
def test_invalid_json(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError) as error:
        load_model_config(tmp_path)
    assert str(error.value).startswith(f"{tmp_path}/config.json: ")
    assert len(str(error.value)) < len(str(tmp_path)) + 200


def test_too_large_json(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(1 << 40)  # sparse
    with pytest.raises(CheckpointError, match=r"config\.json: has 1099511627776 bytes, at most"):
        load_model_config(tmp_path)


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        os.chdir(path.parent)
        sock.bind(path.name)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (os.mkfifo, "a FIFO"),
        (Path.mkdir, "a directory"),
        (lambda path: path.symlink_to("/dev/zero"), "a device"),
        (listening, "a socket"),
    ],
    ids=["fifo", "directory", "device", "socket"],
)
@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json"]
)
def test_regular_files_only(
    tmp_path: Path, name: str, make: Callable[[Path], None], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(dict(SHAPES["moeyard-demo"], rope_scaling=None)))
    (tmp_path / name).unlink(missing_ok=True)
    make(tmp_path / name)
    with pytest.raises(CheckpointError) as error:
        (load_model_config(tmp_path), open_index(tmp_path))
    assert str(error.value) == f"{tmp_path}/{name}: is {kind}; the files of a checkpoint are regular files"


def test_index_with_invalid_file_names(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, text in {
        "pipe": "is a FIFO",
        "../x": "no such file",
        "/dev/zero": "no such file",
        "a" * 5000: "no such file",
        "a\0b": "no such file",
        "": "no such file",
        ".": "no such file",
    }.items():
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"k": name}}))
        with pytest.raises(CheckpointError, match=text) as error:
            open_index(tmp_path)
        assert len(str(error.value)) < 600


def write(path: Path, header: bytes, data: bytes) -> Path:
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return path


def test_mutated_headers(tmp_path: Path) -> None:
    """For any header, what is read lies within the file, or one short line names the file."""
    chance = random.Random(0)
    # 24 bytes each, as values and as codes with scales.
    kinds = (("F32", [2, 3]), ("F8_E4M3", [4, 6]), ("I32", [3, 2]), ("F8_E8M0", [24]))
    sound = {
        f"t{i}": {"dtype": dtype, "shape": shape, "data_offsets": [24 * i, 24 * i + 24]}
        for i, (dtype, shape) in enumerate(kinds)
    }
    values = [
        *(None, True, -1, 0, 1, 2**31, 2**63, 10**30, 1.0, 1e300, [], {}),
        *("F32", "F8_E4M3", "F8_E8M0", "F4", "", "x" * 9999),
        *([0], [2, 3], [3, 2], [-2, -3], [2, 3, 1], [1] * 9, [10**30, 0], [[]], [0, 24], [24, 0], [0, 2**62], [24, 48]),
        *([1] * 50, {"dtype": "F32"}),
    ]
    path, refused = tmp_path / "model.safetensors", 0
    for _ in range(2000):
        header: dict[str, Any] = json.loads(json.dumps(sound))
        for _ in range(chance.randint(1, 3)):
            entry = header.get(f"t{chance.randrange(4)}")
            match chance.randrange(4):
                case 0 if isinstance(entry, dict):
                    entry[chance.choice(["dtype", "shape", "data_offsets", "more"])] = chance.choice(values)
                case 1 if isinstance(entry, dict) and entry:
                    entry.pop(chance.choice(list(entry)))
                case 2:
                    header[chance.choice(["t0", "t4", "__metadata__", "", "k" * 600, "a\nb"])] = chance.choice(values)
                case 3:
                    header.pop(f"t{chance.randrange(4)}", None)
        raw = bytearray(json.dumps(header).encode())
        if chance.random() < 0.3:
            raw[chance.randrange(len(raw))] = chance.randrange(256)
        size = chance.choice([96, 96, 96, 95, 97, 0])
        entries = outcome(write(path, bytes(raw), bytes(size)))
        refused += entries is None
        total = path.stat().st_size
        for entry in (entries or {}).values():
            assert 8 + len(raw) <= entry.start <= entry.start + entry.num_bytes <= total
    assert 600 < refused < 2000


def outcome(path: Path) -> dict[str, TensorEntry] | None:
    try:
        return read_header(path)
    except CheckpointError as error:
        text = str(error)
    assert text.startswith(f"{path}: ")
    assert len(text) < len(str(path)) + 700
    assert text.isprintable()
    return None


@pytest.mark.parametrize("length", [0, 1, 2**20, 2**40, 2**63, 2**64 - 1])
def test_wrong_header_lengths(tmp_path: Path, length: int) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b"{}")
    with pytest.raises(CheckpointError, match="not a safetensors file, or truncated"):
        read_header(path)


def cached(directory: Path, **fields: Any) -> tuple[ExpertCache, Path]:
    """Return a one-slot cache of a checkpoint whose experts are in one file."""
    make_checkpoint(directory, "mixtral", num_hidden_layers=1)
    config = load_model_config(directory)
    backend = CpuBackend(page_size=16)
    cache = ExpertCache(
        backend=backend,
        source=CheckpointWeights(open_checkpoint(directory, config), backend=backend, dtype=torch.float32),
        layers=config.moe_layers,
        experts=range(config.num_experts),
        form=config.expert_form("float32"),
        **fields,
    )
    return cache, directory / "model.safetensors"


def test_expert_file_that_is_written_to(tmp_path: Path) -> None:
    cache, path = cached(tmp_path, num_slots=1)
    cache.preload()
    os.utime(path, ns=(1, 1))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: was written to since it was checked"):
        cache._fill(0, 0, 1)


def test_expert_file_that_is_truncated(tmp_path: Path) -> None:
    cache, path = cached(tmp_path, num_slots=1)
    cache.preload()
    os.truncate(path, 1000)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: now has 1000 bytes instead of \d+ since"):
        cache._fill(0, 0, 3)


def test_expert_file_that_is_written_to_during_a_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, path = cached(tmp_path, num_slots=1)
    cache.preload()
    read = reading.read_exactly

    def write_and_read(*args: Any) -> None:
        with path.open("r+b") as file:
            file.seek(-8, os.SEEK_END)
            file.write(bytes(8))
        read(*args)

    monkeypatch.setattr(reading, "read_exactly", write_and_read)
    with pytest.raises(CheckpointError, match="was written to since it was checked"):
        cache._fill(0, 0, 1)


def test_expert_file_that_is_replaced(tmp_path: Path) -> None:
    """A download or a package manager renames files. An open file stays the same."""
    cache, path = cached(tmp_path, num_slots=1)
    cache.preload()
    (tmp_path / "new").write_bytes(bytes(100))
    (tmp_path / "new").rename(path)
    before = cache.stats.bytes_copied
    cache._fill(0, 0, 1)
    assert cache.stats.bytes_copied > before


def test_file_that_changes_before_it_is_loaded(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "mixtral")
    checkpoint = open_checkpoint(tmp_path, load_model_config(tmp_path))
    path = tmp_path / "model.safetensors"
    (tmp_path / "new").write_bytes(path.read_bytes())
    (tmp_path / "new").rename(path)
    loader = CheckpointWeights(checkpoint, backend=CpuBackend(page_size=16), dtype=torch.float32)
    with pytest.raises(CheckpointError, match="was written to since it was checked"):
        loader.load(checkpoint.spec.head_site["norm"])


def test_number_of_layers_is_bounded_in_every_family(tmp_path: Path) -> None:
    """Every family refuses 10^9 layers before it makes any tuple of layers."""
    for family in FAMILIES:
        text = {"kimi_k2": "deepseek_v3", "kimi_k25": "deepseek_v3", "qwen3_5_moe": "qwen3_5_moe_text"}
        plain = text.get(family, family)
        make_checkpoint(tmp_path / family, plain)
        edit_config(tmp_path / family, num_hidden_layers=10**9, model_type=family)
        with pytest.raises(CheckpointError, match=rf"num_hidden_layers is 1000000000, expected .* to {MAX_LAYERS}"):
            load_model_config(tmp_path / family)


def test_open_regular_closes_what_it_refuses(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(CheckpointError):
            open_regular(tmp_path / "pipe")
    assert len(os.listdir("/proc/self/fd")) == before
