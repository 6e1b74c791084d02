"""Write dashboards/moeyard.json from the table of panels below; a test keeps the two in step.

python deploy/grafana/make_dashboard.py
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OUT = Path(__file__).resolve().parent / "dashboards" / "moeyard.json"
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
RANK = '{rank=~"$rank"}'
QUANTILES = (0.5, 0.95, 0.99)
GRID = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel: what it shows, in Grafana's unit, with (query, legend) pairs. Four stats or three graphs fill a line."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    help: str
    kind: str = "timeseries"
    top: float | None = None

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in grid units."""
        return {"stat": (6, 4), "timeseries": (8, 8), "table": (24, 6)}[self.kind]


def quantiles(metric: str, selector: str = "") -> tuple[tuple[str, str], ...]:
    """p50, p95 and p99 of a histogram over all ranks that `selector` leaves."""
    return tuple(
        (f"histogram_quantile({q}, sum by (le) (rate({metric}_bucket{selector}[$__rate_interval])))", f"p{q * 100:g}")
        for q in QUANTILES
    )


def rate(metric: str, *, by: str = "", selector: str = RANK) -> str:
    """Summed rate per second of a counter."""
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping} (rate({metric}{selector}[$__rate_interval]))"


def mean(metric: str, *, by: str) -> str:
    """Mean of a histogram's observations."""
    return f"{rate(f'{metric}_sum', by=by)} / {rate(f'{metric}_count', by=by)}"


HITS, MISSES = rate("moeyard_expert_cache_hits_total"), rate("moeyard_expert_cache_misses_total")
PREFIX_RATIO = f"{rate('moeyard_prefix_cache_hit_tokens_total')} / {rate('moeyard_prefix_cache_query_tokens_total')}"
EXPERT_RATIO = f"{HITS} / ({HITS} + ({MISSES} or vector(0)))"

