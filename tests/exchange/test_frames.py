"""The frame codec: every encoded frame decodes to itself, and other bytes never decode."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeyard_worker.exchange.membership.agreement import Finding, PoisonFrame, cut_reason, decode_poison, encode_poison
from moeyard_worker.exchange.membership.frames import (
    NO_LAYER,
    TAG_BYTES,
    FrameError,
    Handshake,
    Phase,
    PlanFrame,
    Tag,
    decode_handshake,
    decode_plan_frame,
    decode_tag,
    encode_handshake,
    encode_plan_frame,
    encode_tag,
)

U16, U32, U64 = st.integers(0, 2**16 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
LAYERS = st.integers(0, NO_LAYER - 1)


@st.composite
def tags(draw: st.DrawFn) -> Tag:
    phase = draw(st.sampled_from(Phase))
    layer = draw(LAYERS) if phase in (Phase.DISPATCH, Phase.COMBINE) else None
    return Tag(epoch=draw(U32), step=draw(U64), layer=layer, phase=phase, source=draw(U16))


PLANS = st.builds(
    PlanFrame,
    epoch=U32,
    step=U64,
    source=U16,
    num_tokens=U32,
    num_prompt=U32,
    num_rows=U32,
    num_drafts=st.integers(0, 2**8 - 1),
)
HANDSHAKES = st.builds(Handshake, rank=U16, world_size=U16, epoch=U32, token=st.text())
FINDINGS = st.builds(
    Finding,
    step=U64,
    place=U32,
    ranks=st.lists(U16, max_size=8).map(tuple),
    reason=st.text(max_size=3000).map(cut_reason),
)
POISONS = st.builds(PoisonFrame, round=U16, finding=FINDINGS)
DECODERS = (decode_tag, decode_plan_frame, decode_poison, decode_handshake)


@given(tags())
def test_tag_round_trip(tag: Tag) -> None:
    frame = encode_tag(tag)
    assert len(frame) == TAG_BYTES
    assert decode_tag(frame) == tag
    assert decode_tag(frame + b"payload") == tag


@given(tags(), tags())
def test_two_tags_have_the_same_bytes_only_if_equal(one: Tag, other: Tag) -> None:
    assert (encode_tag(one) == encode_tag(other)) == (one == other)


@given(PLANS)
def test_plan_round_trip(plan: PlanFrame) -> None:
    assert decode_plan_frame(encode_plan_frame(plan)) == plan


@given(HANDSHAKES)
def test_handshake_round_trip(handshake: Handshake) -> None:
    assert decode_handshake(encode_handshake(handshake)) == handshake


@given(U32, U64, U16, POISONS)
def test_poison_round_trip(epoch: int, step: int, source: int, poison: PoisonFrame) -> None:
    tag = Tag(epoch=epoch, step=step, layer=None, phase=Phase.POISON, source=source)
    assert decode_poison(encode_poison(tag, poison)) == (tag, poison)


def test_poison_frame_has_a_size_limit() -> None:
    tag = Tag(epoch=0, step=0, layer=None, phase=Phase.POISON, source=0)
    for reason, message in (("x" * 2001, "a poison reason of 2001 bytes, at most 2000"), ("x", "ranks=.70000")):
        poison = PoisonFrame(round=1, finding=Finding(step=1, place=0, ranks=(70000,), reason=reason))
        with pytest.raises(FrameError, match=message):
            encode_poison(tag, poison)
    good = encode_poison(tag, PoisonFrame(round=1, finding=Finding(step=1, place=0, ranks=(1, 2), reason="x")))
    with pytest.raises(FrameError, match="at most 2000"):
        decode_poison(good + b"x" * 2000)
    for length in range(TAG_BYTES, len(good) - 1):
        with pytest.raises(FrameError, match="a poison frame of"):
            decode_poison(good[:length])
    with pytest.raises(FrameError, match="poison reason: "):
        decode_poison(good + b"\xff")


@given(st.binary(max_size=80))
def test_other_bytes_are_frame_errors(noise: bytes) -> None:
    for decode in DECODERS:
        with pytest.raises(FrameError):
            decode(noise)


@given(st.one_of(PLANS.map(encode_plan_frame), HANDSHAKES.map(encode_handshake)), st.data())
def test_damaged_frame_is_an_error_or_another_frame(frame: bytes, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(frame) - 1))
    damaged = frame[:at] + bytes([frame[at] ^ data.draw(st.integers(1, 255))]) + frame[at + 1 :]
    for decode in DECODERS:
        try:
            decoded = decode(damaged)
        except FrameError:
            continue
        assert decode is decode_tag or decoded != decode(frame)


@given(PLANS.map(encode_plan_frame), st.integers(0, 32))
def test_truncated_plan_is_an_error(frame: bytes, length: int) -> None:
    with pytest.raises(FrameError, match="bytes"):
        decode_plan_frame(frame[:length])
    with pytest.raises(FrameError, match="33"):
        decode_plan_frame(frame + b"x")


@pytest.mark.parametrize(
    ("tag", "message"),
    [
        (Tag(epoch=2**32, step=0, layer=None, phase=Phase.PLAN, source=0), "epoch 4294967296"),
        (Tag(epoch=0, step=-1, layer=None, phase=Phase.PLAN, source=0), "step -1"),
        (Tag(epoch=0, step=0, layer=NO_LAYER, phase=Phase.DISPATCH, source=0), "layer 65535"),
    ],
)
def test_field_out_of_range_is_not_encoded(tag: Tag, message: str) -> None:
    with pytest.raises(FrameError, match=message):
        encode_tag(tag)


def test_errors_name_the_problem() -> None:
    frame = encode_plan_frame(PlanFrame(epoch=1, step=812, source=3, num_tokens=5))
    with pytest.raises(FrameError, match="frame version 9, this side speaks 6"):
        decode_tag(frame[:2] + b"\x09" + frame[3:])
    with pytest.raises(FrameError, match="77 is not a valid Phase"):
        decode_tag(frame[:3] + b"\x4d" + frame[4:])
    with pytest.raises(FrameError, match="expected a handshake, got plan of rank 3, epoch 1, step 812"):
        decode_handshake(frame)
    with pytest.raises(FrameError, match="a frame starts with"):
        decode_tag(b"xx" + frame[2:])
    with pytest.raises(FrameError, match="5000000000 tokens"):
        encode_plan_frame(PlanFrame(epoch=1, step=812, source=3, num_tokens=5_000_000_000))
    with pytest.raises(FrameError, match="-1 prompt rows"):
        encode_plan_frame(PlanFrame(epoch=1, step=812, source=3, num_tokens=5, num_prompt=-1))
    with pytest.raises(FrameError, match="256 drafts"):
        encode_plan_frame(PlanFrame(epoch=1, step=812, source=3, num_tokens=5, num_drafts=256))


@pytest.mark.parametrize("version", [5, 7])
def test_other_frame_versions_are_refused(version: int) -> None:
    frame = encode_plan_frame(PlanFrame(epoch=1, step=812, source=3, num_tokens=5))
    with pytest.raises(FrameError, match=f"frame version {version}, this side speaks 6"):
        decode_tag(frame[:2] + bytes([version]) + frame[3:])
