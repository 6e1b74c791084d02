"""Which rows of a step are whose prompt, in chunks of 64 positions, as device tensors: for state in slots."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

# Positions that a chunk holds, counted from position 0 of its prompt; the last may hold fewer.
CHUNK = 64
# A row of the table that is no chunk: it begins behind its end, so that no position is its own, and elsewhere than its
# prompt, so that it is no prompt's first.
PADDING = (0, 0, 0, CHUNK)

Part = tuple[int, int, int, bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptChunks:
    """Prompts of one step, one behind the other: rows [ends[n - 1], ends[n]) are consecutive positions of prompt n.

    table: [M, 4] int64, a row for each chunk that there is: its prompt's slot, its prompt's first row, the row behind
    its prompt, its own first row; a prompt's chunks follow one another. fresh: [M] bool, whether its prompt begins at
    position 0, hence from zeros, whatever the slot holds. heads: [N] int64, the rows of `table` that are a prompt's
    first chunk, those of long prompts first: who goes through chunks in order begins with them. num_rows: rows of an
    op's input.

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
        """(slot, first row, row behind, fresh) of each prompt, as far as the host knows: of a captured step it reads
        them from a table on a CPU, and none from one on a GPU."""
        if self.planned is not None:
            return self.planned
        if self.table.is_cuda:
            return ()
        rows = zip(self.table.tolist(), self.fresh.tolist(), strict=True)
        return tuple((slot, begin, end, new) for (slot, begin, end, first), new in rows if first == begin)

    @classmethod
    def plan(
        cls, lengths: Sequence[int], starts: Sequence[int], slots: Sequence[int], *, device: torch.device | str
    ) -> "PromptChunks":
        """Prompts of `lengths` positions from `starts` on, over `slots`, none twice. Raises ValueError as `chunks_of`
        does."""
        parts, rows, fresh, heads = chunks_of(lengths, starts, slots)
        table = torch.tensor(rows, dtype=torch.int64).view(-1, 4)
        return cls(
            table=table.to(device), fresh=torch.tensor(fresh, dtype=torch.bool).to(device),
            heads=torch.tensor(heads, dtype=torch.int64).to(device), planned=tuple(parts), num_rows=sum(lengths),
        )  # fmt: skip


def chunks_of(
    lengths: Sequence[int], starts: Sequence[int], slots: Sequence[int]
) -> tuple[list[Part], list[tuple[int, int, int, int]], list[bool], list[int]]:
    """`parts`, and what `table`, `fresh` and `heads` hold, of prompts of `lengths` positions from `starts` on.

    Raises ValueError for a start that is no multiple of 64, an empty prompt, a slot that is none or named twice.
    """
    if not len(lengths) == len(starts) == len(slots):
        raise ValueError(f"{len(lengths)} lengths, {len(starts)} starts, {len(slots)} slots")
    if len(set(slots)) != len(slots) or min(slots, default=0) < 0:
        raise ValueError(f"slots {list(slots)}: each prompt has one of its own")
    parts, rows, fresh = list[Part](), list[tuple[int, int, int, int]](), list[bool]()
    heads, begin = list[tuple[int, int]](), 0
    for length, start, slot in zip(lengths, starts, slots, strict=True):
        if length < 1 or start % CHUNK:
            raise ValueError(
                f"a prompt of {length} positions from {start} on: at least one, from a multiple of {CHUNK}"
            )
        end = begin + length
        parts.append((slot, begin, end, start == 0))
        heads.append((-length, len(rows)))
        firsts = range(begin, end, CHUNK)
        rows += [(slot, begin, end, first) for first in firsts]
        fresh += [start == 0] * len(firsts)
        begin = end
    return parts, rows, fresh, [first for _, first in sorted(heads)]
