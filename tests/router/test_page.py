"""The page at /: its files, its data, and its rendering in a browser if one is installed."""

import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.browser import Browser, Page
from tests.limits import HANG_SECONDS

from moeyard_router.fleet.loads import rows_of_ranks
from moeyard_worker.protocol import ExpertLoads

ROOT = Path(__file__).resolve().parents[2]
STATIC = ROOT / "router/moeyard_router/http/static"
OURS = [path for path in sorted(STATIC.iterdir()) if not path.name.startswith("uplot")]
REPORTED = {
    "generation_tokens": 70,
    "prefill_tokens": 40,
    "prefix_query_tokens": 40,
    "prefix_hit_tokens": 16,
    "preemptions": 1,
    "expert_hits": 30,
    "expert_misses": 10,
    "expert_evictions": 9,
    "expert_slots": 24,
    "draft_tokens": 20,
    "accepted_tokens": 15,
}


# Field of a rank's snapshot -> its name in /metrics.
SAME = {
    "num_running": "num_requests_running",
    "num_waiting": "num_requests_waiting",
    "step": "engine_steps_total",
    "generation_tokens": "generation_tokens_total",
    "prefill_tokens": "prefill_tokens_total",
    "prefix_query_tokens": "prefix_cache_query_tokens_total",
    "preemptions": "preemptions_total",
    "prefix_hit_tokens": "prefix_cache_hit_tokens_total",
    "expert_hits": "expert_cache_hits_total",
    "expert_misses": "expert_cache_misses_total",
    "expert_evictions": "expert_cache_evictions_total",
    "expert_slots": "expert_cache_slots",
    "draft_tokens": "spec_decode_draft_tokens_total",
    "accepted_tokens": "spec_decode_accepted_tokens_total",
}


def report_all(service: Any, wait_for: Callable[..., None]) -> None:
    """Let every rank report all its fields, and its experts' rows on request."""
    for worker in service.workers:
        own = {name: value + worker.rank for name, value in REPORTED.items()}
        worker.loads = loads(worker.rank)
        worker.report(kv_pages_free=48, **own)

    def known() -> bool:
        workers = service.client.get("/v1/fleet/live").json()["workers"]
        return all(w["snapshot"]["preemptions"] == 1 + w["rank"] for w in workers)

    wait_for(known, "the router must have the snapshots")


def loads(rank: int) -> ExpertLoads:
    return ExpertLoads(
        rank=rank, layers=(1, 2), experts=tuple(range(3 * rank, 3 * rank + 3)), rows=(1, 2, 3, 4, 5, 6 + rank)
    )


def samples(service: Any) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return every sample of /metrics by name and labels without the model's name."""
    found = {}
    for family in text_string_to_metric_families(service.client.get("/metrics").text):
        for sample in family.samples:
            labels = {key: value for key, value in sample.labels.items() if key != "model_name"}
            found[sample.name, frozenset(labels.items())] = sample.value
    return found


def second_cell(page: Page) -> str:
    """Press keys to select the second expert of the first layer since the start; return the page's text for it."""
    page.run("document.querySelector('input[name=span][value=start]').click()")
    page.run("document.querySelector('#experts').scrollIntoView({behavior: 'instant'})")
    page.wait("!document.querySelector('#heat-body').hidden")
    page.run("document.querySelector('#heat-map').focus()")
    for key in ("ArrowDown", "ArrowRight"):
        page.call("Input.dispatchKeyEvent", type="keyDown", key=key)
    return str(page.run("document.querySelector('#heat-cell').textContent"))


