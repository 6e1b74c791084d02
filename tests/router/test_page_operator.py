"""What operators read on the page at /: timelines, incidents, refusals, experts over time, settings; and how they reach
it by keyboard, on any screen and in both colour schemes.

If axe-core is in `node_modules` (`npm install --no-save axe-core`), it checks the page, too.
"""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.browser import Browser, Page
from tests.router.launcher import Launcher
from tests.router.test_page import report_all, samples

from moeyard_router.config import Setting, WorkerAddress
from moeyard_router.fleet.records import Refusals
from moeyard_router.http.siblings import merged

AXE = Path(__file__).resolve().parents[2] / "node_modules/axe-core/axe.min.js"
LOST = "rank 1 lost at step 812, layer 17, combine"
INCIDENT = {
    "reason": LOST,
    "seconds": 0.192,
    "lost": [{"rank": 1, "reason": "the process of rank 1 has ended", "process": "process 1837 had 444.7 MiB"}],
    "reports": [
        {
            "rank": 0,
            "epoch": 7,
            "step": 812,
            "place": "layer 17, combine",
            "running": 2,
            "waiting": 1,
            "latest": ["cmpl-56a25f7d-0"],
            "stack": ["_turn (loop.py:196)", "_wait (mesh.py:310)"],
        }
    ],
    "parts": {"losses": 0.016, "processes": 0.036, "meeting": 0.005, "experts": 0.116, "rejoining": 0.02},
}
SETTINGS = (
    Setting(name="model", group="the model", value="tiny", source="flag"),
    Setting(name="workers", group="workers", value=2, source="config file"),
    Setting(name="device", group="workers", value="cpu", source="derived", why="auto: no NVIDIA driver here"),
    Setting(name="dtype", group="workers", value="bfloat16", source="checkpoint", why="dtype of the checkpoint"),
    Setting(name="threads", group="workers", value=1, source="default"),
    Setting(name="API keys", group="keys, TLS and logs", value=1, source="environment", why="MOEYARD_API_KEY"),
)
# Times that are shown as seconds or milliseconds.
UNITS = {"s": 1.0, "ms": 1e-3}
# The contrast of each visible text with the nearest background behind it, where it is below 4.5.
CONTRAST = """(() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const light = (colour) => colour.slice(0, 3).map((v) => linear(v / 255))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const found = parse(getComputedStyle(at).backgroundColor);
      if (found.length < 4 || found[3] === 1) return found;
    }
    return [255, 255, 255];
  };
  const faults = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement, text = walker.currentNode.textContent.trim();
    if (!text || !element.checkVisibility({ visibilityProperty: true })) continue;
    const style = getComputedStyle(element);
    const [high, low] = [light(parse(style.color)), light(behind(element))].sort((a, b) => b - a);
    const ratio = (high + 0.05) / (low + 0.05);
    if (ratio < 4.5 && !element.disabled) faults.push(`${text.slice(0, 40)}: ${ratio.toFixed(2)}`);
  }
  return faults;
})()"""
# Parts whose content is wider than they are. Tables of charts may scroll.
CUT = """[...document.querySelectorAll('.card:not(.table-of .card), .card table')]
  .filter((e) => e.checkVisibility() && e.scrollWidth > e.clientWidth + 1 && !e.closest('.table-of .card'))
  .map((e) => e.id || e.className)"""
# What can be reached by Tab: a name for each element that is shown and takes the focus. One radio button stands for its
# group.
REACHABLE = """[...document.querySelectorAll('a[href], button, input, textarea, summary, [tabindex="0"]')]
  .filter((e) => e.checkVisibility({ visibilityProperty: true }) && !e.disabled && (e.type !== 'radio' || e.checked))"""
NAME = "((e) => [...document.querySelectorAll('*')].indexOf(e))"
# Whether the focus is seen: an outline of the element, or of the label of a radio button.
OUTLINED = """(() => {
  const at = document.activeElement, style = getComputedStyle(at.type === 'radio' ? at.nextElementSibling : at);
  return style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2;
})()"""


