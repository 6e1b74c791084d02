"""One rank's actor as the launcher keeps it, and what is said when a call of it fails."""

import dataclasses
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from moeyard.fencing import fence_process, kill_process
from moeyard.rank import Event, FleetError, Rank, RanksLost, parts
from moeyard.ray_errors import first_line
from moeyard_worker.config.engine_config import EngineConfig

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]

PROGRESS_SECONDS = 0.2
STOP_SECONDS = 3.0


@dataclass(slots=True)
class Member:
    """A rank's actor, and how far it has come: `setup` and `report` are what those calls returned.

    `setting_up` and `loading` are the calls that will, once they were made, and `epoch` that of the mesh it binds.
    `wait` is the call that returns when it ends or loses a peer, and `loss` what it then told, until it rejoins. `has`
    are the experts that it serves with, or will when it starts; `read` those that it has read for an epoch to come.
    `asked` is the latest question for a sign of life, of `asked_at`, and `place` what it answered (`Signs`).
    """

    actor: Any
    setting_up: Any = None
    loading: Any = None
    has: Any = None
    read: Any = None
    epoch: int = 0
    setup: dict[str, Any] | None = None
    report: dict[str, Any] | None = None
    started: bool = False
    wait: Any = None
    loss: dict[str, Any] | None = None
    asked: Any = None
    asked_at: float = 0.0
    place: dict[str, Any] | None = None

    @property
    def whereabouts(self) -> dict[str, Any] | None:
        """The node, number and start of its process, as soon as the process has told them."""
        return self.setup or self.place

    @property
    def pid(self) -> int | None:
        """The number of its process, as soon as that has said it."""
        return None if self.whereabouts is None else int(self.whereabouts["pid"])

    @property
    def loads(self) -> bool:
        """Whether it loads while others do not wait for that."""
        return self.loading is not None and self.report is None

    def take(self, rank: int, report: dict[str, Any], *, first: bool) -> None:
        """It has loaded; `first`: in the fleet's start, which says by itself what it is at."""
        self.report = report
        if not first:
            log.info("rank %d has loaded: %s", rank, parts({**setup_of(self)["seconds"], **report["seconds"]}))


class Laps:
    """Seconds of what a fleet does one after the other on its way to the next epoch, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.monotonic()

    def __call__(self, name: str) -> None:
        """What was done since the last call has this name."""
        now = time.monotonic()
        self.seconds[name], self._since = now - self._since, now


def sized(config: EngineConfig, report: Mapping[str, Any] | None, changes: Mapping[str, Any]) -> EngineConfig:
    """The config of a rank's process: one that takes another's place decides as that did, which `report` says.

    `changes` is what the rank has otherwise than others.
    """
    if report is None:
        return config
    decided = {"max_model_len": report["max_model_len"], "expert_slots": report["expert_slots"]}
    return dataclasses.replace(config, **{**decided, "expert_memory": None, **changes})


def lost_of(rank: int, error: RayError | FleetError) -> RanksLost:
    """The loss of a rank whose call failed, or who may not come; its own words, if it has any."""
    if isinstance(error, FleetError):
        lost = RanksLost([rank], str(error))
    elif isinstance(error, RayTaskError):
        lost = RanksLost([rank], first_line(error.cause or error), exit_code=2)
    elif isinstance(error, RayActorError):
        lost = RanksLost([rank], f"worker {rank} died while starting: {first_line(error)}")
    else:
        lost = RanksLost([rank], f"Ray could not run worker {rank}: {first_line(error)}")
    lost.__cause__ = error
    return lost


def is_new(member: Member) -> bool:
    return member.setup is None


def is_here(member: Member) -> bool:
    """Whether its process is of this host, and known."""
    return member.setup is not None and member.setup["node"] == ray.get_runtime_context().get_node_id()


def setup_of(member: Member) -> dict[str, Any]:
    assert member.setup is not None, "a rank is set up before it meets others"
    return member.setup


def rank_of(number: int, member: Member) -> Rank:
    """What routers and Prometheus are told of it."""
    if not member.started:
        return Rank(rank=number, frontend="", metrics_url="", report={})
    setup = setup_of(member)
    return Rank(rank=number, frontend=setup["frontend"], metrics_url=setup["metrics_url"], report=member.report or {})


def fence(member: Member) -> None:
    """End its process, also one that is stopped and hears nothing: when it wakes it must harm nobody."""
    ray.kill(member.actor)
    if (place := member.whereabouts) is not None:
        fence_process(place["node"], place["pid"], place["began"])


def end_all(members: Collection[Member]) -> None:
    """Let every rank end in good order for a while, then end it."""
    stops = [member.actor.stop.remote() for member in members]
    if stops:
        ray.wait(stops, num_returns=len(stops), timeout=STOP_SECONDS)
    for member in members:
        ray.kill(member.actor)


def end_by_number(members: Collection[Member]) -> None:
    """SIGKILL for processes of this host whose Ray has ended."""
    for member in members:
        if (place := member.whereabouts) is not None:
            kill_process(place["pid"], place["began"])


def told(rank: int, ref: Any) -> Event:
    """What the end of a rank's `wait`, which is there, says."""
    try:
        loss = ray.get(ref)
    except RayTaskError as error:
        return Event(rank=rank, reason=first_line(error.cause or error))
    except RayActorError:
        return Event(rank=rank, reason=f"the process of rank {rank} has ended")
    except RayError as error:
        return Event(rank=rank, reason=first_line(error))
    if loss is None:
        return Event(rank=rank, reason="it stopped")
    return Event(rank=rank, reason=loss["reason"], loss=loss)


