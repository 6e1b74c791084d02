"""CUDA graphs: capture what a function launches, and compile the kernels of many captures at once before them."""

import gc
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from moeyard_kernels.ops.op import load

if TYPE_CHECKING:
    from moeyard_kernels.common.compiling import Compiled

log = logging.getLogger(__name__)

_T = TypeVar("_T")
# A compilation takes some hundred MB of the host's memory.
_MOST_AT_ONCE = 32


@contextmanager
def without_collection() -> Iterator[None]:
    """Collect garbage now and not meanwhile: a graph that is destroyed during a capture would spoil it."""
    gc.collect()
    with _no_collection():
        yield


@contextmanager
def _no_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def capture(run: Callable[[], _T], pool: Any, *, ahead: bool = True) -> tuple[torch.cuda.CUDAGraph, _T]:
    """Capture what `run` launches, with memory from `pool`. Returns the graph and the result of `run`.

    `ahead`: run once before, for what only a first run makes. Otherwise new kernels are compiled and loaded during the
    capture, which CUDA permits a thread that asks for it ("relaxed"): half of the time.
    """
    if ahead:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(
        graph, pool=pool, stream=_capturing(torch.cuda.current_device()), capture_error_mode="relaxed"
    ):
        result = run()
    return graph, result


def capture_while_serving(run: Callable[[], object], pool: Any) -> torch.cuda.CUDAGraph:
    """Capture what `run` launches between steps: without waiting for anything, and without releasing cached memory.

    Raises what `run` raises, and leaves no graph then.
    """
    graph, side = torch.cuda.CUDAGraph(), _capturing(torch.cuda.current_device())
    side.wait_stream(torch.cuda.current_stream())
    with _no_collection(), torch.cuda.stream(side):
        graph.capture_begin(pool=pool, capture_error_mode="relaxed")
        try:
            run()
        except BaseException:
            with suppress(RuntimeError):  # boundary: a capture that failed may not end in order
                graph.capture_end()
            graph.reset()
            raise
        graph.capture_end()
    return graph


@cache
def _capturing(device: int) -> torch.cuda.Stream:
    """The stream of all captures on a device: only within one stream does memory of a pool pass between captures.

    Torch's own capture stream belongs to the first device of the process, which may be another one.
    """
    return torch.cuda.Stream(device)


def compiling_only(at_once: int, device: torch.device) -> AbstractContextManager["Compiled"]:
    """Compile the kernels that this thread launches while the context lasts, without running them."""
    compiling: AbstractContextManager[Compiled] = load("common.compiling").compiling_only(at_once, device)
    return compiling


def compile_ahead(runs: Iterable[Callable[[], object]], device: torch.device) -> None:
    """Compile what `runs` launch on `device`, the current one, without launching it.

    Captures meet their kernels one after the other, and with an empty cache of Triton these took most of a start: 80 s
    of 92 with Qwen3-30B-A3B. So captures are rehearsed: the kernels that a step launches are compiled on all cores and
    loaded, and its graph of torch's own operators is dropped. No operator runs, so none reads what no kernel wrote.

    Rehearse with a full cache, too. Triton's key of a kernel depends on the kernels that were met before it: constants
    of functions that it calls count only if those were (`_update_hash` in Triton 3.6 and 3.7). In another order some
    kernels would be missing.

    `runs` is advanced when the run before has ended. Raises RuntimeError where a run keeps memory of the device, to
    which nothing was written.
    """
    begun, pool = time.perf_counter(), torch.cuda.graph_pool_handle()
    # The other ranks of this host do the same.
    at_once = min(_MOST_AT_ONCE, max(1, len(os.sched_getaffinity(0)) // torch.cuda.device_count()))
    with without_collection(), warnings.catch_warnings():
        # A step may consist of launches only.
        warnings.filterwarnings("ignore", "The CUDA Graph is empty")
        allocated = torch.cuda.memory_allocated(device)
        with compiling_only(at_once, device) as compiled:
            # A pool lasts as long as one of its graphs.
            graphs = [capture_while_serving(run, pool) for run in runs]
        num_runs = len(graphs)
        graphs.clear()
    gc.collect()
    torch.cuda.empty_cache()
    # Memory that was allocated before may be freed meanwhile.
    if (kept := torch.cuda.memory_allocated(device) - allocated) > 0:
        raise RuntimeError(f"{kept} bytes are kept by steps of which only kernels were compiled")
    seconds = time.perf_counter() - begun
    log.info(
        "compiled %d kernels of %d steps in %.1f s, up to %d at once; %d more were in Triton's cache",
        compiled.count, num_runs, seconds, at_once, compiled.found,
    )  # fmt: skip