@pytest.fixture
def told(start: Any, wait_for: Callable[..., None]) -> Any:
    """A service that has every kind of thing to show."""
    service = start(2, settings=SETTINGS, inflight_per_worker=4)
    worker = service.workers[0]
    worker.phases, worker.waits, worker.pace = (0.004, 0.011), (0.0021, 0.0037), 0.002
    service.complete(prompt=[5, 6], max_tokens=12)
    refuse(service)
    report_all(service, wait_for)
    return service


def refuse(service: Any) -> None:
    """Let the service refuse requests for five reasons."""
    assert service.post("/v1/completions", prompt="a secret", temperature=-3).status_code == 400
    assert service.post("/v1/completions", prompt="a secret " * 2000, max_tokens=9).status_code == 400
    assert service.post("/v1/completions", prompt="a secret", model="secret-model").status_code == 404
    assert service.post("/v1/completions", prompt=[5, 6, 7], max_tokens=9, n=12).status_code == 429
    form = {"content-type": "text/plain"}
    assert service.client.post("/v1/completions", content="a secret", headers=form).status_code == 415


def opened(browser: Browser, service: Any, width: int = 1280, *, dark: bool = False, scale: float = 1.0) -> Page:
    """Return the page of a service once it shows an answer."""
    page = browser.page(service.url, width=width, height=900, dark=dark, scale=scale)
    page.call("Emulation.setFocusEmulationEnabled", enabled=True)
    page.wait("document.querySelector('#state').textContent === 'ready'")
    return page


def shown(page: Page, selector: str) -> None:
    """Scroll a part into view: parts out of view ask for nothing."""
    page.run(f"document.querySelector('{selector}').scrollIntoView({{behavior: 'instant', block: 'start'}})")


def facts(page: Page, selector: str) -> dict[str, str]:
    """Return the names and values of a list of facts."""
    rows = f"[...document.querySelectorAll('{selector} dl.facts > div')]"
    return dict(page.run(f"{rows}.map((e) => [e.children[0].textContent, e.children[1].textContent])"))


def cells(page: Page, selector: str) -> list[list[str]]:
    """Return the texts of a table's rows."""
    rows = f"[...document.querySelectorAll('{selector}')]"
    found: list[list[str]] = page.run(f"{rows}.map((row) => [...row.children].map((cell) => cell.textContent))")
    return found


def seconds(text: str) -> float:
    number, unit = text.split()
    return float(number) * UNITS[unit]


def open_by_key(page: Page, element: str, key: str = "Enter") -> None:
    """Focus an element and press a key."""
    page.run(f"document.querySelector('{element}').focus()")
    page.press(key)


def test_timeline_has_the_times_of_the_request(told: Any, browser: Browser) -> None:
    page = opened(browser, told)
    (request,) = told.client.get("/v1/fleet/live").json()["requests"]
    assert (request["lockstep"], request["fetch"]) == (0.0021, 0.0037)
    page.wait("document.querySelector('#requests-table .open') !== null")
    assert page.run("document.querySelector('.timeline').hidden")
    open_by_key(page, "#requests-table .open")
    page.wait("!document.querySelector('.timeline').hidden")
    assert page.run("document.querySelector('#requests-table .open').ariaExpanded") == "true"
    rows = cells(page, ".spans tbody tr")
    waits = {name: seconds(time) for name, start, time, _, _ in rows if start == "in all"}
    named = {name: (seconds(start), seconds(time)) for name, start, time, _, _ in rows if start != "in all"}
    before = request["ttft"] - 0.004 - 0.011
    expected = {
        "router": (0.0, max(0.0, before)),
        "queue": (max(0.0, before), 0.004),
        "prefill": (max(0.0, before) + 0.004, 0.011),
        "decode": (max(0.0, before) + 0.015, request["decode"]),
    }
    for name, times in expected.items():
        assert named[name] == pytest.approx(times, rel=0.01, abs=1e-5), name
    assert waits == pytest.approx({"waits for peers": 0.0021, "waits for expert weights": 0.0037})
    hint = page.run("document.querySelector('.timeline .hint').textContent")
    assert hint == f"{request['id']}, choice 0; 3 prompt tokens from the cache"
    # The next answer of the router keeps the focus and the open timeline.
    told.complete(prompt=[7], max_tokens=2)
    page.wait("document.querySelectorAll('#requests-table .open').length === 2")
    assert page.run("document.activeElement.ariaExpanded") == "true"
    assert page.complaints() == []
    page.close()


