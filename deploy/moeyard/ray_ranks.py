"""The actors of all ranks: made, taken through a worker's life, listened to, fenced off and replaced.

An epoch is the life of one mesh. When ranks are lost the others keep their processes and all that they hold: the dead
ones get new actors, every rank binds a mesh of the next epoch, and all go on together. Whatever fails on the way names
ranks (`RanksLost`), and `recover` may be called again with these: it goes on with what is sound.
"""

import contextlib
import dataclasses
import os
import secrets
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import psutil
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from moeyard.rank import Event, Rank, RanksLost, Recovered
from moeyard.ray_errors import first_line
from moeyard.vitals import Vitals
from moeyard_worker.config.engine_config import EngineConfig

Progress = Callable[[int, int], None]

PROGRESS_SECONDS = 0.2
STOP_SECONDS = 3.0
# What a rank that lives may take for a call, beyond the step deadline: its host may be busy starting another.
CALL_SECONDS = 15.0
MEET_SECONDS = 20.0
REMEET_SECONDS = 5.0


@dataclass(slots=True)
class _Member:
    """A rank's actor, and how far it has come: `setup` and `report` are what those calls returned.

    `setting_up` is the call that will, once it was made, and `epoch` that of the mesh it binds. `wait` is the call that
    returns when it ends or loses a peer, and `loss` what it then told, until it rejoins.
    """

    actor: Any
    setting_up: Any = None
    epoch: int = 0
    setup: dict[str, Any] | None = None
    report: dict[str, Any] | None = None
    started: bool = False
    wait: Any = None
    loss: dict[str, Any] | None = None


