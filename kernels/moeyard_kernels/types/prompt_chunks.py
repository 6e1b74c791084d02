"""Which rows of a step are whose prompt, in chunks of 64 positions, as device tensors: for state in slots."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from moeyard_kernels.types.sending import to_device

# Positions that a chunk holds, counted from position 0 of its prompt; the last may hold fewer.
CHUNK = 64
# Copies of its state that a prompt may leave on its way through one step.
SNAPSHOTS = 2
# Values of a row of the table.
WIDTH = 4 + 2 * SNAPSHOTS
# A row of the table that is no chunk: it begins behind its end, so that no position is its own, and elsewhere than its
# prompt, so that it is no prompt's first.
PADDING = (CHUNK, 0, *(0, -1) * SNAPSHOTS, 0, 0)

Stop = tuple[int, int]


class Part(NamedTuple):
    """Rows [begin, end) are a prompt over `slot`, from position 0 if `fresh`. taken: (row, slot), ascending: the state
    behind the rows before that row is left in that slot, too."""

    slot: int
    begin: int
    end: int
    fresh: bool
    taken: tuple[Stop, ...] = ()

    @property
    def stops(self) -> tuple[Stop, ...]:
        """(row, slot) of all states that are left, the prompt's own at last."""
        return *self.taken, (self.end, self.slot)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptChunks:
    """Prompts of one step, one behind the other: rows [ends[n - 1], ends[n]) are consecutive positions of prompt n.

    table: [M, 8] int64, a row for each chunk that there is: its own first row, its prompt's first row, and three pairs
    of a row and a slot, the same in all of a prompt's: what is left behind the rows before that row goes to that slot.
    The last pair is the row behind the prompt and its own slot. The others are snapshots, each behind a full chunk,
    ascending; where there are fewer, (the prompt's first row, -1) stands in front. A prompt's chunks follow one
    another. fresh: [M] bool, whether its prompt begins at position 0, hence from zeros, whatever the slot holds. heads:
    [N] int64, the rows of `table` that are a prompt's first chunk, those of long prompts first: who goes through chunks
    in order begins with them. num_rows: rows of an op's input.

    In a captured step these tensors are filled anew before every replay, `planned` is None, and M, N and num_rows are
    what there is room for: the rest of the table is `PADDING`, at least one row, which the rest of `heads` names, and
    rows behind the last prompt come out as anything.
    """

    table: torch.Tensor
    fresh: torch.Tensor
    heads: torch.Tensor
    planned: tuple[Part, ...] | None
    num_rows: int

    @property
    def parts(self) -> tuple[Part, ...]:
        """Each prompt, as far as the host knows: of a captured step it reads them from a table on a CPU, and none from
        one on a GPU."""
        if self.planned is not None:
            return self.planned
        if self.table.is_cuda:
            return ()
        rows = zip(self.table.tolist(), self.fresh.tolist(), strict=True)
        return tuple(_part(row, new) for row, new in rows if row[0] == row[1])

    @property
    def last_slot(self) -> int:
        """The largest slot that something is left in, as far as the host knows; -1 for none."""
        return max((slot for part in self.parts for _, slot in part.stops), default=-1)

    @classmethod
    def plan(
        cls, lengths: Sequence[int], starts: Sequence[int], slots: Sequence[int],
        snapshots: Sequence[Sequence[Stop]] = (), *, device: torch.device | str,
    ) -> "PromptChunks":  # fmt: skip
        """Prompts of `lengths` positions from `starts` on, over `slots`, none twice; and of each, if given, which
        snapshots it leaves: (position, slot). Raises ValueError as `chunks_of` does."""
        parts, rows, fresh, heads = chunks_of(lengths, starts, slots, snapshots)
        table = torch.tensor(rows, dtype=torch.int64).view(-1, WIDTH)
        return cls(
            table=to_device(table, device), fresh=to_device(torch.tensor(fresh, dtype=torch.bool), device),
            heads=to_device(torch.tensor(heads, dtype=torch.int64), device), planned=tuple(parts),
            num_rows=sum(lengths),
        )  # fmt: skip


def chunks_of(
    lengths: Sequence[int], starts: Sequence[int], slots: Sequence[int], snapshots: Sequence[Sequence[Stop]] = ()
) -> tuple[list[Part], list[tuple[int, ...]], list[bool], list[int]]:
    """`parts`, and what `table`, `fresh` and `heads` hold, of what `PromptChunks.plan` takes.

    Raises ValueError for a start that is no multiple of 64, an empty prompt, a slot that is none or named twice, and
    snapshots of a prompt that are more than two, or not at multiples of 64 in it.
    """
    snapshots = snapshots or [()] * len(lengths)
    if not len(lengths) == len(starts) == len(slots) == len(snapshots):
        raise ValueError(
            f"{len(lengths)} lengths, {len(starts)} starts, {len(slots)} slots, {len(snapshots)} snapshots"
        )
    named = [*slots, *(slot for some in snapshots for _, slot in some)]
    if len(set(named)) != len(named) or min(named, default=0) < 0:
        raise ValueError(f"slots {named}: each prompt has one of its own, and each snapshot")
    parts, rows, fresh = list[Part](), list[tuple[int, ...]](), list[bool]()
    heads, begin = list[tuple[int, int]](), 0
    for length, start, slot, some in zip(lengths, starts, slots, snapshots, strict=True):
        if length < 1 or start % CHUNK:
            raise ValueError(
                f"a prompt of {length} positions from {start} on: at least one, from a multiple of {CHUNK}"
            )
        _check_snapshots([position for position, _ in some], start, start + length)
        end = begin + length
        part = Part(slot, begin, end, start == 0, tuple((begin + position - start, to) for position, to in some))
        pairs = [value for stop in (*[(begin, -1)] * (SNAPSHOTS - len(some)), *part.stops) for value in stop]
        parts.append(part)
        heads.append((-length, len(rows)))
        firsts = range(begin, end, CHUNK)
        rows += [(first, begin, *pairs) for first in firsts]
        fresh += [part.fresh] * len(firsts)
        begin = end
    return parts, rows, fresh, [first for _, first in sorted(heads)]


def _check_snapshots(at: Sequence[int], start: int, end: int) -> None:
    apart = all(
        position % CHUNK == 0 and before < position <= end for before, position in zip((start, *at), at, strict=False)
    )
    if len(at) > SNAPSHOTS or not apart:
        raise ValueError(
            f"snapshots at {list(at)} of positions {start} to {end}: {SNAPSHOTS} at most, ascending, at multiples of "
            f"{CHUNK}"
        )


def _part(row: Sequence[int], fresh: bool) -> Part:
    """The prompt of a row of the table."""
    stops = list(zip(row[2::2], row[3::2], strict=True))
    end, slot = stops.pop()
    return Part(slot, row[1], end, fresh, tuple((stop, to) for stop, to in stops if to >= 0))
