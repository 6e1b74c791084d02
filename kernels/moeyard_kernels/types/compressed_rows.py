"""The output positions of a step for compressed attention. A captured step reads them again in every replay."""

from dataclasses import dataclass, replace

import torch

from moeyard_kernels.types.decode_tables import BLOCK, MAX_QUERIES
from moeyard_kernels.types.footprint import CAPTURED, COMPRESSED_SPLIT, COMPRESSED_SPLITS


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedRows:
    """Rows that are stored together and then attend, on the state's device. The contents may change between replays.

    Row r is row r % Q of sequence r // Q. A sequence has at most 16 rows. Those that store are at distinct positions.
    positions [R] int64. places [R] int64: page * page_size + offset of each position, or -1 for a row that stores
    nothing. slots [B] int64. page_table [B, W] int32: the pages of each sequence in order. Entries past its positions
    may name any page. `most` bounds the bytes of intermediate results, but one sequence always fits. Raises ValueError
    naming what does not fit.
    """

    positions: torch.Tensor
    places: torch.Tensor
    slots: torch.Tensor
    page_table: torch.Tensor
    page_size: int
    most: int = CAPTURED

    def __post_init__(self) -> None:
        if self.page_size < 1 or BLOCK % self.page_size:
            raise ValueError(f"page_size {self.page_size} does not divide {BLOCK}")
        for name, dtype, dims in (
            ("positions", torch.int64, 1),
            ("places", torch.int64, 1),
            ("slots", torch.int64, 1),
            ("page_table", torch.int32, 2),
        ):
            x = getattr(self, name)
            if x.dim() != dims or x.dtype != dtype or not x.is_contiguous():
                raise ValueError(f"{name}: {x.dtype} {list(x.shape)}, expected contiguous {dtype} of rank {dims}")
            if x.device != self.positions.device:
                raise ValueError(f"{name} is on {x.device}, positions on {self.positions.device}")
        count, sequences = self.num_rows, self.slots.shape[0]
        if self.places.shape[0] != count or self.page_table.shape[0] != sequences:
            raise ValueError(
                f"places {list(self.places.shape)} and page_table {list(self.page_table.shape)}, expected {count} rows "
                f"and {sequences} sequences"
            )
        if count % max(1, sequences) or count > sequences * MAX_QUERIES:
            raise ValueError(f"{count} rows of {sequences} sequences, expected 1 to {MAX_QUERIES} of each")

    @property
    def num_rows(self) -> int:
        return self.positions.shape[0]

    @property
    def num_queries(self) -> int:
        """Rows per sequence."""
        return self.num_rows // max(1, self.slots.shape[0])

    def num_entries(self, ratio: int) -> int:
        """Return the entries of the longest sequence that the table can hold, one per `ratio` positions."""
        return self.page_table.shape[1] * self.page_size // ratio if ratio else 0

    def num_splits(self, ratio: int, top_k: int) -> int:
        """Return the splits of the keys of any row: one for the window, others for its entries (top_k 0: all)."""
        entries = self.num_entries(ratio)
        entries = min(entries, top_k) if top_k else entries
        return 1 + min(COMPRESSED_SPLITS, -(-entries // COMPRESSED_SPLIT))

    def turns(self, row_bytes: int) -> "list[tuple[slice, CompressedRows]]":
        """Return the rows of each turn, if a row takes `row_bytes` of intermediate results."""
        sequences, queries = self.slots.shape[0], self.num_queries
        each = max(1, self.most // max(1, row_bytes * queries))
        if each >= sequences:
            return [(slice(0, self.num_rows), self)]
        turns = []
        for first in range(0, sequences, each):
            of_turn = slice(first, first + each)
            rows = slice(first * queries, min(self.num_rows, (first + each) * queries))
            turns.append(
                (
                    rows,
                    replace(
                        self,
                        positions=self.positions[rows],
                        places=self.places[rows],
                        slots=self.slots[of_turn],
                        page_table=self.page_table[of_turn],
                    ),
                )
            )
        return turns
