"""Weights on their way to a GPU: copies that run late find the right data in the staging buffers.

A fake GPU delays each copy until a later event is awaited, as late as a GPU may run it.
"""

from collections.abc import Callable
from pathlib import Path
from threading import Lock

import pytest
import torch
from safetensors.torch import load_file
from tests.checkpoints import make_checkpoint

from moeyard_kernels.cpu.backend import CpuBackend
from moeyard_kernels.types.matrix import Matrix, blob_views
from moeyard_worker.checkpoint import reading
from moeyard_worker.checkpoint.check import CheckedCheckpoint
from moeyard_worker.checkpoint.loading import CheckpointWeights, open_checkpoint
from moeyard_worker.checkpoint.reading import PinnedBuffers, Reader
from moeyard_worker.config.checkpoint_error import CheckpointError
from moeyard_worker.config.engine_config import loading_rates
from moeyard_worker.models.families import load_model_config


class LateGpu:
    """A GPU that runs launched copies only at a later awaited event or at `finish`."""

    def __init__(self) -> None:
        self._launched: list[Callable[[], object]] = []
        self._done = 0
        self._lock = Lock()

    def launch_copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._launched.append(lambda: target.copy_(source))

    def run(self, until: int) -> None:
        with self._lock:
            for copy in self._launched[self._done : until]:
                copy()
            self._done = max(self._done, until)

    def finish(self) -> None:
        self.run(len(self._launched))

    def event(self) -> "LateEvent":
        return LateEvent(self)


class LateEvent:
    """A stand-in for `torch.cuda.Event`."""

    def __init__(self, gpu: LateGpu) -> None:
        self._gpu, self._behind = gpu, 0

    def record(self) -> None:
        self._behind = len(self._gpu._launched)

    def synchronize(self) -> None:
        self._gpu.run(self._behind)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> LateGpu:
    late = LateGpu()
    monkeypatch.setattr(reading, "launch_copy", late.launch_copy)
    monkeypatch.setattr(reading, "on_host", lambda _: False)
    return late


def pinned_buffers(gpu: LateGpu, num_bytes: int) -> PinnedBuffers:
    return PinnedBuffers(event=gpu.event, pin_memory=False, num_bytes=num_bytes)


class Plain(CpuBackend):
    """A backend that keeps matrices as they are, as on a GPU, because late copies must reach them."""

    def matrix(self, weight: Matrix) -> Matrix:
        return weight


