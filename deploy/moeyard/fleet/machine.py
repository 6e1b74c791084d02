"""The state machine of a fleet: events in, instructions out. Pure: each event carries its time.

The machine fences and replaces lost ranks, and the fleet continues in a new epoch. A rank that is lost too often fails
the fleet, so that an outer restart policy can act.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moeyard.fleet.commands import Commands
from moeyard.fleet.decisions import LIMIT, WINDOW_SECONDS, RankBudgets
from moeyard.fleet.messages import (
    Answered,
    Command,
    Event,
    Examine,
    Failed,
    FleetError,
    FleetFailed,
    HandOver,
    Instruction,
    Missed,
    RanksLost,
    RayEnded,
    Returned,
    Silent,
    StandbyReady,
    Tick,
    named,
    parts,
)
from moeyard.fleet.ranks import Ranks, Recovered, Script
from moeyard_worker.config.engine_config import EngineConfig
from moeyard_worker.config.placement import Placement

log = logging.getLogger(__name__)

# Ray delivers a rank's last error 5 to 50 ms after its connections close (measured on an idle machine).
LAST_WORD_SECONDS = 1.0


@dataclass(slots=True)
class FleetIncident:
    """One loss and its outcome.

    `lost` maps ranks to reasons, `ends` to their processes as last seen. `reports` come from survivors. `purpose`:
    the reason of an incident without a lost rank.
    """

    began: float
    lost: dict[int, str] = field(default_factory=dict)
    ends: dict[int, str | None] = field(default_factory=dict)
    purpose: str = ""
    reports: list[dict[str, Any]] = field(default_factory=list)

    @property
    def reason(self) -> str:
        """The survivors' reason, else the first reason of a lost rank, else the purpose."""
        if self.reports:
            return str(self.reports[0]["reason"])
        return next(iter(self.lost.values()), self.purpose)

    def facts(self, seconds: float, spent: Mapping[str, float]) -> dict[str, Any]:
        """Return the incident as JSON."""
        lost = [{"rank": r, "reason": reason, "process": self.ends.get(r)} for r, reason in sorted(self.lost.items())]
        return {
            "reason": self.reason,
            "lost": lost,
            "seconds": seconds,
            "reports": self.reports,
            "parts": dict(spent),
        }


