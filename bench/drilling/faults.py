"""The faults of a drill and their moments: a seeded plan, and moments as far as a client can choose them."""

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from drilling.load import Exchange, Load

KINDS = ("kill", "stop", "kill-two", "kill-in-recovery", "router", "exception", "restart", "scale", "oom")
MOMENTS = ("prefill", "decode", "exchange", "idle")
# One round of a full drill: (fault, moment, count).
ROUND = (
    *(("kill", "prefill", 4), ("kill", "decode", 4), ("kill", "exchange", 5), ("kill", "idle", 2)),
    *(("kill-two", "decode", 2), ("kill-in-recovery", "decode", 2), ("stop", "decode", 1)),
)
# Durations of a first token and of a step until the drill has measured some.
GUESSED_TTFT, GUESSED_STEP = 0.5, 0.1


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault, and the phase of the fleet's work in which it begins."""

    kind: str
    moment: str


def plan(seed: int, count: int, *, kind: str | None = None) -> list[Fault]:
    """Plan `count` faults, of every kind in the proportions of ROUND, or of one kind with each moment in turn."""
    rng = random.Random(seed)
    if kind is None:
        one_round = [Fault(what, moment) for what, moment, times in ROUND for _ in range(times)]
    else:
        one_round = [Fault(kind, moment) for moment in MOMENTS]
    faults: list[Fault] = []
    while len(faults) < count:
        faults += rng.sample(one_round, len(one_round))
    return faults[:count]


class Moments:
    """Waits for the moment of a fault, and describes how long after its condition the caller continues.

    A client cannot see the phase of a step. `exchange` is therefore a uniformly random moment of one step, counted from
    the arrival of the previous step's tokens. The chance that it falls inside a dispatch or combine is their share of
    the step, which the workers' histograms give (`exchange_share`).
    """

    def __init__(self, load: Load, rng: random.Random) -> None:
        self._load, self._rng = load, rng

    async def wait(self, moment: str, seconds: float) -> str:
        """Return at a random instant of `moment`, at most `seconds` later. The result describes that instant."""
        deadline = time.monotonic() + seconds
        if moment == "idle":
            drained = await self._load.pause(seconds)
            return await self._later("idle" if drained else "nearly idle", self._rng.uniform(0.2, 1.0))
        if moment == "prefill":
            begun = time.monotonic()
            while time.monotonic() < deadline and not any(
                exchange.ask.name.startswith("fresh") and exchange.begun >= begun for exchange in self._load.inflight
            ):
                await self._load.changed(0.5)
            return await self._later("prefill", self._rng.uniform(0, 0.8) * usual_ttft(self._load.history))
        while time.monotonic() < deadline and not self._mostly_decoding():
            await asyncio.sleep(0.02)
        if moment == "decode":
            return await self._later("decode", self._rng.uniform(0, 0.3))
        before = count_arrivals(self._load.inflight)
        while time.monotonic() < deadline and count_arrivals(self._load.inflight) <= before:
            await asyncio.sleep(0.001)
        return await self._later("step", self._rng.uniform(0, 1) * usual_step(self._load.history))

    def _mostly_decoding(self) -> bool:
        streams = [e for e in self._load.inflight if e.ask.body.get("stream")]
        return bool(streams) and 2 * sum(bool(e.arrivals) for e in streams) >= len(streams)

    async def _later(self, what: str, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return f"{what} +{1000 * seconds:.0f} ms"


def usual_ttft(history: Sequence[Exchange]) -> float:
    """Return the median seconds to the first token of the latest long prompts."""
    times = [e.arrivals[0] - e.begun for e in history[-200:] if e.arrivals and e.ask.name.startswith("fresh")]
    return statistics.median(times) if times else GUESSED_TTFT


def usual_step(history: Sequence[Exchange]) -> float:
    """Return the median seconds per token of the latest streams of one sequence: one step each."""
    # Use the mean of each stream, because a late client reads several tokens at once.
    streams = [e for e in history[-100:] if len(e.arrivals) > 4 and e.ask.body.get("n", 1) == 1]
    means = [(e.arrivals[-1] - e.arrivals[0]) / (len(e.arrivals) - 1) for e in streams]
    return statistics.median(means) if means else GUESSED_STEP


def count_arrivals(exchanges: Iterable[Exchange]) -> int:
    """Count the events with tokens that have arrived."""
    return sum(len(exchange.arrivals) for exchange in exchanges)


def silence(after: float, arrivals: Iterable[float], *, grace: float = 1.0) -> tuple[float, float] | None:
    """Return (begin, end) of the longest gap between tokens that began within `grace` seconds of `after`.

    None means that no token came. Tokens of steps that ended before the fault still arrive for some milliseconds, so
    the first token after it is not the first one of the recovered fleet.
    """
    times = [after, *sorted(at for at in arrivals if at > after)]
    gaps = [(b - a, a, b) for a, b in itertools.pairwise(times) if a <= after + grace]
    if not gaps:
        return None
    _, begin, end = max(gaps)
    return begin, end
