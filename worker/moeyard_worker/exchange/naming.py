"""The words of the mesh's errors: which ranks, where in a step, which frame. Pure."""

from collections.abc import Iterable

from moeyard_worker.exchange.finding import AFTER_STEP, OWN_FAULT
from moeyard_worker.exchange.frames import TAG_BYTES, Frame, FrameError, Phase, PoisonFrame, decode_poison, decode_tag

# In their order.
_OF_LAYER = (Phase.DISPATCH, Phase.FETCH, Phase.COMBINE)


def name_ranks(ranks: Iterable[int]) -> str:
    """E.g. "rank 3", or "ranks 1, 3"."""
    names = [str(rank) for rank in sorted(ranks)]
    return f"{'rank' if len(names) == 1 else 'ranks'} {', '.join(names)}"


def where_in_step(step: int, layer: int | None, phase: Phase) -> str:
    """E.g. "step 812, layer 17, combine"."""
    return f"step {step}{'' if layer is None else f', layer {layer}'}, {phase.name.lower()}"


def place_of(layer: int | None, phase: Phase) -> int:
    """A wait's place in the chain of its step: the plan, the phases of each layer, then what is later."""
    if layer is not None:
        return 2 + len(_OF_LAYER) * layer + _OF_LAYER.index(phase)
    return {Phase.HANDSHAKE: OWN_FAULT, Phase.PLAN: 1}.get(phase, AFTER_STEP)


def name_place(place: int) -> str:
    """The words for what `place_of` returns."""
    if place in (OWN_FAULT, AFTER_STEP):
        return "itself" if place == OWN_FAULT else "after the step"
    layer, phase = divmod(place - 2, len(_OF_LAYER))
    return "plan" if place == 1 else f"layer {layer}, {_OF_LAYER[phase].name.lower()}"


def name_frame(frame: Frame) -> str:
    """The tag of a frame in words, or why it has none."""
    try:
        return str(decode_tag(bytes(frame[:TAG_BYTES])))
    except FrameError as error:
        return f"no frame: {error}"


def is_poison(frame: Frame) -> bool:
    """Whether a frame's tag claims to be of poison."""
    return len(frame) >= TAG_BYTES and frame[3] == Phase.POISON


def told_by(frame: Frame, peer: int, epoch: int) -> PoisonFrame | None:
    """What a poison frame of `peer` in `epoch` says; None for any other frame."""
    if not is_poison(frame):
        return None
    try:
        tag, poison = decode_poison(bytes(frame))
    except FrameError:
        return None
    return poison if (tag.source, tag.epoch) == (peer, epoch) else None