class FleetMachine:
    """Recovery, restart and scaling of a fleet. Pass events to `handle`, then carry out the instructions it returns.

    `failure` is set once the fleet has failed: a rank was lost `limit` times within `window` seconds, or cannot be
    replaced.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        placement: Placement,
        takeover: str = "auto",
        limit: int = LIMIT,
        window: float = WINDOW_SECONDS,
        standby: bool = False,
        fixed_ports: bool = False,
        seats: bool = False,
        first_epoch: int = 0,
    ) -> None:
        """Create the machine of a fleet that has not started.

        `standby`: spare processes have imported everything. `fixed_ports`: two processes of a rank cannot run at once.
        `seats`: Ray assigns the GPUs. The first epoch is `first_epoch + 1`.
        """
        self._out: list[Instruction] = []
        emit = self._out.append
        self.ranks = Ranks(
            config, placement=placement, takeover=takeover, seats=seats, first_epoch=first_epoch, emit=emit
        )
        self.commands = Commands(
            self.ranks,
            emit=emit,
            recover=self._restart,
            switch=self._switch,
            update=self._update,
            sleep=self._sleep,
            # A GPU cannot hold two processes of a rank.
            beside=config.device == "cpu" and not fixed_ports,
            standby=standby,
        )
        self.failure: str | None = None
        self._budgets = RankBudgets(limit, window)
        self._launched = self._all_ended = False
        self._missed: dict[int, str] = {}
        self._weights = self.ranks.weights  # the weights that routers know of
        self._last_word = 0.0
        self._main: Script[Any] | None = self._launch()  # the launch, a recovery or an admission
        self._asker: Script[Any] | None = None  # the script that waits for Answered: the main one or a command's

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Handle an event that happened at `now` (seconds). Carry out the returned instructions in order."""
        self.ranks.now = now
        if isinstance(event, Returned | Failed):
            self.ranks.end_call(event)
        elif isinstance(event, Silent):
            self.ranks.silent(event.processes, event.seconds)
        elif isinstance(event, Missed):
            self._miss(event)
        elif isinstance(event, RayEnded):
            self._ray_ended(event)
        elif isinstance(event, StandbyReady):
            self.commands.standby_is_ready(event.problem)
        elif isinstance(event, Command):
            self.commands.take(event)
        self._run(event)
        out = self._out.copy()
        self._out.clear()
        return out

    def validate(self) -> None:
        """Assert all invariants."""
        self.ranks.validate()
        self.commands.validate()
        assert self._main is None or self._launched or not self.ranks.runs, "the first script is the launch"
        assert not self._out, "all instructions were given"
        assert self.failure is None or (self._asker is None and self.commands.task is None), "a failed fleet is at rest"

    def _miss(self, event: Missed) -> None:
        """Note a rank that a router misses. Ignore ranks that are away, have left or already recover."""
        if self.ranks.forming or event.rank >= self.ranks.size or event.rank in {p.rank for p in self.ranks.away}:
            return
        if not self._missed:
            self._last_word = self.ranks.now + LAST_WORD_SECONDS
        self._missed.setdefault(event.rank, event.reason)

    def _ray_ended(self, event: RayEnded) -> None:
        if self._launched and not event.all_ranks:
            log.error(
                "Ray's %s has ended: serving goes on; when a rank is lost, Ray and all ranks are started again",
                event.daemon,
            )
        self.ranks.ray_ended, self._all_ended = event.daemon, event.all_ranks

    def _run(self, event: Event) -> None:
        """Resume scripts until all wait. Losses go before commands, which advance at ticks only."""
        resumed: list[Script[Any]] = []
        if isinstance(event, Answered) and self._asker is not None:
            script, self._asker = self._asker, None
            resumed.append(script)
            self._resume(script, event.value)
        while self.failure is None and self._asker is None:
            if self._main is None and self._launched and not self.ranks.forming:
                self.ranks.tend()
                self._main = self._urgent()
            due = self.ranks.forming or (isinstance(event, Tick) and not self.ranks.away)
            command = self.commands.script if due and self.commands.task is not None else None
            turn: Script[Any] | None = self._main or command
            if turn is None or turn in resumed:
                return
            resumed.append(turn)
            self._resume(turn, None)

    def _resume(self, script: Script[Any], value: Any) -> None:
        question = None
        if script is self._main:
            try:
                question = script.send(value)
            except StopIteration:
                self._main = None
        else:
            question = self.commands.resume(value)
        if question is not None:
            self._out.append(question)
            self._asker = script

    def _urgent(self) -> Script[Any] | None:
        """Return the script that handles losses, else the one that admits ranks that are ready, else None."""
        incident = FleetIncident(began=self.ranks.now)
        incident.lost, incident.reports = self.ranks.losses()
        if self.ranks.ray_ended is not None and self._all_ended:
            reason = f"Ray's {self.ranks.ray_ended} has ended, and all ranks with it"
            incident.lost = dict.fromkeys(range(self.ranks.size), reason)
        if incident.lost or self.ranks.now >= self._last_word:
            # A router knows only that the rank is gone. The wait gives the rank's own error time to arrive.
            incident.lost, self._missed = self._missed | incident.lost, {}
        if incident.lost or incident.reports:
            # An epoch can end without a lost rank. It needs a successor, too.
            return self._recover(incident)
        return self._admit() if self.ranks.ready else None

    def _launch(self) -> Script[None]:
        self.ranks.forming = True
        try:
            recovered = yield from self.ranks.launch()
        except FleetError as error:
            self.failure = str(error)
            self.commands.close(self.failure)
            self._out.append(FleetFailed(self.failure, getattr(error, "exit_code", 2)))
            return
        finally:
            self.ranks.forming = False
        self._launched = True
        self._out.append(HandOver(recovered.ranks, frozenset(), None))

    def _restart(self, rank: int) -> Script[bool]:
        """Replace a rank on purpose and return whether the fleet continues. The budget does not count it."""
        incident = FleetIncident(began=self.ranks.now, lost={rank: f"rank {rank} is restarted"})
        return self._recover(incident, restarted=rank)

    def _recover(self, incident: FleetIncident, *, restarted: int | None = None) -> Script[bool]:
        """Replace lost ranks, also those lost meanwhile, until the fleet continues (True) or has failed (False).

        `restarted`: the rank that a restart command replaces on purpose.
        """
        dead = frozenset(incident.lost)
        purpose: frozenset[int] = frozenset() if restarted is None else frozenset((restarted,))
        self.ranks.forming = True
        try:
            while True:
                for rank in sorted(dead - purpose):
                    known = self.ranks.members
                    end = incident.ends[rank] = (yield Examine(known[rank].number)) if known else None
                    if (refused := self._budgets.take(rank, self.ranks.now)) is not None:
                        self._give_up(f"{refused}: {incident.lost[rank]}{'' if end is None else f'; {end}'}")
                        return False
                self._log_loss(incident, dead, restarted if dead == purpose else None)
                try:
                    # A restarted rank is back soon, so no other rank takes over its experts.
                    recovered = yield from self.ranks.replace(dead, whole=restarted is not None)
                    break
                except RanksLost as error:
                    for rank in purpose & error.ranks:
                        self.commands.failed(rank)
                    dead, purpose = error.ranks, frozenset()
                    incident.lost |= dict.fromkeys(dead, str(error))
                except FleetError as error:
                    self._give_up(f"{incident.reason}; {error}")
                    return False
        finally:
            self.ranks.forming = False
        if recovered is None:
            log.warning("%s starts once more; the others serve", named(dead))
        else:
            self._hand_over(recovered, incident, planned=bool(purpose))
        if self.commands.task is not None:
            self.commands.replaced(frozenset(incident.lost) - {restarted})
        return True

    def _log_loss(self, incident: FleetIncident, dead: frozenset[int], restarted: int | None) -> None:
        if restarted is not None:
            log.info("replacing rank %d on request; the other ranks will report it as lost", restarted)
        elif not dead:
            log.warning("going on as before: %s", incident.reason)
        else:
            ends = "".join(f"; rank {rank}: {end}" for rank, end in sorted(incident.ends.items()) if end is not None)
            log.warning("lost %s: %s; replacing%s", named(dead), incident.reason, ends)

    def _admit(self) -> Script[None]:
        """Admit ranks that were away, and give them their experts back."""
        incident = FleetIncident(began=self.ranks.now)
        self.ranks.forming = True
        try:
            recovered = yield from self.ranks.admit()
        except RanksLost as error:
            incident.lost = dict.fromkeys(error.ranks, str(error))
            yield from self._recover(incident)
            return
        except FleetError as error:
            self._give_up(str(error))
            return
        finally:
            self.ranks.forming = False
        self._hand_over(recovered, incident)

    def _switch(self) -> Script[bool]:
        """Change to the prepared number of ranks and return whether the fleet continues.

        Raises RanksLost with the reason if the fleet continues with its old size.
        """
        lost = yield from self._change(self.ranks.resize(), "the number of workers was changed")
        if self.failure is not None:
            return False
        if lost is not None:
            raise lost
        self.ranks.end_resize()
        return True

    def _update(self) -> Script[bool]:
        """Change to the weights that all ranks have read. Return whether the fleet continues, with these weights."""
        yield from self._change(self.ranks.update(), "the weights were updated")
        return self.failure is None

    def _sleep(self, level: int) -> Script[bool]:
        """Fall asleep at this level, or wake up (0). Return whether the fleet continues, in this state."""
        what = f"the server fell asleep (level {level})" if level else "the server woke up"
        yield from self._change(self.ranks.sleep(level), what)
        return self.failure is None

    def _change(self, change: Script[Recovered], purpose: str) -> Script[RanksLost | None]:
        """Begin an epoch by `change`, or replace the ranks that are lost meanwhile. Return that loss, if any."""
        incident = FleetIncident(began=self.ranks.now, purpose=purpose)
        self.ranks.forming = True
        try:
            recovered = yield from change
        except RanksLost as error:
            incident.purpose, incident.lost = str(error), dict.fromkeys(error.ranks, str(error))
            yield from self._recover(incident)
            return error
        except FleetError as error:
            self._give_up(str(error))
            return None
        finally:
            self.ranks.forming = False
        self._hand_over(recovered, incident, planned=True)
        return None

    def _hand_over(self, recovered: Recovered, incident: FleetIncident, *, planned: bool = False) -> None:
        """Give routers the ranks of the new epoch, and log the outcome."""
        away = [rank.rank for rank in recovered.ranks if not rank.frontend]
        for rank in recovered.ranks:
            if rank.frontend:
                self._budgets.serves(rank.rank)
        # These reports concern processes that have been replaced.
        self._missed = {}
        seconds = self.ranks.now - incident.began
        incident.reports = incident.reports if planned else list(recovered.losses)
        facts = incident.facts(seconds, recovered.seconds) | ({"planned": True} if planned else {})
        if self._weights != self.ranks.weights:
            self._weights, facts["weight_version"] = self.ranks.weights, self.ranks.weights.version
        self._out.append(HandOver(recovered.ranks, self.commands.drained, facts))
        how = f"serves without {named(away)}" if away else "is whole again"
        spent = f" ({parts(recovered.seconds)})" if recovered.seconds else ""
        level = logging.INFO if planned else logging.WARNING
        log.log(level, "the fleet %s %.1f s after %s%s", how, seconds, incident.reason, spent)

    def _give_up(self, reason: str) -> None:
        self.failure = reason
        # A rank that needs longer than the deadline for one layer (cold experts, say) looks dead to its peers.
        slow = "; if it was only slow, raise --step-deadline or lower --prefill-chunk" if "silent" in reason else ""
        log.error("the fleet has failed: %s%s", reason, slow)
        self.commands.close(f"the fleet has failed: {reason}")
        self._out.append(FleetFailed(reason, 1))