def test_incident_is_told_in_full(start: Any, story: Any, browser: Browser, wait_for: Callable[..., None]) -> None:
    service = start(2, recovery_timeout=300.0)
    page = opened(browser, service)
    launcher = Launcher(service, story)
    launcher.kill(1)
    page.wait("!document.querySelector('#banner').hidden")
    launcher.heal(1, incident=INCIDENT)
    wait_for(lambda: service.client.get("/readyz").status_code == 200, "the fleet must be whole again")
    page.wait("document.querySelector('#incidents-list .pill.ready') !== null")
    (incident,) = service.client.get("/v1/fleet/incidents").json()["incidents"]
    summary = page.run("document.querySelector('#incidents-list summary').textContent")
    assert LOST in summary
    assert page.run("document.querySelector('#incidents-list .pill').textContent") == "recovered"
    shown(page, "#incidents")
    open_by_key(page, "#incidents-list summary")
    found = facts(page, "#incidents-list .inside")
    assert found["First report"] == incident["reason"]
    assert found["Agreed reason"] == LOST
    assert found["Lost ranks"] == "1"
    assert seconds(found["Until all ranks were ready"]) == pytest.approx(incident["seconds_until_whole"], rel=0.01)
    assert found["Sequences that went on elsewhere"] == str(incident["requests_carried"])
    assert found["Tokens computed again"] == str(incident["tokens_recomputed"])
    survivor = facts(page, "#incidents-list section")
    assert survivor == {
        "Step": "812",
        "Place": "layer 17, combine",
        "Running, waiting": "2, 1",
        "Latest requests": "cmpl-56a25f7d-0",
    }
    tables = cells(page, "#incidents-list .inside tbody tr")
    assert tables[0] == ["1", "the process of rank 1 has ended", "process 1837 had 444.7 MiB"]
    assert {name: seconds(time) for name, time in tables[1:6]} == pytest.approx(INCIDENT["parts"])
    assert [reason for _, reason in tables[6:]] == [report["reason"] for report in incident["reports"]]
    open_by_key(page, ".stack summary")
    stack = page.run("[...document.querySelectorAll('.stack li')].map((e) => e.innerText)")
    assert stack == INCIDENT["reports"][0]["stack"]  # type: ignore[index]
    page.close()


def test_refusals_have_reasons_and_sizes_but_no_text(told: Any, browser: Browser) -> None:
    answer = told.client.get("/v1/fleet/live")
    assert "secret" not in answer.text
    live = answer.json()
    counted = {dict(key[1])["reason"]: n for key, n in samples(told).items() if key[0] == "moeyard_rejections_total"}
    assert live["counters"]["rejections"] == counted
    expected = {"bad_request": 400, "prompt_too_long": 400, "unknown_model": 404, "queue_full": 429, "not_json": 415}
    assert {each["reason"]: each["status"] for each in live["refusals"]} == expected
    full = next(each for each in live["refusals"] if each["reason"] == "queue_full")
    assert (full["prompt_tokens"], full["max_tokens"], full["choices"]) == (3, 9, 12)
    assert "no room for 12 more" in full["message"]
    assert full["retry_after"] > 0
    for each in live["refusals"]:
        assert each["body_bytes"] > 0
        assert each["path"] == "/v1/completions"
        if each["reason"] in ("bad_request", "unknown_model", "not_json"):
            assert each["message"] is None, "it may repeat what the client wrote"
    page = opened(browser, told)
    page.wait("document.querySelectorAll('#refusals-body tr').length === 5")
    rows = {row[0].split()[0]: row for row in cells(page, "#refusals-body tr")}
    assert {reason: int(row[1]) for reason, row in rows.items()} == {k: n for k, n in counted.items() if n}
    assert "3 prompt tokens, max 9, 12 choices" in rows["queue_full"][3]
    assert full["message"] in rows["queue_full"][3]
    open_by_key(page, "#refusals-body summary")
    told.post("/v1/completions", prompt=[5], n=12)
    page.wait("document.querySelector('[data-key=queue_full]').children[1].textContent === '2'")
    assert page.run("document.activeElement.tagName") == "SUMMARY", "an update keeps the focus"
    page.close()


