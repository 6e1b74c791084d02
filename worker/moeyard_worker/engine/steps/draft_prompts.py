"""Captured steps of prompts alone, of a model that drafts: what a `SpeculativeRunner` replays where it has no peers.

The model over all rows and the logits of those that are sampled are a graph; the choice of tokens and the drafts behind
them stay with the host and its launches (`Runner.settle`), as they do beside output rows. Launched one by one a prompt
takes a host as long as some thousand rows take a GPU.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from moeyard_kernels.cuda.backend import CudaBackend
from moeyard_kernels.cuda.graph_inputs import Bucket, GraphInputs
from moeyard_worker.engine.sampling.device_sampler import captured
from moeyard_worker.engine.steps.captured_sizes import CHUNKS, MAX_PROMPT, prompt_buckets
from moeyard_worker.engine.steps.peer_buckets import smallest
from moeyard_worker.engine.steps.runner import Runner
from moeyard_worker.scheduling.step import Step


@dataclass(frozen=True, slots=True)
class PromptGraph:
    """A captured step: its inputs, and what it leaves, good until another is replayed: hidden states [num_rows, H] of
    all rows, and logits [num_sampled, V] fp32 of the sampled ones, in order, then garbage."""

    inputs: GraphInputs
    graph: torch.cuda.CUDAGraph
    hidden: torch.Tensor
    logits: torch.Tensor


class PromptGraphs:
    """The graphs of `runner`, of up to `max_prompt` prompt rows (0: none) of sequences of up to `max_pages` pages."""

    def __init__(
        self, runner: Runner, backend: CudaBackend, *, max_pages: int, max_prompt: int, last_ids: torch.Tensor
    ) -> None:
        self._runner, self._backend, self._last_ids = runner, backend, last_ids
        self._max_pages, self._max_prompt = max_pages, min(max_prompt, MAX_PROMPT)
        self._graphs: dict[Bucket, PromptGraph] = {}

    def sizes(self) -> Iterator[Bucket]:
        """The size of every step that is captured."""
        sizes: dict[str, int] = {"max_rows": 1, "max_pages": self._max_pages, "max_prompt": self._max_prompt}
        for size in prompt_buckets(**sizes, flat=self._backend.flat) if self._max_prompt else ():
            if not size.decode:
                yield size

    @torch.inference_mode()
    def capture(self, pool: Any) -> None:
        """Capture all of them, with memory from `pool`, the largest first."""
        graphs = dict[Bucket, PromptGraph]()
        for inputs, hidden, logits in self._steps():
            graph, _ = captured(partial(self._forward, inputs, hidden, logits), pool, ahead=not graphs)
            graphs[inputs.bucket] = PromptGraph(inputs, graph, hidden, logits)
        self._graphs = dict(reversed(graphs.items()))

    def runs(self) -> Iterator[Callable[[], None]]:
        """What `capture` captures."""
        return (partial(self._forward, *step) for step in self._steps())

    def _steps(self) -> Iterator[tuple[GraphInputs, torch.Tensor, torch.Tensor]]:
        """What `_forward` takes, of every size, the largest first."""
        config, device = self._runner.config, self._backend.device
        # Of all graphs: only one of them has run last.
        hidden = torch.zeros(self._max_prompt, config.hidden_size, dtype=self._runner.dtype, device=device)
        logits = torch.zeros(CHUNKS, config.vocab_size, dtype=torch.float32, device=device)
        for size in sorted(self.sizes(), key=lambda size: (size.rows, size.keys), reverse=True):
            inputs = self._backend.graph_inputs(size, self._last_ids)
            yield inputs, hidden[: inputs.num_rows], logits[: inputs.num_sampled]

    def _forward(self, inputs: GraphInputs, hidden: torch.Tensor, logits: torch.Tensor) -> None:
        inputs.begin()
        hidden.copy_(self._runner.model.hidden(inputs))
        self._runner.model.sampled(hidden, inputs, out=logits)

    def replay(self, step: Step) -> PromptGraph | None:
        """Run a step in the smallest that it fits; None for one that is launched kernel by kernel."""
        size = Bucket.of(step) if step.prefill and not step.decode and not step.scored else None
        fits = None if size is None else smallest(self._graphs, size, 0)
        if fits is None:
            return None
        found = self._graphs[fits]
        found.inputs.fill(step, ())
        found.graph.replay()
        return found
