"""Take the pictures of docs/dashboard.md: the page of a server under load, at two widths, light and dark.

    moeyard serve --workers 2 --expert-slots 48 --port 8000
    PYTHONPATH=. python tests/screenshots.py http://127.0.0.1:8000 --out docs/images

It needs a Chromium on PATH. Kill a worker meanwhile to show an incident. PNGs are reduced to 256 colours if Pillow is
installed.
"""

import argparse
import random
import threading
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import httpx
from tests.browser import Browser, find_browser
from tests.limits import HANG_SECONDS

# Size and colours of each window, and the first and last part in its picture.
WINDOWS = {
    "dashboard-1280-light": (1280, 900, False, "header", "#requests"),
    "dashboard-1280-dark": (1280, 900, True, "#incidents", "#settings"),
    "dashboard-390-light": (390, 844, False, "header", "#requests"),
    "dashboard-390-dark": (390, 844, True, "#incidents", "#settings"),
}
TOPICS = ("the union", "the sea", "a good harvest", "the war", "liberty", "my dear friend", "the treasury")


def load(url: str, stop: threading.Event, seed: int) -> None:
    """One client that asks again and again."""
    chance = random.Random(seed)
    with httpx.Client(base_url=url, timeout=HANG_SECONDS) as client:
        while not stop.is_set():
            text = f"Write about {chance.choice(TOPICS)}. " * chance.randint(1, 12)
            body = {
                "messages": [{"role": "user", "content": text}],
                "max_tokens": chance.randint(8, 160),
                "stream": True,
            }
            if chance.random() < 0.15:
                body["stop"] = [" and"]
            if chance.random() < 0.1:
                body["max_tokens"] = 5000  # refused: more than the model's limit
            with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                for _ in answer.iter_lines():
                    if stop.is_set():
                        return
            stop.wait(chance.random() * 1.5)


def reduce(path: Path, colours: int = 256) -> None:
    """Reduce the colours: the most frequent quarter as they are, the others by how well they cover the rest."""
    if find_spec("PIL") is None:
        return
    pillow = import_module("PIL.Image")
    image = pillow.open(path).convert("RGB")
    counted = sorted(image.getcolors(image.width * image.height), reverse=True)[: colours // 4]
    covering = image.quantize(colours - colours // 4, method=1, dither=0).getpalette()
    palette = pillow.new("P", (1, 1))
    palette.putpalette([part for _, colour in counted for part in colour] + covering)
    image.quantize(palette=palette, dither=0).save(path, optimize=True)


def main() -> None:
    """Command line of this script."""
    parser = argparse.ArgumentParser(description="take pictures of a server's page")
    parser.add_argument("url")
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=60.0, help="of load before the pictures")
    args = parser.parse_args()
    program = find_browser()
    if program is None:
        raise SystemExit("no Chromium on PATH")
    stop = threading.Event()
    clients = [threading.Thread(target=load, args=(args.url, stop, seed)) for seed in range(args.clients)]
    browser = Browser(program)
    try:
        pages = {}
        for name, (width, height, dark, _, _) in WINDOWS.items():
            pages[name] = browser.page(args.url, width=width, height=height, dark=dark)
            # Windows in the background rest: this one is always seen.
            pages[name].call("Emulation.setFocusEmulationEnabled", enabled=True)
        for client in clients:
            client.start()
        time.sleep(args.seconds)
        args.out.mkdir(parents=True, exist_ok=True)
        for name, page in pages.items():
            # A window in the background may not have painted everything.
            page.call("Page.bringToFront")
            page.run("document.querySelector('#experts').scrollIntoView({behavior: 'instant'})")
            page.wait("!document.querySelector('#heat-body').hidden")
            page.run("document.querySelector('#prompt').value = 'Give a short address to the farmers of this country.'")
            page.run("document.querySelector('#send').click()")
            page.wait("document.querySelector('.say.assistant small, .say.error') !== null")
            # Parts out of view ask for nothing.
            for part in ("incidents", "settings"):
                page.run(f"document.querySelector('#{part}').scrollIntoView({{behavior: 'instant'}})")
                page.wait(f"document.querySelector('#{part}-empty').hidden || '{part}' === 'incidents'")
            page.run("document.querySelector('#requests-table .open').click()")
            page.run("document.querySelector('#incidents-list > :last-child summary')?.click()")
            page.run("document.querySelector('#refusals summary')?.click()")
            page.run("scrollTo({top: 0, behavior: 'instant'})")
            path = args.out / f"{name}.png"
            _, _, _, first, last = WINDOWS[name]
            page.picture(path, first=first, last=last)
            reduce(path)
            print(
                path,
                path.stat().st_size,
                page.run("[innerWidth, document.documentElement.scrollWidth]"),
                page.complaints(),
            )
    finally:
        stop.set()
        browser.close()
    for client in clients:
        client.join()


if __name__ == "__main__":
    main()
