"""A step in flight on a GPU: whether it has run, how long it took, and the wait for it."""

import time

import torch

from moeyard_worker.exchange.base import Exchange
from moeyard_worker.scheduling.step import Step


class InFlight:
    """What a `LaunchedStep` of a GPU is, whatever it computes. To be made behind all that the step launches.

    `begun` was recorded before them; `exchange` waits for it, as peers may be gone. It waits for no step behind it.
    """

    def __init__(self, step: Step, *, begun: torch.cuda.Event, exchange: Exchange) -> None:
        self.step, self.waited = step, 0.0
        self._exchange = exchange
        self._begun, self._done = begun, torch.cuda.Event(enable_timing=True)
        self._done.record()

    def has_run(self) -> bool:
        """See `LaunchedStep.has_run`."""
        return bool(self._done.query())

    @property
    def device_seconds(self) -> float:
        """From the end of what was launched before this step to its own, on the device."""
        self._done.synchronize()
        return self._begun.elapsed_time(self._done) * 1e-3

    def _wait(self) -> None:
        """For results, which somebody asks for."""
        begun = time.monotonic()
        self._exchange.drain(self.has_run)
        self._done.synchronize()
        self.waited = time.monotonic() - begun
