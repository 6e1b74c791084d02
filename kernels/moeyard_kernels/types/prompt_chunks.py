"""Which rows of a step are whose prompt, in chunks of 64 positions, as device tensors: for state in slots."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

# Positions that a chunk holds, counted from position 0 of its prompt; the last may hold fewer.
CHUNK = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptChunks:
    """Prompts of one step, one behind the other: rows [ends[n - 1], ends[n]) are consecutive positions of prompt n.

    table: [M, 4] int64, a row for each chunk that there is: its prompt's slot, its prompt's first row, the row behind
    its prompt, its own first row. fresh: [M] bool, whether its prompt begins at position 0, hence from zeros, whatever
    the slot holds. heads: [N] int64, the rows of `table` that are a prompt's first chunk, those of long prompts first:
    who goes through chunks in order begins with them. `parts` is the same for a CPU, in the order of rows: (slot, first
    row, row behind, fresh) of each prompt.
    """

    table: torch.Tensor
    fresh: torch.Tensor
    heads: torch.Tensor
    parts: tuple[tuple[int, int, int, bool], ...]
    num_rows: int

    @classmethod
    def plan(
        cls, lengths: Sequence[int], starts: Sequence[int], slots: Sequence[int], *, device: torch.device | str
    ) -> "PromptChunks":
        """Prompts of `lengths` positions from `starts` on, over `slots`, none twice.

        Raises ValueError for a start that is no multiple of 64, an empty prompt, a slot that is none or named twice.
        """
        if not len(lengths) == len(starts) == len(slots):
            raise ValueError(f"{len(lengths)} lengths, {len(starts)} starts, {len(slots)} slots")
        if len(set(slots)) != len(slots) or min(slots, default=0) < 0:
            raise ValueError(f"slots {list(slots)}: each prompt has one of its own")
        parts: list[tuple[int, int, int, bool]] = []
        rows: list[tuple[int, int, int, int]] = []
        fresh: list[bool] = []
        heads: list[tuple[int, int]] = []
        begin = 0
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
        table = torch.tensor(rows, dtype=torch.int64).view(-1, 4)
        return cls(
            table=table.to(device), fresh=torch.tensor(fresh, dtype=torch.bool).to(device),
            heads=torch.tensor([first for _, first in sorted(heads)], dtype=torch.int64).to(device),
            parts=tuple(parts), num_rows=begin,
        )  # fmt: skip
