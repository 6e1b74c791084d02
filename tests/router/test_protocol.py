"""The codec: encoded messages decode to equal ones, and anything else raises a ProtocolError only."""

import dataclasses
import typing
from dataclasses import fields

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeyard_worker import protocol
from moeyard_worker.protocol import (
    FINISH_REASONS,
    GRAMMAR_KINDS,
    KV_METHODS,
    REJECT_REASONS,
    WORKER_STATES,
    ExpertLoads,
    Grammar,
    KvCompression,
    PromptExperts,
    SamplingParams,
    Submit,
    TokenBatch,
    TokenIds,
    TokenLogprob,
    Tokens,
)
from moeyard_worker.wire import ProtocolError, decode, encode

ints = st.integers(min_value=-(2**63), max_value=2**64 - 1)
floats = st.floats(allow_nan=False)
VALUES = {
    int: ints,
    float: floats,
    str: st.text(),
    bytes: st.just(b""),  # of experts: their number depends on other fields
    bool: st.booleans(),
    int | None: st.none() | ints,
    str | None: st.none() | st.text(),
    float | None: st.none() | floats,
    tuple[int, ...]: st.lists(ints, max_size=5).map(tuple),
    tuple[float, ...]: st.lists(floats, max_size=5).map(tuple),
    dict[int, float]: st.dictionaries(ints, floats, max_size=3),
}
CHOICES = {
    "finish_reason": FINISH_REASONS,
    "reason": REJECT_REASONS,
    "state": WORKER_STATES,
    "kind": GRAMMAR_KINDS,
    "method": KV_METHODS,
}


logprobs = st.builds(
    TokenLogprob, logprob=floats, rank=ints, top=st.lists(st.tuples(ints, floats), max_size=3).map(tuple)
)
tokens_with_logprobs = st.lists(st.tuples(ints, logprobs), min_size=1, max_size=4).map(
    lambda pairs: Tokens(
        request_id="r",
        start=0,
        token_ids=tuple(i for i, _ in pairs),
        logprobs=tuple(lp for _, lp in pairs),
        routed_experts=bytes(range(3 * len(pairs))),
    )
)


def instances(cls):
    """Generate any value of a message class from its annotations."""
    kwargs = {}
    for field in fields(cls):
        if field.name in ("prompt_token_ids", "output_token_ids", "trace_decode_token_ids"):
            kwargs[field.name] = st.lists(st.integers(0, 2**32 - 1), max_size=5).map(tuple)
        elif field.name in CHOICES:
            kwargs[field.name] = st.sampled_from(CHOICES[field.name])
        elif field.type is SamplingParams:
            kwargs[field.name] = instances(SamplingParams)
        elif field.type == Grammar | None:
            kwargs[field.name] = st.none() | instances(Grammar)
        elif field.type == KvCompression | None:
            kwargs[field.name] = st.none() | instances(KvCompression)
        elif field.type == tuple[TokenLogprob, ...]:
            kwargs[field.name] = st.just(())
        elif field.type == tuple[Tokens, ...]:
            kwargs[field.name] = st.lists(instances(Tokens) | tokens_with_logprobs, min_size=1, max_size=4).map(tuple)
        elif field.type == tuple[tuple[int, float], ...]:
            kwargs[field.name] = st.lists(st.tuples(ints, floats), max_size=3).map(tuple)
        else:
            kwargs[field.name] = VALUES[field.type]
    if cls is ExpertLoads:  # rows are [layers, experts]
        kwargs |= {"layers": st.just((1, 2)), "experts": st.just((4, 7))}
        kwargs["rows"] = st.just(()) | st.tuples(ints, ints, ints, ints)
        kwargs["chosen"] = st.just(()) | st.lists(ints, min_size=16, max_size=16).map(tuple)
        flags = st.integers(0, 1)
        kwargs["held"] = st.just(()) | st.tuples(flags, flags, flags, flags)
    if cls is PromptExperts:
        kwargs |= {"count": st.just(3), "experts": st.binary(min_size=6, max_size=6)}
    return st.builds(cls, **kwargs)


messages = st.one_of(*(instances(cls) for cls in typing.get_args(protocol.Message)), tokens_with_logprobs)
json_like = st.recursive(
    st.none() | st.booleans() | ints | floats | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5) | ints, inner, max_size=4),
    max_leaves=8,
)


@given(messages)
def test_round_trip(message):
    assert decode(encode(message)) == message


@given(st.lists(st.integers(0, 2**32 - 1), max_size=9))
def test_token_ids_behave_like_a_sequence(ids):
    packed = TokenIds.of(ids)
    assert packed == tuple(ids) == tuple(packed)
    assert (len(packed), packed[1:], list(packed), hash(packed)) == (len(ids), tuple(ids[1:]), ids, hash(tuple(ids)))
    assert packed == TokenIds(packed.data)
    assert packed != [*ids, 1]
    assert (0 in packed) == (0 in ids)
    assert packed.data == b"".join(i.to_bytes(4, "little") for i in ids)
    message = Submit(request_id="r", prompt_token_ids=packed, sampling=SamplingParams(max_tokens=1))
    assert decode(encode(message)).prompt_token_ids == tuple(ids)


@pytest.mark.parametrize("ids", [(-1,), (2**32,)])
def test_token_ids_have_32_bits(ids):
    with pytest.raises(OverflowError):
        TokenIds.of(ids)


@given(st.binary(max_size=200))
def test_garbage_bytes(frame):
    with pytest.raises(ProtocolError):
        decode(frame)