@pytest.mark.parametrize("path", ["/", "/dashboard"])
def test_page_has_a_content_security_policy(service: Any, path: str) -> None:
    answer = service.client.get(path)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["form-action"] == policy["base-uri"] == "'none'"
    assert answer.headers["x-content-type-options"] == "nosniff"
    again = service.client.get(path, headers={"if-none-match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_page_names_only_existing_files(service: Any) -> None:
    page = service.client.get("/").text
    named = set(re.findall(r'(?:src|href)="(static/[^"]+)"', page))
    for path in sorted(STATIC.glob("*.js")):
        named |= {f"static/{name}" for name in re.findall(r'from "\./([^"]+)"', path.read_text())}
    assert {f"static/{path.name}" for path in STATIC.iterdir()} == named | {"static/index.html"}
    for name in named:
        answer = service.client.get(f"/{name}")
        assert answer.status_code == 200, name
        assert "content-security-policy" in answer.headers
        plain = service.client.get(f"/{name}", headers={"accept-encoding": "identity"})
        assert plain.content == answer.content == (STATIC / name.removeprefix("static/")).read_bytes()
    assert service.client.get("/static/nothing.js").status_code == 404
    assert service.client.get("/static/..%2fpage.py").status_code == 404


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.name)
def test_page_has_no_external_or_inline_script(path: Path) -> None:
    text = path.read_text().replace("http://www.w3.org/2000/svg", "")
    assert re.findall(r"https?:|//[a-z]+\.[a-z]|@import|url\(", text) == []
    if path.suffix == ".html":
        assert re.findall(r"<script(?![^>]*\bsrc=)|\son[a-z]+=|\sstyle=|<style|javascript:", text) == []
    assert "innerHTML" not in text, "foreign text must never become markup"


def test_every_field_has_a_label() -> None:
    page = (STATIC / "index.html").read_text()
    for field in re.findall(r"<(?:input|textarea)[^>]*>", page):
        name = re.search(r'\bid="([^"]+)"', field)
        labelled = name is not None and f'for="{name[1]}"' in page
        assert labelled or re.search(r"<label[^>]*>[^<]*" + re.escape(field), page), field


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(
    ("ink", "paper"),
    [
        *(("--text", "--surface"), ("--text", "--sunken"), ("--muted", "--surface"), ("--muted", "--bg")),
        *(("--muted", "--sunken"), ("--accent", "--surface"), ("--on-accent", "--accent"), ("--ok", "--ok-bg")),
        *(("--warn", "--warn-bg"), ("--bad", "--bad-bg"), ("--bad", "--surface")),
    ],
)
def test_text_has_contrast(scheme: str, ink: str, paper: str) -> None:
    """WCAG 2.2, level AA: 4.5 to 1."""
    css = (STATIC / "page.css").read_text()
    roots = [
        dict(re.findall(r"(--[\w-]+): (#[0-9a-f]{6});", block)) for block in re.findall(r":root {(.*?)}", css, re.S)
    ]
    colours = roots[0] | (roots[1] if scheme == "dark" else {})
    light, dark = sorted((luminance(colours[ink]), luminance(colours[paper])), reverse=True)
    assert (light + 0.05) / (dark + 0.05) >= 4.5


def test_wheel_has_the_page_and_the_demo(tmp_path: Path) -> None:
    """The files are package data: an installed wheel serves the page and its first answer."""
    pytest.importorskip("hatchling.build", reason="hatchling is not installed here")
    code = f"from hatchling.build import build_wheel; print(build_wheel({str(tmp_path)!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    wheel = zipfile.ZipFile(tmp_path / done.stdout.split()[-1])
    names = wheel.namelist()
    assert {f"moeyard_router/http/static/{path.name}" for path in STATIC.iterdir()} <= set(names)
    demo = {name.removeprefix("moeyard/bundled/demo/") for name in names if name.startswith("moeyard/bundled/demo/")}
    assert {"config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= demo
    assert wheel.read("moeyard/bundled/demo/model.safetensors") == (ROOT / "deploy/demo/model.safetensors").read_bytes()


def test_page_data_equals_metrics(start: Any, wait_for: Callable[..., None]) -> None:
    service = start(2)
    service.chat(messages=[{"role": "user", "content": "x"}], max_tokens=7, n=2)
    service.complete(prompt="y", max_tokens=9, stop=" quick")
    assert service.post("/v1/completions", prompt="").status_code == 400
    service.wait_idle()
    report_all(service, wait_for)
    live, page = service.client.get("/v1/fleet/live").json(), samples(service)
    compared = 0

    def same(value: float, name: str, **labels: str) -> None:
        nonlocal compared
        assert page[f"moeyard_{name}", frozenset(labels.items())] == value, name
        compared += 1

    for worker in live["workers"]:
        rank = str(worker["rank"])
        for field, name in SAME.items():
            same(worker["snapshot"][field], f"fleet_{name}", rank=rank)
        same(worker["kv_usage"], "fleet_kv_cache_usage_ratio", rank=rank)
        same(worker["state"] == "ready", "fleet_rank_ready", rank=rank)
    same(live["inflight"], "num_requests_inflight")
    for field, value in live["totals"].items():
        reported = [w["kv_usage"] if field == "kv_usage" else w["snapshot"][field] for w in live["workers"]]
        assert value == (reported[0] if field == "kv_usage" else sum(reported)), field
    for name in ("prompt_tokens", "output_tokens"):
        same(live["counters"][name], f"{name}_total")
    for reason, value in live["counters"]["request_success"].items():
        same(value, "request_success_total", finished_reason=reason)
    same(live["counters"]["rejections"]["bad_request"], "rejections_total", reason="bad_request")
    for name, histogram in live["histograms"].items():
        same(histogram["sum"], f"{name}_sum")
        same(histogram["count"], f"{name}_count")
        for bound, count in histogram["buckets"]:
            [labels] = [
                dict(k[1]) for k in page if k[0] == f"moeyard_{name}_bucket" and number(dict(k[1])["le"]) == bound
            ]
            same(count, f"{name}_bucket", **labels)
    assert compared > 2 * 14 + 4 * 20
    assert live["counters"]["output_tokens"] >= 14


def number(bound: str) -> float | None:
    return None if bound == "+Inf" else float(bound)


def test_last_requests_have_phases_and_no_text(start: Any) -> None:
    service = start(1, max_inflight=4)
    service.workers[0].pace = 0.002
    service.chat(messages=[{"role": "user", "content": "a very secret question"}], max_tokens=6)
    service.complete(prompt="more secrets", max_tokens=40, stop=" quick")
    service.wait_idle()
    answer = service.client.get("/v1/fleet/live")
    assert "secret" not in answer.text
    stopped, first = answer.json()["requests"]
    assert (first["kind"], first["reason"], first["output_tokens"], first["rank"]) == ("chat", "length", 6, 0)
    assert (first["queue"], first["prefill"], first["cached_tokens"]) == (0.0, 0.0, 3)
    # Five tokens follow the first, each at the worker's pace. On a busy machine the router may receive several at once.
    assert first["total"] >= 5 * 0.002
    assert 0 < first["decode"] <= first["total"] - first["ttft"] + 1e-9
    # The router does not wait for the worker's last message about a sequence that a stop string ended.
    assert (stopped["kind"], stopped["reason"], stopped["queue"]) == ("completion", "stop", None)
    for _ in range(40):
        service.complete(prompt=[5], max_tokens=1)
    assert len(service.client.get("/v1/fleet/live").json()["requests"]) == 32


def test_unreported_values_are_absent(start: Any) -> None:
    service = start(1)
    page = samples(service)
    names = {name for name, _ in page}
    assert "moeyard_fleet_num_requests_running" in names
    assert [name for name in names if name.startswith("moeyard_fleet_expert")] == []
    assert service.client.get("/v1/fleet/live").json()["totals"]["expert_hits"] is None


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks on a busy machine have time to answer, and answers stay fresh."""
    for name in ("_ANSWER_SECONDS", "_FRESH_SECONDS"):
        monkeypatch.setattr(f"moeyard_router.fleet.loads.{name}", HANG_SECONDS)


def test_expert_loads_are_fetched_on_demand(start: Any, patient: None, wait_for: Callable[..., None]) -> None:
    service = start(2)
    report_all(service, wait_for)
    answer = service.client.get("/v1/fleet/experts").json()
    assert [r["rank"] for r in answer["ranks"]] == [0, 1]
    assert answer["ranks"][1] == {"rank": 1, "layers": [1, 2], "experts": [3, 4, 5], "rows": [[1, 2, 3], [4, 5, 7]]}
    # A fresh answer is shared: many viewers cost as much as one.
    service.workers[0].loads = None
    assert service.client.get("/v1/fleet/experts").json()["ranks"] == answer["ranks"]


def chosen(rank: int, experts: tuple[int, ...], *numbers: int, held: tuple[int, ...] = ()) -> ExpertLoads:
    """Return a GPU rank's report: how many rows chose each of four experts in two layers."""
    return ExpertLoads(rank=rank, layers=(1, 2), experts=experts, chosen=numbers, held=held)


def test_chosen_rows_count_for_the_rank_with_the_expert(
    start: Any, patient: None, wait_for: Callable[..., None], browser_or_none: Browser | None
) -> None:
    """Rows are summed over ranks, like the rows that experts on a CPU computed; the page shows both alike."""
    service = start(2)
    report_all(service, wait_for)
    service.workers[0].loads = chosen(0, (0, 1), 5, 0, 1, 2, 7, 8, 0, 1)
    service.workers[1].loads = chosen(1, (2, 3), 10, 20, 30, 40, 0, 0, 50, 60)
    ranks = service.client.get("/v1/fleet/experts").json()["ranks"]
    assert ranks == [
        {"rank": 0, "layers": [1, 2], "experts": [0, 1], "rows": [[15, 20], [7, 8]]},
        {"rank": 1, "layers": [1, 2], "experts": [2, 3], "rows": [[31, 42], [50, 61]]},
    ]
    if browser_or_none is None:
        return
    page = browser_or_none.page(service.url, width=1280, height=900)
    page.call("Emulation.setFocusEmulationEnabled", enabled=True)
    page.wait("document.querySelector('#state').textContent === 'ready'")
    assert second_cell(page).startswith("Layer 1, expert 1 on rank 0: 20 rows")
    page.close()


def test_rows_of_an_expert_with_copies_on_other_ranks() -> None:
    """Rank 0 has expert 2 in layer 1 only, where rank 1 has a copy; one rank has reported nothing."""
    first = chosen(0, (0, 1, 2), 4, 0, 5, 2, 1, 1, 1, 1, held=(1, 1, 1, 1, 1, 0))
    second = chosen(1, (2, 3), 0, 0, 10, 0, 0, 2, 3, 4)
    found = rows_of_ranks([first, second, ExpertLoads(rank=2, layers=(1, 2), experts=(0,))])
    assert found == [[[4, 0, 8], [1, 3, 0]], [[7, 2], [4, 5]], []]
    assert sum(sum(map(sum, rows)) for rows in found) == sum(first.chosen) + sum(second.chosen)
    # The rows that a silent rank's tokens chose are missing, and so are its experts.
    assert rows_of_ranks([second]) == [[[10, 0], [3, 4]]]
    assert rows_of_ranks([]) == []
    assert rows_of_ranks([chosen(0, ()), chosen(1, (), *range(8))]) == [[], []]


def test_silent_rank_is_omitted(start: Any, wait_for: Callable[..., None]) -> None:
    service = start(2)
    report_all(service, wait_for)
    service.workers[0].loads = None
    assert [r["rank"] for r in service.client.get("/v1/fleet/experts").json()["ranks"]] == [1]


@pytest.mark.parametrize(("width", "dark"), [(390, False), (1280, True)], ids=["390-light", "1280-dark"])
def test_page_in_a_browser(start: Any, browser: Browser, wait_for: Callable[..., None], width: int, dark: bool) -> None:
    service = start(2, recovery_timeout=0.0)
    service.complete(prompt=[5, 6], max_tokens=12)
    report_all(service, wait_for)
    page = browser.page(service.url, width=width, height=900, dark=dark)
    page.call("Emulation.setFocusEmulationEnabled", enabled=True)
    page.wait("document.querySelector('#state').textContent === 'ready'")
    page.wait("document.querySelectorAll('.rank').length === 2")
    live = service.client.get("/v1/fleet/live").json()
    hits = page.run("document.querySelectorAll('.rank dl')[1].innerText")
    assert "74 %" in hits, "expected 31 hits of 31 + 11 needed experts"
    assert (
        page.run("document.querySelectorAll('#requests-table tbody > tr:first-child').length")
        == len(live["requests"])
        == 1
    )
    assert page.run("document.querySelectorAll('canvas').length") >= 4, "expected three charts and a heat map"
    assert second_cell(page).startswith("Layer 1, expert 1 on rank 0: 2 rows")
    page.run("document.querySelector('#prompt').value = 'Hello'")
    page.run("document.querySelector('#send').click()")
    page.wait("document.querySelector('.say.assistant small') !== null")
    assert "quick brown fox" in page.run("document.querySelector('.say.assistant').textContent")
    assert page.run("document.documentElement.scrollWidth") == width, "nothing may overflow"
    background = page.run("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(13, 16, 21)" if dark else "rgb(245, 246, 248)")
    asked = {event["request"]["url"] for event in page.events("Network.requestWillBeSent")}
    assert {url for url in asked if not url.startswith(service.url)} == set()
    assert page.complaints() == []
    service.workers[1].fail("rank 1 lost at step 812, layer 17, combine")
    page.wait("document.querySelector('#banner-text').textContent.includes('rank 1 lost at step 812')")
    assert page.run("document.querySelector('#state').textContent") == "failed"
    assert page.run("document.querySelectorAll('.rank.failed').length") == 1
    service.server.stop()
    page.wait("document.querySelector('#state').textContent === 'no answer'")
    page.close()


def test_page_asks_for_a_required_key(start: Any, browser: Browser) -> None:
    """The page replaces the server's answer to a call without a key by its own; with a key the call succeeds."""
    service = start(1)
    page = browser.page("about:blank", width=390, height=800)
    page.call("Emulation.setFocusEmulationEnabled", enabled=True)
    refusal = json.dumps({"error": {"message": "no such key"}})
    script = (
        "const real = fetch, key = 'Bearer sesame';"
        "window.fetch = async (path, options) => options?.headers?.Authorization === key"
        f" ? real(path, options) : new Response({refusal!r}, {{status: 401}});"
    )
    page.call("Page.addScriptToEvaluateOnNewDocument", source=script)
    page.navigate(service.url)
    page.wait("document.querySelector('#state')?.textContent === 'key wanted'")
    assert "no such key" in page.run("document.querySelector('#banner-text').textContent")
    page.run("document.querySelector('#key').value = 'sesame'")
    page.run("document.querySelector('#key-save').click()")
    page.wait("document.querySelector('#state').textContent === 'ready'")
    assert page.run("document.querySelector('#key').value") == ""
    page.close()
