"""A run's figures in words, and two runs side by side."""

from collections.abc import Mapping
from typing import Any

from moeyard.clients.bench.figures import table

BUSY_CLIENT = 0.7
COLUMNS = (
    ("name", "ms"), ("mean", "mean"), ("p50", "median"), ("p90", "p90"), ("p95", "p95"), ("p99", "p99"),
)  # fmt: skip
# Figures that two runs are compared by: key, title, and whether more is better (None: neither).
COMPARED = (
    ("completed", "completed", None),
    ("failed", "failed", False),
    ("requests_per_s", "requests/s", True),
    ("output_tokens_per_s", "output tokens/s", True),
    ("total_tokens_per_s", "total tokens/s", True),
    *(
        (f"{name}_ms.{stat}", f"{name.upper()} {title} ms", False)
        for name in ("ttft", "tpot", "itl", "e2e")
        for stat, title in (("mean", "mean"), ("p50", "median"), ("p90", "p90"), ("p95", "p95"), ("p99", "p99"))
    ),
    ("goodput.requests_per_s", "goodput requests/s", True),
    ("client_us_per_token", "client us/token", None),
)


def describe(result: Mapping[str, Any]) -> str:
    """The table of one run."""
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
    lines += ["", table([row for row in rows if "mean" in row], COLUMNS)] if found["completed"] else []
    for error in result["errors"]:
        status = f"HTTP {error['status']}" if error["status"] else "no answer"
        lines.append(f"failed      {error['count']} x {status}: {error['message']}")
    return "\n".join(lines)


def _why(facts: Mapping[str, Any]) -> str:
    return ", broken off" if facts["interrupted"] else ""


def _client(found: Mapping[str, Any]) -> str:
    """What measuring cost, because a busy client measures itself."""
    per_token = found["client_us_per_token"]
    each = "" if per_token is None else f", {per_token:.0f} us per token"
    late = f", requests sent {found['late_ms']['p99']:.1f} ms late (p99)" if found["late_ms"] else ""
    busy = "; TOO BUSY: it measures itself" if found["client_cpu_share"] > BUSY_CLIENT else ""
    return f"client      {100 * found['client_cpu_share']:.0f} % of one core{each}{late}{busy}"


def compare(one: Mapping[str, Any], two: Mapping[str, Any], names: tuple[str, str]) -> str:
    """Two results side by side with the second over the first; what got worse or better by a twentieth says so."""
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
    heads = [f"{letter}: {name}: {r['facts']['model']}, {r['facts']['load']}, {r['facts']['lengths']}"
             for letter, name, r in zip("AB", names, (one, two), strict=True)]  # fmt: skip
    return "\n".join([*heads, "", table(rows, columns)])


def _verdict(ratio: float | None, more_is_better: bool | None) -> str | None:
    if ratio is None or more_is_better is None or 1 / 1.05 < ratio < 1.05:
        return None
    return "better" if (ratio > 1) == more_is_better else "worse"


def _at(figures: Mapping[str, Any], key: str) -> float | None:
    value: Any = figures
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
