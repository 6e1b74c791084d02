"""Programs of captured steps on a GPU: the model and the choice of tokens, and drafts if the model makes them.

A step without drafts has one part: the model over all rows and the argmax of the logits. A step that verifies drafts
has more parts. One counts the accepted tokens. One runs the multi-token prediction layer over the same rows, each with
the token after it. Every further draft is a pass over one row per sequence. With DSpark the model's part also stores
the keys of its rows, and one part makes all drafts in one pass. The state that the next step begins with stays on the
device (`tails`). In a model that drafts, a prompt step ends with its logits; the host chooses the tokens and makes the
drafts.

With peers every pass is an exchange that all ranks join. They agree on whether and how often a step drafts, and on the
most rows that a rank verifies. A rank without rows has one part for the model's exchanges and one for those of a pass.

A draft is sampled with the noise of its position and with its request's temperature and cuts. Penalties, minimum
lengths and grammars do not apply to drafts. Where these decide, more drafts are refused, and the tokens stay the same.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import torch

from moeyard_kernels.backend import StepBackend, StepInputs, StepPlan, VerifiedRows
from moeyard_kernels.types.step_size import StepSize
from moeyard_worker.engine.sampling.step_sampler import StepSampler
from moeyard_worker.engine.steps.drafting import BlockSpeculation, block_rows
from moeyard_worker.engine.steps.runner import Runner
from moeyard_worker.models.dspark import BlockDrafter
from moeyard_worker.models.mtp import Drafter

# Parts of a program; `draft_part` names the parts of drafts.
MODEL, ACCEPT, IDLE_DRAFT = "model", "accept", "draft"


def draft_part(drawn: bool, number: int) -> str:
    """Return the name of the part that makes a draft; `drawn` if any request of the step samples."""
    return f"{'drawn' if drawn else 'greedy'} draft {number}"


@dataclass(slots=True)
class _Drafts:
    """Drafts by number, from 1: their hidden states [B, H] and tokens [B]. `end` [B]: the position of the last accepted
    token."""

    states: dict[int, torch.Tensor] = field(default_factory=dict)
    tokens: dict[int, torch.Tensor] = field(default_factory=dict)
    end: torch.Tensor | None = None


@dataclass(slots=True)
class StepState:
    """The inputs of a step, and the results that its parts leave to each other and to the host."""

    inputs: StepInputs
    hidden: torch.Tensor | None = None
    drafts: dict[bool, _Drafts] = field(default_factory=lambda: {False: _Drafts(), True: _Drafts()})

    @property
    def verified(self) -> VerifiedRows:
        """The rows of a step that verifies drafts."""
        assert self.inputs.verified is not None, "only a step that verifies drafts has verified rows"
        return self.inputs.verified


@dataclass(frozen=True, slots=True)
class StepProgram:
    """The parts of a step, in order. The state refers to no part, so that a rehearsed step is freed at once."""

    state: StepState
    parts: dict[str, Callable[[], object]]


class StepPrograms:
    """Makes the programs of a runner's steps. `max_prompt` bounds the prompt rows of a model that drafts."""

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
        self._max_sequences = max_sequences
        self._drafter: Drafter | None = None
        self._blocks: BlockDrafter | None = None
        if isinstance(runner.speculation, BlockSpeculation):
            self._blocks = runner.speculation.drafter
        elif runner.speculation is not None:
            self._drafter = runner.speculation.drafter
        # The most parts that make drafts in a step.
        self.num_passes = num_drafts if self._blocks is None else min(num_drafts, 1)
        self.tails: Any = None
        self._hidden: torch.Tensor | None = None
        if num_drafts:
            self.tails = backend.tails(
                max_sequences=max_sequences, num_drafts=num_drafts, limit=runner.config.max_position
            )
            # One buffer for all steps with prompts: the host reads it before the next one runs.
            shape = max_prompt, runner.config.hidden_width
            self._hidden = torch.zeros(shape, dtype=runner.dtype, device=backend.device)

    @property
    def accepted(self) -> torch.Tensor:
        """The number of accepted tokens of each sequence in the latest step, on the device."""
        counts: torch.Tensor = self.tails.state[:, 0]
        return counts

    def __call__(self, size: StepSize) -> StepProgram:
        """Return the program of steps of a size."""
        verifies = bool(self._num_drafts and size.sequences)
        step = StepState(self._backend.step_inputs(size, self._sampler.last_ids, self.tails if verifies else None))
        parts: dict[str, Callable[[], object]] = {MODEL: partial(self.run_model, step)}
        if verifies:
            parts[ACCEPT] = partial(self._accept, step)
            for drawn, number in product((False, True), range(1, 1 + self.num_passes)):
                if self._blocks is not None:
                    make = partial(self._draft_block, step, drawn)
                else:
                    first = partial(self._first, step, drawn)
                    make = first if number == 1 else partial(self._more, step, drawn, number)
                parts[draft_part(drawn, number)] = make
        elif self._num_drafts and not size.rows:
            parts[IDLE_DRAFT] = partial(self._idle_draft, step)
        return StepProgram(step, parts)

    def run_model(self, step: StepState) -> None:
        """Run the model over all rows, and take the argmax of the logits of sampled rows."""
        inputs, sampler = step.inputs, self._sampler
        if not inputs.num_rows:
            step.hidden = self._model.hidden(inputs)
            return
        inputs.begin()
        hidden = self._model.hidden(inputs)
        if self._blocks is not None:
            assert not inputs.num_prompt, "prompts of a model that drafts blocks are launched"
            self._blocks.store(hidden, inputs)
        elif self._hidden is not None:
            step.hidden = hidden if not inputs.num_prompt else self._hidden[: inputs.num_rows].copy_(hidden)
        logits = sampler.logits[: inputs.num_sampled]
        self._model.sampled(hidden, inputs, out=logits)
        if self._hidden is None or not inputs.num_prompt:
            sampler.last_ids[: inputs.num_sampled] = self._backend.sample(logits).ids

    def _accept(self, step: StepState) -> torch.Tensor:
        return step.verified.accept(self._sampler.last_ids[: step.inputs.num_rows])

    def _idle_draft(self, step: StepState) -> None:
        if self._blocks is None:
            self._pass(step, step.inputs.token_ids)
        else:
            self._block_pass(step, step.inputs)

    def _pass(self, step: StepState, token_ids: torch.Tensor) -> torch.Tensor:
        """Run the drafting layer over the model's states; token_ids [num_rows] are the tokens after the rows."""
        assert self._drafter is not None, "drafts need a layer that makes them"
        assert step.hidden is not None, "the model's part comes first"
        return self._drafter.forward(token_ids, step.hidden, step.inputs)

    def _first(self, step: StepState, drawn: bool) -> None:
        """Make the first draft, from the row of each sequence's last accepted token."""
        size, count = step.inputs.size, self._accept(step)
        step.drafts[drawn].end = step.verified.start + count
        x = self._pass(step, self._sampler.last_ids[: size.rows])
        last = torch.arange(size.sequences, device=x.device) * size.queries + count - 1
        self._draw(step, drawn, 1, x.index_select(0, last))

    def _more(self, step: StepState, drawn: bool, number: int) -> None:
        """Make another draft, from a row that reads the draft before and its hidden state."""
        drafts = step.drafts[drawn]
        assert self._drafter is not None, "drafts need a layer that makes them"
        assert drafts.end is not None, "the first draft comes first"
        rows = step.verified.draft_rows(drafts.end + (number - 2))
        x = self._drafter.forward(drafts.tokens[number - 1], drafts.states[number - 1], rows)
        self._draw(step, drawn, number, x)

    def _draw(self, step: StepState, drawn: bool, number: int, x: torch.Tensor) -> None:
        drafts = step.drafts[drawn]
        assert self._drafter is not None, "drafts need a layer that makes them"
        assert drafts.end is not None, "the first draft comes first"
        token = self._token(step, drawn, drafts.end + number, self._drafter.head(x).float())
        drafts.states[number], drafts.tokens[number] = x, token
        self.tails.state[: step.inputs.size.sequences, 1 + number] = token

    def _token(self, step: StepState, drawn: bool, positions: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Return the drafts [B] at positions [B], chosen by logits [B, V]."""
        size, arguments = step.inputs.size, dict[str, Any]()
        if drawn:
            arguments = {**self._sampler.params_of(size.sequences, size.queries), "positions": positions}
        ids: torch.Tensor = self._backend.sample(logits, **arguments).ids
        return ids

    def _draft_block(self, step: StepState, drawn: bool) -> None:
        """Make all drafts from a block of rows per sequence. A block that does not fit leaves drafts of token 0, as do
        drafts beyond a block."""
        assert self._blocks is not None, "drafts need a drafter of blocks"
        block, state = self._blocks.block, self.tails.state[: step.inputs.size.sequences]
        end = step.verified.start + self._accept(step)
        plan, fits = step.verified.block_rows(end, size=block.size, noise_token=block.noise_token)
        count = min(self._num_drafts, block.size)
        x = self._block_pass(step, plan).view(len(end), block.size, -1)[:, :count].flatten(0, 1)
        logits, token = self._blocks.head(x).view(len(end), count, -1), state[:, 1]
        for number in range(1, 1 + count):
            biased = logits[:, number - 1].float() + self._blocks.bias(token)
            token = torch.where(fits, self._token(step, drawn, end + number, biased), 0)
            state[:, 1 + number] = token

    def _block_pass(self, step: StepState, plan: StepPlan) -> torch.Tensor:
        """Run the drafter's layers over a plan of blocks."""
        assert self._blocks is not None, "drafts need a drafter of blocks"
        rows = block_rows(step.inputs.size.peers, self._blocks.block, max_sequences=self._max_sequences)
        self._exchange.steps.set_rows(rows)
        return self._blocks.forward(plan)
