"""Write dashboards/moeyard.json from panels.yml; a test keeps the two in step.

python deploy/grafana/make_dashboard.py [--out FILE]
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
QUANTILES = (0.5, 0.95, 0.99)
GRID = 24
FLEET = 'job=~"$job", model_name="$model_name"'
SERIES = re.compile(r"\b(moeyard[_:][a-zA-Z0-9_:]+)(\{[^}]*\})?")
# Kind in panels.yml -> Grafana's type, width and height in grid units: four stats or three graphs fill a line.
KINDS = {"stat": ("stat", 6, 4), "graph": ("timeseries", 8, 8), "table": ("table", 24, 6)}


def of_one_fleet(query: str) -> str:
    """Add the chosen model and jobs to the selector of every series of ours in a PromQL expression."""

    def narrowed(series: re.Match[str]) -> str:
        matchers = [FLEET, *filter(None, [(series[2] or "").strip("{} ")])]
        return f"{series[1]}{{{', '.join(matchers)}}}"

    return SERIES.sub(narrowed, query)


def queries(panel: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (legend, PromQL) of each line of a panel."""
    if "queries" in panel:
        return [(legend, of_one_fleet(query)) for legend, query in panel["queries"].items()]
    metric, selector = panel["quantiles"]
    rate = of_one_fleet(f"rate({metric}_bucket{selector}[$__rate_interval])")
    return [(f"p{q * 100:g}", f"histogram_quantile({q}, sum by (le) ({rate}))") for q in QUANTILES]


def panel_json(panel: dict[str, Any], number: int) -> dict[str, Any]:
    """Return Grafana's JSON of one panel, without its position."""
    kind = next(k for k in KINDS if k in panel)
    table = kind == "table"
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
        for i, (legend, query) in enumerate(queries(panel))
    ]
    defaults: dict[str, Any] = {"unit": panel["unit"], "min": 0}
    if "top" in panel:
        defaults["max"] = panel["top"]
    options: dict[str, Any] = {}
    if kind == "graph":
        options = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}
    return {
        "id": number,
        "type": KINDS[kind][0],
        "title": panel[kind],
        "description": panel["help"],
        "datasource": DATASOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": targets,
    }


def layout(sections: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return all panels in rows, with a heading per section."""
    panels: list[dict[str, Any]] = []
    y = 0
    for section in sections:
        place = {"h": 1, "w": GRID, "x": 0, "y": y}
        heading = {"type": "row", "title": section["section"], "collapsed": False, "panels": []}
        panels.append({"id": len(panels) + 1, **heading, "gridPos": place})
        x, y, line = 0, y + 1, 0
        for panel in section["panels"]:
            _, width, height = KINDS[next(k for k in KINDS if k in panel)]
            if x + width > GRID:
                x, y, line = 0, y + line, 0
            place = {"h": height, "w": width, "x": x, "y": y}
            panels.append({**panel_json(panel, len(panels) + 1), "gridPos": place})
            x, line = x + width, max(line, height)
        y += line
    return panels


def variable(name: str, label: str, query: str, *, several: bool) -> dict[str, Any]:
    """Return a variable with a label's values. Default: all if `several`, else the first."""
    choice: dict[str, Any] = {"multi": several, "includeAll": several}
    if several:
        choice["current"] = {"text": "All", "value": "$__all"}
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": f"label_values({query}, {name})", "refId": name},
        "refresh": 2,
        "sort": 3,
        **choice,
    }


def dashboard() -> dict[str, Any]:
    """Return the dashboard. Its variables select one model, the jobs of its fleet, and worker ranks."""
    jobs = '{__name__=~"moeyard_workers|moeyard_engine_steps_total", model_name="$model_name"}'
    variables = [
        variable("model_name", "Model", "moeyard_workers", several=False),
        variable("job", "Jobs", jobs, several=True),
        variable("rank", "Rank", f"moeyard_engine_steps_total{{{FLEET}}}", several=True),
    ]
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
        "templating": {"list": [source, *variables]},
        "panels": layout(yaml.safe_load((HERE / "panels.yml").read_text())),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="write the Grafana dashboard")
    parser.add_argument("--out", type=Path, default=HERE / "dashboards" / "moeyard.json")
    parser.parse_args().out.write_text(json.dumps(dashboard(), indent=2) + "\n")


if __name__ == "__main__":
    main()
