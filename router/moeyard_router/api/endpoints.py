"""The endpoints that generate, and those that only count or spell tokens."""

import asyncio
import contextlib
import hashlib
import math
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from moeyard_router.api.choice import Delta
from moeyard_router.api.generation import ClientGone, Generation
from moeyard_router.api.intake import Intake, Job
from moeyard_router.api.large import LARGE_BODY, Bodies
from moeyard_router.api.replies import MANY_SCORES, LongLists
from moeyard_router.api.request_scope import Direct, direct_of, record_of
from moeyard_router.api.surfaces import COUNTED, SURFACES, ReadJob, Writer
from moeyard_router.config import RouterConfig
from moeyard_router.errors import ApiError
from moeyard_router.fleet.fleet import Fleet
from moeyard_router.metrics import RouterMetrics
from moeyard_router.text.bounded import Elsewhere
from moeyard_router.text.chat import Codec

_JSON = (b"content-type", b"application/json")
_MAX_CLIENT = 256  # characters of a name that tells clients apart; of a longer one its digest does
_MAX_ROUTES = 16  # of an answer's choices: proxies take heads of some KiB
_PIECE = 64 * 1024  # bytes that are sent at once
_STREAM_HEADERS = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"))
_IGNORED = b"x-moeyard-ignored"
_BYTES_PER_TOKEN = 32  # of a body whose prompt is only counted
_BYTES_AROUND = 64 * 1024  # of JSON around that prompt
_MANY = 4096  # tokens above which an answer is written apart from the event loop


class _Endpoint(ABC):
    """ASGI app of a POST whose body becomes a job by `read`, and the job an answer."""

    def __init__(
        self, config: RouterConfig, *, api: str, read: ReadJob, codec: Codec, metrics: RouterMetrics, bodies: Bodies
    ) -> None:
        self._config = config
        self._api = api
        self._read = read
        self._codec = codec
        self._metrics = metrics
        self._bodies = bodies
        self._intake = Intake(config, codec)
        self._limit = config.max_body_bytes
        self._check: Callable[[str | None], None] = lambda key_name: None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; every way out sends exactly one reply, or none to a client that has left."""
        arrived, record = time.monotonic(), record_of(scope)
        try:
            self._check(record.key_name)  # before the body is read: refusals must be cheap
            with self._bodies.room() as take:
                job = await self._job(await read_parts(scope, receive, self._limit, take))
            await self._answer(job, arrived, scope, receive, send)
        except ClientGone:
            record.client_left = True
        except ApiError as error:
            if error.reason:
                self._metrics.rejected(error.reason)
            await send_error(send, error, scope["path"])

    async def _job(self, parts: list[bytes]) -> Job:
        if sum(map(len, parts)) <= LARGE_BODY:
            # A chat template that does too much is rendered in a process, which can be ended whatever it is in.
            with contextlib.suppress(Elsewhere):  # boundary: it is done again there
                return await self._read(self._intake, b"".join(parts))
        return await self._bodies.job(parts, api=self._api)

    @abstractmethod
    async def _answer(self, job: Job, arrived: float, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer."""


class GenerateEndpoint(_Endpoint):
    """An endpoint that generates. `api` is its name in `SURFACES`."""

    def __init__(
        self, config: RouterConfig, *, api: str, fleet: Fleet, codec: Codec, metrics: RouterMetrics, bodies: Bodies
    ) -> None:
        self._surface = SURFACES[api]
        super().__init__(config, api=api, read=self._surface.read, codec=codec, metrics=metrics, bodies=bodies)
        self._fleet = fleet
        self._check = fleet.check

    async def _answer(self, job: Job, arrived: float, scope: Scope, receive: Receive, send: Send) -> None:
        record, session = record_of(scope), dict(scope["headers"]).get(b"x-session-id")
        reply_id = self._surface.prefix + uuid.uuid4().hex
        tokens = self._codec.token_bytes
        await self._fleet.read(prompt.token_ids for prompt in job.prompts[1:])
        generation = Generation(
            job,
            reply_id=reply_id,
            fleet=self._fleet,
            tokens=tokens,
            metrics=self._metrics,
            arrived=arrived,
            client=_client_name(job.client if session is None else session.decode("latin-1")),
            key=record.key_name,
        )
        writer = self._surface.writer(
            job, reply_id=reply_id, model=self._config.model_name, created=int(time.time()), tokens=tokens
        )
        try:
            async with _watching(receive, generation):
                if job.stream:
                    await _stream(job, generation, writer, send, self._bodies, direct_of(scope))
                else:
                    await _whole(job, generation, writer, send, self._bodies)
        finally:
            generation.close()
            record.reply_id = reply_id
            generation.note(record)


