"""What travels between ranks: tags, plan frames, poison frames and handshakes. Pure: stdlib + msgpack.

Every frame starts with a tag of TAG_BYTES bytes (little endian: magic, version, phase, source, layer, epoch, step), so
that a receiver compares one slice with the bytes it expects, and decodes only to explain a mismatch. Decoding is
strict: whatever is not exactly a frame of this version raises `FrameError`.
"""

from dataclasses import asdict, dataclass
from enum import IntEnum
from struct import Struct, unpack_from
from struct import error as StructError

import msgpack

from moeyard_worker.exchange.finding import MAX_REASON_BYTES, Finding

MAGIC = b"mY"
VERSION = 6
NO_LAYER = 0xFFFF
# The round of a poison frame that says what all agreed on; rounds of agreement begin at 1.
SETTLED = 0

_TAG = Struct("<2sBBHHIQ")
_PLAN = Struct("<IIIB")
_POISON = Struct("<HQIH")
TAG_BYTES = _TAG.size

Frame = bytes | memoryview


class FrameError(ValueError):
    """Bytes that are not a frame of this version; says why."""


class Phase(IntEnum):
    """What a frame is for. The order is the order of a rank's life and of a step; experts are fetched between dispatch
    and combine, on devices alone, which makes no frame. What is said beside a step (signs.py) has no turn."""

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
    """Who sent a frame and which one it is. `layer` is None outside dispatch and combine."""

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
    """A rank's part in lockstep step `step`: it takes part with `num_tokens` rows (0 for an idle rank), the first
    `num_prompt` of them of prompts, brings at most `num_rows` with padding to its exchanges, and wants `num_drafts`
    passes of drafting behind them.
    """

    epoch: int
    step: int
    source: int
    num_tokens: int
    num_prompt: int = 0
    num_rows: int = 0
    num_drafts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoisonFrame:
    """A rank's word on why the fleet has ended: in `round` of the agreement the smallest finding it knows, or in round
    SETTLED the one that is final.
    """

    round: int
    finding: Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class Handshake:
    """First frame on a connection. `token` is the receiver's secret: the sender was given its endpoint."""

    rank: int
    world_size: int
    epoch: int
    token: str


def pack_tag(epoch: int, step: int, layer: int, phase: int, source: int) -> bytes:
    """The TAG_BYTES bytes of a tag (`layer` NO_LAYER for none). Positional: it is on the path of every frame."""
    return _TAG.pack(MAGIC, VERSION, phase, source, layer, epoch, step)


def encode_tag(tag: Tag) -> bytes:
    """The bytes of `tag`; raises `FrameError` on a field out of range."""
    if tag.layer == NO_LAYER:
        raise FrameError(f"layer {tag.layer} stands for no layer")
    try:
        return pack_tag(tag.epoch, tag.step, NO_LAYER if tag.layer is None else tag.layer, tag.phase, tag.source)
    except StructError as error:
        raise FrameError(f"{tag}: {error}") from error


def decode_tag(frame: bytes) -> Tag:
    """The tag at the start of `frame`; raises `FrameError`."""
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
    """One frame; raises `FrameError` on a field out of range."""
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
        epoch=tag.epoch, step=tag.step, source=tag.source, num_tokens=num_tokens, num_prompt=num_prompt,
        num_rows=num_rows, num_drafts=num_drafts,
    )  # fmt: skip


def encode_poison(tag: Tag, poison: PoisonFrame) -> bytes:
    """One frame; raises `FrameError` on a field out of range or a reason longer than MAX_REASON_BYTES bytes."""
    finding, ranks = poison.finding, poison.finding.ranks
    reason = finding.reason.encode()
    if len(reason) > MAX_REASON_BYTES:
        raise FrameError(f"a poison reason of {len(reason)} bytes, at most {MAX_REASON_BYTES}")
    try:
        body = _POISON.pack(poison.round, finding.step, finding.place, len(ranks))
        return encode_tag(tag) + body + Struct(f"<{len(ranks)}H").pack(*ranks) + reason
    except StructError as error:
        raise FrameError(f"{poison}: {error}") from error


def decode_poison(frame: bytes) -> tuple[Tag, PoisonFrame]:
    """The tag and the content of a poison frame; raises `FrameError`."""
    tag = decode_tag(frame)
    if tag.phase is not Phase.POISON:
        raise FrameError(f"expected a poison frame, got {tag}")
    try:
        number, step, place, num_ranks = _POISON.unpack_from(frame, TAG_BYTES)
        ranks = unpack_from(f"<{num_ranks}H", frame, TAG_BYTES + _POISON.size)
    except StructError as error:
        raise FrameError(f"a poison frame of {len(frame)} bytes: {error}") from error
    body = frame[TAG_BYTES + _POISON.size + 2 * num_ranks :]
    if len(body) > MAX_REASON_BYTES:
        raise FrameError(f"a poison reason of {len(body)} bytes, at most {MAX_REASON_BYTES}")
    try:
        reason = bytes(body).decode("utf-8")
    except UnicodeDecodeError as error:
        raise FrameError(f"poison reason: {error}") from error
    return tag, PoisonFrame(round=number, finding=Finding(step=step, place=place, ranks=ranks, reason=reason))


def encode_handshake(handshake: Handshake) -> bytes:
    """One frame."""
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
