"""Prometheus' configuration and rules and the Grafana dashboards: valid, complete and consistent, without a fleet."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.language import rules_broken, sentences

ROOT = Path(__file__).resolve().parents[2]
PROMETHEUS = ROOT / "deploy" / "prometheus"
NAMES = ("exchange", "experts", "latency", "operations", "overview")


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
    assert jobs["gpu"]["dns_sd_configs"][0]["names"] == ["dcgm-exporter"], "no target where the name does not exist"


def test_rules_use_known_metrics(
    recording_rules: dict[str, str], series_names: frozenset[str], metrics_of: Callable[[str], set[str]]
) -> None:
    groups = yaml.safe_load((PROMETHEUS / "rules.yml").read_text())["groups"]
    used = set().union(*(metrics_of(rule["expr"]) for group in groups for rule in group["rules"]))
    assert used - series_names - set(recording_rules) == set()
    assert [name for name in recording_rules if not re.fullmatch(r"moeyard:[a-z0-9_]+:[a-z0-9_]+", name)] == []


def test_dashboards_match_their_table(tmp_path: Path) -> None:
    run(sys.executable, ROOT / "deploy/grafana/make_dashboards.py", "--out", tmp_path)
    committed = {file.name: file.read_text() for file in (ROOT / "deploy/grafana/dashboards").iterdir()}
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == committed
    assert set(committed) == {f"{name}.json" for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_dashboard_is_well_formed(dashboards: dict[str, dict[str, Any]], name: str) -> None:
    panels = dashboards[name]["panels"]
    assert dashboards[name]["uid"] == f"moeyard-{name}"
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
        assert all(target["expr"] for target in panel["targets"]), panel["title"]
        # Grafana makes a stat without thresholds red from 80 on.
        assert panel["type"] != "stat" or panel["fieldConfig"]["defaults"]["thresholds"]["steps"], panel["title"]
    # Grafana shows 23 grid units on a screen of 1080 lines.
    assert name != "overview" or max(y for _, y in cells) < 23


def test_a_restarted_rank_keeps_its_line(
    dashboards: dict[str, dict[str, Any]], metrics_of: Callable[[str], set[str]]
) -> None:
    """A worker's series has its instance, too, which changes at a restart. The router's series of ranks have not."""
    targets = [t for board in dashboards.values() for panel in board["panels"] for t in panel.get("targets", [])]
    by_rank = [target["expr"] for target in targets if "{{rank}}" in target["legendFormat"]]
    assert len(by_rank) > 20
    series = {expr: metrics_of(expr) for expr in by_rank if " by (rank) " not in expr}
    assert [expr for expr, names in series.items() if not all(n.startswith("moeyard_fleet_") for n in names)] == []


def test_the_documentation_shows_every_dashboard() -> None:
    shown = re.findall(r"!\[[^\]]+\]\(images/grafana-(\w+)\.png\)", (ROOT / "docs/metrics.md").read_text())
    assert sorted(shown) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_panels_say_what_they_show_and_what_to_do(dashboards: dict[str, dict[str, Any]], name: str) -> None:
    panels = [panel for panel in dashboards[name]["panels"] if panel["type"] != "row"]
    assert len({panel["title"] for panel in panels}) == len(panels)
    for panel in panels:
        text, _, action = panel["description"].partition("\n\n**Do:** ")
        assert text, panel["title"]
        assert action, panel["title"]
        found = [(s, rules) for part in (text, action) for s in sentences(part) if (rules := rules_broken(s))]
        assert found == [], panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]


def test_dashboards_link_to_each_other_with_their_variables(dashboards: dict[str, dict[str, Any]]) -> None:
    for name, dashboard in dashboards.items():
        [link] = dashboard["links"]
        assert (link["type"], link["includeVars"], link["keepTime"]) == ("dashboards", True, True), name
        assert all(set(link["tags"]) <= set(other["tags"]) for other in dashboards.values())
        details = [link["url"] for panel in dashboard["panels"] for link in panel.get("links", [])]
        targets = {
            re.fullmatch(r"/d/moeyard-(\w+)\?\$\{__url_time_range\}&\$\{__all_variables\}", url)[1] for url in details
        }  # type: ignore[index]
        assert targets <= set(NAMES) - {name}, name
    overview = [panel for panel in dashboards["overview"]["panels"] if not panel["links"]]
    assert overview == [], "each panel of the overview leads to details"


def test_queries_of_dashboards_and_annotations_parse(
    annotation_queries: dict[str, str],
    dashboard_queries: dict[str, str],
    program: Callable[[str], str],
    tmp_path: Path,
) -> None:
    assert len(annotation_queries) == 4
    queries = [*dashboard_queries.values(), *annotation_queries.values()]
    rules = [{"record": f"query_{i}", "expr": query} for i, query in enumerate(queries)]
    path = tmp_path / "queries.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    run(program("promtool"), "check", "rules", path)


def test_dashboards_show_every_metric_and_no_unknown_one(
    dashboard_queries: dict[str, str],
    recording_rules: dict[str, str],
    series_names: frozenset[str],
    histograms: tuple[str, ...],
    metrics_of: Callable[[str], set[str]],
) -> None:
    used = set().union(*map(metrics_of, dashboard_queries.values()))
    assert used - series_names - set(recording_rules) == set()
    parts = {f"{name}_{part}" for name in histograms for part in ("bucket", "sum", "count")}
    assert (series_names - parts) - used == set()
    assert {name for name in histograms if f"{name}_bucket" not in used} == set()
    # A rate needs an interval that follows the scrape interval, and a quantile needs the rate of a histogram.
    for title, query in dashboard_queries.items():
        assert "histogram_quantile" not in query or "_bucket" in query, title


def test_metrics_have_a_line_in_the_documentation(series_names: frozenset[str], histograms: tuple[str, ...]) -> None:
    """Every known name is on docs/metrics.md, and every name there is known."""
    parts = {f"{name}_{part}" for name in histograms for part in ("bucket", "sum", "count")}
    known = series_names - parts | set(histograms)
    tables = "".join(line for line in (ROOT / "docs/metrics.md").read_text().splitlines(True) if line[0] == "|")
    written = set(re.findall(r"`(moeyard_\w+)`", tables))
    assert known - written == set()
    assert {name for name in written - known if not name.endswith("_")} == set()


def test_rules_and_panels_keep_fleets_apart(dashboards: dict[str, dict[str, Any]]) -> None:
    """Every aggregate of the rules is by job and model, and every panel shows only the selected ones."""
    groups = yaml.safe_load((PROMETHEUS / "rules.yml").read_text())["groups"]
    rules = [rule["expr"] for group in groups for rule in group["rules"]]
    aggregates = [match for rule in rules for match in re.findall(r"\b(?:sum|max)\b[^(]*\([^)]*\)", rule)]
    assert len(aggregates) > 20
    assert [each for each in aggregates if not re.match(r"(sum|max) by \(job, model_name(, \w+)?\)", each)] == []
    for dashboard in dashboards.values():
        queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
        queries += [each["expr"] for each in dashboard["annotations"]["list"]]
        series = [match for query in queries for match in re.findall(r"moeyard[_:][\w:]+(?:{[^}]*})?", query)]
        assert len(series) > 10
        assert [each for each in series if 'job=~"$job", model_name="$model_name"' not in each] == []
        variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
        assert variables["model_name"]["multi"] is False, "two models must be distinguishable"
        assert {"job", "rank", "percentile"} <= variables.keys()


def test_grafana_finds_data_source_and_dashboards() -> None:
    provisioning = ROOT / "deploy/grafana/provisioning"
    [source] = yaml.safe_load((provisioning / "datasources/prometheus.yml").read_text())["datasources"]
    assert (source["type"], source["url"], source["isDefault"]) == ("prometheus", "http://prometheus:9090", True)
    [provider] = yaml.safe_load((provisioning / "dashboards/moeyard.yml").read_text())["providers"]
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    mounts = dict(volume.split(":")[:2] for volume in compose["grafana"]["volumes"])
    folder = mounts["./deploy/grafana/dashboards"]
    assert folder == provider["options"]["path"]
    home = compose["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{folder}/overview.json"
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