class RayRanks:
    """Owner of the actors. `make(rank)` makes one in its place; `spec(config, rank, epoch)` is what its setup is told.

    `check` is called between calls of Ray and ends what is going on by an exception.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        make: Callable[[int], Any],
        spec: Callable[[EngineConfig, int, int], dict[str, Any]],
    ) -> None:
        self.check: Callable[[], None] = lambda: None
        self._config = config
        self._make = make
        self._spec = spec
        self._members: list[_Member] = []
        self._reports: list[dict[str, Any]] = []  # of the first start
        self._vitals = Vitals()
        self._losses: dict[int, dict[str, Any]] = {}  # what was told of the epoch before, by rank

    def launch(self, progress: Progress) -> list[Rank]:
        """Make all actors and take them up to their first step. Raises RanksLost naming the first rank at fault."""
        self._members = [_Member(self._make(rank)) for rank in range(self._config.num_workers)]
        ranks = self._begin_epoch(progress, meet=MEET_SECONDS)
        self._reports = [rank.report for rank in ranks]
        return ranks

    def events(self, timeout: float) -> list[Event]:
        """What ranks have told within `timeout` seconds, at the latest: each its end, or the loss of a peer."""
        self._vitals.look(_setup(m)["pid"] for m in self._members if _is_here(m))
        waits = {m.wait: rank for rank, m in enumerate(self._members) if m.wait is not None}
        if not waits:
            time.sleep(timeout)
            return []
        done, _ = ray.wait(list(waits), num_returns=1, timeout=timeout)
        return [self._event(waits[ref]) for ref in done]

    def _event(self, rank: int) -> Event:
        member = self._members[rank]
        ref, member.wait = member.wait, None
        try:
            member.loss = ray.get(ref)
        except RayTaskError as error:
            return Event(rank=rank, reason=first_line(error.cause or error))
        except RayActorError:
            return Event(rank=rank, reason=f"the process of rank {rank} has ended")
        except RayError as error:
            return Event(rank=rank, reason=first_line(error))
        if member.loss is None:
            return Event(rank=rank, reason="it stopped")
        return Event(rank=rank, reason=member.loss["reason"], loss=member.loss)

    def recover(self, dead: Collection[int]) -> Recovered:
        """New actors for `dead`, whatever these do, and another epoch for all. Raises RanksLost: call it again."""
        for rank in dead:
            self.fence(rank)
            self._members[rank] = _Member(self._make(rank))
        self._losses = {}
        ranks = self._begin_epoch(lambda done, total: None, meet=REMEET_SECONDS)
        return Recovered(ranks=tuple(ranks), losses=tuple(self._losses.values()))

    def end_of(self, rank: int) -> str | None:
        """How the process of a lost rank was last seen; None where it is on another host."""
        member = self._members[rank]
        return self._vitals.describe(_setup(member)["pid"]) if _is_here(member) else None

    def fence(self, rank: int) -> None:
        """End a rank's process, also one that is stopped and hears nothing: when it wakes it must harm nobody."""
        member = self._members[rank]
        ray.kill(member.actor)
        setup = member.setup
        if setup is None:
            return
        if _is_here(member):
            kill_process(setup["pid"], setup["began"])
        else:
            there = NodeAffinitySchedulingStrategy(setup["node"], soft=False)
            remote = ray.remote(num_cpus=0, scheduling_strategy=there)(kill_process)
            remote.remote(setup["pid"], setup["began"])

    def _begin_epoch(self, progress: Progress, *, meet: float) -> list[Rank]:
        """Take every member from where it is to its first step in a new epoch."""
        members, epoch = self._members, secrets.randbits(31)
        patience = self._config.step_deadline + CALL_SECONDS
        for rank, member in _where(members, _is_new):
            if member.setting_up is None:
                member.setting_up = member.actor.setup.remote(self._spec(self._sized(rank), rank, epoch))
                member.epoch = epoch
        new = {r: m.setting_up for r, m in _where(members, _is_new)}
        # A survivor may still be in its step, and binds when it has found out.
        self._hear_losses(patience)
        old = {r: m.actor.rebind.remote(epoch) for r, m in _where(members, lambda m: not _is_new(m))}
        self._call(old, self._set_up, timeout=patience)
        self._call(new, self._set_up)
        # Those that were being set up while another epoch began.
        late = {r: members[r].actor.rebind.remote(epoch) for r in new if members[r].epoch != epoch}
        self._call(late, self._set_up, timeout=patience)
        mesh = [_setup(m)["mesh"] for m in members]
        self._connect([m.actor.connect.remote(mesh, meet) for m in members], meet + patience)
        unloaded = [(r, m) for r, m in enumerate(members) if m.report is None]
        per_node = Counter(_setup(m)["node"] for _, m in unloaded)
        loads = {r: m.actor.load.remote(per_node[_setup(m)["node"]]) for r, m in unloaded}
        self._follow(loads, progress)
        self._call(loads, self._loaded)
        step = max((m.loss["steps"] for m in members if m.loss is not None), default=0)
        begun = {r: (m.actor.rejoin if m.started else m.actor.start).remote(step) for r, m in enumerate(members)}
        for member in members:
            # Before it is known whether all have begun: those that have will tell of those that have not.
            member.started, member.loss, member.wait = True, None, member.actor.wait.remote()
        self._call(begun, timeout=patience)
        return [
            Rank(
                rank=rank,
                frontend=_setup(member)["frontend"],
                metrics_url=_setup(member)["metrics_url"],
                report=member.report or {},
            )
            for rank, member in enumerate(members)
        ]

    def _set_up(self, rank: int, setup: dict[str, Any]) -> None:
        self._members[rank].setup = (self._members[rank].setup or {}) | setup

    def _loaded(self, rank: int, report: dict[str, Any]) -> None:
        self._members[rank].report = report

    def _sized(self, rank: int) -> EngineConfig:
        """The config of a rank's process: one that takes another's place decides as that did."""
        if not self._reports:
            return self._config
        return dataclasses.replace(
            self._config,
            max_model_len=self._reports[rank]["max_model_len"],
            expert_slots=self._reports[rank]["expert_slots"],
            expert_memory=None,
        )

    def _hear_losses(self, patience: float) -> None:
        """Wait until every started rank has told its loss; raises RanksLost for who ends, is named, or is silent."""
        limit = time.monotonic() + patience
        while silent := {r for r, m in enumerate(self._members) if m.started and m.loss is None}:
            for event in self.events(PROGRESS_SECONDS):
                if event.loss is None:
                    raise RanksLost([event.rank], event.reason)
            self.check()
            if time.monotonic() > limit:
                raise RanksLost(silent, f"worker {min(silent)} does not notice that the others have lost a peer")
        self._losses = {rank: m.loss for rank, m in enumerate(self._members) if m.loss is not None}
        for member in self._members:
            # Whoever was named and stands there still, started, is fenced before anybody meets it again.
            named = {r for r in (member.loss or {}).get("ranks", ()) if self._members[r].started}
            if named and member.loss is not None:
                raise RanksLost(named, member.loss["reason"])

    def _connect(self, calls: list[Any], timeout: float) -> None:
        """Let all meet. That one does not answer is said by another, so where nobody died, who is new is named."""
        try:
            self._call(dict(enumerate(calls)), timeout=timeout)
        except RanksLost as lost:
            fresh = {r for r, m in enumerate(self._members) if not m.started}
            if isinstance(lost.__cause__, RayActorError) or not fresh:
                raise
            raise RanksLost(fresh, str(lost), exit_code=lost.exit_code) from lost

    def _call(
        self,
        calls: dict[int, Any],
        took: Callable[[int, Any], None] = lambda rank, result: None,
        *,
        timeout: float | None = None,
    ) -> None:
        """Give `took` the result of one call per rank; raises RanksLost with the first one's own message.

        While a fleet recovers, that is after all have been heard: what the sound ones did is not done again.
        """
        pending = {ref: rank for rank, ref in calls.items()}
        limit = None if timeout is None else time.monotonic() + timeout
        lost: RanksLost | None = None
        while pending and not (lost and not self._reports):
            done, _ = ray.wait(list(pending), num_returns=1, timeout=PROGRESS_SECONDS)
            self.check()
            for ref in done:
                rank = pending.pop(ref)
                try:
                    took(rank, ray.get(ref))
                except RayError as error:
                    lost = lost or _lost(rank, error)
            if pending and limit is not None and time.monotonic() > limit:
                late = sorted(pending.values())
                lost = lost or RanksLost(late, f"worker {late[0]} did not answer within {timeout:.0f} s")
                break
        if lost is not None:
            raise lost

    def _follow(self, loads: dict[int, Any], progress: Progress) -> None:
        """Report progress until every load has ended, well or badly."""
        calls = list(loads.values())
        while calls:
            _, pending = ray.wait(calls, num_returns=len(calls), timeout=PROGRESS_SECONDS)
            self.check()
            try:
                asked = [self._members[rank].actor.progress.remote() for rank in loads]
                parts = ray.get(asked, timeout=STOP_SECONDS)
                progress(sum(done for done, _ in parts), sum(total for _, total in parts))
            except RayError:
                # Its cause, if any, is raised by the load itself.
                pass
            if not pending:
                return

    def stop(self) -> None:
        """Let every rank end in good order for a while, then end it."""
        stops = [member.actor.stop.remote() for member in self._members]
        if stops:
            ray.wait(stops, num_returns=len(stops), timeout=STOP_SECONDS)
        for member in self._members:
            ray.kill(member.actor)
        self._members = []


