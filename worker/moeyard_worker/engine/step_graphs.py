"""The captured steps of a rank that makes no drafts, by their size: all from its start on, or each once it is met."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from moeyard_kernels.cuda.graph_inputs import Bucket, GraphInputs
from moeyard_worker.engine.device_sampler import captured, nothing_collected
from moeyard_worker.engine.peer_buckets import smallest
from moeyard_worker.exchange.base import Exchange, PeerRows


@dataclass(frozen=True, slots=True)
class StepGraph:
    """One captured step and what it reads."""

    inputs: GraphInputs
    graph: torch.cuda.CUDAGraph


class StepGraphs:
    """Of what `forward` launches with the `inputs` of a size.

    Where captured steps are one epoch's (`Exchange.of_epoch`), each is captured when it is first met in it, which takes
    the host about as long as to launch it.
    """

    def __init__(
        self, inputs: Callable[[Bucket], GraphInputs], forward: Callable[[GraphInputs], None], exchange: Exchange,
        device: torch.device,
    ) -> None:  # fmt: skip
        self._inputs, self._forward, self._exchange, self._device = inputs, forward, exchange, device
        self._lazily = exchange.of_epoch is not None
        if exchange.of_epoch is not None:
            exchange.of_epoch.forget = self._forget
        # The smallest first: a step takes the first that holds it.
        self._sizes: tuple[Bucket, ...] = ()
        self._graphs: dict[Bucket, StepGraph] = {}
        self._pool: Any = None

    @property
    def captured(self) -> Mapping[Bucket, StepGraph]:
        """Those that there are."""
        return self._graphs

    def prepare(self, sizes: Iterable[Bucket]) -> Any:
        """Steps run in these sizes from here on: they are captured, the largest first, so that the others find their
        memory in its pool, which is returned. Lazily: rows, tables and rooms are run once, which compiles them."""
        self._pool = torch.cuda.graph_pool_handle()
        self._sizes = tuple(sorted(sizes, key=lambda size: (size.rows, size.keys, size.width, size.peers)))
        known = set[Any]()
        with nothing_collected():
            for size in reversed(self._sizes):
                if not self._lazily:
                    # Whatever layers keep from their first run is made by the first of each kind.
                    kind = bool(size.prompt), bool(size.decode)
                    self._capture(size, ahead=kind not in known)
                    known.add(kind)
                elif not {(size.rows, size.width), size.peers} <= known:
                    self.run(size)
                    known |= {(size.rows, size.width), size.peers}
        return self._pool

    def run(self, size: Bucket) -> None:
        """Launch a step of that size."""
        self._exchange.expect(PeerRows(size.peers))
        self._forward(self._inputs(size))

    def find(self, size: Bucket, most: int) -> Bucket | None:
        """Of these sizes the one that a step runs in: see `peer_buckets.smallest`."""
        return smallest(((each, each) for each in self._sizes), size, most)

    def graph(self, size: Bucket) -> StepGraph:
        """A captured step, captured now if it has not been."""
        found = self._graphs.get(size)
        if found is None:
            # To capture waits for the device, which may wait for a peer that is gone.
            self._exchange.drain()
            with nothing_collected():
                found = self._capture(size)
        return found

    def _capture(self, size: Bucket, *, ahead: bool = False) -> StepGraph:
        self._exchange.expect(PeerRows(size.peers))
        inputs = self._inputs(size)
        graph, _ = captured(partial(self._forward, inputs), self._pool, ahead=ahead)
        self._graphs[size] = found = StepGraph(inputs, graph)
        return found

    def _forget(self) -> None:
        """See `OfEpoch.forget`: any thread may ask for it."""
        if self._graphs:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            for each in self._graphs.values():
                # Not by its last reference: the frame that an error came from may have one.
                each.graph.reset()
            self._graphs.clear()
            self._pool = torch.cuda.graph_pool_handle()
