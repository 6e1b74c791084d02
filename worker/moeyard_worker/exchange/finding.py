"""What a rank found to have ended the fleet, in an order that all ranks share. Pure.

Several ranks may find one loss, each at the place where it missed something, or even two losses. All name the smallest
finding (agreement.py).
"""

from dataclasses import dataclass

MAX_REASON_BYTES = 2000

# What a rank says about itself comes before all that others miss of it in that step.
OWN_FAULT = 0
AFTER_STEP = 2**32 - 1


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class Finding:
    """Ordered by its fields: the earliest step, in it the earliest place, the lowest ranks, then the words.

    place: how far in the step (naming.py, `place_of`): from OWN_FAULT to AFTER_STEP.
    ranks: who was lost, was silent or is at fault, ascending.
    reason: what clients, operators and all ranks are told, at most MAX_REASON_BYTES bytes of UTF-8 (`cut_reason`).
    """

    step: int
    place: int
    ranks: tuple[int, ...]
    reason: str


def cut_reason(reason: str) -> str:
    """A reason that survives a frame unchanged, so that whoever says it and whoever hears it name the same."""
    return reason.encode("utf-8", "replace")[:MAX_REASON_BYTES].decode("utf-8", "ignore")
