"""The APIs: how each turns a request body into a job, and how those that generate write their answers."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from moeyard_router.api import anthropic, responses
from moeyard_router.api.anthropic import CountTokensRequest, MessagesRequest, MessageWriter
from moeyard_router.api.blocks import BlockWriter
from moeyard_router.api.fields import Strict
from moeyard_router.api.intake import Intake, Job
from moeyard_router.api.replies import ReplyWriter
from moeyard_router.api.responses import ResponsesRequest, ResponseWriter
from moeyard_router.api.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from moeyard_router.api.sglang import SglangRequest, SglangWriter, sglang_job
from moeyard_router.api.token_ids import GenerateRequest, TokenWriter, token_job

Reader = Callable[[Intake, bytes], Awaitable[Job]]
# Writes one answer: `body`, or `chunk`s and then `end` or `failed`.
Writer = ReplyWriter | BlockWriter | TokenWriter | SglangWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class Surface:
    """How an API that generates writes its answers. `prefix` begins their ids. `has_text`: whether they have text."""

    prefix: str
    writer: type[ReplyWriter] | type[BlockWriter] | type[TokenWriter] | type[SglangWriter]
    has_text: bool = True


def _reader(kind: type[Strict], job: Callable[[Intake, Any], Awaitable[Job]]) -> Reader:
    async def read(intake: Intake, body: bytes) -> Job:
        return await job(intake, await intake.parse(body, kind))

    return read


SURFACES = MappingProxyType(
    {
        "completion": Surface(prefix="cmpl-", writer=ReplyWriter),
        "chat": Surface(prefix="chatcmpl-", writer=ReplyWriter),
        "generate": Surface(prefix="gen-", writer=TokenWriter, has_text=False),
        "sglang": Surface(prefix="", writer=SglangWriter),
        "response": Surface(prefix="resp_", writer=ResponseWriter),
        "message": Surface(prefix="msg_", writer=MessageWriter),
    }
)
# The last three count or spell the tokens of one prompt. `Job.echo` asks for the spelling.
READERS: Mapping[str, Reader] = MappingProxyType(
    {
        "completion": _reader(CompletionRequest, Intake.completion),
        "chat": _reader(ChatRequest, Intake.chat),
        "generate": _reader(GenerateRequest, lambda intake, request: token_job(request, intake)),
        "sglang": _reader(SglangRequest, lambda intake, request: sglang_job(request, intake)),
        "response": _reader(ResponsesRequest, lambda intake, request: responses.translated(request).job(intake)),
        "message": _reader(MessagesRequest, lambda intake, request: anthropic.translated(request).job(intake)),
        "count_tokens": _reader(CountTokensRequest, lambda intake, request: anthropic.translated(request).job(intake)),
        "tokenize": _reader(TokenizeRequest, Intake.tokenize),
        "detokenize": _reader(DetokenizeRequest, Intake.detokenize),
    }
)
