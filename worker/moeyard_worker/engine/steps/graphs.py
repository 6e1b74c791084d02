"""The captured steps of a rank, by size: captured at start, or each at its first use."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from moeyard_kernels.backend import StepBackend, StepInputs
from moeyard_kernels.types.step_size import StepSize
from moeyard_worker.engine.steps.programs import StepProgram
from moeyard_worker.exchange.base import Exchange, PeerRows

log = logging.getLogger(__name__)

# Seconds in which launches must end once nothing waits for peers.
_END_S, _PAUSE_S = 10.0, 1e-3

Graph = torch.cuda.CUDAGraph


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A captured step: its program, and the graph of each part."""

    program: StepProgram
    graphs: Mapping[str, Graph]

    @property
    def inputs(self) -> StepInputs:
        """The inputs that a step fills in before a replay."""
        return self.program.state.inputs


class StepGraphs:
    """Captured steps: the launches of `program` for each size.

    With `ExchangeTraits.graphs_per_epoch` each size is captured at its first use in the epoch, while peers wait.
    """

    def __init__(self, program: Callable[[StepSize], StepProgram], exchange: Exchange, backend: StepBackend) -> None:
        self._program, self._exchange, self._backend = program, exchange, backend
        self._per_epoch = exchange.traits.graphs_per_epoch
        exchange.steps.release_graphs = self.release
        # Smallest first: a step uses the first size that holds it.
        self.sizes: tuple[StepSize, ...] = ()
        self.captured: dict[StepSize, CapturedStep] = {}
        # Graphs of ended epochs that the device may still run.
        self._running: list[dict[StepSize, CapturedStep]] = []
        self._pool: Any = None

    def prepare(self, sizes: Iterable[StepSize]) -> Any:
        """Run steps in these sizes from now on; return their memory pool.

        Captures begin with the largest size, so that smaller ones reuse its memory. If graphs last one epoch, each
        number of rows, width and number of peers' rows runs once to compile its kernels.
        """
        self._pool = torch.cuda.graph_pool_handle()
        self.sizes = tuple(sorted(sizes, key=lambda size: size.order))
        with self._backend.without_collection():
            (self._run_some if self._per_epoch else self._capture_all)()
        return self._pool

    def runs(self, sizes: Iterable[StepSize]) -> Iterator[Callable[[], object]]:
        """Yield the launches that `prepare` captures for these sizes, in its order."""
        for size in sorted(sizes, key=lambda size: size.order, reverse=True):
            yield from self._expected(size).parts.values()

    def _capture_all(self) -> None:
        kinds = set[tuple[bool, int, str]]()
        for size in reversed(self.sizes):
            program, graphs = self._expected(size), dict[str, Graph]()
            for name, run in program.parts.items():
                # Layers allocate workspace in their first run of each kind.
                kind = bool(size.prompt), size.queries if size.decode else 0, name
                graphs[name] = self._backend.capture(run, self._pool, ahead=kind not in kinds)[0]
                kinds.add(kind)
                if len(program.parts) > 1:
                    # Capturing does not run a part, and the next part reads its results.
                    graphs[name].replay()
            self.captured[size] = CapturedStep(program, graphs)

    def _run_some(self) -> None:
        tables, peers = set[tuple[int, int]](), set[int]()
        for size in reversed(self.sizes):
            if (size.rows, size.width) not in tables or size.peers not in peers:
                self.run(size)
            tables.add((size.rows, size.width))
            peers.add(size.peers)

    def _expected(self, size: StepSize) -> StepProgram:
        self._exchange.steps.set_rows(PeerRows(size.peers))
        return self._program(size)

    def run(self, size: StepSize) -> None:
        """Launch a step of that size."""
        for run in self._expected(size).parts.values():
            run()

    def step(self, size: StepSize) -> CapturedStep:
        """Return a captured step; capture it now if necessary. Raises ExchangeError, see
        `ExchangeSteps.before_capture`."""
        found = self.captured.get(size)
        if found is None:
            assert self._per_epoch, f"{size} was to be captured at the start"
            self._exchange.steps.before_capture()
            program = self._expected(size)
            graphs = {name: self._backend.capture_while_serving(run, self._pool) for name, run in program.parts.items()}
            found = self.captured[size] = CapturedStep(program, graphs)
        return found

    def release(self) -> None:
        """Free all graphs, for `ExchangeSteps.release_graphs`. Any thread may call it."""
        captured, self.captured = self.captured, {}
        if not captured:
            return
        if not self._has_ended():
            log.warning("the device still runs steps of the ended epoch: %d stay allocated", len(captured))
            self._running.append(captured)
            return
        for step in captured.values():
            for graph in step.graphs.values():
                # Reset explicitly: the traceback of an error may still hold a reference.
                graph.reset()

    def _has_ended(self) -> bool:
        """Wait up to `_END_S` seconds for all launches; return whether they have ended."""
        if self._backend.device.type == "cpu":
            return True
        limit = time.monotonic() + _END_S
        try:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._backend.device))
            while not event.query():
                if time.monotonic() > limit:
                    return False
                time.sleep(_PAUSE_S)
        except RuntimeError:  # boundary: the device has failed; other code raises its error
            return False
        return True


def smallest(sizes: Iterable[StepSize], size: StepSize, most: int) -> StepSize | None:
    """Return the first of `sizes` that holds a step of `size` while a peer brings up to `most` rows; None if none does.
    Without peers `most` is 0. With peers this rank brings at most `most` rows itself, as the ranks agreed."""
    for each in sizes:
        if each.holds(size) and each.peers >= most and (not most or each.rows <= most):
            return each
    return None
