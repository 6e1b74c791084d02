"""ASGI apps of the POST endpoints: those that generate, and those that only count or spell tokens."""

import asyncio
import contextlib
import hashlib
import math
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson
from starlette.types import Receive, Scope, Send

from moeyard_router.api.choice import Choice, Delta
from moeyard_router.api.generation import ClientGone, Generation
from moeyard_router.api.intake import Intake, Job
from moeyard_router.api.large import LARGE_BODY, Bodies
from moeyard_router.api.replies import MANY_SCORES, PIECE_BYTES, LongLists
from moeyard_router.api.request_log import RequestLog
from moeyard_router.api.request_scope import EXTENSION, SCOPE_KEY, Direct, RequestRecord
from moeyard_router.api.surfaces import READERS, SURFACES, Writer
from moeyard_router.config import RouterConfig
from moeyard_router.errors import ApiError
from moeyard_router.fleet.fleet import Fleet
from moeyard_router.fleet.records import Refusals
from moeyard_router.metrics import RouterMetrics
from moeyard_router.text.bounded import Elsewhere
from moeyard_router.text.chat import Codec
from moeyard_router.text.detokenizer import TokenBytes

if TYPE_CHECKING:
    from moeyard_router.api.spans import Traces

_JSON = (b"content-type", b"application/json")
_MAX_CLIENT_NAME = 256  # characters; a longer name is replaced by its digest
_MAX_ROUTES = 16  # choices in the route header, because proxies limit headers to some KiB
_STREAM_HEADERS = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"))
# Body limit of endpoints that only count a prompt: bytes per token, plus bytes of surrounding JSON.
_BYTES_PER_TOKEN = 32
_BYTES_AROUND = 64 * 1024
_MANY_EXPERTS = 1 << 20  # bytes of routed experts, which take a millisecond to encode
_MAX_DIGITS = 16  # of a declared length that is kept
_MANY_TOKENS = 4096  # a longer list of tokens is encoded outside the event loop


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The objects of one router that its endpoints share."""

    config: RouterConfig
    fleet: Fleet
    codec: Codec
    metrics: RouterMetrics
    bodies: Bodies
    log: RequestLog | None
    traces: "Traces | None" = None


class _Endpoint(ABC):
    """ASGI app of a POST. `api` names the function in `READERS` that turns the body into a job."""

    def __init__(self, services: Services, api: str) -> None:
        self._services = services
        self._api = api
        self._intake = Intake(services.config, services.codec)
        self._limit = services.config.max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send exactly one answer, or none if the client has left."""
        arrived = time.monotonic()
        record: RequestRecord = scope[SCOPE_KEY]
        job: Job | None = None
        try:
            self._admit(record.key_name)
            with self._services.bodies.buffer() as take:
                job = await self._job(await read_parts(scope, receive, self._limit, take))
            await self._answer(job, arrived, scope, receive, send)
        except ClientGone:
            record.client_left = True
        except ApiError as error:
            if error.reason:
                self._services.metrics.rejected(error.reason)
                note_refusal(self._services.fleet.refusals, error, scope, job=job)
            await send_error(send, error, scope["path"])

    def _admit(self, key_name: str | None) -> None:
        """Refuse before the body is read, because refusals must be cheap."""
        return

    async def _job(self, parts: list[bytes]) -> Job:
        if sum(map(len, parts)) <= LARGE_BODY:
            # A chat template that exceeds its budget is rendered in a process, which can be killed at any point.
            with contextlib.suppress(Elsewhere):  # boundary: the process does it again
                return await READERS[self._api](self._intake, b"".join(parts))
        return await self._services.bodies.job(parts, api=self._api)

    @abstractmethod
    async def _answer(self, job: Job, arrived: float, scope: Scope, receive: Receive, send: Send) -> None: ...


class GenerateEndpoint(_Endpoint):
    """An endpoint that generates. `api` is its name in `SURFACES` too."""

    def __init__(self, services: Services, api: str) -> None:
        super().__init__(services, api)
        self._no_text = TokenBytes(None)

    def _admit(self, key_name: str | None) -> None:
        self._services.fleet.check(key_name)

    async def _answer(self, job: Job, arrived: float, scope: Scope, receive: Receive, send: Send) -> None:
        record: RequestRecord = scope[SCOPE_KEY]
        session = dict(scope["headers"]).get(b"x-session-id")
        services, surface = self._services, SURFACES[self._api]
        reply_id = surface.prefix + uuid.uuid4().hex
        # Only stop strings need text that the answer does not have.
        tokens = services.codec.token_bytes if surface.has_text or job.stops else self._no_text
        await services.fleet.read(prompt.token_ids for prompt in job.prompts[1:])
        if record.trace is not None:
            record.trace.accepted(job, reply_id)
        generation = Generation(
            job,
            reply_id=reply_id,
            fleet=services.fleet,
            tokens=tokens,
            metrics=services.metrics,
            arrived=arrived,
            client=_client_name(job.client if session is None else session.decode("latin-1")),
            key=record.key_name,
            log=services.log,
            trace=record.trace,
            names=_names(job, reply_id, record.request_id),
        )
        writer = surface.writer(
            job,
            reply_id=reply_id,
            served=generation.served,
            created=int(time.time()),
            tokens=tokens,
        )
        try:
            async with _watching(receive, generation):
                if job.stream:
                    direct = scope.get("extensions", {}).get(EXTENSION)
                    await _stream(job, generation, writer, send, services.bodies, direct)
                else:
                    await _whole(job, generation, writer, send, services.bodies)
        finally:
            generation.close()
            record.reply_id = reply_id
            generation.note(record)


