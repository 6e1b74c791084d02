"""Graphs without a GPU: what would be captured is run again in every replay. Over the oracles of the kernels.

`CudaBackend` asks for no GPU itself; what captures and times its steps does. Here that is told to go without: a graph
keeps the function that it was made of, and a replay puts what that returns where the first run's results are.

Graphs share the memory of what they compute on the way: what the sampler's graphs leave is good until something else is
replayed, and here is spoilt then.
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
from moeyard_worker.config.engine_config import EngineConfig
from moeyard_worker.engine.assembly import worker
from moeyard_worker.engine.assembly.device import CpuDevice, CudaDevice
from moeyard_worker.engine.steps import gpu_runner

GPU = torch.cuda.is_available()
# The options of a rank that runs a GPU's steps, within `gpu_steps`.
PLACE: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16"} if GPU else {"dtype": "float32"}


class Graph:
    """`replay` runs `run` once more."""

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


def captured(run: Callable[[], Any], pool: list[SampledTokens], *, ahead: bool = True) -> tuple[Graph, Any]:
    """See `CudaBackend.capture`."""
    if ahead:
        run()
    result = run()
    return Graph(run, result, pool), result


def rehearsed(_backend: CudaBackend, runs: Iterable[Callable[[], object]]) -> None:
    """See `CudaBackend.compile_ahead`: each runs once, when the one before has."""
    for run in runs:
        run()


class Event:
    """Everything has run when it is asked."""

    def __init__(self, *, enable_timing: bool = False) -> None:
        pass

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _other: "Event") -> float:
        return 1.0


class OracleDevice(CpuDevice):
    """The CPU, with the backend and the runners of a GPU."""

    footprints: Footprints = footprint
    step_runner = CudaDevice.step_runner

    def __init__(self, config: EngineConfig) -> None:
        self.backend = CudaBackend(page_size=config.page_size, device=torch.device("cpu"))


@contextmanager
def gpu_steps() -> Iterator[None]:
    """Workers that are loaded meanwhile run a GPU's steps: on one, or where there is none, on the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        if not GPU:
            _without_a_gpu(patch)
        yield


def _without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "make_device", lambda config, _gpu: OracleDevice(config))
    monkeypatch.setattr(CudaBackend, "capture", staticmethod(captured))
    monkeypatch.setattr(CudaBackend, "compile_ahead", rehearsed)
    monkeypatch.setattr(gpu_runner, "_to_host", torch.clone)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", list)
