"""A run as a picture: how latencies are distributed, and how much came when. The one file that needs matplotlib."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from moeyard.clients.bench.server.figures import per_second


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Write a PNG of three: shares of requests by TTFT and by TPOT in ms, and output tokens of each second."""
    figure = Figure(figsize=(12, 3.6), dpi=120, layout="constrained")
    axes = figure.subplots(1, 3)
    for axis, name in zip(axes, ("ttft", "tpot"), strict=False):
        values = sorted(row[name] * 1e3 for row in result["requests"] if row["error"] is None and row[name] is not None)
        shares = [(i + 1) / len(values) * 100 for i in range(len(values))]
        axis.step(values, shares, where="post")
        limit = result["figures"].get("goodput", {}).get("slo_s", {}).get(name)
        if limit is not None:
            axis.axvline(limit * 1e3, linestyle="--", color="tab:red", label=f"objective {limit * 1e3:g} ms")
            axis.legend(loc="lower right")
        axis.set(xlabel=f"{name.upper()} in ms", ylabel="% of requests", ylim=(0, 102))
    rates = per_second(result["requests"])
    axes[2].step([*range(len(rates) + 1)], [*rates, rates[-1]] if rates else [0.0], where="post")
    axes[2].set(xlabel="s", ylabel="output tokens/s", ylim=(0, None))
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.suptitle(f"{result['facts']['model']}: {result['facts']['load']}, {result['facts']['lengths']}")
    figure.savefig(path, format="png")
