"""Measured bandwidths: the ceilings that benchmarks compare with."""

import statistics
import time
from collections.abc import Callable

import torch

# Source and target of the device's copy together.
COPY_BYTES = 8 << 30


def copy_bandwidth() -> float:
    """Return bytes/s (read + write) of a device-to-device copy of 4 GiB, median of 9, outside of graphs.

    On an H200 a copy of 1 GiB as a node of a graph reached 2.76 TB/s, this one 4.27.
    """
    source = torch.empty(COPY_BYTES // 4, dtype=torch.bfloat16, device="cuda").uniform_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / _device_seconds(lambda: target.copy_(source), 9)


def link_bandwidth(expert_bytes: int) -> float:
    """Return bytes/s of the copy engine for blobs of `expert_bytes` out of pinned memory, median of 5."""
    store = torch.zeros(16, expert_bytes, dtype=torch.uint8).pin_memory()
    target = torch.empty_like(store, device="cuda")

    def copy() -> None:
        for slot in range(len(store)):
            target[slot].copy_(store[slot], non_blocking=True)

    return store.nbytes / _device_seconds(copy, 5)


def host_copy_bandwidth() -> float:
    """Return bytes/s (read + write) of copying 256 MiB with one thread, median of 5."""
    source = torch.ones(64 << 20)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(6):
        begun = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - begun)
    return 2 * source.nbytes / statistics.median(seconds[1:])


def _device_seconds(run: Callable[[], object], times: int) -> float:
    """Return the median seconds of `times` runs on the current device, after two that do not count."""
    seconds = []
    for _ in range(times + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) * 1e-3)
    return statistics.median(seconds[2:])
