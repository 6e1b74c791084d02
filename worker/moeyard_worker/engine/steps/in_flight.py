"""A step in flight on a GPU: whether it has run, how long it took, and its results."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from moeyard_kernels.types.sampling import SampledTokens
from moeyard_worker.engine.sampling.sampling import accepted, read_tokens, unsound
from moeyard_worker.engine.sampling.scoring import Scores, read_scores, unsound_scores
from moeyard_worker.engine.steps.runner import Launched, as_bytes
from moeyard_worker.exchange.base import Exchange
from moeyard_worker.scheduling.request import Accepted, Request
from moeyard_worker.scheduling.step import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """State after a step that verified drafts: `read` [B, 1 + Q] (`VerifiedRows.read`) and `state` of its tails.

    Results contain all `num_drafts` drafts; the scheduler decides how many are verified.
    """

    read: torch.Tensor
    state: torch.Tensor
    num_drafts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """Experts that a step chose: an asynchronous copy `ids` of the rows of its graph, and the `rows` of the step."""

    ids: torch.Tensor
    rows: Sequence[int]


class InFlight:
    """A step that runs on a GPU. Create it after all launches of the step; `begun` was recorded before them.

    `tokens` and `chosen` (the logits of the chosen tokens) are asynchronous copies to the host. `places` are their rows
    that belong to the step, None for all in order. The exchange waits for this step only, since peers may be lost.
    """

    def __init__(
        self,
        step: Step,
        requests: Sequence[Request],
        *,
        tokens: SampledTokens,
        chosen: torch.Tensor,
        places: Sequence[int] | None = None,
        errors: Mapping[int, str],
        scores: Sequence[SampledTokens] = (),
        verified: Verified | None = None,
        routed: Routed | None = None,
        begun: torch.cuda.Event,
        exchange: Exchange,
    ) -> None:
        self.step, self.waited = step, 0.0
        self._requests, self._tokens, self._chosen, self._places = requests, tokens, chosen, places
        self._errors, self._blocks, self._verified, self._exchange = errors, scores, verified, exchange
        self._routed = routed
        self._results: list[Accepted] | None = None
        self._scores: Scores | None = None
        self._begun, self._done = begun, torch.cuda.Event(enable_timing=True)
        self._done.record()

    def has_run(self) -> bool:
        """Return whether the step has finished."""
        return bool(self._done.query())

    @property
    def device_seconds(self) -> float:
        """Seconds on the device, from the end of earlier launches to the end of this step."""
        self._done.synchronize()
        return self._begun.elapsed_time(self._done) * 1e-3

    @property
    def results(self) -> list[Accepted]:
        """`results[i]` belongs to `step.sampled[i]`. Waits for the step."""
        if self._results is None:
            begun = time.monotonic()
            self._exchange.steps.drain(self.has_run)
            self._done.synchronize()
            self.waited = time.monotonic() - begun
            self._results = self._accepted()
        return self._results

    def _accepted(self) -> list[Accepted]:
        step, tokens, verified = self.step, self._tokens, self._verified
        if verified is not None:
            # The device determined the start and the tokens.
            chunks = [
                replace(chunk, start=row[0], token_ids=tuple(row[1 : 1 + chunk.num_tokens]), slack=0)
                for chunk, row in zip(step.decode, verified.read.tolist(), strict=True)
            ]
            step = replace(step, decode=tuple(chunks))
        if self._places is not None:
            tokens = tokens.each(lambda x: x[self._places])
        requests = zip(step.sampled, self._requests, strict=True)
        num_alternatives = [request.sampling.logprobs for chunk, request in requests for _ in range(chunk.num_sampled)]
        found = accepted(step, read_tokens(tokens, num_alternatives), self._errors)
        if verified is None:
            return found
        return [
            replace(result, drafts=tuple(state[2 : 2 + verified.num_drafts]))
            for result, state in zip(found, verified.state.tolist(), strict=True)
        ]

    @property
    def scores(self) -> Scores:
        """`scores[i]` belongs to `step.scored[i]`. Waits for the step."""
        if self._scores is None:
            self._done.synchronize()
            self._scores = read_scores(self.step, self._blocks) if self._blocks else []
        return self._scores

    @property
    def experts(self) -> bytes:
        """The experts that all rows chose, empty if they are not wanted. Waits for the step."""
        if self._routed is None:
            return b""
        self._done.synchronize()
        return as_bytes(self._routed.ids[list(self._routed.rows)])

    @property
    def unsound(self) -> tuple[str, ...]:
        """Ids of the requests with non-finite logits. Waits for the step."""
        self._done.synchronize()
        chosen = self._chosen if self._places is None else self._chosen[self._places]
        bad = unsound(self.step, self._requests, chosen)
        if self._blocks:
            bad += unsound_scores(self.step, self.scores)
        return tuple(dict.fromkeys(bad))


LaunchedStep = Launched | InFlight
