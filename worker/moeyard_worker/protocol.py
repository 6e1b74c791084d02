"""The boundary between a router and a worker: what crosses it, and nothing else.

A router may know this file and no other of the worker's; it never sees a tensor, a page or a rank's memory. The file is
stdlib + msgpack only, so importing it loads no torch. Messages are msgpack maps with a version and a type; decoding is
strict (unknown, missing or mistyped fields raise `ProtocolError`), and nothing is ever unpickled.

Router to worker: `Hello`, `Submit`, `Abort`. Worker to router: `Snapshot`, `PromptLogprobs`, `Tokens`, `Done`,
`Rejected`. Every `Submit` is answered by exactly one `Done` or `Rejected`; `PromptLogprobs` of a request precede its
`Tokens`, and these its `Done`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Union, get_args

import msgpack

PROTOCOL_VERSION = 1
# The most alternatives that an answer lists beside a chosen token, as in the OpenAI API.
MAX_LOGPROBS = 20
# The most tokens that one `PromptLogprobs` tells of: what a router decodes at once stays below a millisecond or two.
MAX_PROMPT_LOGPROBS = 128

FinishReason = Literal["stop", "length", "abort", "error"]
RejectReason = Literal["queue_full", "prompt_too_long", "never_fits", "bad_request", "duplicate", "fleet_failed"]
WorkerState = Literal["ready", "failed", "stopping"]

FINISH_REASONS: tuple[str, ...] = get_args(FinishReason)
REJECT_REASONS: tuple[str, ...] = get_args(RejectReason)
WORKER_STATES: tuple[str, ...] = get_args(WorkerState)


class ProtocolError(ValueError):
    """A frame that is not a message of this protocol version; says which field and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen. The router fills every field; `seed` is always explicit.

    Units and ranges: `temperature` >= 0 (0 is greedy); `top_p` in (0, 1]; `top_k` >= 0 (0 is off); `min_p` in [0, 1];
    penalties as OpenAI (presence, frequency in [-2, 2]) and CTRL (repetition > 0, 1 is off); `logprobs` None for none,
    otherwise the number of alternatives reported beside the chosen token, 0 to MAX_LOGPROBS. `prompt_logprobs` is the
    same for every prompt token but the first. `max_tokens` 0 computes the prompt and ends.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Log-probability (natural log, of the unmodified distribution) of a token and of the `top` likeliest ones.

    `rank` is 1 for the likeliest token. `top` is sorted by falling log-probability, ties by lower id.
    """

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A router introduces itself and asks for snapshots: one at once, then on every change of load or state."""

    type: ClassVar[str] = "hello"


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """Run one sequence. `request_id` is unique per router; `prompt_token_ids` is not empty."""

    type: ClassVar[str] = "submit"
    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """Stop a request and free its slot and pages within one step; answered by `Done(finish_reason="abort")`.

    An abort of an unknown or ended request is ignored: its terminal reply is already on the way.
    """

    type: ClassVar[str] = "abort"
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobs:
    """Log-probabilities of prompt tokens `start`, `start + 1` and so on, each under the tokens before it.

    Sent as the prompt is computed, at most MAX_PROMPT_LOGPROBS at once, each token once and in order. The first has no
    tokens before it, so `start` is at least 1.
    """

    type: ClassVar[str] = "prompt_logprobs"
    request_id: str
    start: int
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """New output tokens of a request. `start` is the index of the first one among the request's output tokens."""

    type: ClassVar[str] = "tokens"
    request_id: str
    start: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The end of a request. Seconds are measured on the worker's monotonic clock.

    `stop_token_id` is set when `finish_reason` is "stop" (the id is the last of the output tokens).
    `error` names what failed when `finish_reason` is "error".
    """

    type: ClassVar[str] = "done"
    request_id: str
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    stop_token_id: int | None = None
    error: str | None = None
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A request that was never run. `retry_after` (seconds) is set where trying again may help."""

    type: ClassVar[str] = "rejected"
    request_id: str
    reason: str
    message: str
    retry_after: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A worker's load and state, for the router's choice of rank.

    `step` counts lockstep steps of the fleet; `failure` names what broke when `state` is "failed".
    KV pages are counted for this rank; `kv_pages_free` includes pages that only the prefix index holds.
    """

    type: ClassVar[str] = "snapshot"
    rank: int
    world_size: int
    epoch: int
    step: int
    state: str
    failure: str | None
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    kv_pages_total: int
    kv_pages_free: int
    page_size: int
    max_model_len: int
    vocab_size: int


Message = Union[Hello, Submit, Abort, PromptLogprobs, Tokens, Done, Rejected, Snapshot]  # noqa: UP007 - for get_args
_MESSAGES = MappingProxyType({cls.type: cls for cls in get_args(Message)})


def encode(message: Message) -> bytes:
    """Serialize a message to one frame."""
    body = {"v": PROTOCOL_VERSION, "type": message.type}
    for f in fields(message):
        body[f.name] = _plain(getattr(message, f.name))
    frame: bytes = msgpack.packb(body, use_bin_type=True)
    return frame


def decode(frame: bytes) -> Message:
    """Parse one frame; raises `ProtocolError` naming what is wrong with it."""
    try:
        body = msgpack.unpackb(frame, raw=False, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException) as error:  # TypeError: a map or list as the key of a map
        raise ProtocolError(f"not msgpack: {error}") from error
    if not isinstance(body, dict):
        raise ProtocolError(f"a message is a map, got {type(body).__name__}")
    version, kind = body.pop("v", None), body.pop("type", None)
    if not _is_int(version) or version != PROTOCOL_VERSION:
        raise ProtocolError(f"protocol version {version!r}, this side speaks {PROTOCOL_VERSION}")
    cls = _MESSAGES.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise ProtocolError(f"unknown message type {kind!r}")
    message: Message = _build(cls, body, cls.type)
    return message


def _plain(value: Any) -> Any:
    if isinstance(value, TokenLogprob):
        # There are many of them; msgpack takes tuples as they are.
        return {"logprob": value.logprob, "rank": value.rank, "top": value.top}
    if isinstance(value, SamplingParams):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return value


def _build(cls: Any, body: dict[Any, Any], where: str) -> Any:
    rules = _FIELD_RULES[cls]
    kwargs = {}
    for name, value in body.items():
        if name not in rules:
            raise ProtocolError(f"{where}: unknown field {name!r}")
        fits, form = rules[name]
        if not fits(value):
            kind = cls.__annotations__[name]
            raise ProtocolError(f"{where}.{name}: expected {getattr(kind, '__name__', kind)}, got {value!r:.80}")
        kwargs[name] = value if form is None else form(value, f"{where}.{name}")
    try:
        message = cls(**kwargs)
    except TypeError as error:
        raise ProtocolError(f"{where}: {error}") from error
    _check_values(message, where)
    return message


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or _is_int(value)


def _is_pair(value: Any) -> bool:
    # The usual pair by its exact types: this runs for every alternative of every token.
    if type(value) is not list or len(value) != 2:
        return False
    token_id, number = value
    return (type(token_id) is int and type(number) is float) or (_is_int(token_id) and _is_number(number))


# Per annotation used above: whether a value from msgpack fits, and how it gets its Python form (None: it has it).
_RULES: MappingProxyType[Any, tuple[Callable[[Any], bool], Callable[[Any, str], Any] | None]] = MappingProxyType(
    {
        int: (_is_int, None),
        float: (_is_number, lambda v, _: float(v)),
        str: (lambda v: isinstance(v, str), None),
        bool: (lambda v: isinstance(v, bool), None),
        int | None: (lambda v: v is None or _is_int(v), None),
        str | None: (lambda v: v is None or isinstance(v, str), None),
        float | None: (lambda v: v is None or _is_number(v), lambda v, _: v if v is None else float(v)),
        tuple[int, ...]: (lambda v: isinstance(v, list) and all(map(_is_int, v)), lambda v, _: tuple(v)),
        dict[int, float]: (
            lambda v: isinstance(v, dict) and all(_is_int(k) and _is_number(x) for k, x in v.items()),
            lambda v, _: {k: float(x) for k, x in v.items()},
        ),
        tuple[tuple[int, float], ...]: (
            lambda v: isinstance(v, list) and all(map(_is_pair, v)),
            lambda v, _: tuple((k, float(x)) for k, x in v),
        ),
        SamplingParams: (lambda v: isinstance(v, dict), lambda v, where: _build(SamplingParams, v, where)),
        tuple[TokenLogprob, ...]: (
            lambda v: isinstance(v, list) and all(isinstance(x, dict) for x in v),
            lambda v, where: tuple(_build(TokenLogprob, x, where) for x in v),
        ),
    }
)
_FIELD_RULES = MappingProxyType(
    {cls: {f.name: _RULES[f.type] for f in fields(cls)} for cls in (*get_args(Message), SamplingParams, TokenLogprob)}
)
_CHOICES = MappingProxyType(
    {
        Done: ("finish_reason", FINISH_REASONS),
        Rejected: ("reason", REJECT_REASONS),
        Snapshot: ("state", WORKER_STATES),
    }
)


def _check_values(message: Any, where: str) -> None:
    name, values = _CHOICES.get(type(message), (None, ()))
    if name is not None and getattr(message, name) not in values:
        raise ProtocolError(f"{where}.{name}: {getattr(message, name)!r} is not one of {', '.join(values)}")
    if isinstance(message, PromptLogprobs) and len(message.logprobs) > MAX_PROMPT_LOGPROBS:
        raise ProtocolError(f"{where}: {len(message.logprobs)} logprobs, at most {MAX_PROMPT_LOGPROBS} at once")
    if isinstance(message, Tokens) and message.logprobs and len(message.logprobs) != len(message.token_ids):
        raise ProtocolError(f"{where}: {len(message.logprobs)} logprobs for {len(message.token_ids)} tokens")
