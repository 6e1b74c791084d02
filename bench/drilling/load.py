"""Streams of endless requests: each sends the next one, reads its answer and records the time of every token."""

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from drilling.asks import Ask, fresh_ask
from drilling.streams import Answer, error_message

# One request in this many has a new prompt, which no cache holds.
FRESH_EVERY = 4


@dataclass(slots=True, eq=False)
class Exchange:
    """A request, in flight or answered. Times are monotonic seconds; `arrivals` has one for each event with tokens."""

    ask: Ask
    begun: float
    answer: Answer = field(default_factory=Answer)
    arrivals: list[float] = field(default_factory=list)
    ended: float | None = None


class Client:
    """Sends requests to one server. `seconds` bounds the silence of a stream."""

    def __init__(self, url: str, *, seconds: float) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self.http = httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(seconds, connect=10.0), limits=limits)

    async def run(self, exchange: Exchange) -> None:
        """Send a request and read its answer to the end. Failures go to the answer's `error`."""
        answer = exchange.answer
        try:
            if exchange.ask.body.get("stream"):
                await self._stream(exchange)
            else:
                response = await self.http.post(exchange.ask.endpoint, json=exchange.ask.body)
                self._whole(exchange, response.status_code, response.content)
        except httpx.HTTPError as error:
            answer.error = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        exchange.ended = time.monotonic()

    async def _stream(self, exchange: Exchange) -> None:
        answer, done = exchange.answer, False
        async with self.http.stream("POST", exchange.ask.endpoint, json=exchange.ask.body) as response:
            if response.status_code != 200:
                self._whole(exchange, response.status_code, await response.aread())
                return
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data:") and answer.take(json.loads(line[5:])):
                    exchange.arrivals.append(time.monotonic())
        if answer.error is None and not done:
            answer.error = "the stream ended without [DONE]"

    def _whole(self, exchange: Exchange, status: int, content: bytes) -> None:
        try:
            body: Any = json.loads(content)
        except ValueError:
            body = content[:200].decode(errors="replace")
        if status != 200:
            exchange.answer.error = f"{status}: {error_message(body)}"
        elif exchange.answer.take(body):
            exchange.arrivals.append(time.monotonic())


class Load:
    """`streams` concurrent requests until it is closed. `history` has every exchange in the order of their start."""

    def __init__(self, client: Client, asks: Sequence[Ask], *, streams: int, seed: int, max_tokens: int) -> None:
        self.history: list[Exchange] = []
        self._client, self._asks, self._max_tokens = client, asks, max_tokens
        self._rng = random.Random(seed)
        self._going = asyncio.Event()
        self._going.set()
        self._changed = asyncio.Event()
        self._tasks = [asyncio.create_task(self._stream()) for _ in range(streams)]

    @property
    def inflight(self) -> list[Exchange]:
        """Exchanges that have begun and not ended."""
        return [exchange for exchange in self.history if exchange.ended is None]

    async def _stream(self) -> None:
        while True:
            await self._going.wait()
            number = len(self.history)
            fresh = self._rng.randrange(FRESH_EVERY) == 0
            ask = fresh_ask(self._rng, number, max_tokens=self._max_tokens) if fresh else self._rng.choice(self._asks)
            exchange = Exchange(ask, time.monotonic())
            self.history.append(exchange)
            self._changed.set()
            await self._client.run(exchange)
            self._changed.set()
            if exchange.answer.error is not None:
                # Do not send a thousand requests per second to a server that refuses them.
                await asyncio.sleep(0.5)

    async def changed(self, seconds: float) -> None:
        """Wait up to `seconds` until a request begins or ends."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    async def ended(self, exchanges: Sequence[Exchange], seconds: float) -> bool:
        """Wait until these have ended. Return False if the time runs out first."""
        deadline = time.monotonic() + seconds
        while any(exchange.ended is None for exchange in exchanges):
            if time.monotonic() > deadline:
                return False
            await self.changed(0.2)
        return True

    async def pause(self, seconds: float) -> bool:
        """Start no more requests and wait for those in flight. Return False if the time runs out first."""
        self._going.clear()
        return await self.ended(self.inflight, seconds)

    def resume(self) -> None:
        """Start requests again."""
        self._going.set()

    async def close(self, seconds: float) -> None:
        """Start no more requests, wait up to `seconds` for those in flight, and stop."""
        await self.pause(seconds)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def references(client: Client, asks: Sequence[Ask], *, streams: int) -> dict[str, Exchange]:
    """Send every request once, `streams` at a time, and return the exchanges by name.

    Raises RuntimeError if an answer is not complete.
    """
    found: dict[str, Exchange] = {}
    waiting = list(reversed(asks))

    async def stream() -> None:
        while waiting:
            exchange = Exchange(waiting.pop(), time.monotonic())
            await client.run(exchange)
            if exchange.answer.error is not None:
                raise RuntimeError(f"no reference for {exchange.ask.name}: {exchange.answer.error}")
            found[exchange.ask.name] = exchange

    await asyncio.gather(*(stream() for _ in range(streams)))
    return found
