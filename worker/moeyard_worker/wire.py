"""Messages of `protocol` as frames: msgpack maps with a version and a type.

Decoding is strict: unknown, missing or mistyped fields raise `ProtocolError`. Nothing is ever unpickled. The rows of a
`TokenBatch` are a map of columns: request_ids, starts, token_ids, logprobs, cached_tokens, routed_experts and
weight_versions. Each of the last four is empty if no row has any. The ids of prompts, of continued and of forced
outputs are little-endian bytes, 4 per id, because a list of 131,072 ids took 12 ms.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from itertools import chain
from types import MappingProxyType
from typing import Any, get_args

import msgpack

from moeyard_worker.protocol import (
    FINISH_REASONS,
    GRAMMAR_KINDS,
    KV_METHODS,
    MAX_GRAMMAR_BYTES,
    MAX_LOGPROBS,
    MAX_PROMPT_EXPERTS,
    MAX_PROMPT_LOGPROBS,
    REJECT_REASONS,
    WORKER_STATES,
    Abort,
    Done,
    ExpertLoads,
    Grammar,
    KvCompression,
    Message,
    PromptExperts,
    PromptLogprobs,
    Rejected,
    SamplingParams,
    Snapshot,
    Submit,
    TokenIds,
    TokenLogprob,
    Tokens,
)

PROTOCOL_VERSION = 9
# UTF-8 bytes of a request's name; a router's are "chatcmpl-", 32 digits and the number of the choice.
MAX_NAME_BYTES = 256
# The most entries of a request's `logit_bias` and `stop_token_ids` together (a router takes 1024 of each).
MAX_ENTRIES = 4096
# Room for field names, numbers, and small additions of later versions.
SLACK_BYTES = 1 << 16
# Generous sizes of parts of a reply. A row of a batch has 21 log-probabilities of up to 18 bytes for each of the few
# tokens of a step. Failure messages are cut far below this.
_ROW_BYTES = 1 << 14
_LOADS_BYTES = 1 << 22


class ProtocolError(ValueError):
    """A frame that is not a message of this protocol version. The message names the field and the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits that are checked before a frame is decoded: of the frame, of one string, of one list or map."""

    frame_bytes: int
    string_bytes: int
    items: int


def request_limits(max_model_len: int) -> Limits:
    """Return the limits of a router's messages. Prompts and grammars up to twice the limit get an error by name."""
    prompt, grammar = 8 * max_model_len, 2 * MAX_GRAMMAR_BYTES
    return Limits(
        frame_bytes=prompt + grammar + 16 * MAX_ENTRIES + SLACK_BYTES,
        string_bytes=max(prompt, grammar),
        items=MAX_ENTRIES,
    )


def reply_limits(max_sequences: int) -> Limits:
    """Return the limits of a worker's messages to a router with at most `max_sequences` at that worker."""
    scores = MAX_PROMPT_LOGPROBS * (MAX_LOGPROBS + 1) * 32
    size = _LOADS_BYTES + scores + max_sequences * _ROW_BYTES
    return Limits(frame_bytes=size, string_bytes=MAX_PROMPT_EXPERTS, items=size)


# Fields of ids that cross as bytes, and are tuples after decoding.
_PACKED = frozenset(("prompt_token_ids", "output_token_ids", "trace_decode_token_ids"))
_MESSAGES = MappingProxyType({cls.type: cls for cls in get_args(Message)})


def encode(message: Message) -> bytes:
    """Serialize a message to one frame."""
    body = {"v": PROTOCOL_VERSION, "type": message.type, **_fields(message)}
    frame: bytes = msgpack.packb(body, use_bin_type=True)
    return frame


def decode(frame: bytes, limits: Limits | None = None) -> Message:
    """Parse one frame. Raises `ProtocolError`, naming the fault; limits are checked first."""
    bounds = {}
    if limits is not None:
        if len(frame) > limits.frame_bytes:
            raise ProtocolError(f"a frame of {len(frame)} bytes, at most {limits.frame_bytes} are read")
        bounds = {"max_str_len": limits.string_bytes, "max_bin_len": limits.string_bytes, "max_ext_len": 0}
        bounds |= {"max_array_len": limits.items, "max_map_len": limits.items}
    try:
        body = msgpack.unpackb(frame, raw=False, strict_map_key=False, **bounds)
    except (ValueError, TypeError, msgpack.UnpackException) as error:  # TypeError: a map or list as the key of a map
        raise ProtocolError(f"not msgpack: {error}") from error
    if not isinstance(body, dict):
        raise ProtocolError(f"a message is a map, got {type(body).__name__}")
    version, kind = body.pop("v", None), body.pop("type", None)
    if not _is_int(version) or version != PROTOCOL_VERSION:
        raise ProtocolError(f"protocol version {version!r:.80}, this side speaks {PROTOCOL_VERSION}")
    cls = _MESSAGES.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise ProtocolError(f"unknown message type {kind!r:.80}")
    message: Message = _build(cls, body, cls.type)
    return message