def opened(directory: Path) -> CheckedCheckpoint:
    return open_checkpoint(directory, load_model_config(directory))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("served", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_bytes", [1000, 1 << 20], ids=["many-pieces", "one-piece"])
def test_dense_values(tmp_path: Path, gpu: LateGpu, dtype: torch.dtype, served: torch.dtype, num_bytes: int) -> None:
    checkpoint = opened(make_checkpoint(tmp_path, "deepseek_v3", dtype=dtype))
    stored = load_file(tmp_path / "model.safetensors")
    read: list[int] = []
    pinned = pinned_buffers(gpu, num_bytes)
    loader = CheckpointWeights(
        checkpoint, backend=Plain(page_size=16), dtype=served, progress=read.append, pinned=pinned
    )
    loaded = [(each, loader.load(each)) for each in checkpoint.spec.dense()]
    loaded = [(each, found.data if each.matrix else found) for each, found in loaded]
    gpu.finish()
    for weight, got in loaded:
        rows = [stored[part.key].to(got.dtype).flatten() for part in weight.parts]
        assert torch.equal(got.flatten(), torch.cat(rows)), weight
    assert sum(read) == loader._reader.read_bytes == checkpoint.dense_bytes()
    assert loader.read_rate is not None


@pytest.mark.parametrize("announced", [False, True])
@pytest.mark.parametrize("fused", [False, True], ids=["per_expert", "fused"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_expert_values(tmp_path: Path, gpu: LateGpu, fused: bool, dtype: torch.dtype, announced: bool) -> None:
    plain = make_checkpoint(tmp_path / "plain", "qwen3_moe", dtype=dtype)
    stored = load_file(plain / "model.safetensors")
    directory = make_checkpoint(tmp_path / "fused", "qwen3_moe", dtype=dtype, fused_experts=True) if fused else plain
    checkpoint = opened(directory)
    # Buffers smaller than a matrix, so it moves in pieces.
    weights = CheckpointWeights(
        checkpoint, backend=Plain(page_size=16), dtype=torch.float32, pinned=pinned_buffers(gpu, 1000)
    )
    config = checkpoint.spec.config
    form = config.expert_form("float32")
    kept = {}
    experts = [(layer, expert) for layer in config.moe_layers for expert in range(config.num_experts)]
    if announced:
        weights.expect(key for key in experts if key != experts[2])
    for key in experts:
        out = kept[key] = blob_views(form, torch.full((form.blob_bytes,), 255, dtype=torch.uint8))
        weights.fill(*key, out)
    gpu.finish()
    for (layer, expert), out in kept.items():
        for name, matrix in (("gate", out.gate), ("up", out.up), ("down", out.down)):
            wanted = stored[f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight"]
            assert torch.equal(matrix.data, wanted.float())


def test_experts_are_read_before_they_are_filled(tmp_path: Path, gpu: LateGpu) -> None:
    """A file that changes before an expert is read is an error of that expert."""
    checkpoint = opened(make_checkpoint(tmp_path, "qwen3_moe"))
    weights = CheckpointWeights(
        checkpoint, backend=Plain(page_size=16), dtype=torch.float32, pinned=pinned_buffers(gpu, 1000)
    )
    config = checkpoint.spec.config
    form, experts = config.expert_form("float32"), [(layer, e) for layer in config.moe_layers for e in range(4)]
    views = blob_views(form, torch.empty(form.blob_bytes, dtype=torch.uint8))
    weights.expect(experts)
    assert weights._ahead is not None
    for group in weights._ahead._next:
        group.read.result()
    assert weights._reader.read_bytes == 4 * form.blob_bytes
    (tmp_path / "model.safetensors").write_bytes(b"")
    for key in experts[:4]:
        weights.fill(*key, views)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: now has 0 bytes instead of"):
        weights.fill(*experts[4], views)


def test_pieces_cover_part_of_a_tensor(tmp_path: Path, gpu: LateGpu) -> None:
    entries = opened(make_checkpoint(tmp_path, "qwen3_moe")).index.entries
    stored = load_file(tmp_path / "model.safetensors")["lm_head.weight"].flatten()
    reader, sizes = Reader(entries, pinned_buffers(gpu, 4 * 100)), list[int]()
    out = torch.empty(250)
    reader.copy("lm_head.weight", out, 30, progress=sizes.append)
    gpu.finish()
    assert sizes == [400, 400, 200]
    assert torch.equal(out, stored[30:280])


def test_truncated_file_is_named(tmp_path: Path, gpu: LateGpu) -> None:
    checkpoint = opened(make_checkpoint(tmp_path, "qwen3_moe"))
    (tmp_path / "model.safetensors").write_bytes(b"")
    loader = CheckpointWeights(
        checkpoint, backend=Plain(page_size=16), dtype=torch.float32, pinned=pinned_buffers(gpu, 1000)
    )
    with pytest.raises(CheckpointError, match=r"model\.safetensors: now has 0 bytes instead of"):
        loader.load(checkpoint.spec.embed)


def test_loading_rates_message() -> None:
    assert loading_rates(3 << 30, 2.0, None) == "loaded 3 GiB of weights in 2.0 s (1.61 GB/s)"
    assert loading_rates(3 << 30, 2.0, 2e9) == (
        "loaded 3 GiB of weights in 2.0 s (1.61 GB/s, the files alone 2.00 GB/s)"
    )
