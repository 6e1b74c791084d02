"""Time of a benchmark's scenario by torch's profiler: kernels by name, and idle time."""

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

# Shown launches of one graph: those of a few layers. Later ones repeat them.
_CHAIN = 72
# Cut long names: some kernels and operators carry their whole signature.
_NAME = 76


class Recording:
    """Start a profile of this process's device for all threads, and of this thread's operators, until `stop`."""

    def __init__(self, device: str) -> None:
        self._on_device = device != "cpu"
        activities = [ProfilerActivity.CPU]
        if self._on_device:
            activities.append(ProfilerActivity.CUDA)
        self._found = profile(activities=activities)
        self._found.start()
        self._begun = time.perf_counter()

    def stop(self) -> None:
        self._wall = time.perf_counter() - self._begun
        self._found.stop()

    def lines(self, most: int = 24) -> list[str]:
        wall = self._wall
        averages: list[Any] = list(self._found.key_averages())
        lines = []
        if self._on_device:
            kernels = [(a.self_device_time_total, a.count, a.key) for a in averages if a.self_device_time_total]
            busy = sum(us for us, _, _ in kernels) * 1e-3
            lines.append(f"device: {busy:.1f} ms of kernels and copies in {wall * 1e3:.1f} ms")
            lines += _lines(kernels, most)
            lines += chain(_launched(self._found))
        lines.append(f"host: {wall * 1e3:.1f} ms with what recording costs")
        return lines + _lines([(a.self_cpu_time_total, a.count, a.key) for a in averages], most // 2)


def profiled(go: Callable[[], object], *, device: str, most: int = 24) -> list[str]:
    """Run `go` under the profiler; lines of text, the `most` that took longest of each side first.

    On a device: time and count of its kernels and copies, and how much of the wall's time they fill together (streams
    that run at once count twice). The host's operators follow; recording them slows it, so their times are to be
    compared with each other only. `chain` lists each launch of the graph with the longest total replay
    time.
    """
    recording = Recording(device)
    try:
        go()
    finally:
        recording.stop()
    return recording.lines(most)


def _lines(entries: list[tuple[float, int, str]], most: int) -> list[str]:
    return [
        f"  {us * 1e-3:9.2f} ms {count:7d} x {us / count:9.1f} us  {name[:_NAME]}"
        for us, count, name in sorted(entries, reverse=True)[:most]
    ]


def chain(launches: Iterable[tuple[int, str, int, int]]) -> list[str]:
    """Lines about what each launch of a graph adds to a step: how long it ended after all that began before it.

    launches: (number of the graph's launch, name, begin and end in ns). Launches begin while the ones before run, so
    how long one ran says little; what they add sums up to the step. Medians over all replays of the graph that took
    longest together; no lines where none was replayed.
    """
    replays: dict[int, list[tuple[int, int, str]]] = defaultdict(list)
    for number, name, begin, end in launches:
        replays[number].append((begin, end, name))
    graphs: dict[tuple[str, ...], list[list[tuple[int, int, str]]]] = defaultdict(list)
    for events in replays.values():
        if len(events) > 1:
            graphs[tuple(sorted(name for _, _, name in events))].append(sorted(events))
    if not graphs:
        return []
    names, steps = max(graphs.items(), key=lambda item: sum(events[-1][1] - events[0][0] for events in item[1]))
    # The order of two streams varies, so identify a launch by its name and count.
    begun, added = defaultdict(list), defaultdict(list)
    for events in steps:
        first = until = events[0][0]
        count: Counter[str] = Counter()
        for begin, end, name in events:
            which = name, count[name]
            count[name] += 1
            begun[which].append(begin - first)
            added[which].append(max(0, end - until) * 1e-3)
            until = max(until, end)
    medians = {which: statistics.median(us) for which, us in added.items()}
    total = sum(medians.values())
    lines = [f"a step of {len(names)} launches, replayed {len(steps)} times: {total:.1f} us; what each adds:"]
    order = sorted(medians, key=lambda which: statistics.median(begun[which]))
    return lines + [f"  {medians[which]:9.2f} us  {which[0][:_NAME]}" for which in order[:_CHAIN]]


def _launched(found: Any) -> list[tuple[int, str, int, int]]:
    """Kernels of graphs: those that share the number of the call that launched them."""
    events = found.profiler.kineto_results.events()
    kernels = [event for event in events if event.device_type() == DeviceType.CUDA and event.duration_ns()]
    return [(e.correlation_id(), e.name(), e.start_ns(), e.start_ns() + e.duration_ns()) for e in kernels]
