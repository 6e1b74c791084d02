"""Rows that travel behind the ids of their experts: of few rows a collective costs its launch more than its bytes."""

import torch

# Expert ids, as they travel.
_ID = torch.int32


class RowPackets:
    """Packets [n, width] of `dtype`: K ids as int32, a row of H values, and what keeps packets whole ids apart."""

    def __init__(self, *, top_k: int, hidden: int, dtype: torch.dtype) -> None:
        per_id = _ID.itemsize // dtype.itemsize
        self._begin = top_k * per_id
        self._end = self._begin + hidden
        self._width, self._dtype = self._end + -self._end % per_id, dtype

    @property
    def num_bytes(self) -> int:
        """Of one."""
        return self._width * self._dtype.itemsize

    def pack(self, rows: torch.Tensor, ids: torch.Tensor, count: int) -> torch.Tensor:
        """`count` packets: of rows [n, H] and ids [n, K] of any integer type, then of no row, with ids of -1."""
        packets = self.to_come(count, rows.device, nobody=count > len(rows))
        packets[: len(rows), : self._begin].view(_ID).copy_(ids)
        packets[: len(rows), self._begin : self._end] = rows
        return packets

    def to_come(self, count: int, device: torch.device, *, nobody: bool = False) -> torch.Tensor:
        """So many packets, unwritten; if `nobody` will write them all ids are -1."""
        packets = torch.empty(count, self._width, dtype=self._dtype, device=device)
        if nobody:
            packets[:, : self._begin].view(_ID).fill_(-1)
        return packets

    def rows(self, packets: torch.Tensor) -> torch.Tensor:
        """Rows [n, H], contiguous."""
        return packets[:, self._begin : self._end].contiguous()

    def ids(self, packets: torch.Tensor) -> torch.Tensor:
        """Ids [n, K] int64, a tensor of its own."""
        return packets[:, : self._begin].view(_ID).long()