def test_flood_of_one_reason_keeps_the_others() -> None:
    refusals = Refusals()
    known: dict[str, Any] = {"path": "/", "status": 401, "retry_after": None, "body_bytes": None}
    refusals.add(reason="overload", message="the fleet is full", when=1.0, **known)
    for i in range(100):
        refusals.add(reason="no_key", message="an API key is needed", when=2.0 + i, **known)
    found = refusals.latest()
    assert [each["when"] for each in found] == [101.0, 100.0, 99.0, 98.0, 1.0]
    assert [each["message"] for each in found[-2:]] == [None, "the fleet is full"]


def test_refusals_of_all_routers_are_listed() -> None:
    one = {"inflight": 0, "router_inflight": [], "samples": {}, "requests": []}
    figures = [{**one, "refusals": [{"when": 1.0}, {"when": 0.5}]}, {**one, "refusals": [{"when": 2.0}]}]
    assert [each["when"] for each in merged(figures, num_requests=9)["refusals"]] == [2.0, 1.0, 0.5]


def test_settings_have_their_sources(told: Any, browser: Browser) -> None:
    answer = told.client.get("/v1/fleet/config").json()
    assert [each["name"] for each in answer["settings"]] == [each.name for each in SETTINGS]
    page = opened(browser, told)
    shown(page, "#settings")
    page.wait("!document.querySelector('#settings-table').hidden")
    given = [each for each in SETTINGS if each.source != "default"]
    rows = cells(page, "#settings-table tbody tr:not(.group)")
    assert [(name, value) for name, value, _ in rows] == [(each.name, str(each.value)) for each in given]
    assert [source for _, _, source in rows] == [each.source + each.why for each in given]
    open_by_key(page, "#settings-all", " ")
    assert len(cells(page, "#settings-table tbody tr:not(.group)")) == len(SETTINGS)
    page.run("document.querySelector('#settings-find').focus()")
    page.call("Input.insertText", text="thr")
    assert cells(page, "#settings-table tbody tr:not(.group)") == [["threads", "1", "default"]]
    page.close()


def test_settings_follow_restart_and_scale(start: Any, browser: Browser, wait_for: Callable[..., None]) -> None:
    """`moeyard scale` changes the number of workers, `moeyard restart` settings of a rank."""
    settings = (*SETTINGS, Setting(name="max-inflight", group="HTTP", value=10, source="derived"))
    service = start(2, settings=settings, max_inflight=10, inflight_per_worker=5)
    page = opened(browser, service)
    shown(page, "#settings")
    page.wait("!document.querySelector('#settings-table').hidden")
    alone = WorkerAddress(rank=0, endpoint=service.workers[0].endpoint, changes=(("threads", 2),))
    service.server.replace_workers((alone,), lambda: None)
    wait_for(
        lambda: (
            service.client.get("/v1/fleet/config").json()["changed"] == [{"rank": 0, "name": "threads", "value": 2}]
        ),
        "the new address tells the changes",
    )
    answer = service.client.get("/v1/fleet/config").json()
    found = {each["name"]: (each["value"], each["source"]) for each in answer["settings"]}
    assert found["workers"] == (1, "derived")
    assert found["max-inflight"] == (5, "derived")
    page.wait("[...document.querySelectorAll('#settings-table th')].some((e) => e.textContent === 'threads')")
    rows = {row[0]: row[1] for row in cells(page, "#settings-table tbody tr:not(.group)")}
    assert rows["threads"] == "1rank 0: 2, since its restart"
    assert (rows["workers"], rows["max-inflight"]) == ("1", "5")
    page.close()


