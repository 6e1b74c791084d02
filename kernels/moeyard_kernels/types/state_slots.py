"""Slots of recurrent state that a step's rows read and write, as device tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from moeyard_kernels.types.decode_tables import MAX_QUERIES
from moeyard_kernels.types.sending import to_device


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSlots:
    """Slots of one step, on the state's device. The contents may change between replays of a graph.

    read: [B] int64, the slot whose state sequence b starts from; -1 marks a padding sequence, whose output rows are
    zeros.
    write: [B, Q] int64, Q at most 16, the slot that receives the state after query j, or -1 for none. Row b Q + j of an
    op's input is query j of sequence b. An in-place update has one query, and write[b, 0] is read[b]. A sequence with
    fewer than Q queries writes after its last one, and its output rows past that are undefined. Drafts write each query
    to a separate slot. So a rejected draft needs no copy: the next step reads the slot of the last accepted query.

    The caller ensures that no slot which one sequence writes is read or written by another. Raises ValueError naming
    what does not fit.
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
        """Return slots of one query per sequence, which reads and writes slots [B] int64."""
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
    """Copies of state between slots before a step, as tensors on the state's device.

    source, target: [N] int64. Slot source[n] is copied to slot target[n], unless source[n] is -1. Targets are distinct
    and are no sources. Raises ValueError naming what does not fit.
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
        """Return the moves of (source, target) pairs."""
        source, target = to_device(torch.tensor(moves, dtype=torch.int64).view(-1, 2).t().contiguous(), device)
        return cls(source=source, target=target)


# Positions of a chunk, counted from position 0 of its prompt. The last chunk may hold fewer.
CHUNK = 64
# The most snapshots of its state that a prompt may save in one step.
SNAPSHOTS = 2
# Values of a row of the table.
WIDTH = 4 + 2 * SNAPSHOTS
# A padding row of the table. It begins after its end, so it covers no position. Its first row differs from its
# prompt's, so it is not the first chunk of a prompt.
PADDING = (CHUNK, 0, *(0, -1) * SNAPSHOTS, 0, 0)

Stop = tuple[int, int]


class PromptRows(NamedTuple):
    """Rows [begin, end) of one prompt, whose state is in `slot`. `fresh`: the prompt begins at position 0.

    taken: snapshots (row, slot), ascending. The state before that row is saved in that slot.
    """

    slot: int
    begin: int
    end: int
    fresh: bool
    taken: tuple[Stop, ...] = ()

    @property
    def stops(self) -> tuple[Stop, ...]:
        """(row, slot) of all saved states, the prompt's final state last."""
        return *self.taken, (self.end, self.slot)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptChunks:
    """Prompts of one step, consecutive in the rows: rows [ends[n - 1], ends[n]) are consecutive positions of prompt n.

    table: [M, 8] int64, one row per chunk; a prompt's chunks are consecutive. A row holds the chunk's
    first row, its prompt's first row, and three (row, slot) pairs that are the same for all chunks of the prompt. The
    state before a pair's row is saved in its slot. The last pair is the row after the prompt, and the prompt's slot.
    The other pairs are snapshots, each after a full chunk, ascending; missing ones are (the prompt's first row, -1), in
    front.
    fresh: [M] bool, whether the prompt begins at position 0. It then starts from zeros, whatever the slot holds.
    heads: [N] int64, the table rows of each prompt's first chunk, long prompts first, so that a kernel which walks
    through chunks starts with these. num_rows: rows of an op's input.

    A captured step fills these tensors before every replay. Then `planned` is None, and M, N and num_rows are
    capacities. The rest of the table, at least one row, is `PADDING`; unused `heads` point to it. Output rows after the
    last prompt are undefined.
    """

    table: torch.Tensor
    fresh: torch.Tensor
    heads: torch.Tensor
    planned: tuple[PromptRows, ...] | None
    num_rows: int

    @property
    def parts(self) -> tuple[PromptRows, ...]:
        """Prompts, if the host knows them: of a captured step, from a CPU table only."""
        if self.planned is not None:
            return self.planned
        if self.table.is_cuda:
            return ()
        rows = zip(self.table.tolist(), self.fresh.tolist(), strict=True)
        return tuple(_part(row, new) for row, new in rows if row[0] == row[1])

    @property
    def last_slot(self) -> int:
        """Largest slot that is written, if the host knows it; -1 for none."""
        return max((slot for part in self.parts for _, slot in part.stops), default=-1)

    @classmethod
    def plan(
        cls,
        lengths: Sequence[int],
        starts: Sequence[int],
        slots: Sequence[int],
        snapshots: Sequence[Sequence[Stop]] = (),
        *,
        device: torch.device | str,
    ) -> "PromptChunks":
        """Plan prompts of `lengths` positions from `starts` on, in distinct `slots`.

        `snapshots`: (position, slot) pairs of each prompt. Raises ValueError as `chunks_of` does.
        """
        parts, rows, fresh, heads = chunks_of(lengths, starts, slots, snapshots)
        table = torch.tensor(rows, dtype=torch.int64).view(-1, WIDTH)
        return cls(
            table=to_device(table, device),
            fresh=to_device(torch.tensor(fresh, dtype=torch.bool), device),
            heads=to_device(torch.tensor(heads, dtype=torch.int64), device),
            planned=tuple(parts),
            num_rows=sum(lengths),
        )


def chunks_of(
    lengths: Sequence[int], starts: Sequence[int], slots: Sequence[int], snapshots: Sequence[Sequence[Stop]] = ()
) -> tuple[list[PromptRows], list[tuple[int, ...]], list[bool], list[int]]:
    """Return `parts`, and the contents of `table`, `fresh` and `heads`, for the arguments of `PromptChunks.plan`.

    Raises ValueError for a start that is no multiple of 64, an empty prompt, and a negative or repeated slot. Raises it
    also for more than two snapshots of a prompt, or snapshots outside it or not at multiples of 64.
    """
    snapshots = snapshots or [()] * len(lengths)
    if not len(lengths) == len(starts) == len(slots) == len(snapshots):
        raise ValueError(
            f"{len(lengths)} lengths, {len(starts)} starts, {len(slots)} slots, {len(snapshots)} snapshots"
        )
    named = [*slots, *(slot for some in snapshots for _, slot in some)]
    if len(set(named)) != len(named) or min(named, default=0) < 0:
        raise ValueError(f"slots {named}: each prompt has one of its own, and each snapshot")
    parts, rows, fresh = list[PromptRows](), list[tuple[int, ...]](), list[bool]()
    heads, begin = list[tuple[int, int]](), 0
    for length, start, slot, some in zip(lengths, starts, slots, snapshots, strict=True):
        if length < 1 or start % CHUNK:
            raise ValueError(
                f"a prompt of {length} positions from {start} on: at least one, from a multiple of {CHUNK}"
            )
        _check_snapshots([position for position, _ in some], start, start + length)
        end = begin + length
        part = PromptRows(slot, begin, end, start == 0, tuple((begin + position - start, to) for position, to in some))
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


def _part(row: Sequence[int], fresh: bool) -> PromptRows:
    """Return the prompt of a row of the table."""
    stops = list(zip(row[2::2], row[3::2], strict=True))
    end, slot = stops.pop()
    return PromptRows(slot, row[1], end, fresh, tuple((stop, to) for stop, to in stops if to >= 0))
