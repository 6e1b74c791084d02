"""The APIs that generate, each by how its bodies become jobs and how its answers are written."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from moeyard_router.api.anthropic import MessageWriter, counting_job, message_job
from moeyard_router.api.choice import Choice, Delta
from moeyard_router.api.intake import Intake, Job, Prompt
from moeyard_router.api.replies import ReplyWriter
from moeyard_router.api.responses import ResponseWriter, response_job
from moeyard_router.api.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from moeyard_router.errors import ApiError
from moeyard_router.text.detokenizer import TokenBytes


class Writer(Protocol):
    """Makes the bytes of one answer: `body`, or `chunk`s and then `end` or `failed`."""

    def chunk(self, index: int, delta: Delta, choices: Sequence[Choice]) -> bytes:
        """What was added to choice `index`, as events; empty if there is nothing to say."""

    def texts(self) -> Callable[[int, str], bytes] | None:
        """What makes the event of a choice's text (not empty) where that has begun and nothing else was added to it;
        None if events of this answer say more.
        """

    def body(self, deltas: Sequence[Delta], choices: Sequence[Choice]) -> bytes:
        """The whole answer; `deltas[i]` is everything of choice i."""

    def pieces(self, data: bytes) -> list[bytes]:
        """What `body` or `chunk` gave, with the long lists in it that they left out."""

    def end(self, choices: Sequence[Choice]) -> bytes:
        """What a stream says behind its last chunk."""

    def failed(self, error: ApiError, choices: Sequence[Choice]) -> bytes:
        """What a stream that failed says instead."""


class _WriterOf(Protocol):
    def __call__(self, job: Job, *, reply_id: str, model: str, created: int, tokens: TokenBytes) -> Writer: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Surface:
    """One API. `read` makes a job of a body or raises `ApiError`; `prefix` begins the ids of its answers."""

    prefix: str
    read: Callable[[Intake, bytes], Awaitable[Job]]
    writer: _WriterOf


async def _completion(intake: Intake, body: bytes) -> Job:
    return await intake.completion(await intake.parse(body, CompletionRequest))


async def _chat(intake: Intake, body: bytes) -> Job:
    return await intake.chat(await intake.parse(body, ChatRequest))


async def _tokens(intake: Intake, body: bytes) -> Job:
    request = await intake.parse(body, TokenizeRequest)
    ids, ignored = await intake.tokens(request)
    return _counted(Prompt(token_ids=ids), spelled=bool(request.return_token_strs), ignored=ignored)


async def _text(intake: Intake, body: bytes) -> Job:
    request = await intake.parse(body, DetokenizeRequest)
    return _counted(Prompt(token_ids=(), text=intake.text(request)), ignored=request.ignored)


def _counted(prompt: Prompt, *, spelled: bool = False, ignored: tuple[str, ...]) -> Job:
    """A prompt that is not to be run; `echo` says whether its tokens are to be spelled."""
    return Job(
        chat=True, prompts=(prompt,), continuations=(), stops=(), include_stop=False,
        skip_special_tokens=False, stop_ids=frozenset(), stream=False, include_usage=False, continuous_usage=False,
        return_token_ids=True, echo=spelled, logprobs=None, ignored=ignored,
    )  # fmt: skip


SURFACES = MappingProxyType(
    {
        "completion": Surface(prefix="cmpl-", read=_completion, writer=ReplyWriter),
        "chat": Surface(prefix="chatcmpl-", read=_chat, writer=ReplyWriter),
        "response": Surface(prefix="resp_", read=response_job, writer=ResponseWriter),
        "message": Surface(prefix="msg_", read=message_job, writer=MessageWriter),
    }
)
# What is only counted or spelled, of one prompt: not to be run.
COUNTED: Mapping[str, Callable[[Intake, bytes], Awaitable[Job]]] = MappingProxyType(
    {"tokenize": _tokens, "count_tokens": counting_job, "detokenize": _text}
)