class CountEndpoint(_Endpoint):
    """An endpoint that counts or spells the tokens of one prompt."""

    def __init__(self, services: Services, api: str) -> None:
        super().__init__(services, api)
        self._limit = min(self._limit, _BYTES_AROUND + _BYTES_PER_TOKEN * services.config.max_model_len)

    async def _answer(self, job: Job, arrived: float, scope: Scope, receive: Receive, send: Send) -> None:
        answer = await self._counted(job)
        many = any(_is_list(value) and len(value) > _MANY_TOKENS for value in answer.values())
        pieces = await self._services.bodies.write(_long, answer) if many else [orjson.dumps(answer, default=list)]
        await send_whole(send, 200, pieces, headers=[_JSON, *_ignored_header(job)])

    async def _counted(self, job: Job) -> dict[str, Any]:
        ids = job.prompts[0].token_ids
        if self._api == "count_tokens":
            return {"input_tokens": len(ids)}
        if self._api == "detokenize":
            return {"prompt": job.prompts[0].text}
        spelled = await self._intake.work(len(ids), self._services.codec.spell, ids) if job.echo else None
        limit = self._services.config.max_model_len
        return {"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": spelled}


async def _whole(job: Job, generation: Generation, writer: Writer, send: Send, bodies: Bodies) -> None:
    collected = [Delta() for _ in job.continuations]
    while not generation.finished:
        for index, delta in (await generation.step()).items():
            collected[index].extend(delta)

    def write() -> list[bytes]:
        pieces = writer.body(collected, generation.choices)
        for delta in collected:
            delta.logprobs.clear()  # in this thread and one by one: freeing many takes as long as encoding them
        return pieces

    long = _takes_long(job, job.num_scores, dict(enumerate(collected)), generation.choices)
    pieces = await bodies.write(write) if long else write()
    await send_whole(send, 200, pieces, headers=[_JSON, _route_header(generation), *_ignored_header(job)])


