"""Tests whether the fleet decodes: a warm-up on every rank, then tiny canary requests after long idle times."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable

from moeyard_router.config import RouterConfig
from moeyard_router.errors import ApiError
from moeyard_router.fleet.fleet import Fleet
from moeyard_worker.protocol import Done, SamplingParams, Tokens

_RETRY_SECONDS = 0.5


class Health:
    """The answer of /readyz. `run` is a background task for the life of the fleet."""

    def __init__(self, config: RouterConfig, fleet: Fleet) -> None:
        self._config = config
        self._fleet = fleet
        self._warm = -1  # the latest generation of workers that has decoded
        self._problem: str | None = None
        self._numbers = itertools.count()

    def unready(self) -> str | None:
        """Return why the service is not ready, or None. Ready means that all workers are up and decoded lately.

        A recovering fleet is not ready. It accepts requests but decodes none.
        """
        problem = self._blocked()
        if problem is not None:
            return problem
        if self._warm != self._fleet.admission.generation:
            return self._problem or "the fleet is warming up: no decode step has run yet"
        silence = time.monotonic() - (self._fleet.admission.last_progress or 0.0)
        if silence > self._config.canary_interval + self._config.canary_timeout:
            return self._problem or f"no decode step has run for {silence:.0f} s"
        return None

    def _blocked(self) -> str | None:
        """Return why no step can run now, or None."""
        return self._fleet.admission.unavailable() or self._fleet.admission.held

    async def run(self, changed: asyncio.Event, on_ready: Callable[[], None]) -> None:
        """Warm up once all workers are up, call `on_ready` once, then send canaries after idle times.

        `changed` is set at each change of the fleet. Workers that replace others warm up too.
        """
        first = True
        while await self._warm_up(changed):
            if first:
                on_ready()
            first = False
            await self._watch(changed)

    async def _warm_up(self, changed: asyncio.Event) -> bool:
        """Wait until every worker of the present generation has decoded. False if the fleet stops before."""
        while self._warm != self._fleet.admission.generation:
            generation = self._fleet.admission.generation
            if self._blocked() is None:
                ranks = self._ranks()
                problems = await asyncio.gather(*(self._canary(rank) for rank in ranks))
                self._problem = next((p for p in problems if p is not None), None)
                if self._problem is None:
                    self._warm = generation
                else:
                    await asyncio.sleep(_RETRY_SECONDS)
            elif self._fleet.admission.stopping is not None:
                return False
            else:
                changed.clear()
                await changed.wait()
        return True

    async def _watch(self, changed: asyncio.Event) -> None:
        """Send canaries after idle times, until workers are replaced."""
        ranks = itertools.cycle(self._ranks())
        while self._warm == self._fleet.admission.generation:
            idle = time.monotonic() - (self._fleet.admission.last_progress or 0.0)
            wait = self._config.canary_interval - idle
            if wait > 0:
                changed.clear()
                with contextlib.suppress(TimeoutError):  # boundary: usually nothing changes
                    async with asyncio.timeout(wait):
                        await changed.wait()
            elif self._blocked() is None and self._fleet.num_inflight == 0:
                self._problem = await self._canary(next(ranks))
                if self._problem is not None:
                    await asyncio.sleep(_RETRY_SECONDS)
            else:
                await asyncio.sleep(min(1.0, self._config.canary_interval))

    def _ranks(self) -> list[int]:
        """Return the ranks that are not away."""
        return [address.rank for address in self._fleet.admission.ranks.addresses if not address.away]

    async def _canary(self, rank: int) -> str | None:
        """Run one token of prompt and two of output on `rank`. Return the problem, or None."""
        sampling = SamplingParams(max_tokens=min(2, self._config.max_model_len - 1), temperature=0.0, ignore_eos=True)
        try:
            ticket = self._fleet.submit(f"canary-{next(self._numbers)}", [((0,), sampling)], rank=rank)
        except ApiError as error:
            return error.message
        try:
            async with asyncio.timeout(self._config.canary_timeout):
                while True:
                    for _, _, event in await ticket.events():
                        if isinstance(event, Tokens):
                            continue
                        if isinstance(event, Done) and event.finish_reason == "length":
                            return None
                        return f"the canary on worker {rank} ended with {event}"
        except TimeoutError:
            return f"the canary on worker {rank} got no answer within {self._config.canary_timeout:g} s"
        finally:
            ticket.close()