class CountEndpoint(_Endpoint):
    """An endpoint that counts or spells the tokens of one prompt. `api` is its name in `COUNTED`."""

    def __init__(self, config: RouterConfig, *, api: str, codec: Codec, metrics: RouterMetrics, bodies: Bodies) -> None:
        super().__init__(config, api=api, read=COUNTED[api], codec=codec, metrics=metrics, bodies=bodies)
        self._limit = min(config.max_body_bytes, _BYTES_AROUND + _BYTES_PER_TOKEN * config.max_model_len)

    async def _answer(self, job: Job, arrived: float, scope: Scope, receive: Receive, send: Send) -> None:
        answer = await self._counted(job)
        many = any(_is_list(value) and len(value) > _MANY for value in answer.values())
        pieces = await self._bodies.write(_long, answer) if many else [orjson.dumps(answer, default=list)]
        await send_whole(send, 200, pieces, headers=[_JSON, *reply_headers(job)])

    async def _counted(self, job: Job) -> dict[str, Any]:
        ids = job.prompts[0].token_ids
        if self._api == "count_tokens":
            return {"input_tokens": len(ids)}
        if self._api == "detokenize":
            return {"prompt": job.prompts[0].text}
        spelled = await self._intake.work(len(ids), self._codec.spell, ids) if job.echo else None
        return {"count": len(ids), "max_model_len": self._config.max_model_len, "tokens": ids, "token_strs": spelled}


async def _whole(job: Job, generation: Generation, writer: Writer, send: Send, bodies: Bodies) -> None:
    collected = [Delta() for _ in job.continuations]
    while not generation.finished:
        for index, delta in (await generation.step()).items():
            collected[index].extend(delta)

    def write() -> list[bytes]:
        pieces = writer.pieces(writer.body(collected, generation.choices))
        for delta in collected:
            delta.logprobs.clear()  # one by one, and here: to free many takes as long as to write them
        return pieces

    pieces = await bodies.write(write) if _many_scores(job, job.num_scores, collected) else write()
    await send_whole(send, 200, pieces, headers=[_JSON, _route_header(generation), *reply_headers(job)])


