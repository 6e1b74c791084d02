"""Headless Chromium over its debugging pipe: no driver, no port, no other package."""

import base64
import contextlib
import fcntl
import itertools
import json
import os
import select
import shutil
import signal
import tempfile
import time
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.limits import HANG_SECONDS

# Keys whose default action needs Windows' code of the key.
_KEY_CODES = MappingProxyType(
    {"Tab": 9, "Enter": 13, " ": 32, "ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "End": 35}
)
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find_browser() -> str | None:
    """Path of a Chromium on PATH, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One browser process; `page` opens a window with its own size and colours."""

    def __init__(self, program: str) -> None:
        self._folder = tempfile.mkdtemp(prefix="moeyard-browser-")
        # The browser reads commands from descriptor 3 and answers on 4, each message ended by a zero byte.
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (theirs_in, theirs_out)]
        arguments = [
            program,
            "--headless=new",
            "--remote-debugging-pipe",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--disable-component-update",
            "--hide-scrollbars",
            "--force-color-profile=srgb",
            f"--user-data-dir={self._folder}",
            "about:blank",
        ]
        log = str(Path(self._folder) / "log")
        self._pid = os.posix_spawn(
            program,
            arguments,
            {**os.environ, "HOME": self._folder},
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 1, log, os.O_WRONLY | os.O_CREAT, 0o600),
                (os.POSIX_SPAWN_DUP2, 1, 2),
                (os.POSIX_SPAWN_DUP2, high[0], 3),
                (os.POSIX_SPAWN_DUP2, high[1], 4),
            ],
            setpgroup=0,
        )
        for fd in (theirs_in, theirs_out, *high):
            os.close(fd)
        self._ids = itertools.count(1)
        self._buffer = b""
        self.events: list[dict[str, Any]] = []
        self.call("Browser.getVersion")

    def call(self, method: str, session: str | None = None, **params: Any) -> Any:
        """Run one command of the DevTools protocol; events that come meanwhile are kept in `events`."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + HANG_SECONDS
        while True:
            answer = self._read(deadline, method)
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            if "method" in answer:
                self.events.append(answer)

    def _read(self, deadline: float, what: str) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"the browser did not answer {what} in time"
            part = os.read(self._in, 1 << 20)
            assert part, f"the browser ended:\n{(Path(self._folder) / 'log').read_text(errors='replace')[-2000:]}"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        parsed: dict[str, Any] = json.loads(message)
        return parsed

    def page(self, url: str, *, width: int, height: int, dark: bool = False, scale: float = 1.0) -> "Page":
        """A window in which `url` is being loaded."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, target, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", features=[scheme])
        page.navigate(url)
        return page

    def close(self) -> None:
        """End the browser and forget its profile."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._in)
        os.close(self._out)
        shutil.rmtree(self._folder, ignore_errors=True)


class Page:
    """One window."""

    def __init__(self, browser: Browser, target: str, session: str) -> None:
        self._browser = browser
        self._target = target
        self._session = session

    def call(self, method: str, **params: Any) -> Any:
        """A command of the DevTools protocol in this window."""
        return self._browser.call(method, session=self._session, **params)

    def navigate(self, url: str) -> None:
        """Go there, and wait until its elements exist."""
        self.call("Page.navigate", url=url)
        self.wait(f"location.href.startsWith({url!r}) && document.readyState !== 'loading'")

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, expression: str) -> Any:
        """Wait until a JavaScript expression is true; return its value."""
        deadline = time.monotonic() + HANG_SECONDS
        while not (value := self.run(expression)):
            text = self.run("document.body ? document.body.innerText.slice(0, 800) : ''")
            assert time.monotonic() < deadline, f"{expression} is not true:\n{text}"
            time.sleep(0.05)
        return value

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press a key of the keyboard."""
        known = {"key": key, "code": key, "windowsVirtualKeyCode": _KEY_CODES.get(key, 0), "modifiers": 8 * shift}
        text = {"Enter": {"text": "\r"}, " ": {"text": " "}}.get(key, {})
        self.call("Input.dispatchKeyEvent", type="keyDown", **known, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **known)

    def picture(self, path: Path, *, first: str, last: str, margin: int = 12) -> None:
        """Write a PNG of the document from the top left of `first` to its right end and the bottom of `last`."""
        box = "document.querySelector({!r}).getBoundingClientRect()"
        left, top = (max(0, self.run(f"{box.format(first)}.{side}") - margin) for side in ("left", "top"))
        width = min(self.run("innerWidth"), self.run(f"{box.format(first)}.right") + margin) - left
        bottom = self.run(f"{box.format(last)}.bottom") + margin
        clip = {"x": left, "y": top, "width": width, "height": bottom - top, "scale": 1}
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)["data"]
        path.write_bytes(base64.b64decode(data))

    def events(self, method: str) -> list[dict[str, Any]]:
        """Parameters of all events of this name so far."""
        self.run("0")
        found = [e for e in self._browser.events if e["method"] == method and e.get("sessionId") == self._session]
        return [event["params"] for event in found]

    def complaints(self) -> list[str]:
        """Errors and warnings in the console: broken scripts, breaches of the page's own policy."""
        said = [e["entry"] for e in self.events("Log.entryAdded")]
        found = [f"{e['level']}: {e['text']} {e.get('url', '')}" for e in said if e["level"] in ("error", "warning")]
        return found + [e["exceptionDetails"]["text"] for e in self.events("Runtime.exceptionThrown")]

    def close(self) -> None:
        """Close the window."""
        self._browser.call("Target.closeTarget", targetId=self._target)
