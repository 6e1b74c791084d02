"""Runs steps on a GPU: decode steps as CUDA graphs, others launch by launch; results are taken when they are there.

A step is launched and not waited for. Its tokens stay on the device, where the next step finds those that the host does
not know yet (`Chunk.fed`), and are copied to the host behind it.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from moeyard_kernels import ops
from moeyard_kernels.cuda.backend import CudaBackend
from moeyard_kernels.cuda.decode_inputs import DecodeInputs
from moeyard_kernels.types.sampled_tokens import SampledTokens
from moeyard_worker.engine.runner import Runner
from moeyard_worker.engine.sampling import accepted, ask, edits_logits, sampled_rows, tell
from moeyard_worker.scheduling.request import Accepted, Request
from moeyard_worker.scheduling.step import Step

# Rows of a captured step; a step runs in the next larger one. Where few rows cost little more than one, steps are wide.
_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
# Pages of a captured step's table: one split of the keys without a merge, then up to the longest sequence by fours.
_FIRST_WIDTH = 8


@dataclass(frozen=True, slots=True)
class _Graph:
    """One captured decode step and what it reads and writes."""

    inputs: DecodeInputs
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor


class GraphLaunched:
    """A step that runs. `results` waits for it, and for no step behind it."""

    def __init__(self, step: Step, tokens: SampledTokens, requests: Sequence[Request]) -> None:
        self.step = step
        self._requests = requests
        self._tokens = _to_host(tokens)
        self._done = torch.cuda.Event()
        self._done.record()
        self._results: list[Accepted] | None = None

    @property
    def results(self) -> list[Accepted]:
        """`results[i]` of `step.sampled[i]`."""
        if self._results is None:
            self._done.synchronize()
            asked = [r.sampling.logprobs for c, r in zip(self.step.sampled, self._requests, strict=True)]
            self._results = accepted(self.step, tell(self._tokens, asked))
        return self._results


class GraphRunner:
    """A runner on a GPU. `max_rows` bounds the rows of a decode step, `max_pages` the pages of a sequence."""

    def __init__(self, runner: Runner, backend: CudaBackend, *, max_rows: int, max_pages: int) -> None:
        self._runner, self._backend = runner, backend
        self._max_rows, self._max_pages = max_rows, max_pages
        self._last_ids = torch.zeros(max_rows, dtype=torch.int64, device=backend.device)
        self._graphs: dict[tuple[int, int], _Graph] = {}
        # Steps of each kind; rows of all replays, and how many of them were padding.
        self.num_replayed = 0
        self.num_eager = 0
        self.num_rows = 0
        self.num_padded_rows = 0
        # Launch every step kernel by kernel while this is set.
        self.eager = False

    def buckets(self) -> Iterator[tuple[int, int]]:
        """(rows, pages) of every step that is captured."""
        rows = [r for r in _ROWS if r < self._max_rows] + [self._max_rows]
        widths, width = [], _FIRST_WIDTH
        while width < self._max_pages:
            widths.append(width)
            width *= 4
        return itertools.product(rows, (*widths, self._max_pages))

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture all buckets, the largest first, so that the others find their memory in its pool."""
        pool = torch.cuda.graph_pool_handle()
        for rows, width in sorted(self.buckets(), reverse=True):
            self._graphs[rows, width] = self._capture(rows, width, pool)

    def _capture(self, rows: int, width: int, pool: Any) -> _Graph:
        inputs = DecodeInputs(
            rows=rows, width=width, page_size=self._backend.page_size, windows=self._backend.windows,
            last_ids=self._last_ids,
        )  # fmt: skip
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            # Compiles what is not compiled yet.
            self._decode(inputs)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            logits = self._decode(inputs)
        return _Graph(inputs, graph, logits)

    def _decode(self, inputs: DecodeInputs) -> torch.Tensor:
        inputs.begin()
        logits = self._runner.model.forward(inputs)
        self._last_ids[: inputs.num_rows] = ops.sample(logits).ids
        return logits

    @torch.inference_mode()
    def launch(self, step: Step, requests: Sequence[Request], *, before: GraphLaunched | None) -> GraphLaunched:
        """See `Runner.launch`; returns before the step has run."""
        if not step.chunks:
            self._runner.forward(step)
            return GraphLaunched(step, SampledTokens(ids=self._last_ids[:0]), requests)
        found = self._bucket(step)
        if found is None:
            logits = self._eager(step)
        else:
            count = len(step.decode)
            found.inputs.fill(step.decode, [-1 if c.fed is None else c.fed for c in step.decode])
            found.graph.replay()
            self.num_replayed += 1
            self.num_rows += found.inputs.num_rows
            self.num_padded_rows += found.inputs.num_rows - count
            logits = found.logits[:count]
        num_sampled = len(step.sample_rows)
        if found is not None and all(_plain(request) for request in requests):
            return GraphLaunched(step, SampledTokens(ids=self._last_ids[:num_sampled]), requests)
        rows = sampled_rows(step, requests, before)
        tokens = ask(logits, rows, self._runner.config.eos_token_ids)
        self._last_ids[:num_sampled] = tokens.ids
        return GraphLaunched(step, tokens, requests)

    def _bucket(self, step: Step) -> _Graph | None:
        """The smallest captured step that this one fits; None for what is launched kernel by kernel."""
        if self.eager or step.prefill or any(len(c.token_ids) > 1 or not c.num_sampled for c in step.decode):
            return None
        count, pages = len(step.decode), max(len(c.pages) for c in step.decode)
        fits = [size for size in self._graphs if size[0] >= count and size[1] >= pages]
        return self._graphs[min(fits)] if fits else None

    def _eager(self, step: Step) -> torch.Tensor:
        """Logits of the sampled rows; tokens that the host does not know come from the step before."""
        self.num_eager += 1
        plan = self._backend.plan(step)
        row, rows, feed = step.num_prefill_tokens, [], []
        for chunk in step.decode:
            if chunk.fed is not None:
                assert chunk.num_tokens == 1, "drafts are fed by nobody yet"
                rows.append(row)
                feed.append(chunk.fed)
            row += chunk.num_tokens
        if rows:
            index = torch.tensor([rows, feed]).to(self._backend.device, non_blocking=True)
            plan.token_ids[index[0]] = self._last_ids[index[1]]
        return self._runner.model.forward(plan)


def _plain(request: Request) -> bool:
    """Whether the largest logit is all it wants."""
    p = request.sampling
    edits = edits_logits(p) or len(request.output) < p.min_tokens
    return p.temperature == 0 and p.logprobs is None and not edits


def _to_host(tokens: SampledTokens) -> SampledTokens:
    """Copies in pinned memory that are on their way."""

    def moved(x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True)

    ids = moved(tokens.ids)
    assert ids is not None, "every step of sampling has tokens"
    return replace(
        tokens,
        ids=ids,
        logprobs=moved(tokens.logprobs),
        ranks=moved(tokens.ranks),
        top_ids=moved(tokens.top_ids),
        top_logprobs=moved(tokens.top_logprobs),
    )
