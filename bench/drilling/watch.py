"""The server's view of itself during a drill: readiness over time, incidents and metrics."""

import asyncio
import contextlib
import re
import time
from collections.abc import Collection, Sequence
from typing import Any

import httpx
from drilling.server import Server, read_json

POLL_SECONDS = 0.1
# Pause between reads of /v1/fleet for its final state. The cores are needed elsewhere.
LOOK_SECONDS = 1.0
# A fleet that reports failure this long does not come back.
FAILED_SECONDS = 5.0
# Readiness this long is final: peers notice a loss in milliseconds, and every recovery takes longer.
SETTLED_SECONDS = 0.5
# Incident times are rounded to milliseconds.
CLOCK_SECONDS = 0.002


def recovered(
    changes: Sequence[tuple[float, bool, str]], begun: float, now: float, *, notice: float
) -> tuple[float, str] | None:
    """Return (seconds from `begun` to its end, reason) of an unreadiness that is over, or None while it may last.

    `changes` are (time, readiness, text). Without a change within `notice` seconds the server was not harmed: (0, "").
    """
    # The last state before `begun` still held at `begun`.
    before = [change for change in changes if change[0] < begun][-1:]
    since = [*before, *(change for change in changes if change[0] >= begun)]
    wrong = next((text for _, ready, text in since if not ready), None)
    if wrong is None:
        return (0.0, "") if now - begun > notice else None
    at, ready, _ = since[-1]
    return (at - begun, wrong) if ready and now - at > SETTLED_SECONDS else None


def unready_seconds(changes: Sequence[tuple[float, bool, str]], begun: float, now: float) -> float:
    """Return the seconds between `begun` and `now` in which the last change was to unreadiness."""
    ends = [when for when, _, _ in changes[1:]] + [now] * bool(changes)
    spans = [(max(when, begun), end) for (when, ready, _), end in zip(changes, ends, strict=True) if not ready]
    return sum(max(0.0, end - start) for start, end in spans)


def losses_since(
    incidents: Sequence[dict[str, Any]], since: float, ranks: Collection[int] = ()
) -> list[dict[str, Any]]:
    """Return the incidents reported after `since` in which a rank (one of `ranks`, if any) was lost.

    `since` is Unix time. A fault in the middle of an incident is reported in that incident, which began earlier.
    """
    found = []
    for each in incidents:
        lost = {*each["ranks"], *(one["rank"] for one in (each["launcher"] or {}).get("lost", ()))}
        heard = each["when"] + max((report["seconds"] for report in each["reports"]), default=0.0)
        if heard >= since - CLOCK_SECONDS and (lost & set(ranks) if ranks else lost):
            found.append(each)
    return found


class Watch:
    """Polls /readyz and stores every change. `start` and `close` it in the same event loop."""

    def __init__(self, server: Server) -> None:
        self.changes: list[tuple[float, bool, str]] = []
        self.http = httpx.AsyncClient(base_url=server.url, timeout=5.0)
        self._server = server
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            try:
                answer = await self.http.get("/readyz")
                ready, text = answer.status_code == 200, answer.text
            except httpx.HTTPError as error:
                ready, text = False, f"no answer: {type(error).__name__}"
            if not self.changes or self.changes[-1][1] != ready:
                self.changes.append((time.monotonic(), ready, text))
            await asyncio.sleep(POLL_SECONDS)

    async def close(self) -> None:
        """Stop polling."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        await self.http.aclose()

    async def ready_after(self, begun: float, *, patience: float, notice: float) -> tuple[float | None, str]:
        """Return (seconds from `begun` until lasting readiness, reason). The seconds are None if it does not come back.

        A server that is still ready after `notice` seconds was not harmed (0 seconds). The wait ends early if the
        process has ended or the fleet reports failure.
        """
        failed_since: float | None = None
        looked = begun
        while True:
            now = time.monotonic()
            if self._server.process.poll() is not None:
                return None, f"the server has ended with code {self._server.process.poll()}"
            if (ended := recovered(self.changes, begun, now, notice=notice)) is not None:
                return ended
            _, ready, text = self.changes[-1] if self.changes else (now, False, "")
            if not ready and now - looked > LOOK_SECONDS:
                looked, fleet = now, await read_json(self.http, "/v1/fleet")
                failed_since = (failed_since or now) if fleet and fleet.get("failure") else None
            given_up = failed_since is not None and now - failed_since > FAILED_SECONDS
            if given_up or now - begun > patience:
                return None, text
            await asyncio.sleep(POLL_SECONDS)

    def unready_seconds(self, begun: float, now: float) -> float:
        """Return the total seconds of unreadiness since `begun`."""
        return unready_seconds(self.changes, begun, now)

    async def incidents(self) -> list[dict[str, Any]]:
        """Return the list of /v1/fleet/incidents, the latest first."""
        page = await read_json(self.http, "/v1/fleet/incidents")
        return list(page["incidents"]) if page else []

    async def exchange_share(self) -> dict[str, float]:
        """Return the share of the ranks' step time that dispatch and combine took so far, waiting included."""
        seconds = {"dispatch": 0.0, "combine": 0.0, "step": 0.0}
        for group in await read_json(self.http, "/metrics/targets") or ():
            for target in group["targets"]:
                with contextlib.suppress(httpx.HTTPError):
                    page = (await self.http.get(f"http://{target}/metrics")).text
                    for phase in ("dispatch", "combine"):
                        pattern = rf'^moeyard_exchange_seconds_sum{{[^}}]*phase="{phase}"[^}}]*}} (\S+)'
                        seconds[phase] += sum(float(v) for v in re.findall(pattern, page, re.M))
                    steps = re.findall(r"^moeyard_step_seconds_sum\S* (\S+)", page, re.M)
                    seconds["step"] += sum(float(v) for v in steps)
        return {p: seconds[p] / seconds["step"] for p in ("dispatch", "combine")} if seconds["step"] else {}
