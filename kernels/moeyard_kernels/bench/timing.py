"""How long a launch takes on the GPU: replays of a CUDA graph with a cold L2, medians, and the ceilings of the run."""

import statistics
from collections.abc import Callable

import torch
import triton
import triton.language as tl

# More than twice the L2 of an H200 (60 MB).
_FLUSH_BYTES = 160 << 20
_COPIES = 16
_REPLAYS = 15


@triton.jit
def _read_kernel(p_x, p_out, N, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Read [i BLOCK, i BLOCK + BLOCK) of int32 and store something only if it holds a value that it never does."""
    o_x = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b_x = tl.load(p_x + o_x, mask=o_x < N, other=0)
    top = tl.max(b_x, 0)
    if top == 123456789:
        tl.store(p_out, top)


class Timer:
    """Times launches on the current device. `copy_bandwidth` (bytes/s, read + write) is measured when it is made."""

    def __init__(self) -> None:
        self._flushed = torch.zeros(_FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
        self._sink = torch.zeros(1, dtype=torch.int32, device="cuda")
        self.copy_bandwidth = copy_bandwidth()

    def flush(self) -> None:
        """Evict what the L2 holds by reading other memory, which leaves no lines to write back."""
        block = 8192
        grid = (self._flushed.numel() // block,)
        _read_kernel[grid](self._flushed, self._sink, self._flushed.numel(), BLOCK=block, num_warps=8)

    def seconds(self, run: Callable[[], object]) -> float:
        """Median time of one `run` after a cold L2: a graph of (flush, run) x n less a graph of (flush) x n, over n."""

        def both() -> None:
            for _ in range(_COPIES):
                self.flush()
                run()

        def flush_only() -> None:
            for _ in range(_COPIES):
                self.flush()

        run()
        with_run, without = self._median([both, flush_only], replays=_REPLAYS)
        return max(with_run - without, 0.0) / _COPIES

    def _median(self, bodies: list[Callable[[], object]], *, replays: int) -> list[float]:
        """Seconds per replay of each body, replayed in turns so that drift meets all alike."""
        graphs = [capture(body) for body in bodies]
        times: list[list[float]] = [[] for _ in graphs]
        for _ in range(replays + 2):
            for graph, found in zip(graphs, times, strict=True):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                graph.replay()
                end.record()
                end.synchronize()
                found.append(begin.elapsed_time(end) * 1e-3)
        return [statistics.median(found[2:]) for found in times]


def copy_bandwidth() -> float:
    """Bytes/s (read + write) of a device-to-device copy of 4 GiB, median of 9, outside of graphs.

    A copy of 1 GiB as a node of a graph measured 2.76 TB/s on an H200, this one 4.27.
    """
    source = torch.empty(2 << 30, dtype=torch.bfloat16, device="cuda").uniform_()
    target = torch.empty_like(source)
    times = []
    for _ in range(11):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    return 2 * source.nbytes / statistics.median(times[2:])


def capture(body: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """`body` as a graph, after one run outside of it (compilation, lazy handles)."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        body()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph
