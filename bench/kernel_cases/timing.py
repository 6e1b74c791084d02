"""Time of a launch on the GPU: medians of replays of a CUDA graph, and the ceilings of the run.

Each launch finds its inputs outside the L2, as in a step between other layers. An op rotates over copies of its inputs,
back to back. The launches that follow overlap its writes, as in a step. An op of few bytes would need thousands of
copies. Before each of its launches the L2 is flushed by reading, and the time of the reads is subtracted. The reads
carry the write-back of the launch before them. This charges the write-back to the op, although a step hides it.
`torch.neg` of 4096 x 2048 bf16 took 12.9 us this way and 9.8 us in rotation, while launches that only read agreed
within 0.4 us (2026-11-22, one H200). For 1 MiB it is 0.2 us at most.
"""

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from kernel_cases.case import with_own_tensors
from moeyard.clients.bench.bandwidth import copy_bandwidth
from moeyard_kernels.common.dependent import dependent, let_next_begin, wait_for_previous

# More than twice the L2 of an H200 (60 MB).
_FLUSH_BYTES = 160 << 20
# Bytes that all sets of a rotation read and write. If half of them are read, that evicts as much as a flush.
_ROTATION_BYTES = 320 << 20
# An op that moves less would need more than 320 sets.
_LEAST_ROTATED = 1 << 20
_LAUNCHES = 16
_REPLAYS = 15
# The start of a graph (about 10 us) is subtracted from shorter rotations. For longer ones it is negligible.
_LONG_SECONDS = 5e-3


@triton.jit
def _read_kernel(p_x, p_out, N, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """Read [i BLOCK, i BLOCK + BLOCK) of int32, and store only for a value that it never has."""
    if EARLY:
        wait_for_previous()
        let_next_begin()
    o_x = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b_x = tl.load(p_x + o_x, mask=o_x < N, other=0)
    top = tl.max(b_x, 0)
    if top == 123456789:
        tl.store(p_out, top)


class Timer:
    """Times launches on the current device. The constructor measures `copy_bandwidth` (bytes/s, read + write)."""

    def __init__(self) -> None:
        self._flushed = torch.zeros(_FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
        self._sink = torch.zeros(1, dtype=torch.int32, device="cuda")
        self.copy_bandwidth = copy_bandwidth()

    def flush(self, *, early: bool) -> None:
        """Evict the L2 by reading other memory, which leaves no lines to write back.

        early: let the next launch begin early, as a kernel of ours before it in a step would.
        """
        block = 8192
        grid = (self._flushed.numel() // block,)
        options = dependent(self._flushed) if early else {}
        _read_kernel[grid](
            self._flushed, self._sink, self._flushed.numel(), BLOCK=block, EARLY=early, num_warps=8, **options
        )

    def seconds(self, run: partial[Any], num_bytes: int, *, early: bool = True) -> float:
        """Return the median seconds of one `run`, which moves `num_bytes` (see the module). Its tensors are copied.

        early: whether its first launch may begin early. torch's launches do not, and then the reads between them do
        not.
        """
        if num_bytes < _LEAST_ROTATED:
            return self._seconds_flushed(run, early=early)
        sets = [with_own_tensors(run) for _ in range(max(2, -(-_ROTATION_BYTES // num_bytes)))]
        launches = sets * -(-_LAUNCHES // len(sets))

        def turns(count: int) -> Callable[[], object]:
            # A list keeps all outputs. A freed output would be the next one's memory, in the L2 and never written back.
            return lambda: [launch() for _ in range(count) for launch in launches]

        [once] = _medians([turns(1)], replays=3)
        if once > _LONG_SECONDS:
            [once] = _medians([turns(1)])
            return once / len(launches)
        once, thrice = _medians([turns(1), turns(3)])
        return (thrice - once) / 2 / len(launches)

    def _seconds_flushed(self, run: partial[Any], *, early: bool) -> float:
        """Time a graph of (flush, run) x n less a graph of (flush) x n, over n."""

        def both() -> None:
            for _ in range(_LAUNCHES):
                self.flush(early=early)
                run()

        def flush_only() -> None:
            for _ in range(_LAUNCHES):
                self.flush(early=early)

        with_run, without = _medians([both, flush_only])
        return max(with_run - without, 0.0) / _LAUNCHES


def _medians(bodies: list[Callable[[], object]], *, replays: int = _REPLAYS) -> list[float]:
    """Return the seconds per replay of each body's graph, replayed in turns so that drift affects all alike."""
    graphs = [capture(body) for body in bodies]
    times: list[list[float]] = [[] for _ in graphs]
    for _ in range(replays + 2):
        for graph, found in zip(graphs, times, strict=True):
            found.append(replay_seconds(graph))
    return [statistics.median(found[2:]) for found in times]


def replay_seconds(graph: torch.cuda.CUDAGraph) -> float:
    """Replay a graph, wait for its end, and return its seconds on the device."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3


def capture(body: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Capture `body` as a graph, after one run outside of it (compilation, lazy handles)."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        body()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph
