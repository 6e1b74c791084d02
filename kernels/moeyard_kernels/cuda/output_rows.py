"""The output positions of a launched step for compressed attention, in waves of up to 16 rows per sequence."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from moeyard_kernels.types.compressed_rows import CompressedRows
from moeyard_kernels.types.decode_tables import MAX_QUERIES
from moeyard_kernels.types.footprint import LAUNCHED
from moeyard_kernels.types.plan_parts import page_table
from moeyard_kernels.types.sending import to_device
from moeyard_kernels.types.step import ChunkRows


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputWave:
    """Rows that are stored together and then attend. at: [n] int64, the rows, counted from the first one that is not of
    a prompt; None for all of them in order."""

    at: torch.Tensor | None
    rows: CompressedRows


def output_waves(
    decode: Sequence[ChunkRows], positions: torch.Tensor, places: torch.Tensor, page_size: int
) -> tuple[OutputWave, ...]:
    """Return the waves of a step's decode rows, at `positions` and `places` [n] int64. Each row counts as a sequence.

    A wave overwrites the oldest rows of slots, which the rows of the wave before still read.
    """
    if not decode:
        return ()
    lengths = np.array([len(chunk.token_ids) for chunk in decode])
    begins, tables = np.cumsum(lengths) - lengths, page_table(decode, page_size).astype(np.int32)
    slots = np.array([chunk.state_slot for chunk in decode])
    found = []
    for first in range(0, int(lengths.max()), MAX_QUERIES):
        counts = np.clip(lengths - first, 0, MAX_QUERIES)
        owners = np.repeat(np.arange(len(decode)), counts)
        table, slot = (to_device(torch.from_numpy(x[owners]), positions.device) for x in (tables, slots))
        at, its_positions, its_places = None, positions, places
        if lengths.max() > MAX_QUERIES:
            rows = np.concatenate(
                [np.arange(begin, begin + n) for begin, n in zip(begins + first, counts, strict=True)]
            )
            at = to_device(torch.from_numpy(rows), positions.device)
            its_positions, its_places = positions.index_select(0, at), places.index_select(0, at)
        rows_of_wave = CompressedRows(
            positions=its_positions,
            places=its_places,
            slots=slot,
            page_table=table,
            page_size=page_size,
            most=LAUNCHED,
        )
        found.append(OutputWave(at=at, rows=rows_of_wave))
    return tuple(found)
