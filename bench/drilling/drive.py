"""One fault at a time: its moment, its signals, and its effect on the fleet and on every request in flight."""

import asyncio
import contextlib
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil
from drilling.asks import FIRST_ID, Ask
from drilling.faults import Fault, Moments, silence
from drilling.load import Client, Exchange, Load
from drilling.server import Server, read_json
from drilling.short_memory import short_of_memory
from drilling.streams import Answer, Difference, compare
from drilling.watch import SETTLED_SECONDS, Watch, losses_since

# A stopped rank that still exists is woken after this time.
STOPPED_SECONDS = 20.0
# A request may take as long as the recovery that it waited for, plus its own tokens.
END_SECONDS = 120.0
# Peers notice a stopped rank at its step deadline, and a killed one at once.
NOTICE_SECONDS = 15.0
# A rank that computes allocates memory within a step.
STARVE_SECONDS = 10.0
# Ray's own processes notice the end of their driver half a minute later. Workers end at once.
ORPHAN_SECONDS = 75.0
# Faults in which the launcher itself ends ranks, so that no incident reports a loss.
ASKED = ("router", "restart", "scale")


@dataclass(slots=True, kw_only=True)
class Outcome:
    """The effect of a fault. Seconds count from its last signal; None: it never came.

    `ranks` were hit. `missed` counts signals without a target. `incident` is the server's own record.
    """

    number: int
    fault: str
    moment: str
    ranks: list[int] = field(default_factory=list)
    inflight: int = 0
    affected: int = 0
    failed: int = 0
    lost: int = 0
    repeated: int = 0
    different: int = 0
    output_seconds: float | None = None
    ready_seconds: float | None = None
    silence_seconds: float | None = None
    cause: str = ""
    note: str = ""
    errors: list[str] = field(default_factory=list)
    missed: int = 0
    incident: dict[str, Any] = field(default_factory=dict)

    @property
    def survived(self) -> bool:
        """Whether the fault happened, the fleet is whole again, and no request noticed."""
        # A killed router also cuts its connections. Then remains and later answers count.
        failed = 0 if self.fault == "router" else self.failed
        harmed = failed or self.lost or self.repeated or self.different
        return self.happened and self.ready_seconds is not None and not harmed

    @property
    def happened(self) -> bool:
        """Whether every target was hit and the server noticed. A fault that missed its target is not survived."""
        if self.fault in ASKED:
            return self.fault == "router" or bool(self.ranks)
        hit = self.fault == "exception" or (bool(self.ranks) and not self.missed)
        return hit and bool(self.incident)


def hit(outcome: Outcome, rank: int, process: psutil.Process, *, stop: bool = False) -> None:
    """Stop or kill the process of a rank if it still exists."""
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            raise psutil.ZombieProcess(process.pid)
        process.suspend() if stop else process.kill()
    except psutil.NoSuchProcess:
        outcome.missed += 1
        outcome.note = f"rank {rank} had ended before the hit"
    else:
        outcome.ranks.append(rank)