async def _stream(
    job: Job, generation: Generation, writer: Writer, send: Send, bodies: Bodies, direct: Direct | None
) -> None:
    """Send server-sent events.

    Headers wait for the first event, so a refusal keeps its own status. Events go by `direct` while the client reads
    them; the first ones, the last, and those that must wait go by `send`.
    """
    deltas = await generation.step()

    def write(deltas: dict[int, Delta]) -> bytes:
        data = b""
        for index, delta in deltas.items():
            data += writer.chunk(index, delta, generation.choices)
        return data

    def write_scores(deltas: dict[int, Delta]) -> list[bytes]:
        return [
            piece
            for index, delta in deltas.items()
            for piece in writer.pieces(writer.chunk(index, delta, generation.choices))
        ]

    num_scores, event_of = job.num_scores, writer.texts()
    scored, apart = num_scores > 0 or job.logprobs is not None, num_scores >= MANY_SCORES

    async def events(deltas: dict[int, Delta]) -> bytes:
        if _many_scores(job, num_scores, deltas.values()):
            await _send_pieces(send, await bodies.write(write_scores, deltas), more=True)
            return b""
        return b"".join(write_scores(deltas)) if scored else write(deltas)

    def push(deltas: dict[int, Delta]) -> None:
        if direct is not None and (data := b"".join(write_scores(deltas)) if scored else write(deltas)):
            direct.write(data)

    def say(index: int, text: str) -> None:
        if direct is not None and event_of is not None:
            direct.write(event_of(index, text))

    headers = [*_STREAM_HEADERS, _route_header(generation), *reply_headers(job)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    try:
        data = await events(deltas)
        while not generation.finished:
            if data:
                await _send_pieces(send, [data], more=True)
                data = b""
            if direct is not None and not apart:
                await generation.push(direct.ready, push, say if event_of is not None else None)
                direct.flush()
            if not generation.finished:
                data = await events(await generation.step())
        data += writer.end(generation.choices)
    except ApiError as error:
        data = writer.failed(error, generation.choices)
    await _send_pieces(send, [data], more=False)


async def _send_pieces(send: Send, pieces: list[bytes], *, more: bool) -> None:
    """A body bit by bit, as its reader takes it: of one that was handed over whole a reader would have to take all
    within the time that it has for each bit.
    """
    places = [(piece, begin) for piece in pieces for begin in range(0, len(piece), _PIECE)]
    if not places and not more:
        places = [(b"", 0)]
    for number, (piece, begin) in enumerate(places, 1):
        part = piece if len(piece) <= _PIECE else piece[begin : begin + _PIECE]
        await send({"type": "http.response.body", "body": part, "more_body": more or number < len(places)})
        if number < len(places):
            await asyncio.sleep(0)  # a reader that keeps up would let nobody else have a turn


def _many_scores(job: Job, num_scores: int, deltas: Iterable[Delta]) -> bool:
    """Whether to write these, and `num_scores` of prompts, would keep the event loop waiting."""
    return num_scores + job.output_scores(sum(len(d.logprobs) for d in deltas)) >= MANY_SCORES


def _client_name(client: str | None) -> str | None:
    """A name as long as may be kept of each client."""
    if client is None or len(client) <= _MAX_CLIENT:
        return client
    return hashlib.blake2b(client.encode("utf-8", "replace")).hexdigest()


def _route_header(generation: Generation) -> tuple[bytes, bytes]:
    """Per choice its rank, why that one, and the prompt tokens thought to be cached there; of many the first ones."""
    routes = [f"rank={r.rank};reason={r.reason};cached={r.cached_tokens}" for r in generation.routes]
    if len(routes) > _MAX_ROUTES:
        routes[_MAX_ROUTES:] = [f"more={len(routes) - _MAX_ROUTES}"]
    return b"x-moeyard-route", ", ".join(routes).encode()


def reply_headers(job: Job) -> list[tuple[bytes, bytes]]:
    """What an answer says beside its body: which fields of its request have no effect."""
    return [(_IGNORED, ", ".join(job.ignored).encode())] if job.ignored else []


@contextlib.asynccontextmanager
async def _watching(receive: Receive, generation: Generation) -> AsyncIterator[None]:
    """While the block runs, a client that leaves ends the generation at once."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        generation.disconnect()

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def read_parts(scope: Scope, receive: Receive, limit: int, take: Callable[[int], None]) -> list[bytes]:
    """Return the body in the pieces in which it came: joining 16 MB takes 10 ms.

    `take` counts bytes and may refuse them. Raises `ApiError` 413 above `limit` bytes, `ClientGone`.
    """
    declared = dict(scope["headers"]).get(b"content-length", b"0")
    if not declared.isdigit() or int(declared) > limit:
        raise _too_large(limit)
    parts, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        take(len(part))
        parts.append(part)
        more = message.get("more_body", False)
    return parts


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the request body is larger than {limit} bytes", reason="too_large")


async def send_error(send: Send, error: ApiError, path: str) -> None:
    """Send an error as JSON, as clients of `path` expect it, with Retry-After where trying again may help."""
    headers = [_JSON]
    if error.retry_after is not None:
        headers.append((b"retry-after", str(max(1, math.ceil(error.retry_after))).encode()))
    if error.status == 401:
        headers.append((b"www-authenticate", b'Bearer realm="moeyard"'))
    if error.status == 413 or error.reason == "busy":
        headers.append((b"connection", b"close"))  # the rest of the body is not read
    await send_whole(send, error.status, [orjson.dumps(error.body_at(path))], headers=headers)


async def send_whole(send: Send, status: int, pieces: list[bytes], *, headers: list[tuple[bytes, bytes]]) -> None:
    length = (b"content-length", str(sum(map(len, pieces))).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await _send_pieces(send, pieces, more=False)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _long(answer: Mapping[str, Any]) -> list[bytes]:
    lists = LongLists()
    placed = {name: lists.add(map(orjson.dumps, value)) if _is_list(value) else value for name, value in answer.items()}
    return lists.pieces(orjson.dumps(placed))
