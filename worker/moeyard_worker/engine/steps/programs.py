"""Programs of captured steps on a GPU: the model and the choice of tokens, and drafts where a model makes them.

A step without drafts is one part: the model over all rows and the ids of the largest logits. A step that verifies
drafts has more parts: which of the chosen tokens count, a pass of the layer for multi-token prediction over the same
rows with the tokens behind them, and a pass over one row per sequence for every further draft. The state that the next
step begins with stays on the device (`tails`). A step of prompts of a model that drafts ends with its logits; the host
chooses its tokens and makes the drafts behind them.

With peers every pass is an exchange, which all ranks take part in: they agree on how many passes a step has and on the
most rows that one of them verifies. A rank without rows has a part for the model's exchanges and one for those of a
pass.

A draft is drawn with the noise of its position and with its request's temperature and cuts. Penalties, a minimum length
and grammars do not reach it here: where they decide, drafts are refused more often, and tokens stay what they are.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import torch

from moeyard_kernels.backend import StepBackend, StepInputs, VerifiedRows
from moeyard_kernels.types.step_size import StepSize
from moeyard_worker.engine.sampling.step_sampler import StepSampler
from moeyard_worker.engine.steps.runner import Runner

# Parts of a program; those of drafts are named by `draft_part`.
MODEL, ACCEPT, IDLE_DRAFT = "model", "accept", "draft"


def draft_part(drawn: bool, number: int) -> str:
    """The part that makes a draft; `drawn` if one of the step's requests is."""
    return f"{'drawn' if drawn else 'greedy'} draft {number}"


@dataclass(slots=True)
class _Drafts:
    """By number, from 1: the states behind the drafts [B, H], and the drafts [B]; `end` [B]: where the last accepted
    token sits."""

    states: dict[int, torch.Tensor] = field(default_factory=dict)
    tokens: dict[int, torch.Tensor] = field(default_factory=dict)
    end: torch.Tensor | None = None


@dataclass(slots=True)
class StepState:
    """The inputs of a step, and what its parts leave to each other and to the host."""

    inputs: StepInputs
    hidden: torch.Tensor | None = None
    drafts: dict[bool, _Drafts] = field(default_factory=lambda: {False: _Drafts(), True: _Drafts()})

    @property
    def verified(self) -> VerifiedRows:
        """The rows of a step that verifies drafts."""
        assert self.inputs.verified is not None, "a step of output rows of a model that drafts"
        return self.inputs.verified


@dataclass(frozen=True, slots=True)
class StepProgram:
    """The parts of a step, in order. Its state refers to no part, so that a rehearsed step is freed at once."""

    state: StepState
    parts: dict[str, Callable[[], object]]

    @property
    def inputs(self) -> StepInputs:
        """The step's inputs."""
        return self.state.inputs


class StepPrograms:
    """Makes the programs of `runner`'s steps. `max_prompt` bounds the prompt rows of steps of a model that drafts."""

    def __init__(
        self,
        runner: Runner,
        backend: StepBackend,
        sampler: StepSampler,
        *,
        max_sequences: int,
        num_drafts: int,
        max_prompt: int,
    ) -> None:
        self._model, self._backend, self._sampler = runner.model, backend, sampler
        self._exchange, self._num_drafts = runner.exchange, num_drafts
        self._drafter = None if runner.speculation is None else runner.speculation.drafter
        self.tails: Any = None
        self._hidden: torch.Tensor | None = None
        if num_drafts:
            self.tails = backend.tails(
                max_sequences=max_sequences, num_drafts=num_drafts, limit=runner.config.max_position
            )
            # One buffer for all steps with prompts: the host reads it before the next one runs.
            shape = max_prompt, runner.config.hidden_size
            self._hidden = torch.zeros(shape, dtype=runner.dtype, device=backend.device)

    @property
    def accepted(self) -> torch.Tensor:
        """How many tokens of each sequence the latest step accepts, on the device."""
        counts: torch.Tensor = self.tails.state[:, 0]
        return counts

    def __call__(self, size: StepSize) -> StepProgram:
        """The program of steps of a size."""
        verifies = bool(self._num_drafts and size.sequences)
        step = StepState(self._backend.step_inputs(size, self._sampler.last_ids, self.tails if verifies else None))
        parts: dict[str, Callable[[], object]] = {MODEL: partial(self.run_model, step)}
        if verifies:
            parts[ACCEPT] = partial(self._accept, step)
            for drawn, number in product((False, True), range(1, 1 + self._num_drafts)):
                make = partial(self._first, step, drawn) if number == 1 else partial(self._more, step, drawn, number)
                parts[draft_part(drawn, number)] = make
        elif self._num_drafts and not size.rows:
            parts[IDLE_DRAFT] = partial(self._idle_draft, step)
        return StepProgram(step, parts)

    def run_model(self, step: StepState) -> None:
        """The model over all rows, and the ids of the largest logits of those that are sampled."""
        inputs, sampler = step.inputs, self._sampler
        if not inputs.num_rows:
            step.hidden = self._model.hidden(inputs)
            return
        inputs.begin()
        hidden = self._model.hidden(inputs)
        if self._hidden is not None:
            step.hidden = hidden if not inputs.num_prompt else self._hidden[: inputs.num_rows].copy_(hidden)
        logits = sampler.logits[: inputs.num_sampled]
        self._model.sampled(hidden, inputs, out=logits)
        if self._hidden is None or not inputs.num_prompt:
            sampler.last_ids[: inputs.num_sampled] = self._backend.sample(logits).ids

    def _accept(self, step: StepState) -> torch.Tensor:
        return step.verified.accept(self._sampler.last_ids[: step.inputs.num_rows])

    def _idle_draft(self, step: StepState) -> None:
        assert self._drafter is not None, "drafts are made by a layer for that"
        assert step.hidden is not None, "the model's part comes first"
        self._drafter.forward(step.inputs.token_ids, step.hidden, step.inputs)

    def _first(self, step: StepState, drawn: bool) -> None:
        """The first draft: of the row of each sequence's last accepted token."""
        size, drafts = step.inputs.size, step.drafts[drawn]
        count = self._accept(step)
        drafts.end = step.verified.start + count
        assert self._drafter is not None, "drafts are made by a layer for that"
        assert step.hidden is not None, "the model's part comes first"
        x = self._drafter.forward(self._sampler.last_ids[: size.rows], step.hidden, step.inputs)
        last = torch.arange(size.sequences, device=x.device) * size.queries + count - 1
        self._draw(step, drawn, 1, x.index_select(0, last))

    def _more(self, step: StepState, drawn: bool, number: int) -> None:
        """Another draft: of a row that reads the draft before, given the state behind that."""
        drafts = step.drafts[drawn]
        assert self._drafter is not None, "drafts are made by a layer for that"
        assert drafts.end is not None, "there is a first one"
        rows = step.verified.draft_rows(drafts.end + (number - 2))
        x = self._drafter.forward(drafts.tokens[number - 1], drafts.states[number - 1], rows)
        self._draw(step, drawn, number, x)

    def _draw(self, step: StepState, drawn: bool, number: int, x: torch.Tensor) -> None:
        size, drafts = step.inputs.size, step.drafts[drawn]
        assert drafts.end is not None, "there is a first one"
        arguments: dict[str, Any] = {}
        if drawn:
            arguments = {**self._sampler.asked(size.sequences, size.queries), "positions": drafts.end + number}
        token = self._backend.sample(self._model.head(x).float(), **arguments).ids
        drafts.states[number], drafts.tokens[number] = x, token
        self.tails.state[: size.sequences, 1 + number] = token