def history(page: Page, *, rows: list[list[int]]) -> None:
    """Let the page get these counts of six experts in two layers, a minute apart by the router's clock."""
    answers = [
        {
            "time": 1000.0 + 60 * i,
            "generation": 1,
            "ranks": [{"rank": 0, "layers": [1, 2], "experts": [0, 1, 2], "rows": [row, row]}],
        }
        for i, row in enumerate(rows)
    ]
    script = (
        f"const answers = {json.dumps(answers)}, real = fetch; let asked = 0, clock = 0;"
        # The page asks again after three seconds of this clock.
        "performance.now = () => (clock += 4000);"
        "window.fetch = async (path, options) => String(path).endsWith('/experts')"
        " ? new Response(JSON.stringify(answers[Math.min(asked++, answers.length - 1)])) : real(path, options);"
    )
    page.call("Page.addScriptToEvaluateOnNewDocument", source=script)


def test_heat_map_goes_back_in_time(start: Any, browser: Browser) -> None:
    service = start(1)
    page = browser.page("about:blank", width=1280, height=900)
    page.call("Emulation.setFocusEmulationEnabled", enabled=True)
    history(page, rows=[[0, 0, 0], [6, 0, 0], [6, 3, 6], [9, 6, 9]])
    page.navigate(service.url)
    page.wait("document.querySelector('#state')?.textContent === 'ready'")
    shown(page, "#experts")
    page.wait("document.querySelector('#heat-busiest tbody')?.children.length === 6")
    page.wait("[...document.querySelectorAll('#heat-busiest tr:nth-child(1) td')].at(-1)?.textContent === '1.00 ×'")
    page.run("document.querySelector('#heat-time').focus()")

    def at(minutes: int) -> dict[tuple[str, str], tuple[str, str]]:
        """Press the slider's keys, and return rows and share of each expert."""
        page.press("End")
        for _ in range(6 * minutes):
            page.press("ArrowLeft")
        said = page.run("document.querySelector('#heat-time').ariaValueText")
        assert said == (f"{minutes} min 0 s ago" if minutes else "now")
        return {
            (layer, expert): (count, over) for layer, expert, _, count, over in cells(page, "#heat-busiest tbody tr")
        }

    assert at(0) == {(layer, expert): ("3", "1.00 ×") for layer in "12" for expert in "012"}
    assert at(1)["1", "2"] == ("6", "2.00 ×")
    assert at(1)["1", "0"] == ("0", "0.00 ×")
    assert at(2)["2", "0"] == ("6", "3.00 ×")
    assert "The highest was 3.0 × the mean, in layer 1" in page.run("document.querySelector('#heat-strip').ariaLabel")
    open_by_key(page, "#heat-now", " ")
    assert page.run("document.querySelector('#heat-until').textContent") == "until now"
    assert page.complaints() == []
    page.close()


def unfold(page: Page) -> None:
    """Let every part ask for its data, and open everything that can be opened."""
    page.run("document.querySelector('#key-open').click()")
    for part in ("#experts", "#incidents", "#settings"):
        shown(page, part)
    page.wait("!document.querySelector('#settings-table').hidden")
    shown(page, "#experts")
    page.run("document.querySelector('input[name=span][value=start]').click()")
    page.wait("!document.querySelector('#heat-cells').hidden")
    page.run("document.querySelector('#settings-all').click()")
    page.run("document.querySelectorAll('details').forEach((e) => { e.open = true; })")
    page.run("document.querySelectorAll('#requests-table .open').forEach((e) => e.click())")
    page.run("scrollTo({top: 0, behavior: 'instant'})")


