"""The loss that ended an epoch, as a rank reports it to the launcher, which replaces lost ranks, and to operators."""

import traceback
from dataclasses import dataclass

from moeyard_worker.exchange.membership.agreement import Finding, name_place

_FRAMES, _NAMED = 12, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The end of an epoch as one rank saw it. All ranks name the same `ranks`, `step`, `place` and `reason`.

    epoch: the epoch that ended.
    steps: the last step that this rank had begun.
    place: where in the step, e.g. "layer 17, combine".
    ranks: the ranks that were lost, silent or at fault.
    running, waiting: numbers of requests of this rank.
    latest: the names of the youngest running requests.
    stack: where this rank was when it learned of the loss, innermost call last.
    """

    rank: int
    epoch: int
    steps: int
    step: int
    place: str
    ranks: tuple[int, ...]
    reason: str
    running: int
    waiting: int
    latest: tuple[str, ...]
    stack: tuple[str, ...]

    def __str__(self) -> str:
        latest = f", the latest {' '.join(self.latest)}" if self.latest else ""
        return (
            f"epoch {self.epoch} ended: {self.reason}; rank {self.rank} keeps {self.running} running and "
            f"{self.waiting} waiting requests{latest}; it was at {' < '.join(reversed(self.stack))}"
        )


def make_loss(
    error: BaseException,
    finding: Finding,
    *,
    rank: int,
    epoch: int,
    steps: int,
    running: list[str],
    waiting: int,
) -> Loss:
    """Return the loss that `finding` names, and that `error` reported. `running`: the rank's requests, oldest first."""
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
    return Loss(
        rank=rank,
        epoch=epoch,
        steps=steps,
        step=finding.step,
        place=name_place(finding.place),
        ranks=finding.ranks,
        reason=finding.reason,
        running=len(running),
        waiting=waiting,
        latest=tuple(running[-_NAMED:]),
        stack=tuple(f"{frame.name} ({frame.filename.rpartition('/')[2]}:{frame.lineno})" for frame in frames),
    )
