"""Which slots of recurrent state a step's rows go on from and leave behind, as device tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from moeyard_kernels.types.decode_tables import MAX_QUERIES
from moeyard_kernels.types.sending import to_device


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSlots:
    """Slots of one step as tensors of the state's device; their contents may change between replays of a graph.

    read: [B] int64, the slot that sequence b goes on from; -1 is a padding sequence, whose rows come out as zeros.
    write: [B, Q] int64, Q at most 16, the slot that takes what is left behind query j, or -1 for none. Row b Q + j of
    an op's input is query j of sequence b. In place with one query, write[b, 0] is read[b]. A sequence of fewer queries
    than Q writes behind its last one; rows past it come out as anything. Drafts write each query to a slot of their
    own, so that a rejected one costs no copy: the next step reads the slot of the last that was accepted.

    No slot that one sequence writes may be another's, read or written; that is the caller's to see to. Raises
    ValueError naming what does not fit.
    """

    read: torch.Tensor
    write: torch.Tensor

    def __post_init__(self) -> None:
        read, write = self.read, self.write
        if read.dim() != 1 or read.dtype != torch.int64 or not read.is_contiguous():
            raise ValueError(f"read: expected contiguous int64 [sequences], got {read.dtype} {list(read.shape)}")
        if write.dim() != 2 or write.dtype != torch.int64 or not write.is_contiguous():
            raise ValueError(
                f"write: expected contiguous int64 [sequences, queries], got {write.dtype} {list(write.shape)}"
            )
        if write.shape[0] != read.shape[0] or not 1 <= write.shape[1] <= MAX_QUERIES:
            raise ValueError(
                f"write: {list(write.shape)}, expected [{read.shape[0]}, queries], 1 to {MAX_QUERIES} of them"
            )
        if write.device != read.device:
            raise ValueError(f"write is on {write.device}, read on {read.device}")

    @classmethod
    def in_place(cls, slots: torch.Tensor) -> "StateSlots":
        """One query of each sequence, which reads and writes slots [B] int64."""
        return cls(read=slots, write=slots.unsqueeze(1))

    @property
    def num_sequences(self) -> int:
        return self.read.shape[0]

    @property
    def num_queries(self) -> int:
        """Queries per sequence."""
        return self.write.shape[1]

    @property
    def num_rows(self) -> int:
        return self.num_sequences * self.num_queries


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotMoves:
    """What sequences go on from instead of what is in their slots, as tensors of the state's device.

    source, target: [N] int64, contents of slot source[n] are to be copied to slot target[n]; nothing where source[n] is
    -1. No target is another's, or a source. Raises ValueError naming what does not fit.
    """

    source: torch.Tensor
    target: torch.Tensor

    def __post_init__(self) -> None:
        source, target = self.source, self.target
        for name, x in (("source", source), ("target", target)):
            if x.dim() != 1 or x.dtype != torch.int64 or not x.is_contiguous():
                raise ValueError(f"{name}: expected contiguous int64 [moves], got {x.dtype} {list(x.shape)}")
        if source.shape != target.shape or source.device != target.device:
            raise ValueError(
                f"target: {list(target.shape)} on {target.device}, source {list(source.shape)} on {source.device}"
            )

    @classmethod
    def plan(cls, moves: Sequence[tuple[int, int]], *, device: torch.device | str) -> "SlotMoves":
        """Of (source, target) pairs."""
        source, target = to_device(torch.tensor(moves, dtype=torch.int64).view(-1, 2).t().contiguous(), device)
        return cls(source=source, target=target)


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
