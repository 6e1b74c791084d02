"""Reports of a benchmark: text, comparisons, tables and plots."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moeyard.clients.bench.figures import per_second
from moeyard.entry import load

BUSY_CLIENT = 0.7
STATISTICS = (("mean", "mean"), ("p50", "median"), ("p90", "p90"), ("p95", "p95"), ("p99", "p99"))
# Figures of a comparison: key, title, and whether more is better (None: neither).
COMPARED = (
    ("completed", "completed", None),
    ("failed", "failed", False),
    ("requests_per_s", "requests/s", True),
    ("output_tokens_per_s", "output tokens/s", True),
    ("total_tokens_per_s", "total tokens/s", True),
    *(
        (f"{name}_ms.{stat}", f"{name.upper()} {title} ms", False)
        for name in ("ttft", "tpot", "itl", "e2e")
        for stat, title in STATISTICS
    ),
    ("goodput.requests_per_s", "goodput requests/s", True),
    ("client_us_per_token", "client us/token", None),
)


def describe(result: Mapping[str, Any]) -> str:
    """Return the table of one run."""
    facts, found = result["facts"], result["figures"]
    count = found["completed"] + found["failed"]
    lines = [f"{facts['url']} {facts['model']}: {facts['load']}, {facts['lengths']}"]
    lines.append(f"requests    {found['completed']} of {count} whole, in {found['duration_s']:.1f} s{_why(facts)}")
    lines.append(
        f"throughput  {found['requests_per_s']:.2f} requests/s, {found['output_tokens_per_s']:,.1f} output tokens/s, "
        f"{found['total_tokens_per_s']:,.1f} tokens/s with prompts"
    )
    if found["completed"]:
        mean_prompt, mean_output = (found[f"{name}_tokens"] / found["completed"] for name in ("prompt", "output"))
        cached = 100 * found["cached_tokens"] / max(1, found["prompt_tokens"])
        per_event = found["tokens_per_event"]
        together = f", {per_event:.2f} per event" if per_event and per_event > 1.05 else ""
        lines.append(
            f"tokens      {mean_prompt:.1f} per prompt ({cached:.0f} % from the cache), {mean_output:.1f} per answer"
            + together
        )
    if "goodput" in found:
        good = found["goodput"]
        slo = ", ".join(f"{name} {limit * 1e3:g} ms" for name, limit in good["slo_s"].items())
        lines.append(f"goodput     {good['requests_per_s']:.2f} requests/s, {100 * good['share']:.1f} % within {slo}")
    lines.append(_client(found))
    rows = [{"name": name.upper(), **found[f"{name}_ms"]} for name in ("ttft", "tpot", "itl", "e2e")]
    lines += (
        ["", table([row for row in rows if "mean" in row], (("name", "ms"), *STATISTICS))] if found["completed"] else []
    )
    for error in result["errors"]:
        status = f"HTTP {error['status']}" if error["status"] else "no answer"
        lines.append(f"failed      {error['count']} x {status}: {error['message']}")
    return "\n".join(lines)


def _why(facts: Mapping[str, Any]) -> str:
    return ", broken off" if facts["interrupted"] else ""


def _client(found: Mapping[str, Any]) -> str:
    """Describe the client's CPU use. The figures of a busy client measure the client."""
    per_token = found["client_us_per_token"]
    each = "" if per_token is None else f", {per_token:.0f} us per token"
    late = f", requests sent {found['late_ms']['p99']:.1f} ms late (p99)" if found["late_ms"] else ""
    busy = "; TOO BUSY: it measures itself" if found["client_cpu_share"] > BUSY_CLIENT else ""
    return f"client      {100 * found['client_cpu_share']:.0f} % of one core{each}{late}{busy}"


def compare(one: Mapping[str, Any], two: Mapping[str, Any], names: tuple[str, str]) -> str:
    """Compare two results by the ratio of the second to the first. Mark changes of 5 % or more."""
    rows = []
    for key, title, more_is_better in COMPARED:
        first, second = _at(one["figures"], key), _at(two["figures"], key)
        if first is None or second is None:
            continue
        ratio = second / first if first else None
        rows.append(
            {"name": title, "a": first, "b": second, "ratio": ratio, "verdict": _verdict(ratio, more_is_better)}
        )
    columns = (("name", ""), ("a", "A"), ("b", "B"), ("ratio", "B/A"), ("verdict", " "))
    facts = ((letter, name, r["facts"]) for letter, name, r in zip("AB", names, (one, two), strict=True))
    heads = [f"{letter}: {name}: {f['model']}, {f['load']}, {f['lengths']}" for letter, name, f in facts]
    return "\n".join([*heads, "", table(rows, columns)])


def _verdict(ratio: float | None, more_is_better: bool | None) -> str | None:
    if ratio is None or more_is_better is None or 1 / 1.05 < ratio < 1.05:
        return None
    return "better" if (ratio > 1) == more_is_better else "worse"


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Write a PNG of three: shares of requests by TTFT and by TPOT in ms, and output tokens of each second."""
    figure = load("matplotlib.figure").Figure(figsize=(12, 3.6), dpi=120, layout="constrained")
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


def latency_columns(name: str, head: str, *shares: str) -> tuple[tuple[str, str], ...]:
    """Columns of percentiles: the first has the head before its own."""
    return tuple((f"{name}_ms.{share}", share if i else f"{head} {share}") for i, share in enumerate(shares))


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[tuple[str, str]]) -> str:
    """Rows as aligned text under the heads of `columns` (key of a row, head); a key may lead into a dict: "itl_ms.p99".

    A column that no row has is left out, a row that lacks one leaves it empty.
    """
    cells = [[_cell(_at(row, key)) for row in rows] for key, _ in columns]
    kept = [(head, column) for (_, head), column in zip(columns, cells, strict=True) if any(column)]
    widths = [max(len(text) for text in (head, *column)) for head, column in kept]
    lines = [[head for head, _ in kept], *([column[i] for _, column in kept] for i in range(len(rows)))]
    return "\n".join("  ".join(f"{text:>{w}}" for text, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def _at(row: Mapping[str, Any], key: str) -> Any:
    value: Any = row
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" if value < 1 else f"{value:.2f}"
    return str(value)