class Drill:
    """Injects faults into a server under load. `known` are its undisturbed answers."""

    def __init__(
        self,
        server: Server,
        client: Client,
        *,
        load: Load,
        watch: Watch,
        known: dict[str, Exchange],
        rng: random.Random,
        patience: float,
        poison: int | None = None,
    ) -> None:
        self._server, self._client, self._load, self._watch = server, client, load, watch
        self._known, self._rng, self._patience, self._poison = known, rng, patience, poison
        self._moments = Moments(load, rng)
        self._charged: set[Exchange] = set()
        self._lost_at = float("inf")  # the time from which there is no fleet
        self._recovery = 4.0  # duration of the last recovery, for a fault in the middle of the next one

    async def inflict(self, number: int, fault: Fault) -> Outcome:
        """Inject one fault and follow it to the end of every request that it met."""
        fleet = await self._whole_fleet()
        ranks = self._server.ranks(fleet) if fleet else {}
        order = self._rng.sample(sorted(ranks), len(ranks))
        outcome = Outcome(number=number, fault=fault.kind, moment=await self._moments.wait(fault.moment, 30.0))
        outcome.inflight = len(self._load.inflight)
        first, since = time.monotonic(), time.time()
        if fault.kind == "router":
            await self._kill_router(outcome)
            return outcome
        if fault.kind in ("restart", "scale"):
            await self._ask(outcome, fault.kind, order)
            return outcome
        poisoned = None
        if fault.kind == "exception":
            poisoned = asyncio.create_task(self._client.run(exchange := Exchange(self._bad_ask(), first)))
        else:
            exchange = None
            await self._signal(outcome, fault.kind, [(rank, ranks[rank]) for rank in order])
        last = time.monotonic() if fault.kind != "exception" else first
        stopped = [ranks[rank] for rank in outcome.ranks] if fault.kind == "stop" else []
        woken = asyncio.create_task(self._wake(stopped[0])) if stopped else None
        if fault.moment == "idle":
            await asyncio.sleep(0.3)
            self._load.resume()
        outcome.ready_seconds, outcome.cause = await self._watch.ready_after(
            last, patience=self._patience, notice=NOTICE_SECONDS
        )
        if woken is not None:
            outcome.note = await woken
        # Requests that were in flight at any time since the fault.
        met = [e for e in self._load.history if e.ended is None or e.ended > first]
        whole = await self._load.ended(met, END_SECONDS if outcome.ready_seconds is not None else 10.0)
        if not whole:
            outcome.note = f"{sum(e.ended is None for e in met)} requests never ended"
        if poisoned is not None and exchange is not None:
            await poisoned
            outcome.note = f"the request at fault: {exchange.answer.error or 'answered in spite of the fault'}"
            outcome.failed += exchange.answer.error is None
        if outcome.ready_seconds is None:
            self._lost_at = first
        await self._judge(outcome, met)
        self._time(outcome, first=first, last=last, met=met)
        if outcome.ready_seconds:
            self._recovery = outcome.ready_seconds
        # Ranks know where in a step the fault came; the router only knows that a connection broke. The latest incident
        # may be the return of experts to a rank.
        if losses := losses_since(await self._watch.incidents(), since, outcome.ranks):
            outcome.incident = losses[0]
            if outcome.ready_seconds is not None:
                outcome.cause = str((outcome.incident["launcher"] or outcome.incident)["reason"])
            if fault.kind == "oom" and outcome.incident["launcher"]:
                outcome.note = "; ".join(str(lost["process"]) for lost in outcome.incident["launcher"]["lost"])
        elif outcome.ranks:
            outcome.note = "; ".join(part for part in (outcome.note, "no incident reports it") if part)
        return outcome

    async def _whole_fleet(self) -> dict[str, Any] | None:
        """Return /v1/fleet when all ranks are present, or after END_SECONDS."""
        limit = time.monotonic() + END_SECONDS
        while True:
            fleet = await read_json(self._watch.http, "/v1/fleet")
            if not fleet or all(worker["endpoint"] for worker in fleet["workers"]) or time.monotonic() > limit:
                return fleet
            await asyncio.sleep(0.1)

    async def _ask(self, outcome: Outcome, name: str, order: Sequence[int]) -> None:
        """Drain and restart one rank or all of them, or scale up by one or two and back.

        The result counts the seconds without a token, and the seconds in which the server was not ready.
        """
        first, seconds = time.monotonic(), self._rng.uniform(0, 2)
        if name == "restart":
            outcome.ranks = sorted(order) if self._rng.random() < 0.3 else list(order[:1])
            commands = [["--worker", str(outcome.ranks[0])] if len(outcome.ranks) == 1 else []]
        else:
            outcome.ranks = [len(order) + i for i in range(self._rng.randint(1, 2))]
            commands = [[str(outcome.ranks[-1] + 1)], [str(len(order))]]
        if outcome.moment.startswith(("idle", "nearly")):
            self._load.resume()
        code, said = 0, ""
        for words in commands:
            if not code:
                code, said = await self._server.command(name, "--drain-timeout", f"{seconds:.2f}", *words)
        outcome.note = f"drained for {seconds:.1f} s at most"
        last = time.monotonic()
        outcome.ready_seconds, outcome.cause = await self._watch.ready_after(
            last, patience=self._patience, notice=SETTLED_SECONDS
        )
        met = [e for e in self._load.history if e.ended is None or e.ended > first]
        if not await self._load.ended(met, END_SECONDS if outcome.ready_seconds is not None else 10.0):
            outcome.note = f"{sum(e.ended is None for e in met)} requests never ended"
        await self._judge(outcome, met)
        if code:
            outcome.failed += 1
            outcome.errors.append(f"moeyard {name} ended with code {code}: {said}")
        if outcome.ready_seconds is None:
            self._lost_at = first
            return
        outcome.ready_seconds = self._watch.unready_seconds(first, time.monotonic())
        outcome.ready_seconds /= len(outcome.ranks) if name == "restart" else len(commands)
        quiet = silence(first, [at for e in met for at in e.arrivals], grace=last - first)
        if quiet is not None:
            outcome.output_seconds = outcome.silence_seconds = quiet[1] - quiet[0]
        outcome.cause = said

    async def _signal(self, outcome: Outcome, kind: str, victims: Sequence[tuple[int, psutil.Process]]) -> None:
        """Stop or kill the first of `victims`, and a second one at once or during the first one's recovery."""
        if not victims:
            outcome.missed += 1
            outcome.note = "there was no worker to hit"
            return
        (rank, process), *others = victims
        if kind == "oom":
            outcome.ranks.append(rank)
            await self._starve(outcome, process)
            return
        known = {each.pid for _, each in victims}
        waiting = set[int]()
        if kind == "kill-in-recovery":
            # With --standby one process has been waiting and takes the place. Another is started for the next loss.
            waiting = {each.pid for each in self._server.rank_processes()} - known
        hit(outcome, rank, process, stop=kind == "stop")
        if kind == "kill-two" and others:
            hit(outcome, *others[0])
        elif kind == "kill-in-recovery":
            pause = self._rng.uniform(0.1, 0.9) * self._recovery
            await asyncio.sleep(pause)
            fresh = [p for p in self._server.rank_processes() if p.pid not in known]
            fresh.sort(key=lambda each: each.pid not in waiting)
            # Hit the replacement, or a rank that has survived so far.
            second = (rank, fresh[0]) if fresh and (not others or self._rng.random() < 0.5) else (others or victims)[0]
            outcome.moment += f", again +{1000 * pause:.0f} ms"
            hit(outcome, *second)

    async def _starve(self, outcome: Outcome, process: psutil.Process) -> None:
        """Let the kernel kill a process when it next allocates memory."""
        with short_of_memory(process.pid):
            deadline = time.monotonic() + STARVE_SECONDS
            # The control group can be removed only after the process is reaped.
            while process.is_running() and time.monotonic() < deadline:
                await asyncio.sleep(0.01)

    async def _wake(self, process: psutil.Process) -> str:
        """Continue a stopped process after a while if it still exists."""
        deadline = time.monotonic() + STOPPED_SECONDS
        while time.monotonic() < deadline:
            if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                return "fenced before it was continued"
            await asyncio.sleep(0.1)
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()
        # Give it time for the harm that it must not do.
        await asyncio.sleep(3.0)
        return "woken"

    def _bad_ask(self) -> Ask:
        assert self._poison is not None, "an exception is drilled with a checkpoint that has a token of NaN"
        prompt = [FIRST_ID, FIRST_ID + 1, self._poison]
        return Ask("poison", "/v1/completions", {"prompt": prompt, "max_tokens": 4, "stream": True})

    async def _judge(self, outcome: Outcome, met: Sequence[Exchange]) -> None:
        """Count failures and differences among the requests that the fault met."""
        outcome.affected = len(met)
        self._charged.update(met)
        expected = await self._expected([e for e in met if e.ended is not None])
        total = Difference()
        for exchange in met:
            if exchange.ended is None or exchange.answer.error is not None:
                outcome.failed += 1
                error = exchange.answer.error or "never ended"
                outcome.errors.append(f"{exchange.ask.name}: {error}")
            if exchange.ended is not None and (reference := expected.get(exchange.ask.name)) is not None:
                total += (found := compare(reference, exchange.answer))
                if found:
                    outcome.errors.append(f"{exchange.ask.name}: {found}")
        outcome.lost, outcome.repeated, outcome.different = total.lost, total.repeated, total.different

    async def _expected(self, exchanges: Sequence[Exchange]) -> dict[str, Answer]:
        """Return references by name. New prompts are sent again to the recovered fleet."""
        found = {e.ask.name: self._known[e.ask.name].answer for e in exchanges if e.ask.name in self._known}
        again = [Exchange(e.ask, time.monotonic()) for e in exchanges if e.ask.name not in self._known]
        await asyncio.gather(*(self._client.run(exchange) for exchange in again))
        return found | {e.ask.name: e.answer for e in again if e.answer.error is None}

    def _time(self, outcome: Outcome, *, first: float, last: float, met: Sequence[Exchange]) -> None:
        carried = [e for e in met if e.begun < last]
        quiet = silence(last, [at for e in carried or met for at in e.arrivals])
        if quiet is not None:
            outcome.output_seconds = quiet[1] - last
            outcome.silence_seconds = max(quiet[1] - first, quiet[1] - quiet[0])

    async def _kill_router(self, outcome: Outcome) -> None:
        """Kill the launcher. Its processes must end by themselves, and a new one must give the same answers."""
        cut, first = self._load.inflight, time.monotonic()
        self._charged.update(cut)
        self._server.process.kill()
        self._server.process.wait()
        await self._load.pause(END_SECONDS)
        outcome.affected = outcome.failed = len(cut)
        ranks_ended: float | None = None
        while (left := self._server.processes()) and time.monotonic() - first < ORPHAN_SECONDS:
            if ranks_ended is None and not self._server.rank_processes():
                ranks_ended = time.monotonic() - first
            await asyncio.sleep(0.2)
        workers = len(self._server.rank_processes())
        outcome.note = f"nothing left after {time.monotonic() - first:.1f} s, ranks after {ranks_ended or 0.0:.1f} s"
        if left or self._server.shared_left():
            outcome.note = f"left: {len(left)} processes, {workers} of them ranks; {self._server.shared_left()}"
        self._server.kill()
        self._server.begin()
        await asyncio.to_thread(self._server.wait_ready, self._patience + 60.0)
        outcome.ready_seconds = time.monotonic() - first
        again = [Exchange(e.ask, time.monotonic()) for e in list(self._known.values())[:8]]
        await asyncio.gather(*(self._client.run(exchange) for exchange in again))
        self._charged.update(e for e in self._load.history if e.ended is None or e.ended > first)
        outcome.different = sum(bool(compare(self._known[e.ask.name].answer, e.answer)) for e in again)
        outcome.different += bool(left) + bool(self._server.shared_left())
        self._load.resume()

    def beyond(self) -> int:
        """Count wrong answers that no fault explains."""
        return sum(
            e.answer.error is not None
            or (e.ask.name in self._known and bool(compare(self._known[e.ask.name].answer, e.answer)))
            for e in self._load.history
            if e.ended is not None and e.ended < self._lost_at and e not in self._charged
        )
