"""Draft the tokens after those a step has sampled, with the model's layer for multi-token prediction or with DSpark.

With the layer (`Speculation`) the first pass covers all rows of the step, each with the token after it. Later passes
attend to its states. The row of each sequence's last accepted token gives its first draft. Every other pass has one row
per sequence: the draft before, with the output of the pass before. All ranks make the same number of passes, with or
without rows. With DSpark (`BlockSpeculation`) all rows of the step store keys, which needs no peer. Then one pass over
a block per sequence makes all drafts.

The state of these rows, and of refused drafts, is provisional: the next step overwrites it. A draft is chosen as its
token will be: with the noise of its position, its request's parameters and its grammar. It is kept only if the model
then chooses the same token, so drafts cannot change an answer.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from moeyard_kernels.backend import Backend, StepPlan
from moeyard_kernels.types.sending import to_device
from moeyard_worker.engine.sampling.sampling import SampledRow, choose, mask_of
from moeyard_worker.exchange.base import Exchange, PeerRows
from moeyard_worker.models.decoder import Decoder
from moeyard_worker.models.dspark import BlockDrafter
from moeyard_worker.models.model_config import BlockDrafts, ModelConfig
from moeyard_worker.models.mtp import Drafter
from moeyard_worker.scheduling.request import Accepted, Request
from moeyard_worker.scheduling.step import Chunk, Step


class Speculation:
    """Makes drafts with `drafter` for `model`, in steps planned by `backend`, over the model's `exchange`.

    `slots`: whether the drafting layer keeps state per sequence. It does so only if the slot holds rows by position.
    """

    def __init__(
        self,
        drafter: Drafter,
        *,
        model: Decoder,
        backend: Backend,
        exchange: Exchange,
        eos_token_ids: tuple[int, ...],
        slots: bool,
    ) -> None:
        self.drafter, self._model, self._backend, self._exchange = drafter, model, backend, exchange
        self._eos_token_ids, self._slots = eos_token_ids, slots

    def warm(self, plan: StepPlan) -> None:
        """Launch the model over prompts, and the first pass after it."""
        self.drafter.forward(plan.token_ids, self._model.hidden(plan), plan)

    def draft(
        self,
        tails: "Sequence[Tail]",
        step: Step,
        plan: StepPlan,
        hidden: torch.Tensor,
        *,
        num_passes: int,
        most_rows: int,
    ) -> None:
        """Add up to `num_passes` drafts to each of the step's `tails` (`tails_of`).

        `hidden` [num_rows, H] are the step's inputs to the head, and `plan` is the step's plan. No rank brings more
        than `most_rows` rows to the step's exchanges. Raises ExchangeError when a peer is lost.
        """
        token_ids = torch.from_numpy(_tokens_behind(step, tails, plan.num_rows))
        x = self.drafter.forward(to_device(token_ids, hidden.device), hidden, plan)
        going = [tail for tail in tails if tail.wants(1, self._backend.page_size)]
        x = _rows(x, [tail.row for tail in going])
        self._choose(x, going)
        # No rank has prompt rows in the remaining passes.
        self._exchange.steps.set_rows(PeerRows(most_rows))
        for number in range(2, num_passes + 1):
            kept = [i for i, tail in enumerate(going) if tail.wants(number, self._backend.page_size)]
            x, going = _rows(x, kept), [going[i] for i in kept]
            plan = self._backend.plan(Step(decode=tuple(tail.chunk(number, slots=self._slots) for tail in going)))
            padded = x.new_zeros(plan.num_rows, x.shape[1])
            padded[: len(going)] = x
            x = self.drafter.forward(plan.token_ids, padded, plan)[: len(going)]
            self._choose(x, going)
        # A rank without rows drains too: these passes also wait for peers.
        self._exchange.steps.drain()

    def _choose(self, x: torch.Tensor, going: "Sequence[Tail]") -> None:
        if not going:
            return
        self._exchange.steps.drain()
        _extend(going, self.drafter.head(x).float(), self._backend, self._eos_token_ids)


class BlockSpeculation:
    """Makes drafts with `drafter` for `model`, as `Speculation`. No block ends behind the model's last position."""

    def __init__(
        self,
        drafter: BlockDrafter,
        *,
        model: Decoder,
        config: ModelConfig,
        backend: Backend,
        exchange: Exchange,
        max_sequences: int | None,
    ) -> None:
        self.drafter, self._model, self._backend, self._exchange = drafter, model, backend, exchange
        self._block, self._max_sequences = drafter.block, max_sequences
        self._eos_token_ids, self._max_position = config.eos_token_ids, config.max_position

    def warm(self, plan: StepPlan) -> None:
        """Launch the model over prompts, the store of their keys, and a block behind none. The first slot is empty."""
        self.drafter.store(self._model.hidden(plan), plan)
        size, token = self._block.size, self._block.noise_token
        ids, pages = (token,) * size, (0,) * size
        chunk = Chunk(key=(b"", ""), start=0, token_ids=ids, pages=pages, prompt=False, num_sampled=0, state_slot=0)
        block: Any = self._backend.plan(Step(decode=(chunk,)))
        # Gates do not count rows without an entry.
        block.entries.fill_(-1)
        self._exchange.steps.set_rows(PeerRows(size))
        self.drafter.head(self.drafter.forward(block))
        self.drafter.bias(block.token_ids[:1])

    def draft(
        self,
        tails: "Sequence[Tail]",
        step: Step,
        plan: StepPlan,
        hidden: torch.Tensor,
        *,
        num_passes: int,
        most_rows: int,
    ) -> None:
        """Add drafts as `Speculation`. Call it without passes too: later drafts need the keys of all positions."""
        size = self._block.size
        if step.num_tokens:
            self.drafter.store(hidden, plan)
        if not num_passes:
            return
        going = [t for t in tails if t.wants(1, self._backend.page_size) and t.end + size <= self._max_position]
        self._exchange.steps.set_rows(block_rows(most_rows, self._block, max_sequences=self._max_sequences))
        x = self.drafter.forward(self._backend.plan(Step(decode=tuple(tail.block(self._block) for tail in going))))
        self._exchange.steps.drain()
        if going:
            self._choose(x, going, min(num_passes, size))

    def _choose(self, x: torch.Tensor, going: "Sequence[Tail]", num_drafts: int) -> None:
        size = self._block.size
        wanted = [i * size + j for i in range(len(going)) for j in range(num_drafts)]
        logits = self.drafter.head(_rows(x, wanted)).float().unflatten(0, (len(going), num_drafts))
        for number in range(1, num_drafts + 1):
            kept = [i for i, tail in enumerate(going) if tail.wants(number, self._backend.page_size)]
            if not kept:
                break
            before = torch.tensor([going[i].last for i in kept], dtype=torch.int64)
            biased = _rows(logits[:, number - 1], kept) + self.drafter.bias(to_device(before, x.device))
            _extend([going[i] for i in kept], biased, self._backend, self._eos_token_ids)


