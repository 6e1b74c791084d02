"""CUDA graphs without a GPU, over the kernels' references: a replay calls the captured function again.

`CudaBackend` needs no GPU, but the code that captures and times its steps does. Here a graph keeps its function, and a
replay copies the new results into those of the first run.

Graphs share memory for intermediates: results of the sampler's graphs are valid until another graph replays, so a
replay overwrites them.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from moeyard_kernels.cuda import footprint
from moeyard_kernels.cuda.backend import CudaBackend
from moeyard_kernels.types.footprint import Footprints
from moeyard_kernels.types.sampling import SampledTokens
from moeyard_worker.checkpoint import reading
from moeyard_worker.config.engine_config import EngineConfig
from moeyard_worker.engine.assembly import worker
from moeyard_worker.engine.assembly.device import CpuDevice, CudaDevice
from moeyard_worker.engine.steps import gpu_runner

GPU = torch.cuda.is_available()
# Options of a rank that runs GPU steps within `gpu_steps`.
PLACE: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16"} if GPU else {"dtype": "float32"}


class Graph:
    def __init__(self, run: Callable[[], Any], result: Any, pool: list[SampledTokens]) -> None:
        self._run, self._result, self._pool = run, result, pool
        if isinstance(result, SampledTokens):
            pool.append(result)

    def replay(self) -> None:
        for left in self._pool:
            left.each(lambda x: x.fill_(float("nan") if x.is_floating_point() else -7))
        found = self._run()
        if isinstance(found, SampledTokens):
            for name in ("ids", "logprobs", "ranks", "top_ids", "top_logprobs"):
                if getattr(found, name) is not None:
                    getattr(self._result, name).copy_(getattr(found, name))

    def reset(self) -> None:
        self._run = None  # type: ignore[assignment]


def captured(run: Callable[[], Any], pool: list[SampledTokens], *, ahead: bool = True) -> tuple[Graph, Any]:
    """See `CudaBackend.capture`."""
    if ahead:
        run()
    result = run()
    return Graph(run, result, pool), result


def rehearsed(_backend: CudaBackend, runs: Iterable[Callable[[], object]]) -> None:
    """See `CudaBackend.compile_ahead`: one after the other."""
    for run in runs:
        run()


class Event:
    """An event that has always happened."""

    def __init__(self, *, enable_timing: bool = False) -> None:
        pass

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _other: "Event") -> float:
        return 1.0


class ReferenceDevice(CpuDevice):
    """The CPU with a GPU's backend and runners."""

    footprints: Footprints = footprint
    captures = True
    step_runner = CudaDevice.step_runner

    def __init__(self, config: EngineConfig) -> None:
        self.backend = CudaBackend(page_size=config.page_size, device=torch.device("cpu"))


@contextmanager
def gpu_steps() -> Iterator[None]:
    """Run a GPU's steps on workers loaded in this block. Without a GPU they run on the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        if not GPU:
            _without_a_gpu(patch)
        yield


def _without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "make_device", lambda config, _gpu: ReferenceDevice(config))
    # Arrays of numpy cannot share a GPU's memory, and what they share cannot be freed.
    monkeypatch.setattr(reading, "on_host", lambda _: False)
    monkeypatch.setattr(CudaBackend, "capture", staticmethod(captured))
    monkeypatch.setattr(CudaBackend, "compile_ahead", rehearsed)
    monkeypatch.setattr(gpu_runner, "_to_host", torch.clone)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", list)
