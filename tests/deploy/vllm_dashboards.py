"""The queries of vLLM's dashboards: vllm_dashboards.yml in PromQL."""

import re
from pathlib import Path

import yaml

_CALL = re.compile(r"(rate|ratio|mean|within|sum|max|min|avg|count|q\d\d) (\S+)(?: ([^\s()]+))??(?: by ([^()]+))?")
_SERIES = re.compile(r"\b(vllm:\w+|http_requests_total|http_request_duration_\w+|process_\w+)(?:\{([^}]*)\})?")
# The selectors of these dashboards, with all values chosen. They demand that the labels are there.
_TARGET = 'job=~".+", instance=~".+"'
_ENGINE = 'model_name=~".+", engine=~".+"'


def read_queries() -> tuple[dict[str, str], dict[str, str]]:
    """Return PromQL by dashboard, panel and text, and the reasons why series are absent by the beginning of a name."""
    source = yaml.safe_load(Path(__file__).with_name("vllm_dashboards.yml").read_text())
    queries = {
        f"{board} / {title} / {text}": _promql(text)
        for board, panels in source["dashboards"].items()
        for title, texts in panels.items()
        for text in texts.split("; ")
    }
    return queries, source["no_data"]


def _promql(text: str) -> str:
    call = _CALL.fullmatch(text)
    expanded = text if call is None else _expand(call[1], call[2], call[3] or "", call[4] or "")
    selected = _SERIES.sub(_select, expanded)
    return re.sub(r"\bW\b", "1m", selected).replace("RANGE", "5m")


def _expand(name: str, first: str, second: str, labels: str) -> str:
    def total(metric: str, *more: str) -> str:
        return f"sum by ({', '.join(filter(None, (*more, labels)))}) (rate({metric}[W]))"

    if name == "rate":
        return total(first)
    if name == "ratio":
        return f"{total(first)} / ({total(second)} > 0)"
    if name == "mean":
        return f"{total(first + '_sum')} / ({total(first + '_count')} > 0)"
    if name == "within":
        bucket = f'{second}_bucket{{le="{first}"}}'
        return f"{total(bucket)} / ({total(second + '_count')} > 0)"
    if name.startswith("q"):
        return f"histogram_quantile(0.{name[1:]}, {total(first + '_bucket', 'le')})"
    return f"{name} by ({labels}) ({first})"


def _select(series: re.Match[str]) -> str:
    name, own = series.groups()
    # vLLM gives the configuration of the cache no model's name.
    engine = 'engine=~".+"' if name == "vllm:cache_config_info" else _ENGINE if name.startswith("vllm:") else ""
    engine = "" if name == "vllm:lora_requests_info" else engine
    return f"{name}{{{', '.join(filter(None, (_TARGET, engine, own)))}}}"