def _fields(value: Any) -> dict[str, Any]:
    found = {}
    for f in fields(value):
        each = getattr(value, f.name)
        if f.name in _PACKED:
            found[f.name] = (each if isinstance(each, TokenIds) else TokenIds.of(each)).data
        else:
            found[f.name] = _plain(each)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, tuple) and value and isinstance(value[0], Tokens):
        return _columns(value)
    if isinstance(value, TokenLogprob):
        # There are many of them, and msgpack accepts tuples.
        return {"logprob": value.logprob, "rank": value.rank, "top": value.top}
    if isinstance(value, SamplingParams | Grammar | KvCompression):
        return _fields(value)
    if isinstance(value, tuple):
        # Tuples of integers may have tens of thousands of entries and need no conversion.
        return value if value and type(value[0]) is int else [_plain(v) for v in value]
    return value


def _columns(rows: Iterable[Tokens]) -> dict[str, list[Any]]:
    logprobs, cached = [_plain(row.logprobs) for row in rows], [row.cached_tokens for row in rows]
    experts, versions = [row.routed_experts for row in rows], [row.weight_version for row in rows]
    return {
        "request_ids": [row.request_id for row in rows],
        "starts": [row.start for row in rows],
        "token_ids": [row.token_ids for row in rows],
        "logprobs": logprobs if any(logprobs) else [],
        "cached_tokens": cached if cached.count(None) < len(cached) else [],
        "routed_experts": experts if any(experts) else [],
        "weight_versions": versions if versions.count(None) < len(versions) else [],
    }


def _rows(columns: dict[Any, Any], where: str) -> tuple[Tokens, ...]:
    """Parse the rows of a batch. Columns are checked as a whole, because this runs for every token."""
    names = ("request_ids", "starts", "token_ids", "logprobs", "cached_tokens", "routed_experts", "weight_versions")
    if set(columns) != set(names) or not all(isinstance(columns[name], list) for name in names):
        raise ProtocolError(f"{where}: expected the columns {', '.join(names)}")
    request_ids, starts, token_ids, logprobs, cached, experts, versions = (columns[name] for name in names)
    if not request_ids or not len(request_ids) == len(starts) == len(token_ids):
        raise ProtocolError(f"{where}: columns of {len(request_ids)}, {len(starts)} and {len(token_ids)} rows")
    if not (
        set(map(type, request_ids)) == {str}
        and set(map(type, starts)) == {int}
        and set(map(type, token_ids)) == {list}
        and set(map(type, chain.from_iterable(token_ids))) <= {int}
    ):
        raise ProtocolError(f"{where}: request_ids, starts or token_ids of a wrong type")
    for name, column in zip(names[3:], (logprobs, cached, experts, versions), strict=True):
        if len(column) not in (0, len(request_ids)):
            raise ProtocolError(f"{where}: {name} of {len(column)} rows for {len(request_ids)}")
    for name, column, kind in (("cached_tokens", cached, int), ("weight_versions", versions, str)):
        if not set(map(type, column)) <= {kind, type(None)}:
            raise ProtocolError(f"{where}: {name} of a wrong type")
    absent = [None] * len(request_ids)
    counts, versions = cached or absent, versions or absent
    if not logprobs and not experts:
        rows = zip(request_ids, starts, map(tuple, token_ids), counts, versions, strict=True)
        return tuple(
            Tokens(request_id=name, start=start, token_ids=ids, cached_tokens=count, weight_version=version)
            for name, start, ids, count, version in rows
        )
    names = ("request_id", "start", "token_ids", "logprobs", "cached_tokens", "routed_experts", "weight_version")
    none: list[Any] = [[]] * len(request_ids)
    optional = (logprobs or none, counts, experts or [b""] * len(none), versions)
    scored = zip(request_ids, starts, token_ids, *optional, strict=True)
    return tuple(_build(Tokens, dict(zip(names, row, strict=True)), where) for row in scored)


def _build(cls: Any, body: dict[Any, Any], where: str) -> Any:
    rules = _FIELD_RULES[cls]
    kwargs = {}
    for name, value in body.items():
        if name not in rules:
            raise ProtocolError(f"{where}: unknown field {name!r:.80}")
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
    # Exact types are checked first, because this runs for every alternative of every token.
    if type(value) is not list or len(value) != 2:
        return False
    token_id, number = value
    return (type(token_id) is int and type(number) is float) or (_is_int(token_id) and _is_number(number))