@pytest.fixture
def after_a_loss(start: Any, story: Any, wait_for: Callable[..., None]) -> Any:
    """A service with an incident, too."""
    service = start(2, settings=SETTINGS, inflight_per_worker=4)
    service.workers[0].waits = (0.0021, 0.0037)
    service.complete(prompt=[5, 6], max_tokens=12)
    refuse(service)
    launcher = Launcher(service, story)
    launcher.kill(1)
    wait_for(lambda: service.client.get("/readyz").status_code == 503, "the router must notice the loss")
    launcher.heal(1, incident=INCIDENT)
    wait_for(lambda: service.client.get("/readyz").status_code == 200, "the fleet must be whole again")
    report_all(service, wait_for)
    return service


# 640 pixels with a scale of 2 are a window of 1280 pixels at 200 % zoom.
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_page_fits_and_has_contrast(after_a_loss: Any, browser: Browser, dark: bool) -> None:
    for width, scale in ((390, 1.0), (768, 1.0), (1280, 1.0), (640, 2.0)):
        page = opened(browser, after_a_loss, width, dark=dark, scale=scale)
        unfold(page)
        page.wait("document.querySelector('#incidents-list .inside table') !== null")
        assert page.run("document.documentElement.scrollWidth") == width, "nothing may overflow"
        assert page.run(CUT) == [], "nothing may be cut off"
        assert page.run(CONTRAST) == [], f"{width} pixels"
        assert page.complaints() == []
        page.close()


@pytest.mark.parametrize("width", [390, 1280])
def test_every_control_is_reached_by_keyboard(after_a_loss: Any, browser: Browser, width: int) -> None:
    page = opened(browser, after_a_loss, width)
    page.press("Tab")
    assert page.run("document.activeElement.className") == "skip"
    unfold(page)
    expected = page.run(f"{REACHABLE}.map({NAME})")
    page.run("document.querySelector('.skip').focus()")
    reached = [page.run(f"{NAME}(document.activeElement)")]
    for _ in range(len(expected) + 5):
        page.press("Tab")
        if page.run("document.activeElement === document.body"):
            break
        reached.append(page.run(f"{NAME}(document.activeElement)"))
        assert page.run(OUTLINED), page.run("document.activeElement.outerHTML.slice(0, 200)")
    assert set(expected) <= set(reached)
    assert reached == sorted(reached), "Tab follows the order of the document"
    page.close()


def test_page_has_landmarks_names_and_live_regions(after_a_loss: Any, browser: Browser) -> None:
    page = opened(browser, after_a_loss)
    unfold(page)
    tree = page.call("Accessibility.getFullAXTree")["nodes"]
    nodes = [node for node in tree if not node["ignored"]]

    def named(role: str) -> list[str]:
        return [node.get("name", {}).get("value", "") for node in nodes if node["role"]["value"] == role]

    for role in ("banner", "navigation", "main", "complementary", "contentinfo"):
        assert len(named(role)) == 1, role
    for role in ("button", "textbox", "searchbox", "checkbox", "radio", "slider", "link", "region", "img", "table"):
        assert "" not in named(role), role
    parts = ("Ranks", "Last five minutes", "Last requests", "Incidents", "Refusals", "Experts", "Settings")
    assert set(parts) <= set(named("region"))
    levels = [int(node["properties"][0]["value"]["value"]) for node in nodes if node["role"]["value"] == "heading"]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels)), levels
    # Live regions exist before their text does, otherwise screen readers miss the first one.
    assert page.run("document.querySelector('[role=alert] #banner') !== null")
    assert page.run("document.querySelector('#state').getAttribute('role')") == "status"
    page.close()


@pytest.mark.skipif(not AXE.is_file(), reason="axe-core is not in node_modules")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_axe_finds_nothing(after_a_loss: Any, browser: Browser, width: int, dark: bool) -> None:
    page = opened(browser, after_a_loss, width, dark=dark)
    unfold(page)
    page.run(f"{AXE.read_text()}; 0")
    found = page.run(
        "axe.run({resultTypes: ['violations']}).then(({violations}) => violations.map((v) =>"
        " `${v.id}: ${v.nodes.map((n) => n.html.slice(0, 120)).join(' | ')}`))"
    )
    assert found == []
    page.close()