SECTIONS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Now",
        (
            Panel(
                title="Ranks",
                unit="none",
                kind="stat",
                queries=(("sum by (state) (moeyard_workers)", "{{state}}"),),
                help="Every step needs all ranks: one failed rank stops the fleet.",
            ),
            Panel(
                title="Requests running, waiting",
                unit="none",
                kind="stat",
                queries=(
                    (f"sum(moeyard_num_requests_running{RANK})", "running"),
                    (f"sum(moeyard_num_requests_waiting{RANK})", "waiting"),
                ),
                help="Sequences that take part in steps, and sequences in the queues.",
            ),
            Panel(
                title="Tokens per second",
                unit="none",
                kind="stat",
                queries=(("moeyard:generation_tokens:rate1m", "output"), ("moeyard:prompt_tokens:rate1m", "prompt")),
                help="Whole fleet, last minute.",
            ),
            Panel(
                title="TTFT p95, TPOT p95, ITL p99",
                unit="s",
                kind="stat",
                queries=(
                    ("moeyard:time_to_first_token_seconds:p95_5m", "TTFT"),
                    ("moeyard:time_per_output_token_seconds:p95_5m", "TPOT"),
                    ("moeyard:inter_token_latency_seconds:p99_5m", "ITL"),
                ),
                help="As clients see them, last five minutes.",
            ),
        ),
    ),
    (
        "Latency",
        (
            Panel(
                title="Time to first token",
                unit="s",
                queries=quantiles("moeyard_time_to_first_token_seconds"),
                help="Arrival at the router to the first token, queue and prefill included.",
            ),
            Panel(
                title="Time per output token",
                unit="s",
                queries=quantiles("moeyard_time_per_output_token_seconds"),
                help="Mean gap between the tokens of one request, one observation per request.",
            ),
            Panel(
                title="Inter-token latency",
                unit="s",
                queries=quantiles("moeyard_inter_token_latency_seconds"),
                help="Every single gap between two tokens; its tail shows stalls that a mean hides.",
            ),
            Panel(
                title="Prefill time",
                unit="s",
                queries=quantiles("moeyard_prefill_seconds", RANK),
                help="First scheduled to first token, on the worker.",
            ),
            Panel(
                title="Queue time",
                unit="s",
                queries=quantiles("moeyard_queue_seconds", RANK),
                help="Arrival at the worker to first scheduled.",
            ),
            Panel(
                title="Whole request",
                unit="s",
                queries=quantiles("moeyard_e2e_request_latency_seconds"),
                help="Arrival at the router to the last token.",
            ),
        ),
    ),
    (
        "Traffic",
        (
            Panel(
                title="Tokens per second by rank",
                unit="none",
                queries=(
                    (rate("moeyard_generation_tokens_total", by="rank"), "output, rank {{rank}}"),
                    (rate("moeyard_prefill_tokens_total", by="rank"), "prompt, rank {{rank}}"),
                ),
                help="Tokens sampled and prompt positions computed (prefix hits are not computed).",
            ),
            Panel(
                title="Running and waiting by rank",
                unit="none",
                queries=(
                    (f"moeyard_num_requests_running{RANK}", "running, rank {{rank}}"),
                    (f"moeyard_num_requests_waiting{RANK}", "waiting, rank {{rank}}"),
                    ("moeyard_num_requests_inflight", "in the router"),
                ),
                help="The router counts a request until its last byte is written.",
            ),
            Panel(
                title="Requests per second",
                unit="reqps",
                queries=(
                    (rate("moeyard_request_success_total", by="finished_reason", selector=""), "{{finished_reason}}"),
                    (rate("moeyard_rejections_total", by="reason", selector=""), "rejected: {{reason}}"),
                ),
                help="Ended requests by reason, and requests that were never run.",
            ),
            Panel(
                title="HTTP responses",
                unit="reqps",
                queries=((rate("moeyard_http_requests_total", by="path, status", selector=""), "{{status}} {{path}}"),),
                help="By path and status.",
            ),
            Panel(
                title="Prompt tokens received",
                unit="none",
                queries=((rate("moeyard_prompt_tokens_total", selector=""), "tokens per second"),),
                help="As counted by the router, prefix hits included.",
            ),
            Panel(
                title="Steps per second and rows per step",
                unit="none",
                queries=(
                    (rate("moeyard_engine_steps_total", by="rank"), "steps/s, rank {{rank}}"),
                    (mean("moeyard_step_tokens", by="rank"), "rows per step, rank {{rank}}"),
                ),
                help="A rank without requests takes part in every step with zero rows.",
            ),
        ),
    ),
    (
        "KV and prefix cache",
        (
            Panel(
                title="KV pages in use",
                unit="percentunit",
                top=1.0,
                queries=((f"moeyard_kv_cache_usage_ratio{RANK}", "rank {{rank}}"),),
                help="Share of the pages that live sequences hold.",
            ),
            Panel(
                title="Prefix-cache hit ratio",
                unit="percentunit",
                top=1.0,
                queries=((PREFIX_RATIO, "hit ratio"),),
                help="Prompt tokens found in the prefix index over prompt tokens looked up.",
            ),
            Panel(
                title="Preemptions",
                unit="none",
                queries=((rate("moeyard_preemptions_total", by="rank"), "rank {{rank}}"),),
                help="Sequences per second that lost their pages and will be computed again.",
            ),
        ),
    ),
    (
        "Experts",
        (
            Panel(
                title="Expert-cache hit ratio",
                unit="percentunit",
                top=1.0,
                queries=(
                    (EXPERT_RATIO, "all"),
                    (
                        f"{rate('moeyard_expert_cache_hits_total', by='phase')} / "
                        f"({rate('moeyard_expert_cache_hits_total', by='phase')} + "
                        f"{rate('moeyard_expert_cache_misses_total', by='phase')})",
                        "{{phase}}",
                    ),
                ),
                help="Needed experts found in a slot over needed experts. A phase without misses yet has no line.",
            ),
            Panel(
                title="Hits by segment",
                unit="none",
                queries=((rate("moeyard_expert_cache_hits_total", by="segment, phase"), "{{segment}}, {{phase}}"),),
                help="Probation holds what was needed once, protected what was needed again.",
            ),
            Panel(
                title="Misses and evictions",
                unit="none",
                queries=(
                    (rate("moeyard_expert_cache_misses_total", by="phase"), "misses, {{phase}}"),
                    (
                        rate("moeyard_expert_cache_evictions_total", by="segment, phase"),
                        "evictions, {{segment}}, {{phase}}",
                    ),
                ),
                help="Experts per second copied into a slot, and pushed out of one.",
            ),
            Panel(
                title="Expert weights moved",
                unit="Bps",
                queries=((rate("moeyard_expert_cache_bytes_total", by="direction"), "{{direction}}"),),
                help="Bytes per second between the expert store and the slots.",
            ),
            Panel(
                title="Expert stall",
                unit="s",
                queries=quantiles("moeyard_expert_stall_seconds", RANK),
                help="Wait for expert weights in one layer of a step.",
            ),
            Panel(
                title="Load imbalance and slots",
                unit="none",
                queries=(
                    (f"moeyard_expert_load_imbalance{RANK}", "max over mean, rank {{rank}}"),
                    (f"moeyard_expert_cache_slots{RANK}", "slots, rank {{rank}}"),
                ),
                help="Rows of the busiest local expert over the mean; 1 is even.",
            ),
        ),
    ),
    (
        "Exchange and steps",
        (
            Panel(
                title="Dispatch",
                unit="s",
                queries=quantiles("moeyard_exchange_seconds", '{phase="dispatch", rank=~"$rank"}'),
                help="One dispatch of one layer, waiting for peers included.",
            ),
            Panel(
                title="Combine",
                unit="s",
                queries=quantiles("moeyard_exchange_seconds", '{phase="combine", rank=~"$rank"}'),
                help="One combine of one layer, waiting for peers included.",
            ),
            Panel(
                title="Exchanged activations",
                unit="Bps",
                queries=((rate("moeyard_exchange_bytes_total", by="direction"), "{{direction}}"),),
                help="Bytes per second to and from peers, all ranks.",
            ),
            Panel(
                title="Lockstep wait",
                unit="s",
                queries=quantiles("moeyard_lockstep_wait_seconds", RANK),
                help="Wait for the peers' plans at the start of a step.",
            ),
            Panel(
                title="Step time",
                unit="s",
                queries=quantiles("moeyard_step_seconds", RANK),
                help="One step of one rank.",
            ),
            Panel(
                title="Rows of a step",
                unit="none",
                queries=quantiles("moeyard_step_tokens", RANK),
                help="Prompt rows and decode rows together.",
            ),
        ),
    ),
    (
        "Build",
        (
            Panel(
                title="Versions",
                unit="none",
                kind="table",
                queries=((f"moeyard_build_info{RANK}", ""),),
                help="What each rank runs.",
            ),
        ),
    ),
)


