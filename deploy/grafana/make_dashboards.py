"""Write the dashboards of dashboards/ from panels.yml; a test keeps the two in step.

python deploy/grafana/make_dashboards.py [--out FOLDER]
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
PERCENTILES = {"p50": 0.5, "p75": 0.75, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p99.9": 0.999}
DEFAULT_PERCENTILE = "p95"
GRID = 24
FLEET = 'job=~"$job", model_name="$model_name"'
SERIES = re.compile(r"\b(moeyard[_:][a-zA-Z0-9_:]+)(\{[^}]*\})?")
# End of a legend whose line has its axis on the right.
RIGHT = "(right)"
# Columns of every table that say nothing.
HIDE_COLUMNS = {"id": "organize", "options": {"excludeByName": {"Time": True, "__name__": True, "Value": True}}}
# Kind in panels.yml -> Grafana's type, width and height in grid units: six stats or three graphs fill a line.
KINDS = {"stat": ("stat", 4, 4), "graph": ("timeseries", 8, 7), "table": ("table", 24, 6)}


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
    bucket, total, count = (
        of_one_fleet(f"rate({metric}_{part}{selector}[$__rate_interval])") for part in ("bucket", "sum", "count")
    )
    return [
        ("median", f"histogram_quantile(0.5, sum by (le) ({bucket}))"),
        ("${percentile:text}", f"histogram_quantile($percentile, sum by (le) ({bucket}))"),
        ("mean", f"sum({total}) / sum({count})"),
    ]


def link(title: str, name: str) -> dict[str, Any]:
    """Return a panel's link to another dashboard with the same time range and variables."""
    return {"title": title, "url": f"/d/moeyard-{name}?${{__url_time_range}}&${{__all_variables}}"}


def thresholds(red: float | None) -> dict[str, Any]:
    """Return thresholds that are green, and red from `red` on. Without any, Grafana makes a stat red from 80 on."""
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if red is not None:
        steps.append({"color": "red", "value": red})
    return {"mode": "absolute", "steps": steps}


def overrides(panel: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the settings of single lines of a panel."""
    red, colors = panel.get("red"), panel.get("colors", {})
    found: list[tuple[str, str, str, Any]] = []
    for name, color in colors.items():
        found.append(("byName", name, "color", {"mode": "fixed", "fixedColor": color}))
    if isinstance(red, dict):
        found += [("byName", name, "thresholds", thresholds(value)) for name, value in red.items()]
    if any(legend.endswith(RIGHT) for legend, _ in queries(panel)):
        found.append(("byRegexp", f"/{re.escape(RIGHT)}$/", "custom.axisPlacement", "right"))
    return [
        {"matcher": {"id": matcher, "options": name}, "properties": [{"id": setting, "value": value}]}
        for matcher, name, setting, value in found
    ]


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
    red = panel.get("red")
    if kind == "stat" or red is not None:
        defaults["thresholds"] = thresholds(None if isinstance(red, dict) else red)
    if "needs" in panel:
        defaults["noValue"] = f"No data without {panel['needs']}"
    custom: dict[str, Any] = {}
    if red is not None and kind == "graph":
        custom["thresholdsStyle"] = {"mode": "dashed"}
    if panel.get("stack"):
        custom |= {"stacking": {"mode": "normal", "group": "A"}, "fillOpacity": 25}
    if custom:
        defaults["custom"] = custom
    options: dict[str, Any] = {}
    if kind == "graph":
        options = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}
    description = f"{panel['help']}\n\n**Do:** {panel['do']}"
    if "needs" in panel:
        description += f"\n\nNo data without {panel['needs']}."
    return {
        "id": number,
        "type": KINDS[kind][0],
        "title": panel[kind],
        "description": description,
        "datasource": DATASOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": overrides(panel)},
        "options": options,
        "links": [link("Details", panel["more"])] if "more" in panel else [],
        "targets": targets,
        **({"transformations": [HIDE_COLUMNS]} if table else {}),
    }


def layout(sections: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return all panels in rows, with a heading for each section that has a name."""
    panels: list[dict[str, Any]] = []
    y = 0
    for section in sections:
        if "section" in section:
            place = {"h": 1, "w": GRID, "x": 0, "y": y}
            heading = {"type": "row", "title": section["section"], "collapsed": False, "panels": []}
            panels.append({"id": len(panels) + 1, **heading, "gridPos": place})
            y += 1
        x, line = 0, 0
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


def variables() -> list[dict[str, Any]]:
    """Return the variables, which select one model, the jobs of its fleet, ranks and a percentile."""
    jobs = '{__name__=~"moeyard_workers|moeyard_engine_steps_total", model_name="$model_name"}'
    options = [
        {"text": text, "value": str(value), "selected": text == DEFAULT_PERCENTILE}
        for text, value in PERCENTILES.items()
    ]
    return [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
        variable("model_name", "Model", "moeyard_workers", several=False),
        variable("job", "Jobs", jobs, several=True),
        variable("rank", "Rank", f"moeyard_fleet_rank_ready{{{FLEET}}}", several=True),
        {
            "name": "percentile",
            "label": "Percentile",
            "type": "custom",
            "query": ", ".join(f"{text} : {value}" for text, value in PERCENTILES.items()),
            "options": options,
            "current": next(option for option in options if option["selected"]),
            "multi": False,
            "includeAll": False,
        },
    ]


def annotation(found: dict[str, Any]) -> dict[str, Any]:
    """Return Grafana's JSON of one annotation, which marks each time when its query has a value."""
    return {
        "name": found["name"],
        "enable": True,
        "iconColor": found["color"],
        "datasource": DATASOURCE,
        "expr": of_one_fleet(found["query"]),
        "titleFormat": found["title"],
        "textFormat": found["text"],
    }


def dashboard(found: dict[str, Any], annotations: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one dashboard. Its links lead to the others and keep the time range and the variables."""
    links = {"type": "dashboards", "tags": ["moeyard"], "title": "moeyard", "includeVars": True, "keepTime": True}
    return {
        "uid": f"moeyard-{found['name']}",
        "title": f"moeyard: {found['title']}",
        "description": found["help"],
        "tags": ["moeyard"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "links": [{**links, "asDropdown": False, "targetBlank": False}],
        "annotations": {"list": annotations},
        "templating": {"list": variables()},
        "panels": layout(found["sections"]),
    }


def text(board: dict[str, Any]) -> str:
    """Return a dashboard's JSON with one line for each panel, so that a change of a panel is a change of one line."""
    panels = ",\n  ".join(json.dumps(panel) for panel in board["panels"])
    rest = json.dumps({**board, "panels": []}, indent=1)
    return rest.replace('"panels": []', f'"panels": [\n  {panels}\n ]') + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="write the Grafana dashboards")
    parser.add_argument("--out", type=Path, default=HERE / "dashboards")
    out = parser.parse_args().out
    source = yaml.safe_load((HERE / "panels.yml").read_text())
    annotations = [annotation(each) for each in source["annotations"]]
    for each in source["dashboards"]:
        (out / f"{each['name']}.json").write_text(text(dashboard(each, annotations)))


if __name__ == "__main__":
    main()
