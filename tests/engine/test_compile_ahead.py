"""Rehearsed steps are made one after the other, and memory that they keep is an error. The device is a fake."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moeyard_kernels.cuda import capturing as module
from moeyard_kernels.cuda.capturing import compile_ahead
from moeyard_worker.engine.steps.gpu_runner import GpuRunner
from moeyard_worker.exchange.base import PeerRows

DEVICE = torch.device("cuda", 0)


class Gpu:
    """Record events in order. `allocated` are the allocated bytes before and after."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, allocated: tuple[int, int], gpus: int = 2) -> None:
        self.events: list[object] = []
        sizes = iter(allocated)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _device: next(sizes))
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: self.events.append("freed"))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(module.os, "sched_getaffinity", lambda _process: range(9))
        monkeypatch.setattr(module, "capture_while_serving", self.captured)
        monkeypatch.setattr(module, "compiling_only", self.compiling)

    def captured(self, run: Callable[[], object], pool: object) -> object:
        assert pool == "pool"
        return run()

    @contextmanager
    def compiling(self, at_once: int, device: torch.device) -> Iterator[SimpleNamespace]:
        self.events.append((at_once, device))
        yield SimpleNamespace(count=7, found=5)
        self.events.append("compiled")

    def steps(self) -> Iterator[Callable[[], None]]:
        for name in "ab":
            self.events.append(f"make {name}")
            yield lambda name=name: self.events.append(f"run {name}")


def test_steps_are_made_one_by_one_and_freed_before_memory_is_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Each of 2 GPUs gets 4 of 9 cores. Memory that others freed is no error.
    gpu = Gpu(monkeypatch, allocated=(512, 0))
    with caplog.at_level("INFO"):
        compile_ahead(gpu.steps(), DEVICE)
    assert gpu.events == [(4, DEVICE), "make a", "run a", "make b", "run b", "compiled", "freed"]
    assert "compiled 7 kernels of 2 steps in" in caplog.text
    assert "up to 4 at once; 5 more were in Triton's cache" in caplog.text


def test_each_gpu_gets_at_least_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch, allocated=(0, 0), gpus=16)
    compile_ahead(gpu.steps(), DEVICE)
    assert gpu.events[0] == (1, DEVICE)


def test_memory_that_a_step_keeps_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch, allocated=(0, 512))
    with pytest.raises(RuntimeError, match="512 bytes are still allocated by steps that only compiled kernels"):
        compile_ahead(gpu.steps(), DEVICE)


def test_rehearsal_runs_one_layer_of_each_kind() -> None:
    events: list[object] = []

    @contextmanager
    def one_layer_of_each_kind() -> Iterator[None]:
        events.append("less")
        yield
        events.append("whole")

    model = SimpleNamespace(one_layer_of_each_kind=one_layer_of_each_kind)
    names = iter("abc")
    runner: Any = object.__new__(GpuRunner)
    runner._runner, runner._exchange = (
        SimpleNamespace(model=model),
        SimpleNamespace(steps=SimpleNamespace(set_rows=events.append)),
    )
    runner._sampler = SimpleNamespace(runs=lambda _: [lambda: events.append(next(names))])
    for run in runner._rehearsal([lambda: events.append(next(names))] * 2, [1]):
        run()
    assert events == ["less", "a", "b", "whole", "c", PeerRows(0)]
