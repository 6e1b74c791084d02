"""Frames between ranks: tags, plan frames and handshakes. Pure: stdlib + msgpack.

Every frame starts with a tag of TAG_BYTES bytes (little endian: magic, version, phase, source, layer, epoch, step). A
receiver compares one slice with the bytes it expects, and decodes only to explain a mismatch. Decoding is strict:
anything but a frame of this version raises `FrameError`.
"""

from dataclasses import asdict, dataclass
from enum import IntEnum
from struct import Struct
from struct import error as StructError

import msgpack

MAGIC = b"mY"
VERSION = 6
NO_LAYER = 0xFFFF

_TAG = Struct("<2sBBHHIQ")
_PLAN = Struct("<IIIB")
TAG_BYTES = _TAG.size

Frame = bytes | memoryview


class FrameError(ValueError):
    """Bytes that are not a frame of this version; says why."""


class Phase(IntEnum):
    """The purpose of a frame, in the order of a rank's life and of a step.

    FETCH, between dispatch and combine, happens on devices only and has no frame. BUSY and WAITING are signs of life
    (liveness.py), which come at any time.
    """

    HANDSHAKE = 1
    PLAN = 2
    DISPATCH = 3
    COMBINE = 4
    POISON = 5
    MEETING = 6
    FETCH = 7
    BUSY = 8
    WAITING = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Tag:
    """The source and the identity of a frame. `layer` is None outside dispatch and combine."""

    epoch: int
    step: int
    layer: int | None
    phase: Phase
    source: int

    def __str__(self) -> str:
        """E.g. "dispatch of rank 3, epoch 1, step 812, layer 17"."""
        layer = "" if self.layer is None else f", layer {self.layer}"
        return f"{self.phase.name.lower()} of rank {self.source}, epoch {self.epoch}, step {self.step}{layer}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFrame:
    """A rank's part in lockstep step `step`.

    num_tokens: its rows, 0 for an idle rank. The first `num_prompt` are prompt rows.
    num_rows: the most rows that it brings to its exchanges, with padding.
    num_drafts: the passes of drafting that it wants.
    """

    epoch: int
    step: int
    source: int
    num_tokens: int
    num_prompt: int = 0
    num_rows: int = 0
    num_drafts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Handshake:
    """First frame on a connection. `token` is the receiver's secret, known from its endpoint."""

    rank: int
    world_size: int
    epoch: int
    token: str


def pack_tag(epoch: int, step: int, layer: int, phase: int, source: int) -> bytes:
    """The TAG_BYTES bytes of a tag (`layer` NO_LAYER for none). Positional, as every frame calls it."""
    return _TAG.pack(MAGIC, VERSION, phase, source, layer, epoch, step)


def encode_tag(tag: Tag) -> bytes:
    """Encode `tag`. Raises `FrameError` for a field out of range."""
    if tag.layer == NO_LAYER:
        raise FrameError(f"layer {tag.layer} stands for no layer")
    try:
        return pack_tag(tag.epoch, tag.step, NO_LAYER if tag.layer is None else tag.layer, tag.phase, tag.source)
    except StructError as error:
        raise FrameError(f"{tag}: {error}") from error


def decode_tag(frame: bytes) -> Tag:
    """Parse the tag at the start of `frame`. Raises `FrameError`."""
    if len(frame) < TAG_BYTES:
        raise FrameError(f"a frame of {len(frame)} bytes, a tag has {TAG_BYTES}")
    magic, version, phase, source, layer, epoch, step = _TAG.unpack_from(frame)
    if magic != MAGIC:
        raise FrameError(f"a frame starts with {MAGIC!r}, got {magic!r}")
    if version != VERSION:
        raise FrameError(f"frame version {version}, this side speaks {VERSION}")
    try:
        phase = Phase(phase)
    except ValueError as error:
        raise FrameError(str(error)) from error
    if (layer != NO_LAYER) != (phase in (Phase.DISPATCH, Phase.COMBINE)):
        raise FrameError(f"layer {layer} in a {phase.name.lower()} frame")
    return Tag(epoch=epoch, step=step, layer=None if layer == NO_LAYER else layer, phase=phase, source=source)


def encode_plan_frame(plan: PlanFrame) -> bytes:
    """Encode one frame. Raises `FrameError` for a field out of range."""
    tag = encode_tag(Tag(epoch=plan.epoch, step=plan.step, layer=None, phase=Phase.PLAN, source=plan.source))
    for count, what in ((plan.num_tokens, "tokens"), (plan.num_prompt, "prompt rows"), (plan.num_rows, "rows")):
        if not 0 <= count < 2**32:
            raise FrameError(f"{count} {what} in a plan")
    if not 0 <= plan.num_drafts < 2**8:
        raise FrameError(f"{plan.num_drafts} drafts in a plan")
    return tag + _PLAN.pack(plan.num_tokens, plan.num_prompt, plan.num_rows, plan.num_drafts)


def decode_plan_frame(frame: bytes) -> PlanFrame:
    """Parse a plan frame; raises `FrameError`."""
    tag = decode_tag(frame)
    if tag.phase is not Phase.PLAN:
        raise FrameError(f"expected a plan, got {tag}")
    if len(frame) != TAG_BYTES + _PLAN.size:
        raise FrameError(f"a plan frame has {TAG_BYTES + _PLAN.size} bytes, got {len(frame)}")
    num_tokens, num_prompt, num_rows, num_drafts = _PLAN.unpack_from(frame, TAG_BYTES)
    return PlanFrame(
        epoch=tag.epoch,
        step=tag.step,
        source=tag.source,
        num_tokens=num_tokens,
        num_prompt=num_prompt,
        num_rows=num_rows,
        num_drafts=num_drafts,
    )


def encode_handshake(handshake: Handshake) -> bytes:
    """Encode one frame."""
    tag = encode_tag(Tag(epoch=handshake.epoch, step=0, layer=None, phase=Phase.HANDSHAKE, source=handshake.rank))
    body: bytes = msgpack.packb(asdict(handshake))
    return tag + body


def decode_handshake(frame: bytes) -> Handshake:
    """Parse a handshake; raises `FrameError` on anything but exactly its four fields."""
    tag = decode_tag(frame)
    if tag.phase is not Phase.HANDSHAKE:
        raise FrameError(f"expected a handshake, got {tag}")
    try:
        body = msgpack.unpackb(frame[TAG_BYTES:], raw=False)
    except (ValueError, msgpack.UnpackException) as error:
        raise FrameError(f"handshake: not msgpack: {error}") from error
    kinds = {"rank": int, "world_size": int, "epoch": int, "token": str}
    if not isinstance(body, dict) or body.keys() != kinds.keys():
        raise FrameError(f"handshake: expected the fields {', '.join(kinds)}, got {body!r:.80}")
    for name, kind in kinds.items():
        if type(body[name]) is not kind:
            raise FrameError(f"handshake.{name}: expected {kind.__name__}, got {body[name]!r:.80}")
    if (body["rank"], body["epoch"], 0) != (tag.source, tag.epoch, tag.step):
        raise FrameError(f"handshake: rank {body['rank']}, epoch {body['epoch']} in a {tag}")
    return Handshake(**body)


def name_frame(frame: Frame) -> str:
    """Describe the tag of a frame, or say why it has none."""
    try:
        return str(decode_tag(bytes(frame[:TAG_BYTES])))
    except FrameError as error:
        return f"no frame: {error}"