def tell_progress(members: Collection[Member], progress: Progress) -> None:
    """Ask those that load how far they are, and tell `progress` the sums."""
    try:
        parts = ray.get([member.actor.progress.remote() for member in members], timeout=STOP_SECONDS)
    except RayError:
        return  # its cause, if any, is raised by the load itself
    progress(sum(done for done, _ in parts), sum(total for _, total in parts))


def gather(
    calls: Mapping[int, Any],
    took: Callable[[int, Any], None],
    *,
    timeout: float | None,
    check: Callable[[], None],
    silent: Callable[[Collection[int]], RanksLost | None] = lambda ranks: None,
    at_once: bool,
) -> None:
    """Give `took` the result of one call per rank; raises RanksLost with the first one's own message.

    With `at_once` the first failure is raised. Otherwise all ranks are heard first. A rank that has ended, or one that
    does not answer, is then named before a rank that misses a peer, because it may be that peer. `check` is called
    meanwhile. So is `silent`, with the ranks that have not answered: it names those that are given up.
    """
    pending = {ref: rank for rank, ref in calls.items()}
    limit = None if timeout is None else time.monotonic() + timeout
    lost: RanksLost | None = None
    while pending and not (lost and at_once):
        done, _ = ray.wait(list(pending), num_returns=1, timeout=PROGRESS_SECONDS)
        check()
        for ref in done:
            rank = pending.pop(ref)
            try:
                took(rank, ray.get(ref))
            except RayError as error:
                found = lost_of(rank, error)
                if lost is None or (_complains(lost) and not _complains(found)):
                    lost = found
        if not done and (hung := silent(list(pending.values()))) is not None:
            pending = {ref: rank for ref, rank in pending.items() if rank not in hung.ranks}
            if lost is None or _complains(lost):
                lost = hung
        if pending and limit is not None and time.monotonic() > limit:
            late = sorted(pending.values())
            if lost is None or _complains(lost):
                lost = RanksLost(late, f"worker {late[0]} did not answer within {timeout:.0f} s")
            break
    if lost is not None:
        raise lost


def _complains(lost: RanksLost) -> bool:
    """Whether it is known from a rank that lives, and said itself what went wrong."""
    return isinstance(lost.__cause__, RayTaskError)
