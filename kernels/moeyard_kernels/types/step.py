"""Interface of a step as backends read it: its rows, their positions and their pages. Pure.

The scheduler's `Chunk` and `Step` implement it. A backend makes its plan from them; layers see only the plan.
"""

from collections.abc import Sequence
from typing import Protocol


class CompactionRows(Protocol):
    """The positions of a computed prompt that stay in the cache.

    Each layer chooses `kept` positions by the queries of the last `window` rows and writes them to `pages` in order.
    """

    @property
    def kept(self) -> int: ...
    @property
    def window(self) -> int: ...
    @property
    def pages(self) -> Sequence[int]: ...


class ChunkRows(Protocol):
    """Consecutive rows of one sequence: `token_ids[i]` is at position `start + i`.

    `pages` holds positions 0 to at least start + len(token_ids) - 1 in order, except `dropped` positions before `start`
    that were not kept. Position p has place p - dropped, but is rotated as p.

    `state_slot` is the first of the sequence's `state_ring` slots of recurrent state, -1 for a model without such
    state. The state after position p is in slot state_slot + p % state_ring (`slot_behind`). So up to that many
    rejected rows overwrite no state that is still needed. A chunk at position 0 starts from a blank state. Any other
    chunk starts from slot `restored`, or, if that is -1, from the sequence's previous state. `snapshots`: at most two
    (position, slot) pairs, ascending. The state before the position is copied to the slot, even if the step restores
    that slot.

    `prompt` selects the prompt or the decode formula. `fed`: None if the host knows the tokens; otherwise the place of
    the sequence in the previous step, which left them on the device. `compaction`: set in a prompt's last chunk, which
    holds at least its window, if only some positions are kept.
    """

    @property
    def start(self) -> int: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def pages(self) -> Sequence[int]: ...
    @property
    def dropped(self) -> int: ...
    @property
    def state_slot(self) -> int: ...
    @property
    def state_ring(self) -> int: ...
    @property
    def restored(self) -> int: ...
    @property
    def snapshots(self) -> Sequence[tuple[int, int]]: ...
    @property
    def prompt(self) -> bool: ...
    @property
    def fed(self) -> int | None: ...
    @property
    def compaction(self) -> CompactionRows | None: ...


def slot_behind(chunk: ChunkRows, position: int) -> int:
    """Return the slot of the state after `position`, for a sequence with recurrent state."""
    return chunk.state_slot + position % chunk.state_ring


def slot_left(chunk: ChunkRows) -> int:
    """Return the slot of the state after the last row."""
    return slot_behind(chunk, chunk.start + len(chunk.token_ids) - 1)


def slot_restored(chunk: ChunkRows) -> int:
    """Return the slot that a prompt chunk starts from; -1 if it starts blank or from the slot that it writes."""
    before = -1
    if chunk.start:
        before = chunk.restored if chunk.restored >= 0 else slot_behind(chunk, chunk.start - 1)
    return -1 if before == slot_left(chunk) else before


class StepRows(Protocol):
    """One rank's step: rows of all prompt chunks, then rows of all decode chunks.

    `sample_rows` are the rows whose logits are needed, distinct and ascending.
    """

    @property
    def prefill(self) -> Sequence[ChunkRows]: ...
    @property
    def decode(self) -> Sequence[ChunkRows]: ...
    @property
    def sample_rows(self) -> Sequence[int]: ...