def kill_process(pid: int, began: float) -> None:
    """SIGKILL for a process of this host, unless its number is another's by now: `began` is when it was created."""
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):  # boundary: it has ended
        if abs(psutil.Process(pid).create_time() - began) < 1.0:
            os.kill(pid, signal.SIGKILL)


def _lost(rank: int, error: RayError) -> RanksLost:
    """The loss of a rank whose call failed; its own words, if it has any."""
    if isinstance(error, RayTaskError):
        lost = RanksLost([rank], first_line(error.cause or error), exit_code=2)
    elif isinstance(error, RayActorError):
        lost = RanksLost([rank], f"worker {rank} died while starting: {first_line(error)}")
    else:
        lost = RanksLost([rank], f"Ray could not run worker {rank}: {first_line(error)}")
    lost.__cause__ = error
    return lost


def _is_new(member: _Member) -> bool:
    return member.setup is None


def _is_here(member: _Member) -> bool:
    """Whether its process is of this host, and known."""
    return member.setup is not None and member.setup["node"] == ray.get_runtime_context().get_node_id()


def _setup(member: _Member) -> dict[str, Any]:
    assert member.setup is not None, "a rank is set up before it meets others"
    return member.setup


def _where(members: list[_Member], holds: Callable[[_Member], bool]) -> Iterable[tuple[int, _Member]]:
    return [(rank, member) for rank, member in enumerate(members) if holds(member)]
