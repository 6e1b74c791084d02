"""Captured steps that verify drafts and make others, by their size: what a `SpeculativeRunner` replays.

A step is a chain of graphs in one stream, without the host: the model over all rows, the choice of their tokens, which
of these count, a pass of the layer for multi-token prediction over the same rows with the tokens behind them, and a
pass over one row per sequence for every further draft. What the next step begins with stays on the device (`Tails`).

With peers every pass is an exchange, which all ranks take part in: they have agreed on how many passes a step has and
on the most rows that any of them verifies, and no pass brings more. A rank without rows has a graph of the model's
exchanges and one of a pass's (`IdleGraphs`).

A draft is drawn with the noise of its position and with its request's temperature and cuts. Penalties, a minimum length
and grammars it does not know here: where they decide, drafts are refused more often, and tokens stay what they are.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import torch

from moeyard_kernels import ops
from moeyard_kernels.cuda.backend import CudaBackend
from moeyard_kernels.cuda.verify_inputs import Tails, VerifyInputs, VerifySize
from moeyard_worker.engine.sampling.device_sampler import DeviceSampler, captured
from moeyard_worker.engine.steps.peer_buckets import rooms, smallest, verifying_with_peers
from moeyard_worker.engine.steps.runner import Runner
from moeyard_worker.exchange.base import PeerRows
from moeyard_worker.scheduling.step import Step

# Sequences of a captured step; a step runs in the next larger one.
_SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128)
# Pages of its table: few, then up to the longest sequence by so much. There are several graphs of each.
_FIRST_WIDTH, _WIDER = 8, 16


@dataclass(slots=True)
class _Drafts:
    """By number, from 1: what gave a draft [B, H], the draft [B], and where the last accepted token sits [B]."""

    states: dict[int, torch.Tensor] = field(default_factory=dict)
    tokens: dict[int, torch.Tensor] = field(default_factory=dict)
    end: torch.Tensor | None = None


@dataclass(slots=True)
class SizedGraphs:
    """All graphs of one size, and what they read and leave."""

    inputs: VerifyInputs
    hidden: torch.Tensor | None = None
    verify: torch.cuda.CUDAGraph | None = None
    accept: torch.cuda.CUDAGraph | None = None
    # By (whether something is drawn, number of the draft).
    draft: dict[tuple[bool, int], torch.cuda.CUDAGraph] = field(default_factory=dict)
    drafts: dict[bool, _Drafts] = field(default_factory=lambda: {False: _Drafts(), True: _Drafts()})

    def replay(self, num_drafts: int, *, drawn: bool) -> None:
        """What follows the choice of tokens: count the right ones, and draft."""
        assert self.accept is not None, "captured"
        if not num_drafts:
            self.accept.replay()
        for number in range(1, num_drafts + 1):
            self.draft[drawn, number].replay()


@dataclass(frozen=True, slots=True)
class IdleGraphs:
    """What a rank without rows does in a step of its peers: the model's exchanges, and those of each pass."""

    verify: torch.cuda.CUDAGraph
    draft: torch.cuda.CUDAGraph

    def replay(self, num_drafts: int) -> None:
        """A step with so many passes."""
        self.verify.replay()
        for _ in range(num_drafts):
            self.draft.replay()


