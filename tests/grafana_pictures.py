"""Draw the Grafana dashboards for docs/metrics.md with data of a demo fleet under load.

    PYTHONPATH=. python tests/grafana_pictures.py

The pictures are no screenshots of Grafana: tests/grafana.html draws each dashboard's JSON from its queries. It takes
eleven minutes, in which a rank is killed and one is restarted. It needs Chromium and Prometheus on PATH, or
Prometheus from deploy/tools/get_prometheus.sh.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx
from tests.browser import Browser, find_browser
from tests.deploy.conftest import find_program
from tests.deploy.live_fleet import ROOT, Running, kill_rank, scrape, serve_demo
from tests.screenshots import load, reduce

STEP = 5  # the scrape interval of deploy/prometheus, in seconds, which is Grafana's shortest step
CLIENTS = 8


def under_load(served: Running, seconds: int) -> None:
    """Send requests, more and more of them. Then lose a rank, and restart one on purpose."""
    stop, clients = threading.Event(), []
    try:
        for seed in range(CLIENTS):
            clients.append(threading.Thread(target=load, args=(served.url, stop, seed)))
            clients[-1].start()
            time.sleep(seconds * 0.4 / CLIENTS)
        time.sleep(seconds * 0.1)
        kill_rank(served)
        time.sleep(seconds * 0.25)
        port = served.url.rpartition(":")[2]
        subprocess.run([sys.executable, "-m", "moeyard", "restart", "--worker", "0", "--port", port], check=True)
        time.sleep(seconds * 0.25)
    finally:
        stop.set()
        for client in clients:
            client.join()


def draw(program: str, prometheus: str, end: int, seconds: int, out: Path) -> set[str]:
    """Write a PNG of each dashboard, and return "dashboard / panel" for those without data.

    program: a Chromium.
    end, seconds: the range, which ends at this Unix time.
    """
    answer = httpx.get(f"{prometheus}/api/v1/label/model_name/values", trust_env=False)
    [model] = answer.json()["data"]
    end -= end % STEP
    variables = {
        "__rate_interval": f"{4 * STEP}s",
        "model_name": model,
        "job": ".*",
        "rank": ".*",
        "percentile": "0.95",
    }
    view = {
        "prometheus": prometheus,
        "start": end - seconds,
        "end": end,
        "step": STEP,
        "variables": variables,
        "percentile": "p95",
        "chosen": {"Data source": "Prometheus", "Model": model, "Jobs": "All", "Rank": "All", "Percentile": "p95"},
    }
    out.mkdir(parents=True, exist_ok=True)
    empty = set()
    browser = Browser(program)
    try:
        page = browser.page((ROOT / "tests/grafana.html").as_uri(), width=1280, height=900)
        for file in sorted((ROOT / "deploy/grafana/dashboards").glob("*.json")):
            titles = page.run(f"show({file.read_text()}, {json.dumps(view)})")
            empty |= {f"{file.stem} / {title}" for title in titles}
            path = out / f"grafana-{file.stem}.png"
            page.picture(path, first="header", last="main")
            reduce(path, colours=64)
        assert page.complaints() == []
    finally:
        browser.close()
    return empty


def main() -> None:
    """Command line of this script."""
    parser = argparse.ArgumentParser(description="draw the Grafana dashboards")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/images")
    parser.add_argument("--seconds", type=int, default=600, help="of load, all of which the pictures show")
    args = parser.parse_args()
    prometheus, browser = find_program("prometheus"), find_browser()
    if prometheus is None or browser is None:
        raise SystemExit("no prometheus (deploy/tools/get_prometheus.sh), or no Chromium on PATH")
    with (
        tempfile.TemporaryDirectory() as folder,
        serve_demo(Path(folder), "--max-num-seqs", "2", "--expert-slots", "44") as served,
    ):
        watched = Path(folder, "prometheus")
        watched.mkdir()
        with scrape(served.url, prometheus, watched) as watching:
            under_load(served, args.seconds)
            print("without data:", draw(browser, watching.url, int(time.time()), args.seconds, args.out))


if __name__ == "__main__":
    main()
