"""Weights on their way to a GPU: copies that run late find in the buffers what was read for them.

A stand-in for a GPU keeps copies back until somebody waits for an event behind them, as late as a GPU may run them.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.checkpoints import make_checkpoint

from moeyard_kernels.cpu.backend import CpuBackend
from moeyard_worker.checkpoint import loading
from moeyard_worker.checkpoint.check import CheckedCheckpoint
from moeyard_worker.checkpoint.loading import DenseLoader, MappedExperts, open_checkpoint
from moeyard_worker.checkpoint.staging import StagedExperts, Staging, pieces
from moeyard_worker.config.checkpoint_error import CheckpointError
from moeyard_worker.config.engine_config import loading_rates
from moeyard_worker.models.families import load_model_config


class LateGpu:
    """Runs what was launched when an event behind it is waited for, or at `finish`."""

    def __init__(self) -> None:
        self._launched: list[Callable[[], object]] = []
        self._done = 0

    def put(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._launched.append(lambda: target.copy_(source))

    def run(self, until: int) -> None:
        for copy in self._launched[self._done : until]:
            copy()
        self._done = max(self._done, until)

    def finish(self) -> None:
        self.run(len(self._launched))

    def event(self) -> "LateEvent":
        return LateEvent(self)


class LateEvent:
    """As `torch.cuda.Event`."""

    def __init__(self, gpu: LateGpu) -> None:
        self._gpu, self._behind = gpu, 0

    def record(self) -> None:
        self._behind = len(self._gpu._launched)

    def synchronize(self) -> None:
        self._gpu.run(self._behind)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> LateGpu:
    late = LateGpu()
    monkeypatch.setattr(loading, "put", late.put)
    return late


def staging_of(gpu: LateGpu, num_bytes: int) -> Staging:
    return Staging(event=gpu.event, pin_memory=False, num_bytes=num_bytes)


class Plain(CpuBackend):
    """Keeps matrices as they are, as a GPU does: late copies must reach them."""

    def matrix(self, weight: torch.Tensor) -> torch.Tensor:
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
    staging = staging_of(gpu, num_bytes)
    loader = DenseLoader(checkpoint, backend=Plain(page_size=16), dtype=served, progress=read.append, staging=staging)
    loaded = [(weight, loader.load(weight)) for weight in checkpoint.spec.dense()]
    gpu.finish()
    for weight, got in loaded:
        rows = [stored[part.key].to(got.dtype).flatten() for part in weight.parts]
        assert torch.equal(got.flatten(), torch.cat(rows)), weight
    assert sum(read) == staging.read_bytes == checkpoint.dense_bytes()
    assert staging.read_seconds > 0


@pytest.mark.parametrize("fused", [False, True], ids=["per_expert", "fused"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_expert_values(tmp_path: Path, gpu: LateGpu, fused: bool, dtype: torch.dtype) -> None:
    checkpoint = opened(make_checkpoint(tmp_path, "qwen3_moe", dtype=dtype, fused_experts=fused))
    config = checkpoint.spec.config
    # Smaller than an expert: the buffers grow.
    source, mapped = StagedExperts(checkpoint, staging_of(gpu, 64)), MappedExperts(checkpoint)
    kept, expected = [], []
    for layer in config.moe_layers:
        for expert in range(config.num_experts):
            for staged, plain in zip(source.tensors(layer, expert), mapped.tensors(layer, expert), strict=True):
                assert staged.shape == plain.shape
                kept.append(torch.full(plain.shape, float("nan"), dtype=torch.float32))
                gpu.put(kept[-1], staged)
                expected.append(plain.float())
    gpu.finish()
    assert all(torch.equal(got, want) for got, want in zip(kept, expected, strict=True))


def test_pieces_cover_a_tensor(tmp_path: Path) -> None:
    checkpoint = opened(make_checkpoint(tmp_path, "qwen3_moe"))
    key, entry = next((k, e) for k, e in checkpoint.index.entries.items() if len(e.shape) == 2)
    count = entry.shape[0] * entry.shape[1]
    found = pieces(key, entry, 4 * 100)
    assert [piece.begin for piece in found] == list(range(0, count, 100))
    assert sum(piece.count for piece in found) == count


def test_a_file_cut_short_is_named(tmp_path: Path, gpu: LateGpu) -> None:
    checkpoint = opened(make_checkpoint(tmp_path, "qwen3_moe"))
    (tmp_path / "model.safetensors").write_bytes(b"")
    loader = DenseLoader(checkpoint, backend=Plain(page_size=16), dtype=torch.float32, staging=staging_of(gpu, 1000))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: now has 0 bytes instead of"):
        loader.load(checkpoint.spec.embed)


def test_rates_in_words() -> None:
    assert loading_rates(3 << 30, 2.0, None) == "loaded 3 GiB of weights in 2.0 s (1.61 GB/s)"
    assert loading_rates(3 << 30, 2.0, 2e9) == (
        "loaded 3 GiB of weights in 2.0 s (1.61 GB/s, the files alone 2.00 GB/s)"
    )
