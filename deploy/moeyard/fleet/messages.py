"""Events that the fleet machine takes, instructions that it gives, and the errors of a fleet. Pure."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from moeyard_router.fleet.orders import Drain


class FleetError(ValueError):
    """The fleet cannot start or continue; one line says why and what to do."""


class FleetLost(FleetError):
    """The same, where another attempt may succeed: a node or a worker went away meanwhile."""

    exit_code = 1


class Unrecoverable(FleetError):
    """Ranks cannot be replaced any more in the life of this process; those that live continue."""

    exit_code = 1


class RanksLost(FleetError):
    """Some ranks have to be replaced before the fleet can continue.

    `said`: a process that lives has raised it, about itself or about a peer that it misses; another attempt to start
    the fleet changes nothing then.
    """

    def __init__(self, ranks: Iterable[int], reason: str, *, said: bool = False) -> None:
        super().__init__(reason)
        self.ranks, self.said, self.exit_code = frozenset(ranks), said, 2 if said else 1


class Refused(ValueError):
    """A command that is not carried out, or not to its end. `exit_code` 2: another attempt changes nothing."""

    def __init__(self, reason: str, exit_code: int = 1) -> None:
        super().__init__(reason)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """A rank as routers and Prometheus reach it, and what it decided while it loaded.

    An empty `frontend` means that it is away: the others serve without it.
    """

    rank: int
    frontend: str
    metrics_url: str
    report: dict[str, Any]


# Events.


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed. The first one starts the fleet."""


@dataclass(frozen=True, slots=True)
class Returned:
    """The call of that number has returned `value`."""

    call: int
    value: Any


@dataclass(frozen=True, slots=True)
class Failed:
    """The call of that number has failed: the process `raised` it, has `ended`, or Ray did not run it (`unrun`).

    `unplaced`: the cluster has given the process no place in time.
    """

    call: int
    reason: str
    how: Literal["raised", "ended", "unrun", "unplaced"]


@dataclass(frozen=True, slots=True)
class Silent:
    """Processes with open calls gave no sign of life for so many seconds."""

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
    """The renewed standby processes have imported everything, or cannot, for `problem`."""

    problem: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A person's order. `number` names it in Tell and Finish; no `ranks` of a restart: all, one after the other."""

    number: int
    name: Literal["drain", "undrain", "restart", "scale"]
    ranks: tuple[int, ...] = ()
    size: int = 0
    seconds: float = 0.0
    changes: Mapping[str, Any] = field(default_factory=dict)


Event = Tick | Returned | Failed | Silent | Missed | RayEnded | Answered | StandbyReady | Command


# Instructions. Examine, Order, ReservePlaces and StartRay are questions: the next event is Answered.


@dataclass(frozen=True, slots=True)
class Make:
    """Make a process for a rank, at its place; one `beside` the rank's own does not wait for that one's CPU."""

    process: int
    rank: int
    beside: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """Call a method of a process; its end is Returned or Failed. Calls that are `watched` may end in silence."""

    number: int
    process: int
    method: str
    args: tuple[Any, ...] = ()
    watched: bool = False


@dataclass(frozen=True, slots=True)
class Fence:
    """End a process with SIGKILL, also one that is stopped and hears nothing."""

    process: int


@dataclass(frozen=True, slots=True)
class End:
    """Let processes that are in no epoch put away what they hold, and end them. Give back places of no rank."""

    processes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Examine:
    """Answer how a process was last seen, as text; None where that is not known."""

    process: int


@dataclass(frozen=True, slots=True)
class Order:
    """Have all routers take an order; answer their number of sequences at its rank, or UNKNOWN, if `answered`."""

    drain: Drain
    answered: bool = True


@dataclass(frozen=True, slots=True)
class ReservePlaces:
    """Ask for the places of ranks that come, for a fleet of `size`; answer what the cluster lacks, or None."""

    ranks: tuple[int, ...]
    size: int


@dataclass(frozen=True, slots=True)
class StartRay:
    """End what is left of the private Ray and all its processes; start another. Answer why it does not, or None."""

    ended: str


@dataclass(frozen=True, slots=True)
class RenewStandby:
    """Start the standby processes again, with the code of now. The answer is StandbyReady, later."""


@dataclass(frozen=True, slots=True)
class HandOver:
    """The fleet serves: give routers these ranks, which of them are drained, and the incident, None at the start."""

    ranks: tuple[Rank, ...]
    drained: frozenset[int]
    incident: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class Tell:
    """Tell a command's progress."""

    command: int
    text: str


@dataclass(frozen=True, slots=True)
class Finish:
    """A command's last word. `exit_code` None: it is done; otherwise it is refused."""

    command: int
    text: str
    exit_code: int | None = None


@dataclass(frozen=True, slots=True)
class FleetFailed:
    """The fleet has failed. `exit_code` is the command line's, if the fleet never served."""

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
    """Seconds by name as text."""
    return ", ".join(f"{name} {each:.1f} s" for name, each in seconds.items())


def named(ranks: Collection[int]) -> str:
    """Ranks as text."""
    return ", ".join(f"rank {rank}" for rank in sorted(ranks))
