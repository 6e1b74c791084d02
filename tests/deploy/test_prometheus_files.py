"""Prometheus' configuration and rules and the Grafana dashboard: valid, complete and consistent, without a fleet."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
PROMETHEUS = ROOT / "deploy" / "prometheus"


def run(*command: str | Path) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_configuration_is_valid(program: Callable[[str], str]) -> None:
    run(program("promtool"), "check", "config", "--lint-fatal", PROMETHEUS / "prometheus.yml")


def test_rules_are_valid_and_behave(program: Callable[[str], str]) -> None:
    run(program("promtool"), "check", "rules", "--lint-fatal", PROMETHEUS / "rules.yml")
    run(program("promtool"), "test", "rules", Path(__file__).with_name("rules_cases.yml"))


def test_scrapes_the_router_and_the_workers_that_it_lists() -> None:
    jobs = {
        job["job_name"]: job for job in yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["scrape_configs"]
    }
    assert jobs["moeyard-router"]["static_configs"] == [{"targets": ["router:8000"]}]
    assert jobs["moeyard-worker"]["http_sd_configs"][0]["url"] == "http://router:8000/metrics/targets"


def test_rules_use_known_metrics(
    recording_rules: dict[str, str], series_names: frozenset[str], metrics_of: Callable[[str], set[str]]
) -> None:
    groups = yaml.safe_load((PROMETHEUS / "rules.yml").read_text())["groups"]
    used = set().union(*(metrics_of(rule["expr"]) for group in groups for rule in group["rules"]))
    assert used - series_names - set(recording_rules) == set()
    assert [name for name in recording_rules if not re.fullmatch(r"moeyard:[a-z0-9_]+:[a-z0-9_]+", name)] == []


def test_dashboard_matches_its_table(tmp_path: Path) -> None:
    run(sys.executable, ROOT / "deploy/grafana/make_dashboard.py", "--out", tmp_path / "dashboard.json")
    committed = (ROOT / "deploy/grafana/dashboards/moeyard.json").read_text()
    assert (tmp_path / "dashboard.json").read_text() == committed


def test_dashboard_is_well_formed(dashboard: dict[str, Any]) -> None:
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        own = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert max(x for x, _ in own) < 24, panel["title"]
        assert not own & cells, f"{panel['title']} overlaps another panel"
        cells |= own
        if panel["type"] == "row":
            continue
        assert panel["targets"], panel["title"]
        assert panel["description"], panel["title"]
        assert all(target["expr"] for target in panel["targets"]), panel["title"]


def test_dashboard_queries_parse(
    dashboard_queries: list[tuple[str, str]], program: Callable[[str], str], tmp_path: Path
) -> None:
    rules = [{"record": f"query_{i}", "expr": query} for i, (_, query) in enumerate(dashboard_queries)]
    path = tmp_path / "queries.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    run(program("promtool"), "check", "rules", path)


def test_dashboard_shows_every_metric_and_no_unknown_one(
    dashboard_queries: list[tuple[str, str]],
    recording_rules: dict[str, str],
    series_names: frozenset[str],
    histograms: tuple[str, ...],
    metrics_of: Callable[[str], set[str]],
) -> None:
    used = set().union(*(metrics_of(query) for _, query in dashboard_queries))
    assert used - series_names - set(recording_rules) == set()
    parts = {f"{name}_{part}" for name in histograms for part in ("bucket", "sum", "count")}
    assert (series_names - parts) - used == set()
    assert {name for name in histograms if f"{name}_bucket" not in used} == set()
    # A rate needs an interval that follows the scrape interval, and a quantile needs the rate of a histogram.
    for title, query in dashboard_queries:
        assert "histogram_quantile" not in query or "_bucket" in query, title


def test_rules_and_panels_keep_fleets_apart(dashboard: dict[str, Any]) -> None:
    """Every aggregate of the rules is by job and model, and every panel shows only the selected ones."""
    groups = yaml.safe_load((PROMETHEUS / "rules.yml").read_text())["groups"]
    rules = [rule["expr"] for group in groups for rule in group["rules"]]
    aggregates = [match for rule in rules for match in re.findall(r"\b(?:sum|max)\b[^(]*\([^)]*\)", rule)]
    assert len(aggregates) > 20
    assert [each for each in aggregates if not re.match(r"(sum|max) by \(job, model_name(, \w+)?\)", each)] == []
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    series = [match for query in queries for match in re.findall(r"moeyard[_:][\w:]+(?:{[^}]*})?", query)]
    assert len(series) > 100
    assert [each for each in series if 'job=~"$job", model_name="$model_name"' not in each] == []
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert variables["model_name"]["multi"] is False, "two models must be distinguishable"
    assert {"job", "rank"} <= variables.keys()


def test_grafana_finds_data_source_and_dashboards() -> None:
    provisioning = ROOT / "deploy/grafana/provisioning"
    [source] = yaml.safe_load((provisioning / "datasources/prometheus.yml").read_text())["datasources"]
    assert (source["type"], source["url"], source["isDefault"]) == ("prometheus", "http://prometheus:9090", True)
    [provider] = yaml.safe_load((provisioning / "dashboards/moeyard.yml").read_text())["providers"]
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    mounts = dict(volume.split(":")[:2] for volume in compose["grafana"]["volumes"])
    assert mounts["./deploy/grafana/dashboards"] == provider["options"]["path"]
    assert mounts["./deploy/grafana/provisioning"] == "/etc/grafana/provisioning"
    assert "./deploy/prometheus:/etc/prometheus:ro" in compose["prometheus"]["volumes"]


def test_queries_of_the_documentation_parse_and_use_known_metrics(
    program: Callable[[str], str],
    series_names: frozenset[str],
    metrics_of: Callable[[str], set[str]],
    tmp_path: Path,
) -> None:
    """Every query in docs/metrics.md, "Queries", parses and finds a series."""
    section = (ROOT / "docs" / "metrics.md").read_text().partition("## Queries\n")[2].partition("\n## ")[0]
    lines = [line[4:] for line in section.splitlines() if line.startswith("    ")]
    queries = [query.strip() for query in re.split(r"^#.*$", "\n".join(lines), flags=re.M) if query.strip()]
    # The last comment describes two queries.
    queries[-1:] = queries[-1].splitlines()
    assert len(queries) == 6
    assert set().union(*map(metrics_of, queries)) - series_names == set()
    rules = [{"record": f"query_{i}", "expr": query} for i, query in enumerate(queries)]
    path = tmp_path / "queries.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "documentation", "rules": rules}]}))
    run(program("promtool"), "check", "rules", path)