async def _stream(
    job: Job, generation: Generation, writer: Writer, send: Send, bodies: Bodies, direct: Direct | None
) -> None:
    """Send server-sent events.

    The headers wait for the first event, so a refusal keeps its own status. Events go by `direct` while the client
    keeps up. The first, the last and those that must wait go by `send`.
    """
    num_scores = job.num_scores

    def encode(deltas: dict[int, Delta]) -> list[bytes]:
        return [piece for i, delta in deltas.items() for piece in writer.chunk(i, delta, generation.choices)]

    async def events(deltas: dict[int, Delta]) -> bytes:
        if not _takes_long(job, num_scores, deltas, generation.choices):
            return b"".join(encode(deltas))
        await _send_pieces(send, await bodies.write(encode, deltas), more=True)
        return b""

    first = await generation.step()
    headers = [*_STREAM_HEADERS, _route_header(generation), *_ignored_header(job)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    try:
        data = await events(first)
        while not generation.finished:
            if data:
                await _send_pieces(send, [data], more=True)
                data = b""
            # The last event of a choice with routed experts may be long.
            if direct is not None and num_scores < MANY_SCORES and job.routing is None:
                await generation.push(direct, encode, writer.text_event)
                direct.flush()
            if not generation.finished:
                data = await events(await generation.step())
        data += writer.end(generation.choices)
    except ApiError as error:
        data = writer.failed(error, generation.choices)
    await _send_pieces(send, [data], more=False)


async def _send_pieces(send: Send, pieces: list[bytes], *, more: bool) -> None:
    """Send a body in parts of at most PIECE_BYTES, at the reader's pace.

    The send timeout applies to each part. A body sent in one call would have to be read wholly within it.
    """
    places = [(piece, begin) for piece in pieces for begin in range(0, len(piece), PIECE_BYTES)]
    if not places and not more:
        places = [(b"", 0)]
    for number, (piece, begin) in enumerate(places, 1):
        part = piece if len(piece) <= PIECE_BYTES else piece[begin : begin + PIECE_BYTES]
        await send({"type": "http.response.body", "body": part, "more_body": more or number < len(places)})
        if number < len(places):
            await asyncio.sleep(0)  # a fast reader never blocks `send`, so let other tasks run


def _takes_long(job: Job, num_scores: int, deltas: Mapping[int, Delta], choices: Sequence[Choice]) -> bool:
    """Return whether encoding these deltas and `num_scores` of prompts would block the event loop too long."""
    if num_scores + job.output_scores(sum(len(d.logprobs) for d in deltas.values())) >= MANY_SCORES:
        return True
    ended = (index for index, delta in deltas.items() if delta.finish_reason is not None)
    return sum(len(choices[index].experts) for index in ended) >= _MANY_EXPERTS


def _client_name(client: str | None) -> str | None:
    if client is None or len(client) <= _MAX_CLIENT_NAME:
        return client
    return hashlib.blake2b(client.encode("utf-8", "replace")).hexdigest()


def _names(job: Job, *names: str) -> frozenset[str]:
    """Return the names by which a client may end its request: those of headers and answer, and its own."""
    given = (job.repeated or {}).get("rid") or (job.repeated or {}).get("request_id")
    return frozenset((*names, *([given] if isinstance(given, str) else ())))


def _route_header(generation: Generation) -> tuple[bytes, bytes]:
    """Return each choice's rank, the reason for it, and the prompt tokens expected in that rank's cache."""
    routes = [f"rank={r.rank};reason={r.reason};cached={r.cached_tokens}" for r in generation.ticket.routes]
    if len(routes) > _MAX_ROUTES:
        routes[_MAX_ROUTES:] = [f"more={len(routes) - _MAX_ROUTES}"]
    return b"x-moeyard-route", ", ".join(routes).encode()


def _ignored_header(job: Job) -> list[tuple[bytes, bytes]]:
    return [(b"x-moeyard-ignored", ", ".join(job.ignored).encode())] if job.ignored else []


@contextlib.asynccontextmanager
async def _watching(receive: Receive, generation: Generation) -> AsyncIterator[None]:
    """End the generation as soon as its client disconnects."""

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
    """Return the body in the parts in which it arrived, because joining 16 MB takes 10 ms.

    `take` counts bytes and may refuse them. Raises `ApiError` 413 above `limit` bytes, and `ClientGone`.
    """
    too_large = ApiError(413, f"the request body is larger than {limit} bytes", reason="too_large")
    declared = dict(scope["headers"]).get(b"content-length", b"0")
    if not declared.isdigit() or int(declared) > limit:
        raise too_large
    parts, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise too_large
        take(len(part))
        parts.append(part)
        more = message.get("more_body", False)
    return parts


def note_refusal(
    refusals: Refusals, error: ApiError, scope: Scope, *, job: Job | None = None, route: str | None = None
) -> None:
    """Keep an error in the list of refusals. `route`: the label of the path, by default the path itself."""
    declared = dict(scope["headers"]).get(b"content-length", b"")
    # A longer number is nonsense, and no JSON has it.
    known = declared.isdigit() and len(declared) < _MAX_DIGITS
    sizes: dict[str, int | None] = {"body_bytes": int(declared) if known else None}
    if job is not None and job.continuations:
        sizes["prompt_tokens"] = sum(len(prompt.token_ids) for prompt in job.prompts)
        sizes |= {"choices": len(job.continuations), "max_tokens": job.continuations[0].sampling.max_tokens}
    refusals.add(
        reason=error.reason,
        message=error.message,
        when=time.time(),
        path=scope["path"] if route is None else route,
        status=error.status,
        retry_after=error.retry_after,
        **sizes,
    )


async def send_error(send: Send, error: ApiError, path: str) -> None:
    """Send an error as JSON in the shape that clients of `path` expect."""
    headers = [_JSON]
    if error.retry_after is not None:
        headers.append((b"retry-after", str(max(1, math.ceil(error.retry_after))).encode()))
    if error.status == 401:
        headers.append((b"www-authenticate", b'Bearer realm="moeyard"'))
    if error.status == 413 or error.reason == "busy":
        headers.append((b"connection", b"close"))  # the rest of the body is not read
    await send_whole(send, error.status, [orjson.dumps(error.body_at(path))], headers=headers)


async def send_whole(send: Send, status: int, pieces: list[bytes], *, headers: list[tuple[bytes, bytes]]) -> None:
    """Send an answer with a Content-Length."""
    length = (b"content-length", str(sum(map(len, pieces))).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await _send_pieces(send, pieces, more=False)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _long(answer: Mapping[str, Any]) -> list[bytes]:
    lists = LongLists()
    placed = {name: lists.add(map(orjson.dumps, value)) if _is_list(value) else value for name, value in answer.items()}
    return lists.pieces(orjson.dumps(placed))
