"""The captured steps of a rank that makes no drafts, by their size: all from its start on, or each once it is met."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from moeyard_kernels.cuda.graph_inputs import Bucket, GraphInputs
from moeyard_worker.engine.sampling.device_sampler import captured, captured_meanwhile, nothing_collected
from moeyard_worker.engine.steps.peer_buckets import smallest
from moeyard_worker.exchange.base import Exchange, PeerRows

log = logging.getLogger(__name__)

# For what was launched to end, once nothing waits for peers.
_END_S, _PAUSE_S = 10.0, 1e-3


@dataclass(frozen=True, slots=True)
class StepGraph:
    """One captured step and what it reads."""

    inputs: GraphInputs
    graph: torch.cuda.CUDAGraph


class StepGraphs:
    """Of what `forward` launches with the `inputs` of a size.

    Where captured steps are one epoch's (`Exchange.of_epoch`), each is captured when it is first met in it: the host
    launches it once more, so to speak, and peers wait.
    """

    def __init__(
        self, inputs: Callable[[Bucket], GraphInputs], forward: Callable[[GraphInputs], None], exchange: Exchange,
        device: torch.device,
    ) -> None:  # fmt: skip
        self._inputs, self._forward, self._exchange, self._device = inputs, forward, exchange, device
        self._of_epoch = exchange.of_epoch
        if self._of_epoch is not None:
            self._of_epoch.forget = self._forget
        # The smallest first: a step takes the first that holds it.
        self._sizes: tuple[Bucket, ...] = ()
        self._graphs: dict[Bucket, StepGraph] = {}
        # Those that a device may still be at when they were to go.
        self._left: list[dict[Bucket, StepGraph]] = []
        self._pool: Any = None

    @property
    def captured(self) -> Mapping[Bucket, StepGraph]:
        """Those that there are."""
        return self._graphs

    def prepare(self, sizes: Iterable[Bucket]) -> Any:
        """Steps run in these sizes from here on: they are captured, the largest first, so that the others find their
        memory in its pool, which is returned. Lazily: rows, tables and rooms are run once, which compiles them."""
        self._pool = torch.cuda.graph_pool_handle()
        self._sizes = _ascending(sizes)
        with nothing_collected():
            (self._capture_all if self._of_epoch is None else self._run_some)()
        return self._pool

    def runs(self, sizes: Iterable[Bucket]) -> Iterator[Callable[[], None]]:
        """What `prepare` captures of these sizes, in its order."""
        for size in reversed(_ascending(sizes)):
            yield self._expected(size)[1]

    def _capture_all(self) -> None:
        kinds = set[tuple[bool, bool]]()
        for size in reversed(self._sizes):
            # Whatever layers keep from their first run is made by the first of each kind.
            kind, (inputs, run) = (bool(size.prompt), bool(size.decode)), self._expected(size)
            self._graphs[size] = StepGraph(inputs, captured(run, self._pool, ahead=kind not in kinds)[0])
            kinds.add(kind)

    def _run_some(self) -> None:
        tables, rooms = set[tuple[int, int]](), set[int]()
        for size in reversed(self._sizes):
            if (size.rows, size.width) not in tables or size.peers not in rooms:
                self.run(size)
            tables.add((size.rows, size.width))
            rooms.add(size.peers)

    def _expected(self, size: Bucket) -> tuple[GraphInputs, Callable[[], None]]:
        self._exchange.expect(PeerRows(size.peers))
        inputs = self._inputs(size)
        return inputs, partial(self._forward, inputs)

    def run(self, size: Bucket) -> None:
        """Launch a step of that size."""
        self._expected(size)[1]()

    def find(self, size: Bucket, most: int) -> Bucket | None:
        """Of these sizes the one that a step runs in: see `peer_buckets.smallest`."""
        return smallest(self._sizes, size, most)

    def graph(self, size: Bucket) -> StepGraph:
        """A captured step, captured now if it has not been. Raises ExchangeError as `OfEpoch.capturing`."""
        found = self._graphs.get(size)
        if found is None:
            assert self._of_epoch is not None, f"{size} was to be captured at the start"
            self._of_epoch.capturing()
            inputs, run = self._expected(size)
            found = self._graphs[size] = StepGraph(inputs, captured_meanwhile(run, self._pool))
        return found

    def _forget(self) -> None:
        """See `OfEpoch.forget`: any thread may ask for it."""
        graphs, self._graphs = self._graphs, {}
        if not graphs:
            return
        if not self._has_ended():
            log.warning("a device is still at steps captured in the epoch that has ended: %d stay", len(graphs))
            self._left.append(graphs)
            return
        for each in graphs.values():
            # Not by its last reference: the frame that an error came from may have one.
            each.graph.reset()

    def _has_ended(self) -> bool:
        """Whether what was launched has run, which is waited for, but not for ever."""
        if self._device.type == "cpu":
            return True
        limit = time.monotonic() + _END_S
        try:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._device))
            while not event.query():
                if time.monotonic() > limit:
                    return False
                time.sleep(_PAUSE_S)
        except RuntimeError:  # boundary: a device that has failed, of which somebody else says why
            return False
        return True


def _ascending(sizes: Iterable[Bucket]) -> tuple[Bucket, ...]:
    return tuple(sorted(sizes, key=lambda size: (size.rows, size.keys, size.width, size.peers)))
