"""Rough clients: they cancel, hang up in the middle of a request, read slowly, and send invalid requests."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

import httpx
from drilling.asks import Ask

# (path, content type, body) of requests that must be refused with a 4xx.
NONSENSE = (
    ("/v1/completions", "application/json", b'{"prompt": "x", "max_tok'),
    ("/v1/completions", "application/json", b'{"prompt": "x", "max_tokens": 100000}'),
    ("/v1/completions", "application/json", b'{"prompt": [1, 2, 4000000000], "max_tokens": 2}'),
    ("/v1/completions", "application/json", b'{"prompt": "x", "bogus": 1}'),
    ("/v1/completions", "text/plain", b'{"prompt": "x", "max_tokens": 2}'),
    ("/v1/completions", "application/json", b"[" * 5000),
    ("/v1/chat/completions", "application/json", b'{"messages": "hello"}'),
    ("/v1/chat/completions", "application/json", b'{"messages": [], "temperature": -1}'),
    ("/v1/nowhere", "application/json", b"{}"),
)
# Bytes that a slow reader takes at once, and the pause after them.
SIP_BYTES, SIP_SECONDS, SIPS = 64, 0.2, 50
# Limit for the first byte while the fleet recovers.
WAIT_SECONDS = 120.0


class Rough:
    """Tasks of rough clients until `close`. `seen` counts their actions and the answers."""

    def __init__(self, url: str, asks: list[Ask], *, clients: int, seed: int) -> None:
        self.seen: Counter[str] = Counter()
        self._asks = [ask for ask in asks if ask.body.get("stream")]
        self._rng = random.Random(seed)
        self._http = httpx.AsyncClient(base_url=url, timeout=WAIT_SECONDS)
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        kinds = (self._cancel, self._hang_up, self._sip, self._nonsense)
        self._tasks = [asyncio.create_task(self._go_on(kinds[i % len(kinds)])) for i in range(clients)]

    async def close(self) -> None:
        """Cancel all tasks and cut their connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._http.aclose()

    async def _go_on(self, kind: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await kind()
            except (httpx.HTTPError, OSError) as error:
                self.seen[f"broken: {type(error).__name__}"] += 1
            await asyncio.sleep(self._rng.uniform(0.0, 0.5))

    async def _cancel(self) -> None:
        """Read part of a stream and leave."""
        ask, left = self._rng.choice(self._asks), self._rng.randint(0, 40)
        async with self._http.stream("POST", ask.endpoint, json=ask.body) as answer:
            if answer.status_code != 200:
                self.seen[f"refused: {answer.status_code}"] += 1
                return
            async for _ in answer.aiter_lines():
                left -= 1
                if left < 0:
                    break
        self.seen["cancelled"] += 1

    async def _hang_up(self) -> None:
        """Send part of a request, or all of it, and abort at once."""
        request = self._request()
        _, writer = await asyncio.open_connection(self._host, self._port)
        writer.write(request[: self._rng.choice((len(request), len(request) // 2, 9))])
        await writer.drain()
        writer.transport.abort()
        self.seen["hung up"] += 1

    async def _sip(self) -> None:
        """Read a stream in small pieces with pauses, and leave before its end."""
        reader, writer = await asyncio.open_connection(self._host, self._port, limit=1024)
        try:
            writer.write(self._request())
            await writer.drain()
            for _ in range(SIPS):
                async with asyncio.timeout(WAIT_SECONDS):
                    if not await reader.read(SIP_BYTES):
                        break
                await asyncio.sleep(SIP_SECONDS)
        finally:
            writer.transport.abort()
        self.seen["read slowly"] += 1

    async def _nonsense(self) -> None:
        path, kind, body = self._rng.choice(NONSENSE)
        answer = await self._http.post(path, content=body, headers={"Content-Type": kind})
        self.seen["nonsense refused" if 400 <= answer.status_code < 500 else f"nonsense: {answer.status_code}"] += 1

    def _request(self) -> bytes:
        ask = self._rng.choice(self._asks)
        body = json.dumps(ask.body).encode()
        head = f"POST {ask.endpoint} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
