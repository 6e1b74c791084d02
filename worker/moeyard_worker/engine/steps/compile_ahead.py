"""Kernels of the steps that are to be captured, compiled many at a time before they are.

Captures meet them one after the other, and with an empty cache of Triton's these took most of a start: with
Qwen3-30B-A3B 80 s of 92. So captures are rehearsed: what a step launches is compiled on all cores and loaded, and of
the step there is a graph of torch's own operators, which is dropped. As no operator has run, none has read what no
kernel wrote.

Steps are rehearsed with a full cache, too. Triton's key of a kernel depends on which kernels were met before it: of
functions that it calls the constants count only if those were (`_update_hash` in Triton 3.6 and 3.7). So in another
order it would find some of them missing.
"""

import gc
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator

import torch

from moeyard_kernels.door.compiling import compiling_only
from moeyard_worker.engine.sampling.device_sampler import captured_meanwhile, nothing_collected
from moeyard_worker.engine.steps.runner import Runner
from moeyard_worker.exchange.base import PeerRows

log = logging.getLogger(__name__)

# A compilation takes some hundred MB of the host's memory.
_MOST_AT_ONCE = 32


def rehearsal(
    runner: Runner, steps: Iterable[Callable[[], object]], choices: Iterable[Callable[[], object]]
) -> Iterator[Callable[[], object]]:
    """For `compile_ahead`: steps of the runner's model, through one layer of each kind, then choices of tokens."""
    with runner.model.one_layer_of_each_kind():
        yield from steps
    yield from choices
    # Nothing of the last step is kept.
    runner.exchange.expect(PeerRows(0))


def compile_ahead(runs: Iterable[Callable[[], object]], device: torch.device) -> None:
    """Compile what `runs` launch on `device`, the current one; they launch nothing.

    The next of `runs` is asked for when the one before is through. Raises RuntimeError where one of them has kept
    memory of the device: nothing was written to it.
    """
    begun, pool = time.perf_counter(), torch.cuda.graph_pool_handle()
    # Ranks of this host do the same, each for its GPU.
    at_once = min(_MOST_AT_ONCE, max(1, len(os.sched_getaffinity(0)) // torch.cuda.device_count()))
    with nothing_collected(), warnings.catch_warnings():
        # Where all that a step does is launches.
        warnings.filterwarnings("ignore", "The CUDA Graph is empty")
        allocated = torch.cuda.memory_allocated(device)
        with compiling_only(at_once, device) as compiled:
            # A pool lasts as long as one of its graphs.
            graphs = [captured_meanwhile(run, pool) for run in runs]
        num_runs = len(graphs)
        graphs.clear()
    gc.collect()
    torch.cuda.empty_cache()
    # What a process had before, it may free meanwhile.
    if (kept := torch.cuda.memory_allocated(device) - allocated) > 0:
        raise RuntimeError(f"{kept} bytes are kept of steps of which kernels were compiled only")
    seconds = time.perf_counter() - begun
    log.info(
        "compiled %d kernels of %d steps in %.1f s, up to %d at once; %d more were in Triton's cache",
        compiled.count, num_runs, seconds, at_once, compiled.found,
    )  # fmt: skip
