"""CUDA graphs: capture the launches of a function, and compile the kernels of many captures in parallel beforehand."""

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
    from moeyard_kernels.common.compiling import CompileCounts

log = logging.getLogger(__name__)

_T = TypeVar("_T")
# A compilation takes several hundred MB of host memory.
_MOST_AT_ONCE = 32


@contextmanager
def without_collection(*, first: bool = True) -> Iterator[None]:
    """Collect garbage `first` and not in the block: destroying a graph during a capture would spoil the capture."""
    enabled = gc.isenabled()
    if first:
        gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def capture(run: Callable[[], _T], pool: Any, *, ahead: bool = True) -> tuple[torch.cuda.CUDAGraph, _T]:
    """Capture the launches of `run`, with memory from `pool`. Return the graph and the result of `run`.

    `ahead`: run once before, for one-time setup. Otherwise new kernels are compiled and loaded during the capture,
    which CUDA allows in "relaxed" mode; this halves the time.
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
    """Capture the launches of `run` between steps, without waiting and without releasing cached memory. Raises the
    errors of `run`, and leaves no graph then."""
    graph, side = torch.cuda.CUDAGraph(), _capturing(torch.cuda.current_device())
    side.wait_stream(torch.cuda.current_stream())
    with without_collection(first=False), torch.cuda.stream(side):
        graph.capture_begin(pool=pool, capture_error_mode="relaxed")
        try:
            run()
        except BaseException:
            with suppress(RuntimeError):  # boundary: a failed capture may not end in order
                graph.capture_end()
            graph.reset()
            raise
        graph.capture_end()
    return graph


@cache
def _capturing(device: int) -> torch.cuda.Stream:
    """Return the stream of all captures on a device: memory of a pool passes between captures of one stream only.
    Torch's own capture stream belongs to the first device of the process, which may be another one."""
    return torch.cuda.Stream(device)


def compiling_only(at_once: int, device: torch.device) -> AbstractContextManager["CompileCounts"]:
    """Compile the kernels that this thread launches while the context lasts, without running them."""
    compiling: AbstractContextManager[CompileCounts] = load("common.compiling").compiling_only(at_once, device)
    return compiling


def compile_ahead(runs: Iterable[Callable[[], object]], device: torch.device) -> None:
    """Compile the launches of `runs` on `device`, the current one, without running them.

    Captures compile their kernels one after the other. With an empty Triton cache this took most of a start: 80 s of 92
    with Qwen3-30B-A3B. So captures are rehearsed: the kernels of a step are compiled on all cores and loaded, and the
    graph of torch's own operators is dropped. No operator runs, so none reads unwritten memory.

    Rehearse with a full cache, too. Triton's cache key of a kernel depends on the kernels compiled before it: constants
    of called functions count only if these were compiled (`_update_hash` in Triton 3.6 and 3.7). In another order some
    kernels would miss the cache.

    `runs` advances when the run before has ended. Raises RuntimeError if a run keeps device memory, which was never
    written.
    """
    begun, pool = time.perf_counter(), torch.cuda.graph_pool_handle()
    # The other ranks of this host do the same.
    at_once = min(_MOST_AT_ONCE, max(1, len(os.sched_getaffinity(0)) // torch.cuda.device_count()))
    with without_collection(), warnings.catch_warnings():
        # A step may consist of Triton launches only.
        warnings.filterwarnings("ignore", "The CUDA Graph is empty")
        allocated = torch.cuda.memory_allocated(device)
        with compiling_only(at_once, device) as compiled:
            # A pool lasts as long as one of its graphs.
            graphs = [capture_while_serving(run, pool) for run in runs]
        num_runs = len(graphs)
        graphs.clear()
    gc.collect()
    torch.cuda.empty_cache()
    # Memory that was allocated before may be freed in the meantime.
    if (kept := torch.cuda.memory_allocated(device) - allocated) > 0:
        raise RuntimeError(f"{kept} bytes are still allocated by steps that only compiled kernels")
    seconds = time.perf_counter() - begun
    log.info(
        "compiled %d kernels of %d steps in %.1f s, up to %d at once; %d more were in Triton's cache",
        compiled.count,
        num_runs,
        seconds,
        at_once,
        compiled.found,
    )
