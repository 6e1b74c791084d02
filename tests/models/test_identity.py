"""The identity of a checkpoint: equal for copies, different for other weights."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoints import make_checkpoint

from moeyard_worker.checkpoint.identity import difference, identity
from moeyard_worker.checkpoint.index import open_index
from moeyard_worker.config.checkpoint_error import CheckpointError

WEIGHTS, CONFIG = "model.safetensors", "config.json"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model", "qwen3_moe")


def identity_of(directory: Path) -> dict[str, tuple[str, str]]:
    return identity(open_index(directory))


def test_copies_are_equal(model: Path, tmp_path: Path) -> None:
    """A copy with other file times is equal too, except on one host."""
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    assert set(identity_of(model)) == {WEIGHTS, CONFIG}
    assert identity_of(copy) == identity_of(model)
    os.utime(copy / WEIGHTS, ns=(1, 1))
    assert difference(identity_of(model), identity_of(copy), one_host=False) == ""
    assert difference(identity_of(model), identity_of(copy), one_host=True) == WEIGHTS
    os.utime(copy / CONFIG, ns=(1, 1))
    assert difference(identity_of(copy), identity_of(copy), one_host=True) == ""


def test_changed_weights_of_the_same_shapes_differ(model: Path, tmp_path: Path) -> None:
    """Every tensor changes slightly, as after more training, while size and time stay the same."""
    other = Path(shutil.copytree(model, tmp_path / "other"))
    tensors = {key: x + 1e-3 * torch.ones_like(x) for key, x in load_file(model / WEIGHTS).items()}
    save_file(tensors, other / WEIGHTS, metadata={"format": "pt"})
    stat = (model / WEIGHTS).stat()
    os.utime(other / WEIGHTS, ns=(stat.st_mtime_ns, stat.st_mtime_ns))
    assert (other / WEIGHTS).stat().st_size == stat.st_size
    assert difference(identity_of(model), identity_of(other), one_host=False) == WEIGHTS


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "deepseek_v4", "mixtral"])
@pytest.mark.parametrize(("kind", "seen"), [("all", True), ("others", True), ("experts", True), ("one expert", False)])
def test_changed_tensors(tmp_path: Path, family: str, kind: str, seen: bool) -> None:
    """Each tensor that is no expert's is sampled, and one expert of each layer, but not the last one."""
    model = make_checkpoint(tmp_path / "model", family)
    before, tensors = identity_of(model), load_file(model / WEIGHTS)
    experts = {key for key in tensors if ".experts." in key}
    last = {key for key in experts if ".experts.7." in key}
    layers = {key.partition(".experts.")[0] for key in experts}
    assert len(tensors) > len(experts) > len(last) >= 3 * len(layers) > 0
    for keys in {
        "all": [set(tensors)],
        "others": [{key} for key in set(tensors) - experts],
        "experts": [{key for key in experts if key.startswith(f"{layer}.experts.")} for layer in layers],
        "one expert": [last],
    }[kind]:
        changed = {key: x + 1 if key in keys else x for key, x in tensors.items()}
        save_file(changed, model / WEIGHTS, metadata={"format": "pt"})
        assert (difference(before, identity_of(model), one_host=False) == WEIGHTS) is seen, keys


def test_changed_and_missing_files_are_named(model: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(model, tmp_path / "other"))
    text = (other / CONFIG).read_text()
    (other / CONFIG).write_text(text.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    assert (other / CONFIG).read_text() != text
    assert difference(identity_of(model), identity_of(other), one_host=False) == CONFIG
    whole, less = identity_of(model), {CONFIG: identity_of(model)[CONFIG]}
    assert difference(whole, less, one_host=False) == difference(less, whole, one_host=False) == WEIGHTS


def test_changed_shard_is_named(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", "qwen3_moe", max_shard_size="200KB")
    shards = sorted(model.glob("*.safetensors"))
    assert len(shards) > 2
    before = identity_of(model)
    tensors = load_file(shards[1])
    save_file({key: -x for key, x in tensors.items()}, shards[1], metadata={"format": "pt"})
    assert difference(before, identity_of(model), one_host=False) == shards[1].name


def test_file_that_changes_meanwhile_is_an_error(model: Path) -> None:
    index = open_index(model)
    os.utime(model / WEIGHTS, ns=(1, 1))
    with pytest.raises(CheckpointError, match="was written to since it was checked"):
        identity(index)
