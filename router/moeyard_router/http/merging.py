"""What several routers on a port each say of themselves, as one: sums of what they count, the latest of what ended.

A router's figures are plain values, as JSON gives them: `inflight`, `router_inflight` (of each rank, in rank order),
`counters` (a number, or numbers by label), `histograms` (`sum`, `count`, cumulative `buckets` [bound, count]) and
`requests` with their time of `ended`. Ranks themselves say the same to all routers.
"""

from collections.abc import Iterable, Mapping
from typing import Any

Figures = Mapping[str, Any]


def merged(own: Figures, others: Iterable[Figures], *, num_requests: int) -> dict[str, Any]:
    """One router's figures for all; of requests the last `num_requests` to end, latest first."""
    every = (own, *others)
    return {
        "inflight": sum(each["inflight"] for each in every),
        "router_inflight": [sum(counts) for counts in zip(*(each["router_inflight"] for each in every), strict=False)],
        "counters": _counters(each["counters"] for each in every),
        "histograms": _histograms(each["histograms"] for each in every),
        "requests": sorted(
            (request for each in every for request in each["requests"]), key=lambda r: r["ended"], reverse=True
        )[:num_requests],
    }


def _counters(every: Iterable[Figures]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for counters in every:
        for name, value in counters.items():
            if not isinstance(value, Mapping):
                found[name] = found.get(name, 0.0) + value
                continue
            labels = found.setdefault(name, {})
            for label, count in value.items():
                labels[label] = labels.get(label, 0.0) + count
    return found


def _histograms(every: Iterable[Figures]) -> dict[str, Any]:
    """All routers run one program, so their bounds are the same."""
    found: dict[str, Any] = {}
    for histograms in every:
        for name, histogram in histograms.items():
            known = found.setdefault(name, {"buckets": [[bound, 0.0] for bound, _ in histogram["buckets"]]})
            for bucket, (_, count) in zip(known["buckets"], histogram["buckets"], strict=True):
                bucket[1] += count
            for part in ("sum", "count"):
                known[part] = known.get(part, 0.0) + histogram[part]
    return found
