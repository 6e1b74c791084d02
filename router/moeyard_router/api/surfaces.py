"""The APIs that generate, each by how its bodies become jobs and how its answers are written."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from moeyard_router.api import anthropic, responses
from moeyard_router.api.anthropic import CountTokensRequest, MessagesRequest, MessageWriter
from moeyard_router.api.blocks import BlockWriter
from moeyard_router.api.intake import Intake, Job, Prompt
from moeyard_router.api.replies import ReplyWriter
from moeyard_router.api.responses import ResponsesRequest, ResponseWriter
from moeyard_router.api.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

ReadJob = Callable[[Intake, bytes], Awaitable[Job]]
# Makes the bytes of one answer: `body`, or `chunk`s and then `end` or `failed`.
Writer = ReplyWriter | BlockWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class Surface:
    """One API. `read` makes a job of a body or raises `ApiError`; `prefix` begins the ids of its answers."""

    prefix: str
    read: ReadJob
    writer: type[ReplyWriter] | type[BlockWriter]


async def _completion(intake: Intake, body: bytes) -> Job:
    return await intake.completion(await intake.parse(body, CompletionRequest))


async def _chat(intake: Intake, body: bytes) -> Job:
    return await intake.chat(await intake.parse(body, ChatRequest))


async def _response(intake: Intake, body: bytes) -> Job:
    return await responses.translated(await intake.parse(body, ResponsesRequest)).job(intake)


async def _message(intake: Intake, body: bytes) -> Job:
    return await anthropic.translated(await intake.parse(body, MessagesRequest)).job(intake)


async def _message_tokens(intake: Intake, body: bytes) -> Job:
    return await anthropic.translated(await intake.parse(body, CountTokensRequest)).job(intake)


async def _tokens(intake: Intake, body: bytes) -> Job:
    request = await intake.parse(body, TokenizeRequest)
    ids, ignored = await intake.tokens(request)
    return Job(chat=True, prompts=(Prompt(token_ids=ids),), echo=bool(request.return_token_strs), ignored=ignored)


async def _text(intake: Intake, body: bytes) -> Job:
    request = await intake.parse(body, DetokenizeRequest)
    return Job(chat=True, prompts=(Prompt(token_ids=(), text=intake.text(request)),), ignored=request.ignored)


SURFACES = MappingProxyType(
    {
        "completion": Surface(prefix="cmpl-", read=_completion, writer=ReplyWriter),
        "chat": Surface(prefix="chatcmpl-", read=_chat, writer=ReplyWriter),
        "response": Surface(prefix="resp_", read=_response, writer=ResponseWriter),
        "message": Surface(prefix="msg_", read=_message, writer=MessageWriter),
    }
)
# Requests whose one prompt is counted or spelled, not run; `Job.echo` asks for the spelling of its tokens.
COUNTED: Mapping[str, ReadJob] = MappingProxyType(
    {"tokenize": _tokens, "count_tokens": _message_tokens, "detokenize": _text}
)