class DraftGraphs:
    """Up to `max_sequences` sequences of up to `max_pages` pages, each with up to `num_drafts` drafts; `queries`: with
    how many rows of each steps are captured. `sampler` has room for all rows."""

    def __init__(
        self, runner: Runner, backend: CudaBackend, sampler: DeviceSampler, *, max_sequences: int, max_pages: int,
        num_drafts: int, queries: Sequence[int],
    ) -> None:  # fmt: skip
        assert runner.speculation is not None, "drafts are made by a layer for that"
        self._model, self._drafter = runner.model, runner.speculation.drafter
        self._backend, self._sampler = backend, sampler
        # Whether something is drawn, and the number of the draft.
        self._passes = [*product((False, True), range(1, 1 + num_drafts))]
        self._limit = runner.config.max_position
        self._exchange, self._has_peers = runner.exchange, runner.exchange.places_rows
        self._max_sequences, self._max_pages, self._queries = max_sequences, max_pages, sorted(queries)
        self.tails = Tails(max_sequences=max_sequences, num_drafts=num_drafts, device=backend.device)
        self._graphs: dict[VerifySize, SizedGraphs] = {}
        # By the rows of a peer that there is room for, ascending.
        self._idle: dict[int, IdleGraphs] = {}

    def sizes(self) -> Iterator[VerifySize]:
        """Of every step that is captured."""
        return verifying_with_peers([*self._own_sizes()]) if self._has_peers else self._own_sizes()

    def _own_sizes(self) -> Iterator[VerifySize]:
        """The same of a rank by itself."""
        widths, width = [], _FIRST_WIDTH
        while width < self._max_pages:
            widths.append(width)
            width *= _WIDER
        sequences = [*(size for size in _SEQUENCES if size < self._max_sequences), self._max_sequences]
        for count, queries, width in product(sequences, self._queries, (*widths, self._max_pages)):
            yield VerifySize(sequences=count, queries=queries, width=width)

    def capture(self, pool: Any) -> None:
        """Capture all sizes, the largest first, so that the others find their memory in its pool."""
        for graphs in self._sized():
            self._graphs[graphs.inputs.size] = graphs
            self._capture(graphs, pool)
        # The smallest first: a step takes the first that holds it.
        self._graphs = dict(reversed(self._graphs.items()))
        if self._has_peers:
            for rows in sorted({1, *rooms(max(size.rows for size in self._own_sizes()))}):
                self._exchange.expect(PeerRows(rows))
                self._idle[rows] = self._capture_idle(pool)

    def runs(self) -> Iterator[Callable[[], object]]:
        """What `capture` captures of steps with rows, one by one: each reads what those before it leave."""
        for graphs in self._sized():
            yield partial(self._verify, graphs)
            yield partial(self._accept, graphs)
            for drawn, number in self._passes:
                yield partial(self._draft, graphs, drawn, number)

    def _sized(self) -> Iterator[SizedGraphs]:
        """Of every size, the largest first, nothing captured yet; peers are expected to bring so many rows."""
        for size in sorted(self.sizes(), key=lambda s: (s.rows, s.width, s.peers), reverse=True):
            self._exchange.expect(PeerRows(size.peers))
            inputs = VerifyInputs(
                size, page_size=self._backend.page_size, windows=self._backend.windows, limit=self._limit,
                device=self._backend.device, slots=self._backend.slots,
            )  # fmt: skip
            yield SizedGraphs(inputs)

    @property
    def num_graphs(self) -> int:
        """How many were captured."""
        return sum(2 + len(graphs.draft) for graphs in self._graphs.values()) + 2 * len(self._idle)

    def find(self, size: VerifySize, most: int) -> SizedGraphs | None:
        """The smallest captured step that holds one of this size, beside peers who bring at most `most` rows."""
        found = smallest(self._graphs, size, most if self._has_peers else 0)
        return None if found is None else self._graphs[found]

    def find_idle(self, most: int) -> IdleGraphs | None:
        """What a rank without rows runs beside peers who bring at most `most`."""
        return next((graphs for rows, graphs in self._idle.items() if rows >= most), None)

    def _capture_idle(self, pool: Any) -> IdleGraphs:
        plan = self._backend.plan(Step.empty())
        nothing = self._model.hidden(plan)
        return IdleGraphs(
            verify=captured(partial(self._idle_pass, self._model.hidden, plan), pool)[0],
            draft=captured(partial(self._idle_pass, self._drafter.forward, plan.token_ids, nothing, plan), pool)[0],
        )

    def _idle_pass(self, forward: Callable[..., torch.Tensor], *given: Any) -> None:
        """Exchanges that bring nothing of this rank's."""
        forward(*given)

    def _capture(self, graphs: SizedGraphs, pool: Any) -> None:
        graphs.verify = captured(partial(self._verify, graphs), pool)[0]
        # What is captured has not run, and what follows reads what it leaves.
        graphs.verify.replay()
        graphs.accept = captured(partial(self._accept, graphs), pool)[0]
        for drawn, number in self._passes:
            graphs.draft[drawn, number] = captured(partial(self._draft, graphs, drawn, number), pool)[0]
            graphs.draft[drawn, number].replay()

    def _verify(self, graphs: SizedGraphs) -> None:
        inputs, rows = graphs.inputs, graphs.inputs.size.rows
        inputs.begin(self.tails)
        graphs.hidden = self._model.hidden(inputs)
        logits = self._sampler.logits[:rows]
        self._model.sampled(graphs.hidden, inputs, out=logits)
        self._sampler.last_ids[:rows] = ops.sample(logits).ids

    def _accept(self, graphs: SizedGraphs) -> torch.Tensor:
        return graphs.inputs.accept(self._sampler.last_ids[: graphs.inputs.size.rows], self.tails)

    def _draft(self, graphs: SizedGraphs, drawn: bool, number: int) -> None:
        if number == 1:
            self._first(graphs, drawn)
        else:
            self._more(graphs, drawn, number)

    def _first(self, graphs: SizedGraphs, drawn: bool) -> None:
        """The first draft: of the row of each sequence's last accepted token."""
        inputs, size, drafts = graphs.inputs, graphs.inputs.size, graphs.drafts[drawn]
        count = self._accept(graphs)
        drafts.end = inputs.start + count
        assert graphs.hidden is not None, "verified before"
        x = self._drafter.forward(self._sampler.last_ids[: size.rows], graphs.hidden, inputs)
        last = torch.arange(size.sequences, device=x.device) * size.queries + count - 1
        self._draw(graphs, drawn, 1, x.index_select(0, last))

    def _more(self, graphs: SizedGraphs, drawn: bool, number: int) -> None:
        """Another draft: of a row that reads the one before, given the state that gave that."""
        drafts = graphs.drafts[drawn]
        assert drafts.end is not None, "there is a first one"
        rows = graphs.inputs.draft_rows(drafts.end + (number - 2))
        x = self._drafter.forward(drafts.tokens[number - 1], drafts.states[number - 1], rows)
        self._draw(graphs, drawn, number, x)

    def _draw(self, graphs: SizedGraphs, drawn: bool, number: int, x: torch.Tensor) -> None:
        size, drafts = graphs.inputs.size, graphs.drafts[drawn]
        assert drafts.end is not None, "there is a first one"
        arguments: dict[str, Any] = {}
        if drawn:
            arguments = {**self._sampler.asked(size.sequences, size.queries), "positions": drafts.end + number}
        token = ops.sample(self._model.head(x).float(), **arguments).ids
        drafts.states[number], drafts.tokens[number] = x, token
        self.tails.state[: size.sequences, 1 + number] = token
