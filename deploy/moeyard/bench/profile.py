"""Where the time of a bench's scenario goes, by torch's profiler: kernels by name, and what nothing ran in."""

import time
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile

# The longest kernel and operator names are whole signatures.
_NAME = 76


def profiled(go: Callable[[], object], *, device: str, most: int = 24) -> list[str]:
    """Run `go` under the profiler; lines of text, the `most` that took longest of each side first.

    On a device: time and count of its kernels and copies, and how much of the wall's time they fill together (streams
    that run at once count twice). The host's operators follow; recording them slows it, so their times are to be
    compared with each other only.
    """
    activities = [ProfilerActivity.CPU]
    if device != "cpu":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as found:
        begun = time.perf_counter()
        go()
        wall = time.perf_counter() - begun
    averages: list[Any] = list(found.key_averages())
    lines = []
    if device != "cpu":
        kernels = [(a.self_device_time_total, a.count, a.key) for a in averages if a.self_device_time_total]
        busy = sum(us for us, _, _ in kernels) * 1e-3
        lines.append(f"device: {busy:.1f} ms of kernels and copies in {wall * 1e3:.1f} ms")
        lines += _lines(kernels, most)
    lines.append(f"host: {wall * 1e3:.1f} ms with what recording costs")
    return lines + _lines([(a.self_cpu_time_total, a.count, a.key) for a in averages], most // 2)


def _lines(entries: list[tuple[float, int, str]], most: int) -> list[str]:
    return [
        f"  {us * 1e-3:9.2f} ms {count:7d} x {us / count:9.1f} us  {name[:_NAME]}"
        for us, count, name in sorted(entries, reverse=True)[:most]
    ]
