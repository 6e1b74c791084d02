"""Whether the fleet decodes: a warm-up on every rank, then tiny canary requests whenever it has been idle for long."""

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
    """Answers /readyz. `run` is a background task that lasts as long as the fleet works."""

    def __init__(self, config: RouterConfig, fleet: Fleet) -> None:
        self._config = config
        self._fleet = fleet
        self._warm = -1  # the generation of workers that has decoded
        self._problem: str | None = None
        self._numbers = itertools.count()

    def unready(self) -> str | None:
        """Why the service is not ready, or None: all workers are up, and a decode step ran lately.

        While the fleet recovers requests are taken, but none is decoded: then it is not ready either.
        """
        problem = self._fleet.unavailable()
        if problem is not None:
            return problem
        if self._warm != self._fleet.generation:
            return self._problem or "the fleet is warming up: no decode step has run yet"
        silence = time.monotonic() - (self._fleet.last_progress or 0.0)
        if silence > self._config.canary_interval + self._config.canary_timeout:
            return self._problem or f"no decode step has run for {silence:.0f} s"
        return None

    async def run(self, changed: asyncio.Event, on_ready: Callable[[], None]) -> None:
        """Warm up once all workers are there (`changed` wakes this up), call `on_ready`, then watch over idle times.

        Workers that take the others' place warm up too; `on_ready` is called once.
        """
        first = True
        while await self._warm_up(changed):
            if first:
                on_ready()
            first = False
            await self._watch(changed)

    async def _warm_up(self, changed: asyncio.Event) -> bool:
        """Until every worker of this generation has decoded; False if none will."""
        while self._warm != self._fleet.generation:
            generation = self._fleet.generation
            if self._fleet.unavailable() is None:
                ranks = self._ranks()
                problems = await asyncio.gather(*(self._canary(rank) for rank in ranks))
                self._problem = next((p for p in problems if p is not None), None)
                if self._problem is None:
                    self._warm = generation
                else:
                    await asyncio.sleep(_RETRY_SECONDS)
            elif self._fleet.stopping is not None:
                return False
            else:
                changed.clear()
                await changed.wait()
        return True

    async def _watch(self, changed: asyncio.Event) -> None:
        """Until other workers are there."""
        ranks = itertools.cycle(self._ranks())
        while self._warm == self._fleet.generation:
            idle = time.monotonic() - (self._fleet.last_progress or 0.0)
            wait = self._config.canary_interval - idle
            if wait > 0:
                changed.clear()
                with contextlib.suppress(TimeoutError):  # boundary: nothing has changed, as mostly
                    async with asyncio.timeout(wait):
                        await changed.wait()
            elif self._fleet.unavailable() is None and self._fleet.num_inflight == 0:
                self._problem = await self._canary(next(ranks))
                if self._problem is not None:
                    await asyncio.sleep(_RETRY_SECONDS)
            else:
                await asyncio.sleep(min(1.0, self._config.canary_interval))

    def _ranks(self) -> list[int]:
        """Those that are not away."""
        return [address.rank for address in self._fleet.addresses if not address.away]

    async def _canary(self, rank: int) -> str | None:
        """Run one token of prompt and two of output on `rank`; what went wrong, or None."""
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
