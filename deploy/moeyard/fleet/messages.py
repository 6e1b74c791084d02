"""Events and instructions of the fleet machine, and the errors of a fleet. Pure."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from moeyard_router.fleet.orders import FleetOrder
from moeyard_worker.config.worker_spec import ServedWeights


class FleetError(ValueError):
    """The fleet cannot start or continue; one line says why and what to do."""


class FleetLost(FleetError):
    """A FleetError where another attempt may succeed: a node or a worker has left."""

    exit_code = 1


class Unrecoverable(FleetError):
    """This launcher process can replace no more ranks. Live ranks continue."""

    exit_code = 1


class RanksLost(FleetError):
    """Some ranks must be replaced before the fleet can continue.

    `reported`: a live process raised it, about itself or a missing peer. Another attempt to start the fleet would fail
    in the same way.
    """

    def __init__(self, ranks: Iterable[int], reason: str, *, reported: bool = False) -> None:
        super().__init__(reason)
        self.ranks, self.reported, self.exit_code = frozenset(ranks), reported, 2 if reported else 1


class Refused(ValueError):
    """A command was refused or stopped. `exit_code` 2: another attempt would fail in the same way."""

    def __init__(self, reason: str, exit_code: int = 1) -> None:
        super().__init__(reason)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """A rank as routers and Prometheus reach it, and its load report.

    An empty `frontend` means that the rank is away and the others serve without it. `changes`: fields of EngineConfig
    in which it differs from the fleet's config.
    """

    rank: int
    frontend: str
    metrics_url: str
    report: dict[str, Any]
    changes: Mapping[str, Any] = field(default_factory=dict)


CommandName = Literal[
    "drain", "undrain", "restart", "scale", "pause", "resume", "update", "checksum", "flush", "cancel", "sleep", "wake"
]

# Events.


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed. The first tick starts the fleet."""


@dataclass(frozen=True, slots=True)
class Returned:
    """Call `call` has returned `value`."""

    call: int
    value: Any


@dataclass(frozen=True, slots=True)
class Failed:
    """Call `call` has failed: the process `raised` an error or has `ended`, or Ray did not run the call (`unrun`).

    `unplaced`: the cluster did not place the process in time.
    """

    call: int
    reason: str
    how: Literal["raised", "ended", "unrun", "unplaced"]


@dataclass(frozen=True, slots=True)
class Silent:
    """Processes with open calls have sent no heartbeat for `seconds`."""

    processes: frozenset[int]
    seconds: float


@dataclass(frozen=True, slots=True)
class Missed:
    """A router has lost the connection to a rank for good."""

    rank: int
    reason: str


@dataclass(frozen=True, slots=True)
class RayEnded:
    """A daemon of the private Ray has ended. `all_ranks`: all ranks have ended with it."""

    daemon: str
    all_ranks: bool


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer to the latest question: Examine, Order, ReservePlaces or StartRay."""

    value: Any


@dataclass(frozen=True, slots=True)
class StandbyReady:
    """The renewed standby processes have imported everything; `problem`: why they cannot."""

    problem: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """An operator's command. Tell and Finish refer to its `number`. A restart without `ranks` restarts each in turn.

    mode: the fate of running requests in a pause, an update or a sleep, as in `Hold`. While requests run, a sleep with
        "keep" is refused, unless the server is paused.
    weights: the new weights of an update.
    level: the level of a sleep.
    names: the requests that "cancel" ends, as in `Cancel`.
    """

    number: int
    name: CommandName
    ranks: tuple[int, ...] = ()
    size: int = 0
    level: int = 0
    seconds: float = 0.0
    changes: Mapping[str, Any] = field(default_factory=dict)
    mode: Literal["abort", "wait", "keep"] = "wait"
    weights: ServedWeights | None = None
    names: frozenset[str] | None = frozenset()


Event = Tick | Returned | Failed | Silent | Missed | RayEnded | Answered | StandbyReady | Command


# Instructions. Examine, Order, ReservePlaces and StartRay are questions: the next event is Answered.


@dataclass(frozen=True, slots=True)
class Make:
    """Create a process in a rank's place. With `beside` it does not wait for the CPU of the rank's present process."""

    process: int
    rank: int
    beside: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """Call a method of a process. Returned or Failed follows. A `watched` call can also cause Silent."""

    number: int
    process: int
    method: str
    args: tuple[Any, ...] = ()
    watched: bool = False


@dataclass(frozen=True, slots=True)
class Fence:
    """Kill a process with SIGKILL, which also works on a stopped process."""

    process: int


@dataclass(frozen=True, slots=True)
class End:
    """Let processes outside any epoch release their resources, then end them. Release places without a rank."""

    processes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Examine:
    """Ask for a text on how a process was last seen; the answer is None if that is unknown."""

    process: int


@dataclass(frozen=True, slots=True)
class Order:
    """Send an order to all routers. If `answered`, the answer is their number of sequences, or UNKNOWN."""

    order: FleetOrder
    answered: bool = True


@dataclass(frozen=True, slots=True)
class ReservePlaces:
    """Request places for new ranks of a fleet of `size`. The answer is what the cluster lacks, or None."""

    ranks: tuple[int, ...]
    size: int


@dataclass(frozen=True, slots=True)
class StartRay:
    """End the private Ray with all its processes and start another. The answer is the reason of a failure, or None."""

    ended: str


@dataclass(frozen=True, slots=True)
class RenewStandby:
    """Restart the standby processes with the code now on disk. StandbyReady follows later."""


@dataclass(frozen=True, slots=True)
class HandOver:
    """The fleet serves. Send routers its ranks, the drained ones among them, and the incident (None at the start)."""

    ranks: tuple[Rank, ...]
    drained: frozenset[int]
    incident: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class Tell:
    """Report a command's progress."""

    command: int
    text: str


@dataclass(frozen=True, slots=True)
class Finish:
    """End a command. `exit_code` None: it succeeded; otherwise it was refused."""

    command: int
    text: str
    exit_code: int | None = None


@dataclass(frozen=True, slots=True)
class FleetFailed:
    """The fleet has failed. The command line exits with `exit_code` if the fleet never served."""

    reason: str
    exit_code: int


Instruction = (
    Make
    | Call
    | Fence
    | End
    | Examine
    | Order
    | ReservePlaces
    | StartRay
    | RenewStandby
    | HandOver
    | Tell
    | Finish
    | FleetFailed
)


def parts(seconds: Mapping[str, float]) -> str:
    """Format seconds by name."""
    return ", ".join(f"{name} {each:.1f} s" for name, each in seconds.items())


def named(ranks: Collection[int]) -> str:
    """Format ranks, sorted."""
    return ", ".join(f"rank {rank}" for rank in sorted(ranks))
