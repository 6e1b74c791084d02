"""The instructions of the admission machine to its caller, which carries them out in order. Pure data."""

from dataclasses import dataclass
from typing import Any

from moeyard_router.config import WorkerAddress
from moeyard_router.fleet.policy import Route
from moeyard_router.fleet.records import IncidentRecord
from moeyard_worker.protocol import Done, ExpertLoads, PromptExperts, PromptLogprobs, Rejected, Submit, Tokens


@dataclass(frozen=True, slots=True)
class Lost:
    """The end of a sequence without a worker that could end it."""

    reason: str


@dataclass(frozen=True, slots=True)
class Aborted:
    """The end of a sequence by an operator. Its output so far is its answer."""


Event = PromptLogprobs | PromptExperts | Tokens | Done | Rejected | Lost | Aborted


# (monotonic seconds, listener of a request, index of its sequence, event). A plain tuple, because each token needs one.
Delivery = tuple[float, Any, int, Event]


@dataclass(frozen=True, slots=True)
class Run:
    """Send `submit` to the route's rank, and tell the listener where sequence `index` runs."""

    listener: Any
    index: int
    route: Route
    submit: Submit


@dataclass(frozen=True, slots=True)
class Stop:
    """Send an `Abort` of this sequence to a rank."""

    rank: int
    request_id: str


@dataclass(frozen=True, slots=True)
class Connect:
    """Open a connection to a rank.

    `broke`: why its previous connection broke, if it had one. Then the rank is lost, for this reason, unless it sends a
    snapshot within a step deadline.
    """

    address: WorkerAddress
    broke: str | None = None


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Close the connection to a rank."""

    rank: int


@dataclass(frozen=True, slots=True)
class Answered:
    """Store a rank's answer to `Inspect`."""

    loads: ExpertLoads


@dataclass(frozen=True, slots=True)
class ReportLost:
    """Report to the owner of the workers that one does not come back."""

    rank: int
    reason: str


@dataclass(frozen=True, slots=True)
class Changed:
    """Publish the states of the ranks and of the fleet, because one may have changed."""


@dataclass(frozen=True, slots=True)
class Began:
    """Set the wall-clock time of a new incident."""

    incident: IncidentRecord


@dataclass(frozen=True, slots=True)
class Ended:
    """Count an incident that ended because the fleet is whole."""

    incident: IncidentRecord


@dataclass(frozen=True, slots=True)
class Carried:
    """Count sequences that continue on another rank or connection."""

    sequences: int
    recomputed_tokens: int


@dataclass(frozen=True, slots=True)
class Waited:
    """Observe how long a request was queued."""

    seconds: float


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Call `time_passed` at this time, or a little later."""

    time: float


Instruction = (
    Run | Stop | Connect | Disconnect | Answered | ReportLost | Changed | Began | Ended | Carried | Waited | WakeAt
)
