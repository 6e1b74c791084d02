"""POST /tokenize and /detokenize, as vLLM has them, and Anthropic's count_tokens: what a prompt costs, what ids say."""

import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from moeyard_router.api.endpoints import read_parts, reply_headers, send_error, send_whole
from moeyard_router.api.generation import ClientGone
from moeyard_router.api.intake import Intake, Job
from moeyard_router.api.large import LARGE_BODY, Bodies
from moeyard_router.api.long_json import LongLists
from moeyard_router.api.record import record_of
from moeyard_router.api.surfaces import COUNTED
from moeyard_router.config import RouterConfig
from moeyard_router.errors import ApiError
from moeyard_router.metrics import RouterMetrics
from moeyard_router.text.bounded import Elsewhere
from moeyard_router.text.chat import Codec

# A body may be as large as a prompt that can be run is in practice, and no larger: so much text per token of the
# model's length, and the JSON around it.
_BYTES_PER_TOKEN = 32
_BYTES_AROUND = 64 * 1024
# Tokens above which an answer is written apart from the event loop.
_MANY = 4096


class BodyEndpoint:
    """ASGI app of a POST that is answered with one JSON object.

    `answer` makes it, and the job of which it tells, from the body's pieces, or raises `ApiError`.

    A body above 64 KiB and 32 bytes for each token of the model's length is a 413; while bodies hold more than
    `max_buffered_bytes` it is a 503.
    """

    def __init__(
        self,
        config: RouterConfig,
        metrics: RouterMetrics,
        bodies: Bodies,
        answer: Callable[[list[bytes]], Awaitable[tuple[dict[str, Any], Job]]],
    ) -> None:
        self._limit = min(config.max_body_bytes, _BYTES_AROUND + _BYTES_PER_TOKEN * config.max_model_len)
        self._metrics = metrics
        self._bodies = bodies
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; nothing to a client that has left."""
        try:
            with self._bodies.room() as take:
                answer, job = await self._answer(await read_parts(scope, receive, self._limit, take))
        except ClientGone:
            record_of(scope).client_left = True
        except ApiError as error:
            self._metrics.rejected(error.reason)
            await send_error(send, error, scope["path"])
        else:
            many = any(_is_list(value) and len(value) > _MANY for value in answer.values())
            pieces = await self._bodies.write(_long, answer) if many else [orjson.dumps(answer, default=list)]
            headers = [(b"content-type", b"application/json"), *reply_headers(job)]
            await send_whole(send, 200, pieces, headers=headers)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _long(answer: Mapping[str, Any]) -> list[bytes]:
    """JSON in pieces, lists item by item."""
    lists = LongLists()
    placed = {name: lists.add(map(orjson.dumps, value)) if _is_list(value) else value for name, value in answer.items()}
    return lists.pieces(orjson.dumps(placed))


class Tokens:
    """What these endpoints answer."""

    def __init__(self, config: RouterConfig, codec: Codec, bodies: Bodies) -> None:
        self._config = config
        self._bodies = bodies
        self._codec = codec
        self._intake = Intake(config, codec)

    async def tokenize(self, parts: list[bytes]) -> tuple[dict[str, Any], Job]:
        """The ids of a prompt or chat, their number, and (`return_token_strs`) their spelling."""
        job = await self._job(parts, "tokenize")
        ids = job.prompts[0].token_ids
        answer = {
            "count": len(ids),
            "max_model_len": self._config.max_model_len,
            "tokens": ids,
            "token_strs": await self._intake.work(len(ids), self._codec.spell, ids) if job.echo else None,
        }
        return answer, job

    async def count(self, parts: list[bytes]) -> tuple[dict[str, Any], Job]:
        """The size of the prompt that a request of Anthropic's API makes."""
        job = await self._job(parts, "count_tokens")
        return {"input_tokens": len(job.prompts[0].token_ids)}, job

    async def detokenize(self, parts: list[bytes]) -> tuple[dict[str, Any], Job]:
        """The text of token ids."""
        job = await self._job(parts, "detokenize")
        return {"prompt": job.prompts[0].text}, job

    async def _job(self, parts: list[bytes], api: str) -> Job:
        """Of a large body, or where a chat template does too much, by a process."""
        if sum(map(len, parts)) <= LARGE_BODY:
            with contextlib.suppress(Elsewhere):  # boundary: it is done again there
                return await COUNTED[api](self._intake, b"".join(parts))
        return await self._bodies.job(parts, api=api)
