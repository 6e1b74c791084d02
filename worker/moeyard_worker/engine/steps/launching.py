"""How the engine's loop drives steps: a runner launches them, and each gives its results once it has run."""

from collections.abc import Sequence
from typing import Any, Protocol

from moeyard_worker.engine.sampling.scoring import Scores
from moeyard_worker.exchange.base import PeerRows
from moeyard_worker.scheduling.request import Accepted, Request
from moeyard_worker.scheduling.step import Step


class LaunchedStep(Protocol):
    """A step that runs, or has run."""

    @property
    def step(self) -> Step: ...
    @property
    def waited(self) -> float:
        """Seconds that whoever asked for its results waited for them."""
        ...

    def has_run(self) -> bool:
        """Whether nothing of it is left to wait for."""
        ...

    @property
    def results(self) -> list[Accepted]: ...
    @property
    def scores(self) -> Scores:
        """`scores[i]` of `step.scored[i]`; waits for the step as `results` does."""
        ...

    @property
    def device_seconds(self) -> float | None:
        """What it took on a device that has a clock of its own; waits for it as `results` does."""
        ...

    @property
    def unsound(self) -> tuple[str, ...]:
        """Ids of the requests whose logits in this step were not finite; waits for it as `results` does."""
        ...


class StepRunner(Protocol):
    """What the engine's loop drives."""

    def rows_of(self, step: Step) -> int:
        """The most rows, with padding, that a step brings to its exchanges."""
        ...

    def launch(
        self, step: Step, requests: Sequence[Request], *, before: Any, num_drafts: int, peers: PeerRows | None = None
    ) -> LaunchedStep:
        """Start a step; `requests[i]` is behind `step.sampled[i]`, `before` is the launch that it was planned upon.

        Up to `num_drafts` tokens are drafted behind those that it samples. `peers`: what all ranks bring (None: there
        are no others).
        """
        ...