def block_rows(most: int, block: BlockDrafts, *, max_sequences: int | None) -> PeerRows:
    """Return the rows of a pass over blocks. Ranks bring up to `most` rows and `max_sequences` sequences to the step.

    A sequence with a block has one row of the step or more.
    """
    return PeerRows((most if max_sequences is None else min(most, max_sequences)) * block.size)


def _extend(tails: "Sequence[Tail]", logits: torch.Tensor, backend: Backend, eos_token_ids: tuple[int, ...]) -> None:
    """Add a draft to each tail, chosen by its row of logits [tails, V] fp32."""
    found = choose(backend, logits, [tail.row_of_next() for tail in tails], eos_token_ids)
    for tail, (token_id, _) in zip(tails, found, strict=True):
        tail.drafts.append(token_id)


def _rows(x: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    return x.index_select(0, to_device(torch.tensor(rows, dtype=torch.int64), x.device))


class Tail:
    """The end of one sequence: its accepted tokens, and the drafts after them.

    `row` of the step read the token before the last accepted one, which is at position `end`.
    """

    __slots__ = ("_chunk", "_params", "_prompt", "_request", "drafts", "end", "output", "result", "row")

    def __init__(self, chunk: Chunk, request: Request, first: SampledRow, result: Accepted, *, row: int) -> None:
        self._chunk, self._request, self.result = chunk, request, result
        self._params = first.params if first.params.logprobs is None else replace(first.params, logprobs=None)
        self._prompt = first.prompt
        self.row = row
        self.output = [*first.output, *result.token_ids]
        self.end = len(first.prompt) + len(self.output) - 1
        self.drafts: list[int] = []

    def wants(self, number: int, page_size: int) -> bool:
        """Return whether it may have draft `number` (from 1): within its request's limit, with a page for the row."""
        request = self._request
        if request.ended or self.result.error is not None or len(self.drafts) < number - 1:
            return False
        # The row that produces the draft is two positions before it.
        pages, dropped = self._chunk.behind
        return self.end + number < request.limit and self.end + number - 2 - dropped < len(pages) * page_size

    def drafted(self) -> Accepted:
        """Return the result with the drafts."""
        return replace(self.result, drafts=tuple(self.drafts))

    @property
    def last(self) -> int:
        """The last draft, or the last accepted token before the first draft."""
        return self.drafts[-1] if self.drafts else self.output[-1]

    def block(self, drafts: BlockDrafts) -> Chunk:
        """Return the rows of a block, which begins with the last accepted token."""
        pages, _ = self._chunk.behind
        return Chunk(
            key=self._chunk.key,
            start=self.end,
            token_ids=(self.output[-1], *(drafts.noise_token,) * (drafts.size - 1)),
            # No row reads or writes a page, but the last rows may be behind the request's pages.
            pages=(*pages, *pages[-1:] * drafts.size),
            prompt=False,
            num_sampled=0,
            state_slot=self._chunk.state_slot,
        )

    def row_of_next(self) -> SampledRow:
        output = [*self.output, *self.drafts]
        mask = mask_of(self._request, output)
        return SampledRow(params=self._params, prompt=self._prompt, output=output, mask=mask)

    def chunk(self, number: int, *, slots: bool) -> Chunk:
        """Return the row of pass `number`, which reads the draft before. `slots`: as in `Speculation`."""
        pages, dropped = self._chunk.behind
        return Chunk(
            key=self._chunk.key,
            start=self.end + number - 2,
            token_ids=(self.drafts[-1],),
            pages=pages,
            prompt=False,
            num_sampled=1,
            dropped=dropped,
            state_slot=self._chunk.state_slot if slots else -1,
        )


def tails_of(
    step: Step, requests: Sequence[Request], rows: Sequence[SampledRow], results: Sequence[Accepted]
) -> list[Tail]:
    """Return the tails of a step's sampled chunks, to which `requests` and `results` belong, and all sampled `rows`."""
    tails: list[Tail] = []
    end = sampled = 0
    for chunk in step.chunks:
        end += chunk.num_tokens
        if chunk.num_sampled:
            number = len(tails)
            row = end - chunk.num_sampled + len(results[number].token_ids) - 1
            tails.append(Tail(chunk, requests[number], rows[sampled], results[number], row=row))
            sampled += chunk.num_sampled
    return tails


def _tokens_behind(step: Step, tails: Sequence[Tail], num_rows: int) -> np.ndarray:
    """Return [num_rows] int64: the token after each row; zero after a refused draft and in the padding."""
    token_ids, begin = np.zeros(num_rows, dtype=np.int64), 0
    remaining = iter(tails)
    for chunk in step.chunks:
        first = chunk.num_tokens - chunk.num_sampled
        behind = chunk.token_ids[1 : first + 1]
        if chunk.num_sampled:
            behind += next(remaining).result.token_ids
        elif chunk.following is not None:
            behind += (chunk.following,)
        token_ids[begin : begin + len(behind)] = behind
        begin += chunk.num_tokens
    return token_ids