# Per annotation: whether a value from msgpack fits, and its conversion to the Python form (None: it needs none).
_Rule = tuple[Callable[[Any], bool], Callable[[Any, str], Any] | None]
_RULES: MappingProxyType[Any, _Rule] = MappingProxyType(
    {
        int: (_is_int, None),
        float: (_is_number, lambda v, _: float(v)),
        str: (lambda v: isinstance(v, str), None),
        bool: (lambda v: isinstance(v, bool), None),
        bytes: (lambda v: isinstance(v, bytes), None),
        int | None: (lambda v: v is None or _is_int(v), None),
        str | None: (lambda v: v is None or isinstance(v, str), None),
        float | None: (lambda v: v is None or _is_number(v), lambda v, _: v if v is None else float(v)),
        tuple[int, ...]: (lambda v: isinstance(v, list) and all(map(_is_int, v)), lambda v, _: tuple(v)),
        tuple[float, ...]: (
            lambda v: isinstance(v, list) and all(map(_is_number, v)),
            lambda v, _: tuple(map(float, v)),
        ),
        dict[int, float]: (
            lambda v: isinstance(v, dict) and all(_is_int(k) and _is_number(x) for k, x in v.items()),
            lambda v, _: {k: float(x) for k, x in v.items()},
        ),
        tuple[tuple[int, float], ...]: (
            lambda v: isinstance(v, list) and all(map(_is_pair, v)),
            lambda v, _: tuple((k, float(x)) for k, x in v),
        ),
        tuple[Tokens, ...]: (lambda v: isinstance(v, dict), _rows),
        SamplingParams: (lambda v: isinstance(v, dict), lambda v, where: _build(SamplingParams, v, where)),
        Grammar | None: (
            lambda v: v is None or isinstance(v, dict),
            lambda v, where: v if v is None else _build(Grammar, v, where),
        ),
        KvCompression | None: (
            lambda v: v is None or isinstance(v, dict),
            lambda v, where: v if v is None else _build(KvCompression, v, where),
        ),
        tuple[TokenLogprob, ...]: (
            lambda v: isinstance(v, list) and all(isinstance(x, dict) for x in v),
            lambda v, where: tuple(_build(TokenLogprob, x, where) for x in v),
        ),
    }
)
_PACKED_RULE: _Rule = (lambda v: isinstance(v, bytes) and len(v) % 4 == 0, lambda v, _: tuple(TokenIds(v)))
_FIELD_RULES = MappingProxyType(
    {
        cls: {f.name: _PACKED_RULE if f.name in _PACKED else _RULES[f.type] for f in fields(cls)}
        for cls in (*get_args(Message), SamplingParams, Grammar, KvCompression, TokenLogprob)
    }
)
_CHOICES = MappingProxyType(
    {
        Done: ("finish_reason", FINISH_REASONS),
        Rejected: ("reason", REJECT_REASONS),
        Snapshot: ("state", WORKER_STATES),
        Grammar: ("kind", GRAMMAR_KINDS),
        KvCompression: ("method", KV_METHODS),
    }
)


def _check_values(message: Any, where: str) -> None:
    name, values = _CHOICES.get(type(message), (None, ()))
    if name is not None and getattr(message, name) not in values:
        raise ProtocolError(f"{where}.{name}: {getattr(message, name)!r:.80} is not one of {', '.join(values)}")
    if isinstance(message, Submit | Abort) and len(message.request_id.encode()) > MAX_NAME_BYTES:
        raise ProtocolError(f"{where}.request_id: a name of more than {MAX_NAME_BYTES} bytes")
    if isinstance(message, PromptLogprobs) and len(message.logprobs) > MAX_PROMPT_LOGPROBS:
        raise ProtocolError(f"{where}: {len(message.logprobs)} logprobs, at most {MAX_PROMPT_LOGPROBS} at once")
    if isinstance(message, Tokens) and message.logprobs and len(message.logprobs) != len(message.token_ids):
        raise ProtocolError(f"{where}: {len(message.logprobs)} logprobs for {len(message.token_ids)} tokens")
    if isinstance(message, Tokens | PromptExperts):
        _check_experts(message, where)
    if isinstance(message, ExpertLoads):
        _check_loads(message, where)


def _check_experts(message: Tokens | PromptExperts, where: str) -> None:
    if isinstance(message, Tokens):
        count, experts = len(message.token_ids), message.routed_experts
    else:
        count, experts = message.count, message.experts
    if experts and (count < 1 or len(experts) % count):
        raise ProtocolError(f"{where}: {len(experts)} bytes of experts for {count} positions")


def _check_loads(message: ExpertLoads, where: str) -> None:
    num_layers, num_experts = len(message.layers), len(message.experts)
    for name, numbers in (("rows", message.rows), ("held", message.held)):
        if len(numbers) not in (0, num_layers * num_experts):
            raise ProtocolError(
                f"{where}.{name}: {len(numbers)} numbers for {num_layers} layers of {num_experts} experts"
            )
    if not set(message.held) <= {0, 1}:
        raise ProtocolError(f"{where}.held: an expert is the rank's, 1, or elsewhere, 0")
    if not message.chosen:
        return
    width, rest = divmod(len(message.chosen), max(1, num_layers))
    if rest or not num_layers:
        raise ProtocolError(f"{where}.chosen: {len(message.chosen)} numbers for {num_layers} layers")
    if any(not 0 <= expert < width for expert in message.experts):
        raise ProtocolError(f"{where}.experts: some are none of the {width} that chosen has in a layer")
