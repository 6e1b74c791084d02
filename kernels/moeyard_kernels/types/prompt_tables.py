"""Tables of a step's prompt chunks that compressed attention reads on the device."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from moeyard_kernels.types.sending import to_device

# Rows of one sequence that a tile of scores holds at most. A kernel's block of rows divides it.
TILE = 128
# Scores of the indexer that are kept at once: 128 MiB of fp32. More rows follow in further launches.
SCORES = 32 << 20
# The width of a row of scores is a multiple of this number.
WIDTH = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenRows:
    """R rows that choose entries, and room for their scores: fp32 [R, width].

    rows: [R] int32, ascending rows of the step. tiles: [N, 2] int32, every tile as (first, end) among these rows. A
    tile has at most `TILE` rows, which are consecutive rows of one chunk.
    """

    rows: torch.Tensor
    tiles: torch.Tensor
    width: int


class PromptTables:
    """B prompt chunks of a step with P rows in all, their pages and the slots of their state. Tensors are int32.

    chunks: [B, 4], the first row of each chunk, the position of that row, the slot of the state before it (-1: blank),
    and the slot of the state after the chunk. rows: [P, 2], chunk and position of each row. page_table [B, pages].
    moves: [N, 3], the states to be kept as (chunk, end, slot): the state before position `end` goes to the slot. The
    moves of a chunk follow each other, and the last one goes to the chunk's own slot.
    """

    def __init__(
        self,
        *,
        starts: Sequence[int],
        lengths: Sequence[int],
        slots: Sequence[tuple[int, int]],
        moves: Sequence[tuple[int, int, int]],
        page_table: np.ndarray,
        page_size: int,
        device: torch.device | str,
    ) -> None:
        """slots: of the state before each chunk, and after it. page_table [B, pages].

        Raises ValueError for a chunk without rows, and for more positions than int32 holds.
        """
        begins, counts = np.asarray(starts, dtype=np.int64), np.asarray(lengths, dtype=np.int64)
        if counts.min(initial=1) < 1:
            raise ValueError(f"prompt chunks of {list(lengths)} rows")
        if (begins + counts).sum() >= 2**31:
            raise ValueError(f"{(begins + counts).sum()} positions of prompts exceed int32")
        firsts = np.cumsum(counts) - counts
        self._begins, self._counts, self._firsts, self._device = begins, counts, firsts, device
        self._blocks: dict[int, torch.Tensor] = {}
        self._chosen: dict[tuple[int, int], tuple[ChosenRows, ...]] = {}
        self.page_size, self.num_rows = page_size, int(counts.sum())
        of_row = np.arange(len(counts)).repeat(counts)
        at = np.arange(self.num_rows) - firsts[of_row] + begins[of_row]
        chunks = np.column_stack((firsts, begins, np.asarray(slots, dtype=np.int64).reshape(-1, 2)))
        parts = (
            chunks,
            np.column_stack((of_row, at)),
            page_table,
            np.asarray(moves, dtype=np.int64).reshape(-1, 3),
        )
        self.chunks, self.rows, self.page_table, self.moves = _sent(parts, device)

    def blocks(self, ratio: int) -> torch.Tensor:
        """Return int32 [N, 2]: chunk and number of every block of `ratio` positions that ends in a chunk.

        Raises ValueError for a chunk that begins inside a block.
        """
        if ratio not in self._blocks:
            if (self._begins % ratio).any():
                raise ValueError(f"prompt chunks at {self._begins.tolist()} begin inside blocks of {ratio} positions")
            counts = self._counts // ratio
            chunk = np.arange(len(counts)).repeat(counts)
            block = np.arange(len(chunk)) - (np.cumsum(counts) - counts - self._begins // ratio)[chunk]
            self._blocks[ratio] = _sent((np.column_stack((chunk, block)),), self._device)[0]
        return self._blocks[ratio]

    def chosen(self, ratio: int, top_k: int, *, most: int = SCORES) -> tuple[ChosenRows, ...]:
        """Return all rows that see more than `top_k` entries of `ratio` positions, in parts of up to `most` scores.

        A part holds one tile at least.
        """
        key = (ratio, top_k)
        if key not in self._chosen:
            self._chosen[key] = tuple(self._parts(ratio, top_k, most))
        return self._chosen[key]

    def _parts(self, ratio: int, top_k: int, most: int) -> list[ChosenRows]:
        found, tiles, rows, width = list[ChosenRows](), list[tuple[int, int]](), list[np.ndarray](), 0

        def end() -> None:
            if tiles:
                sent = _sent((np.concatenate(rows), np.asarray(tiles)), self._device)
                found.append(ChosenRows(rows=sent[0], tiles=sent[1], width=width))

        # The first position that sees more than top_k entries.
        least = (top_k + 1) * ratio - 1
        for first, start, count in zip(self._firsts, self._begins, self._counts, strict=True):
            for at in range(max(least, int(start)), int(start + count), TILE):
                last = min(at + TILE, int(start + count))
                wide = last // ratio + -(last // ratio) % WIDTH
                held = tiles[-1][1] if tiles else 0
                if (held + last - at) * max(width, wide) > most:
                    end()
                    tiles, rows, width, held = [], [], 0, 0
                tiles.append((held, held + last - at))
                rows.append(np.arange(at, last) - start + first)
                width = max(width, wide)
        end()
        return found


def _sent(parts: Sequence[np.ndarray], device: torch.device | str) -> list[torch.Tensor]:
    """Copy the parts to the device together, as int32. Each begins at a multiple of 16 bytes there."""
    padded = [np.pad(part.ravel(), (0, -part.size % 4)) for part in parts]
    flat = to_device(torch.from_numpy(np.concatenate(padded).astype(np.int32)), device)
    pieces = flat.split([part.size for part in padded])
    return [piece[: part.size].view(part.shape) for piece, part in zip(pieces, parts, strict=True)]