def panel_json(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    """Grafana's form of one panel."""
    width, height = panel.size
    table = panel.kind == "table"
    targets = [
        {
            "refId": chr(ord("A") + i),
            "datasource": DATASOURCE,
            "expr": query,
            "legendFormat": legend,
            "range": not table,
            "instant": table,
            **({"format": "table"} if table else {}),
        }
        for i, (query, legend) in enumerate(panel.queries)
    ]
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.top is not None:
        defaults["max"] = panel.top
    options: dict[str, Any] = {}
    if panel.kind == "timeseries":
        options = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.help,
        "datasource": DATASOURCE,
        "gridPos": {"h": height, "w": width, "x": x, "y": y},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": targets,
    }


def dashboard() -> dict[str, Any]:
    """The whole dashboard, panels laid out in lines under a heading per section."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, section in SECTIONS:
        grid = {"h": 1, "w": GRID, "x": 0, "y": y}
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "collapsed": False, "gridPos": grid})
        x, y, line = 0, y + 1, 0
        for panel in section:
            width, height = panel.size
            if x + width > GRID:
                x, y, line = 0, y + line, 0
            panels.append(panel_json(panel, len(panels) + 1, x, y))
            x, line = x + width, max(line, height)
        y += line
    rank = {
        "name": "rank",
        "label": "Rank",
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": "label_values(moeyard_engine_steps_total, rank)", "refId": "rank"},
        "refresh": 2,
        "sort": 3,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    return {
        "uid": "moeyard",
        "title": "moeyard",
        "tags": ["moeyard"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [source, rank]},
        "panels": panels,
    }


def render() -> str:
    """The file's text."""
    return json.dumps(dashboard(), indent=2) + "\n"


if __name__ == "__main__":
    OUT.write_text(render())
