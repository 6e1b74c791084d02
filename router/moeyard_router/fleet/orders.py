"""Orders of a launcher: ranks that drain or are about to be replaced, pauses, and requests that end. Pure."""

from dataclasses import dataclass
from typing import Literal

# Replaces a number of sequences while the fleet is incomplete: the sequences may then be on any rank.
UNKNOWN = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """Stop sending new sequences to `ranks`, and only to these.

    The answer is about `rank`. `carry`: its sequences continue on other ranks, if another rank accepts sequences.
    `leaves`: its process is about to be replaced. Its exit is not a fault, and requests wait until then.
    `size`: the new number of ranks. If it is smaller, all ranks from `size` on leave for good. None: no change.
    """

    ranks: tuple[int, ...]
    rank: int
    carry: bool = False
    leaves: bool = False
    size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """Start no more requests; they queue. `mode` is vLLM's: "abort" ends those that have started, the others let them
    run. None: start requests again.

    The answer is the number of sequences that have started and not ended. `switches`: the weights are about to change,
    so nothing runs until the workers are replaced. `asleep`: the level at which the server sleeps from now on, 0 if it
    is awake. None: no change. A server that sleeps starts no requests, paused or not.
    """

    mode: Literal["abort", "wait", "keep"] | None
    switches: bool = False
    asleep: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """End the requests with these `names` with their output so far, None: all requests.

    The answer is the number of sequences of clients that have not ended, queued ones included.
    """

    names: frozenset[str] | None = frozenset()


@dataclass(frozen=True, slots=True)
class Forget:
    """Expect no cached prefixes at the workers. The answer is 0."""


FleetOrder = Drain | Hold | Cancel | Forget