@pytest.mark.parametrize("frame", [b"\x81\x90\x01", b"\x81\x80\x01", b"\xc7\x00\xff", b"\x91" * 5000 + b"\x01", b""])
def test_frames_that_break_msgpack(frame):
    """A list or a map as a key, a broken timestamp, deep nesting, an empty frame."""
    with pytest.raises(ProtocolError):
        decode(frame)


@given(json_like)
def test_garbage_values(value):
    with pytest.raises(ProtocolError):
        decode(msgpack.packb(value))


@given(messages, st.data())
def test_one_damaged_field(message, data):
    """With any value in one field, decoding returns a message or raises a ProtocolError."""
    body = msgpack.unpackb(encode(message), strict_map_key=False)
    name = data.draw(st.sampled_from(sorted(body)))
    body[name] = data.draw(json_like)
    frame = msgpack.packb(body)
    try:
        decoded = decode(frame)
    except ProtocolError:
        return
    assert msgpack.unpackb(encode(decoded), strict_map_key=False).keys() == body.keys()


@given(messages, st.data())
def test_truncated_frame(message, data):
    frame = encode(message)
    cut = data.draw(st.integers(min_value=0, max_value=len(frame) - 1))
    with pytest.raises(ProtocolError):
        decode(frame[:cut])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"extra": 1}, "unknown field 'extra'"),
        ({"request_id": 7}, "submit.request_id"),
        ({"prompt_token_ids": [1, 2]}, "submit.prompt_token_ids"),
        ({"prompt_token_ids": b"12345"}, "submit.prompt_token_ids"),
        ({"prompt_token_ids": None}, "submit.prompt_token_ids"),
        ({"type": "order"}, "unknown message type 'order'"),
        ({"type": ["submit"]}, "unknown message type"),
        ({"v": 1}, "protocol version 1"),
        ({"v": True}, "protocol version True"),
        ({"sampling": {"max_tokens": 1.5}}, "submit.sampling.max_tokens"),
        ({"sampling": {}}, "max_tokens"),
        ({"sampling": {"max_tokens": 1, "top_p": True}}, "submit.sampling.top_p"),
        ({"sampling": {"max_tokens": 1, "grammar": "{}"}}, "submit.sampling.grammar"),
        ({"sampling": {"max_tokens": 1, "grammar": {"kind": "yacc"}}}, "submit.sampling.grammar.kind: 'yacc'"),
    ],
)
def test_errors_name_the_field(change, named):
    message = Submit(request_id="r", prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=1))
    body = {**msgpack.unpackb(encode(message), strict_map_key=False), **change}
    with pytest.raises(ProtocolError, match="(?s).*" + named.replace(".", r"\.")):
        decode(msgpack.packb(body))


def test_batch_with_a_wrong_shape():
    rows = (Tokens(request_id="a", start=0, token_ids=(1, 2)), Tokens(request_id="b", start=3, token_ids=(4,)))
    body = msgpack.unpackb(encode(TokenBatch(rows=rows)))
    assert decode(msgpack.packb(body)).rows == rows
    assert body["rows"]["cached_tokens"] == []
    for fields_of_first in ({"cached_tokens": 0}, {"cached_tokens": 0, "weight_version": "v1"}):
        first = (dataclasses.replace(rows[0], **fields_of_first), rows[1])
        assert decode(encode(TokenBatch(rows=first))).rows == first
    damages = [
        {"request_ids": ["a"]},
        {"starts": [0, 1.0]},
        {"starts": [0, True]},
        {"token_ids": [[1], ["x"]]},
        {"token_ids": [[1], 4]},
        {"request_ids": ["a", 7]},
        {"logprobs": [[]]},
        {"logprobs": [[], 3]},
        {"more": []},
        {"logprobs": [None, None]},
        {"cached_tokens": [1]},
        {"cached_tokens": [None, 1.5]},
        {"cached_tokens": [True, 1]},
        {"weight_versions": ["v1"]},
        {"weight_versions": [None, 3]},
        {"logprobs": [[], [{"logprob": -1.0, "rank": 1}] * 2]},
        {"request_ids": [], "starts": [], "token_ids": []},
    ]
    for damage in damages:
        with pytest.raises(ProtocolError, match=r"token_batch"):
            decode(msgpack.packb({**body, "rows": {**body["rows"], **damage}}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": (1,) * 7}, r"rows: 7 numbers for 2 layers of 4 experts"),
        ({"held": (1,) * 9}, r"held: 9 numbers for 2 layers of 4 experts"),
        ({"held": (1, 0, 2, 1) * 2}, r"held: an expert is the rank's, 1, or elsewhere, 0"),
        ({"chosen": (1,) * 9}, r"chosen: 9 numbers for 2 layers"),
        ({"chosen": (1,), "layers": (), "experts": (), "held": ()}, r"chosen: 1 numbers for 0 layers"),
        ({"chosen": (1,) * 6}, r"experts: some are none of the 3 that chosen has in a layer"),
        ({"chosen": (1,) * 8, "experts": (-1, 0, 1, 2)}, r"experts: some are none of the 4 that chosen has in a layer"),
    ],
    ids=str,
)
def test_expert_loads_have_a_number_for_every_expert_or_none(changes, message):
    sound = {"rank": 0, "layers": (1, 2), "experts": (0, 1, 2, 3), "chosen": (7,) * 12, "held": (1, 0, 0, 1) * 2}
    assert decode(encode(ExpertLoads(**sound))) == ExpertLoads(**sound)
    with pytest.raises(ProtocolError, match=rf"expert_loads\.{message}"):
        decode(encode(ExpertLoads(**sound | changes)))
