"""What happens when workers are lost: they are fenced, replaced, and the fleet goes on under another epoch.

One thread hears the ranks (their ends, and what survivors tell of a loss) and the router (links that are gone), and
acts on it alone. Ranks that are lost too often end the fleet: then whoever started it can start it again.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from moeyard.rank import Event, FleetError, Rank, RanksLost, Recovered, Unrecoverable, named, parts
from moeyard.restart_budget import LIMIT, WINDOW_SECONDS, RankBudgets
from moeyard.upkeep import Upkeep

log = logging.getLogger(__name__)

_LISTEN_SECONDS = 0.2
# What a rank says as it ends comes through Ray, behind the end of its connections: by 5 to 50 ms on a machine at rest.
_LAST_WORD_SECONDS = 1.0


class Recoverable(Protocol):
    """What is used of a fleet."""

    def events(self, timeout: float) -> list[Event]:
        """What ranks have told within so many seconds."""
        ...

    def end_of(self, rank: int) -> str | None:
        """How the process of a lost rank was last seen, if that is known."""
        ...

    def recover(self, dead: Collection[int], *, whole: bool) -> Recovered | None:
        """Replace ranks and go on; raises RanksLost for those to be replaced next, Unrecoverable, or FleetError when
        it is stopped.

        `whole`: all go on together, nobody takes over. None if the others serve without them already, and still do.
        """
        ...

    def resize(self) -> Recovered:
        """Go on with the number of ranks that was prepared; raises as `recover`, which then is to be called."""
        ...

    def end_resize(self) -> None:
        """End those that have left."""
        ...

    def admit(self) -> Recovered | None:
        """Go on with those that were away and are ready, if any; raises as `recover`, which then is to be called."""
        ...


@dataclass(slots=True)
class Incident:
    """One loss and what came of it: `reports` has what each surviving rank told, `lost` maps ranks to reasons.

    `ends` has how their processes were last seen. `purpose` is why nobody was lost.
    """

    began: float
    lost: dict[int, str] = field(default_factory=dict)
    ends: dict[int, str | None] = field(default_factory=dict)
    purpose: str = ""
    reports: list[dict[str, Any]] = field(default_factory=list)

    @property
    def reason(self) -> str:
        """What the ranks agreed on, or else the first that was heard."""
        if self.reports:
            return str(self.reports[0]["reason"])
        return next(iter(self.lost.values()), self.purpose)

    def facts(self, seconds: float) -> dict[str, Any]:
        """For people, as JSON."""
        lost = [{"rank": r, "reason": reason, "process": self.ends.get(r)} for r, reason in sorted(self.lost.items())]
        return {"reason": self.reason, "lost": lost, "seconds": seconds, "reports": self.reports}


class Supervisor:
    """Replaces lost ranks. Life: construct, `start`, `stop`; `lost` from any thread.

    `replace(ranks, incident)` hands the router the ranks of a new epoch, and what is to be shown of the loss.
    `give_up(reason)` is called once, when the same rank was lost `limit` times within `window` seconds; then `failure`
    is set.
    """

    def __init__(
        self,
        fleet: Recoverable,
        *,
        replace: Callable[[Sequence[Rank], dict[str, Any]], None],
        give_up: Callable[[str], None],
        limit: int = LIMIT,
        window: float = WINDOW_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        upkeep: Upkeep | None = None,
    ) -> None:
        self._upkeep = upkeep
        self.failure: str | None = None
        self._fleet, self._replace, self._clock = fleet, replace, clock
        self._give_up = give_up
        self._budgets = RankBudgets(limit, window)
        self._said: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        self._ready = False  # somebody who was away may join
        self._size: int | None = None  # of the fleet, once it was handed over
        self._away: frozenset[int] = frozenset()  # whom the router knows to be away, once it has heard
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Watch from a thread."""
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Act on nothing any more. What is going on ends when the fleet is stopped."""
        self._stopping.set()
        if self._upkeep is not None:
            self._upkeep.close("the server is stopping")

    def lost(self, rank: int, reason: str) -> None:
        """The router has lost a rank for good, whatever its process does."""
        self._said.put((rank, reason))

    def _run(self) -> None:
        try:
            while not self._stopping.is_set() and self.failure is None:
                self.turn()
        except Exception as error:  # boundary: a fleet that nobody watches any more must not look as if it were
            log.exception("the supervisor failed")
            self._end(f"{type(error).__name__}: {error}")

    def turn(self) -> None:
        """Act on what has happened within a moment."""
        incident = self.listen()
        if incident is not None:
            self.recover(incident)
        elif self._ready:
            self.admit()
        elif self._upkeep is not None and not self._away:
            self._upkeep.turn(self.restart, self.scale)

    def listen(self) -> Incident | None:
        """What has happened within a moment, if it is a loss."""
        incident = Incident(began=self._clock())
        self._hear(incident, _LISTEN_SECONDS)
        missed: dict[int, str] = {}
        while not self._said.empty():
            rank, reason = self._said.get()
            # Said before the router had heard that it is: of its successor only the fleet can know. Or it has left.
            if rank not in self._away and (self._size is None or rank < self._size):
                missed.setdefault(rank, reason)
        if missed.keys() - incident.lost.keys():
            # The router knows that it is gone. Why is what the rank itself can say.
            self._hear(incident, _LAST_WORD_SECONDS)
        incident.lost = missed | incident.lost
        return incident if incident.lost else None

    def _hear(self, incident: Incident, seconds: float) -> None:
        for event in self._fleet.events(seconds):
            self._note(incident, event)

    def _note(self, incident: Incident, event: Event) -> None:
        if event.ready:
            self._ready = True
            return
        if event.loss is None:
            incident.lost[event.rank] = event.reason
            return
        incident.reports.append(event.loss)
        for rank in event.loss["ranks"]:
            incident.lost.setdefault(rank, event.reason)

    def restart(self, rank: int) -> bool:
        """Replace a rank because somebody asked for it; True if the fleet goes on. It counts as no loss."""
        return self.recover(Incident(began=self._clock(), lost={rank: f"rank {rank} is restarted"}), asked=rank)

    def scale(self) -> bool:
        """Go on with more or fewer ranks, as was prepared; True if the fleet does.

        Raises RanksLost, why it could not, if it goes on as before.
        """
        incident = Incident(began=self._clock(), purpose="the number of workers was changed")
        try:
            recovered = self._fleet.resize()
        except RanksLost as error:
            incident.purpose, incident.lost = str(error), dict.fromkeys(error.ranks, str(error))
            if self.recover(incident):
                raise
            return False
        except Unrecoverable as error:
            self._end(str(error))
            return False
        except FleetError:
            return False  # it is being stopped
        self._hand_over(recovered, incident, planned=True)
        self._fleet.end_resize()
        return True

    def recover(self, incident: Incident, *, asked: int | None = None) -> bool:
        """Replace who is lost, and who is lost meanwhile, until the fleet goes on (True) or has to be given up.

        The loss of the one that was `asked` for is on purpose.
        """
        dead: frozenset[int] = frozenset(incident.lost)
        purpose: frozenset[int] = frozenset() if asked is None else frozenset((asked,))
        while not self._stopping.is_set():
            for rank in sorted(dead - purpose):
                end = incident.ends[rank] = self._fleet.end_of(rank)
                if (refused := self._budgets.take(rank, self._clock())) is not None:
                    also = "" if end is None else f"; {end}"
                    self._end(f"{refused}: {incident.lost[rank]}{also}")
                    return False
            if not dead:
                log.warning("going on as before: %s", incident.reason)
            elif dead == purpose:
                log.info("replacing rank %d, as it was asked for; the others will say that it is lost", asked)
            else:
                ends = "".join(
                    f"; rank {rank}: {end}" for rank, end in sorted(incident.ends.items()) if end is not None
                )
                log.warning("lost %s: %s; replacing%s", named(dead), incident.reason, ends)
            try:
                # Whoever is replaced on purpose is back in a moment: nobody takes over.
                recovered = self._fleet.recover(dead, whole=asked is not None)
            except RanksLost as error:
                if self._upkeep is not None and purpose & error.ranks:
                    self._upkeep.failed(purpose & error.ranks)
                dead, purpose = error.ranks, frozenset()
                incident.lost |= dict.fromkeys(dead, str(error))
                continue
            except Unrecoverable as error:
                self._end(f"{incident.reason}; {error}")
                return False
            except FleetError:
                return False  # it is being stopped
            if recovered is None:
                log.warning("%s starts once more; the others serve", named(dead))
            else:
                self._hand_over(recovered, incident, planned=set(incident.lost) == {asked})
            if self._upkeep is not None:
                self._upkeep.replaced(set(incident.lost) - {asked})
            return True
        return False

    def admit(self) -> None:
        """Have who was away join the others, and give them their experts back."""
        self._ready, incident = False, Incident(began=self._clock())
        try:
            recovered = self._fleet.admit()
            if recovered is not None:
                self._hand_over(recovered, incident)
        except RanksLost as error:
            incident.lost = dict.fromkeys(error.ranks, str(error))
            self.recover(incident)
        except Unrecoverable as error:
            self._end(str(error))
        except FleetError:
            return  # it is being stopped

    def _hand_over(self, recovered: Recovered, incident: Incident, *, planned: bool = False) -> None:
        """The router goes on with these ranks."""
        self._away = frozenset(rank.rank for rank in recovered.ranks if not rank.frontend)
        self._size = len(recovered.ranks)
        for rank in recovered.ranks:
            if rank.frontend:
                self._budgets.serves(rank.rank)
        # What it has noticed so far is of those that were replaced.
        while not self._said.empty():
            self._said.get()
        seconds = self._clock() - incident.began
        if not planned:
            incident.reports = list(recovered.losses)
        facts = {**incident.facts(seconds), "parts": dict(recovered.seconds)}
        self._replace(recovered.ranks, {**facts, **({"planned": True} if planned else {})})
        how = f"serves without {named(self._away)}" if self._away else "is whole again"
        level = logging.INFO if planned else logging.WARNING
        spent = f" ({parts(recovered.seconds)})" if recovered.seconds else ""
        log.log(level, "the fleet %s %.1f s after %s%s", how, seconds, incident.reason, spent)

    def _end(self, reason: str) -> None:
        self.failure = reason
        # A rank that computes, or reads cold experts, beyond the deadline in one layer looks dead to its peers.
        slow = "; if it was only slow, raise --step-deadline or lower --prefill-chunk" if "silent" in reason else ""
        log.error("the fleet has failed: %s%s", reason, slow)
        if self._upkeep is not None:
            self._upkeep.close(f"the fleet has failed: {reason}")
        self._give_up(reason)
