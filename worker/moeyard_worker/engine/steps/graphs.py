"""The captured steps of a rank, by size: all from its start on, or each once it is met."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from moeyard_kernels.backend import StepBackend, StepInputs
from moeyard_kernels.types.step_size import StepSize
from moeyard_worker.exchange.base import Exchange, PeerRows

log = logging.getLogger(__name__)

# How long launches may take to end once nothing waits for peers.
_END_S, _PAUSE_S = 10.0, 1e-3

Graph = torch.cuda.CUDAGraph


class Program(Protocol):
    """The launches of a step of one size: parts in order. Each may read what earlier parts leave."""

    @property
    def inputs(self) -> StepInputs: ...
    @property
    def parts(self) -> Mapping[str, Callable[[], object]]: ...


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A captured step: its program and that one's inputs, and the graph of each part."""

    program: Any
    inputs: StepInputs
    graphs: Mapping[str, Graph]


class StepGraphs:
    """Captured steps: what `program` launches for a size.

    With `ExchangeTraits.graphs_per_epoch` each is captured when it is first met in the epoch, while peers wait.
    """

    def __init__(self, program: Callable[[StepSize], Program], exchange: Exchange, backend: StepBackend) -> None:
        self._program, self._exchange, self._backend = program, exchange, backend
        self._per_epoch = exchange.traits.graphs_per_epoch
        exchange.steps.release_graphs = self._release
        # The smallest first: a step takes the first that holds it.
        self._sizes: tuple[StepSize, ...] = ()
        self._captured: dict[StepSize, CapturedStep] = {}
        # Graphs of epochs that have ended, which a device may still run.
        self._running: list[dict[StepSize, CapturedStep]] = []
        self._pool: Any = None

    @property
    def captured(self) -> Mapping[StepSize, CapturedStep]:
        """The captured steps that there are."""
        return self._captured

    @property
    def num_graphs(self) -> int:
        """How many graphs there are."""
        return sum(len(step.graphs) for step in self._captured.values())

    def prepare(self, sizes: Iterable[StepSize]) -> Any:
        """Have steps run in these sizes from here on, and return the pool of their memory.

        They are captured from the largest on, so that the others find their memory in its pool. Where captures wait for
        an epoch, each number of rows, width and number of peers' rows runs once, which compiles its kernels.
        """
        self._pool = torch.cuda.graph_pool_handle()
        self._sizes = tuple(sorted(sizes, key=lambda size: size.order))
        with self._backend.without_collection():
            (self._run_some if self._per_epoch else self._capture_all)()
        return self._pool

    def runs(self, sizes: Iterable[StepSize]) -> Iterator[Callable[[], object]]:
        """Yield what `prepare` captures of these sizes, in its order."""
        for size in sorted(sizes, key=lambda size: size.order, reverse=True):
            yield from self._expected(size).parts.values()

    def _capture_all(self) -> None:
        kinds = set[tuple[bool, int, str]]()
        for size in reversed(self._sizes):
            program, graphs = self._expected(size), dict[str, Graph]()
            for name, run in program.parts.items():
                # Layers keep things from their first run; the first of each kind makes them.
                kind = bool(size.prompt), size.queries if size.decode else 0, name
                graphs[name] = self._backend.capture(run, self._pool, ahead=kind not in kinds)[0]
                kinds.add(kind)
                if len(program.parts) > 1:
                    # A captured part has not run, and the next reads what it leaves.
                    graphs[name].replay()
            self._captured[size] = CapturedStep(program, program.inputs, graphs)

    def _run_some(self) -> None:
        tables, peers = set[tuple[int, int]](), set[int]()
        for size in reversed(self._sizes):
            if (size.rows, size.width) not in tables or size.peers not in peers:
                self.run(size)
            tables.add((size.rows, size.width))
            peers.add(size.peers)

    def _expected(self, size: StepSize) -> Program:
        self._exchange.steps.set_rows(PeerRows(size.peers))
        return self._program(size)

    def run(self, size: StepSize) -> None:
        """Launch a step of that size."""
        for run in self._expected(size).parts.values():
            run()

    def find(self, size: StepSize, most: int) -> StepSize | None:
        """The size that a step runs in; see `smallest`."""
        return smallest(self._sizes, size, most)

    def step(self, size: StepSize) -> CapturedStep:
        """A captured step, captured now if it has not been. Raises ExchangeError as `ExchangeSteps.before_capture`."""
        found = self._captured.get(size)
        if found is None:
            assert self._per_epoch, f"{size} was to be captured at the start"
            self._exchange.steps.before_capture()
            program = self._expected(size)
            graphs = {name: self._backend.capture_while_serving(run, self._pool) for name, run in program.parts.items()}
            found = self._captured[size] = CapturedStep(program, program.inputs, graphs)
        return found

    def _release(self) -> None:
        """Free all graphs, as `ExchangeSteps.release_graphs` asks. Any thread may call it."""
        captured, self._captured = self._captured, {}
        if not captured:
            return
        if not self._has_ended():
            log.warning("a device still runs steps captured in the epoch that has ended: %d stay", len(captured))
            self._running.append(captured)
            return
        for step in captured.values():
            for graph in step.graphs.values():
                # Not by its last reference, which the frame that an error came from may hold.
                graph.reset()

    def _has_ended(self) -> bool:
        """Wait, but not for ever, until all launches have run; whether they have."""
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
        except RuntimeError:  # boundary: a device that has failed; its error is raised elsewhere
            return False
        return True


def smallest(sizes: Iterable[StepSize], size: StepSize, most: int) -> StepSize | None:
    """The first of `sizes` that holds a step of `size` beside peers who bring at most `most` rows; None for none.

    Without peers `most` is 0. With peers it brings no more than `most` itself, as was agreed on.
    """
    for each in sizes:
        if each.holds(size) and each.peers >= most and (not most or each.rows <= most):
            return each
    return None
