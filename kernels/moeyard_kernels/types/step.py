"""What a backend reads of a step: which rows there are, of which positions, in which pages. Pure.

The scheduler's `Chunk` and `Step` have this form; a backend makes its plan from them and layers never see them.
"""

from collections.abc import Sequence
from typing import Protocol


class CompactionRows(Protocol):
    """What is kept of a prompt once it is computed: `kept` positions, which each layer chooses by the queries of the
    last `window`, go to `pages` in order.
    """

    @property
    def kept(self) -> int: ...
    @property
    def window(self) -> int: ...
    @property
    def pages(self) -> Sequence[int]: ...


class ChunkRows(Protocol):
    """Consecutive rows of one sequence: `token_ids[i]` sits at position `start + i`.

    `pages` holds positions 0 to at least start + len(token_ids) - 1 in order, but for `dropped` of them before `start`
    that were not kept: position p has place p - dropped, and p is what rotates it. `state_slot` is the first of the
    sequence's `state_ring` slots of recurrent state, -1 where the model has none: what is left behind position p is in
    slot state_slot + p % state_ring (`slot_behind`), so that rows that turn out to be wrong have written over nothing
    that is needed, if there are no more than that. A chunk at position 0 starts from a blank state, another from what
    slot `restored` holds, or where that is -1, from what it left. `snapshots`: positions and slots, ascending, two at
    most; the state behind the rows before the position is copied to the slot, which may be one that the step restores.
    `prompt` selects the arithmetic (prompt or decode formula). `fed`: None where the host knows the tokens; else the
    place of the sequence in the step before, which left them on the device. `compaction`, in the chunk that ends a
    prompt and holds at least its window: what is kept, None for all.
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
    """The slot of the state behind the row of `position`, of a sequence that has such."""
    return chunk.state_slot + position % chunk.state_ring


def slot_left(chunk: ChunkRows) -> int:
    """The slot of the state behind the last row."""
    return slot_behind(chunk, chunk.start + len(chunk.token_ids) - 1)


def slot_restored(chunk: ChunkRows) -> int:
    """The slot that a prompt's chunk goes on from, if that is not the one that it leaves its state in; -1 for none."""
    before = -1
    if chunk.start:
        before = chunk.restored if chunk.restored >= 0 else slot_behind(chunk, chunk.start - 1)
    return -1 if before == slot_left(chunk) else before


class StepRows(Protocol):
    """One rank's step: the rows of all prompt chunks, then those of all decode chunks.

    `sample_rows` are the rows whose logits are wanted, one by one and ascending.
    """

    @property
    def prefill(self) -> Sequence[ChunkRows]: ...
    @property
    def decode(self) -> Sequence[ChunkRows]: ...
    @property
    def sample_rows(self) -> Sequence[int]: ...
