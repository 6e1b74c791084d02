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
    that were not kept: position p has place p - dropped, and p is what rotates it. `state_slot` is the sequence's slot
    of recurrent state, -1 where the model has none. A chunk at position 0 starts from a blank state, another from what
    slot `restored` holds, unless that is -1. `snapshots`: positions and slots, ascending, two at most; the state behind
    the rows before the position is copied to the slot, which may be one that the step restores. `prompt` selects the
    arithmetic (prompt or decode formula). `compaction`, in the chunk that ends a prompt and holds at least its window:
    what is kept, None for all.
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
    def restored(self) -> int: ...
    @property
    def snapshots(self) -> Sequence[tuple[int, int]]: ...
    @property
    def prompt(self) -> bool: ...
    @property
    def compaction(self) -> CompactionRows | None: ...


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
