"""Which slots of recurrent state a step's decode rows go on from and leave behind, as device tensors."""

from collections.abc import Sequence
from dataclasses import dataclass

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
