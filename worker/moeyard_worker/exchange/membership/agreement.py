"""Findings of what ended an epoch, and how ranks agree on one. Pure: events in, frames out.

A rank killed between two sends is missed by different peers at different places, before either could tell the other.
So no rank names a failure alone. In every round each rank sends the smallest finding it knows to all others and waits
for theirs, except for ranks that have gone. A round settles the smallest finding if exactly the ranks of the previous
round spoke (before the first round: all). Then this rank knows what every remaining rank knows. A rank that settles
sends the settled finding, and each receiver adopts and repeats it. One loss takes two rounds. Every further loss during
agreement takes at most one more.

That is the flooding consensus for crashes with a detector that does not err (Guerraoui and Rodrigues, "Introduction to
Reliable Distributed Programming", 2006, 5.1). Ended connections are such a detector. A stopped rank is given up when a
round's time has passed. It adopts the settled finding when it wakes.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from struct import Struct, unpack_from
from struct import error as StructError

from moeyard_worker.exchange.membership.frames import (
    TAG_BYTES,
    Frame,
    FrameError,
    Phase,
    Tag,
    decode_tag,
    encode_tag,
)

MAX_REASON_BYTES = 2000
# A rank's own fault comes before everything that others miss of it in that step.
OWN_FAULT = 0
AFTER_STEP = 2**32 - 1
# The round of a poison frame with the settled finding; rounds of agreement begin at 1.
SETTLED = 0
_POISON = Struct("<HQIH")
# Phases of a layer, in order.
_OF_LAYER = (Phase.DISPATCH, Phase.FETCH, Phase.COMBINE)


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class Finding:
    """The end of an epoch. Findings are ordered by their fields: step, place, ranks, reason.

    Several ranks may find one loss at different places, or even two losses. All name the smallest finding.

    place: how far in the step (`place_of`): from OWN_FAULT to AFTER_STEP.
    ranks: the lost, silent or faulty ranks, ascending.
    reason: the text for clients, operators and all ranks, at most MAX_REASON_BYTES bytes of UTF-8 (`cut_reason`).
    """

    step: int
    place: int
    ranks: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PoisonFrame:
    """Why the epoch has ended: the smallest finding that a rank knows in `round`, or the final one (SETTLED)."""

    round: int
    finding: Finding


def cut_reason(reason: str) -> str:
    """Cut a reason to what survives a frame unchanged, so that all ranks give the same text."""
    return reason.encode("utf-8", "replace")[:MAX_REASON_BYTES].decode("utf-8", "ignore")


def encode_poison(tag: Tag, poison: PoisonFrame) -> bytes:
    """Encode one frame. Raises `FrameError` for a field out of range, or a reason of over MAX_REASON_BYTES bytes."""
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
    """Parse the tag and the content of a poison frame. Raises `FrameError`."""
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


def name_ranks(ranks: Iterable[int]) -> str:
    """E.g. "rank 3", or "ranks 1, 3"."""
    names = [str(rank) for rank in sorted(ranks)]
    return f"{'rank' if len(names) == 1 else 'ranks'} {', '.join(names)}"


def where_in_step(step: int, layer: int | None, phase: Phase) -> str:
    """E.g. "step 812, layer 17, combine"."""
    return f"step {step}{'' if layer is None else f', layer {layer}'}, {phase.name.lower()}"


def place_of(layer: int | None, phase: Phase) -> int:
    """Return a wait's place in its step: the plan comes first, then the phases of each layer, then everything later."""
    if layer is not None:
        return 2 + len(_OF_LAYER) * layer + _OF_LAYER.index(phase)
    return {Phase.HANDSHAKE: OWN_FAULT, Phase.PLAN: 1}.get(phase, AFTER_STEP)


def name_place(place: int) -> str:
    """Describe a place that `place_of` returns."""
    if place in (OWN_FAULT, AFTER_STEP):
        return "itself" if place == OWN_FAULT else "after the step"
    layer, phase = divmod(place - 2, len(_OF_LAYER))
    return "plan" if place == 1 else f"layer {layer}, {_OF_LAYER[phase].name.lower()}"


def is_poison(frame: Frame) -> bool:
    """Return whether a frame's tag claims to be of poison."""
    return len(frame) >= TAG_BYTES and frame[3] == Phase.POISON


def poison_of(frame: Frame, peer: int, epoch: int) -> PoisonFrame | None:
    """Return the poison frame of `peer` in `epoch`; None for any other frame."""
    if not is_poison(frame):
        return None
    try:
        tag, poison = decode_poison(bytes(frame))
    except FrameError:
        return None
    return poison if (tag.source, tag.epoch) == (peer, epoch) else None


class Agreement:
    """One rank's part. Life: construct, call `receive` and `leave` for each event, send all that `advance` returns.

    settled: the finding that all ranks name, None before the agreement. It is final.
    """

    def __init__(self, peers: Iterable[int], finding: Finding) -> None:
        self.settled: Finding | None = None
        self._peers = frozenset(peers)
        self._gone: set[int] = set()
        self._best = finding
        self._round = 0
        self._before = self._peers
        self._spoke: dict[int, set[int]] = {}
        self._ended = False

    def receive(self, peer: int, poison: PoisonFrame) -> None:
        """Take a peer's frames in order. From a peer that was given up, only a settled finding counts."""
        if self.settled is not None:
            return
        if poison.round == SETTLED:
            self._best = self.settled = poison.finding
        elif peer not in self._gone:
            self._best = min(self._best, poison.finding)
            self._spoke.setdefault(poison.round, set()).add(peer)

    def leave(self, peer: int) -> None:
        """Note that a peer's connection ended, after all its frames were received."""
        self._gone.add(peer)

    def give_up(self) -> None:
        """Note that the round's time has passed. Peers that did not speak in it are not awaited any more."""
        self._gone |= self._missing()

    def advance(self) -> list[PoisonFrame]:
        """Return the frames to send to every peer now, in this order. Peers that seem gone may only be slow."""
        frames: list[PoisonFrame] = []
        if self._ended:
            return frames
        if self._round == 0 and self.settled is None:
            frames.append(self._next_round())
        while self.settled is None and not self._missing():
            spoke = frozenset(self._spoke.get(self._round, ()))
            if spoke == self._before:
                self.settled = self._best
            else:
                self._before = spoke
                frames.append(self._next_round())
        if self.settled is not None:
            self._ended = True
            frames.append(PoisonFrame(round=SETTLED, finding=self.settled))
        return frames

    def _next_round(self) -> PoisonFrame:
        self._round += 1
        return PoisonFrame(round=self._round, finding=self._best)

    def _missing(self) -> frozenset[int]:
        return self._peers - self._spoke.get(self._round, set()) - self._gone
