"""What launches have counted of rows between GPUs, told to the host a few times a second without waiting for them."""

import time

import torch

from moeyard_kernels.types.peer_shape import KEPT_TIMES, NUM_TIMES, RECEIVED, SENT, TIMES
from moeyard_worker.exchange.base import ExchangeStats

LOOK_SECONDS = 0.2  # between two looks at what a device has counted


class PeerCounts:
    """Brings `stats` up to date from `live`, the counts of this rank's window (`peer_shape`).

    A GPU's are as of the look before: the copy of one look is read at the next.
    """

    def __init__(self, live: torch.Tensor, stats: ExchangeStats) -> None:
        self._live, self._stats = live, stats
        self._seen = torch.zeros_like(live, device="cpu", pin_memory=live.is_cuda)
        self._copied = torch.cuda.Event() if live.is_cuda else None
        self._looked = 0.0
        # Of each phase, how many times have been told.
        self._told = [0, 0]

    def look(self, *, wait: bool = False) -> None:
        """As of the last look but one, if it is time for another; with `wait` as of now."""
        now = time.monotonic()
        if not wait and now < self._looked + LOOK_SECONDS:
            return
        if self._copied is None or wait:
            self._seen.copy_(self._live)
        elif not self._copied.query():
            return
        self._looked = now
        self._tell(self._seen.tolist())
        if self._copied is not None:
            self._seen.copy_(self._live, non_blocking=True)
            self._copied.record()

    def _tell(self, counts: list[int]) -> None:
        self._stats.bytes_sent, self._stats.bytes_received = counts[SENT], counts[RECEIVED]
        for phase, name in enumerate(("dispatch", "combine")):
            number, first = counts[NUM_TIMES + phase], TIMES + phase * KEPT_TIMES
            # Older ones have been written over.
            for i in range(max(self._told[phase], number - KEPT_TIMES), number):
                self._stats.seconds[name].append(counts[first + i % KEPT_TIMES] * 1e-9)
            self._told[phase] = number
