"""One rank's view of the memory that all ranks of a host read and write directly.

A rank's memory holds data that others send to it. The place of a token row depends only on the source and the source's
row, so a packet looks the same for all step sizes of sender and receiver. Results have a fixed place at their source.
An exchange has two phases. In each phase every rank sends every rank, itself included, one packet, which may be empty.
A phase ends when all packets have arrived. So no rank is ever two phases ahead, and rows and results need no second
copy.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from moeyard_kernels.types.peer_shape import LINE, NUM_COUNTS, PeerShape

DISPATCH, COMBINE = 0, 1
# Fetching happens between these two (`fetch_window`). It is a phase only in failure reports.
FETCH = 2
# The programs of one packet together add this to the receiver's count of arrivals, however many they are.
ARRIVED = 1024
# A rank's private state: exchanges combined and dispatched so far, and whether the rank has failed. CLOCK and ABORTED
# are the clock and the host's abort flag as one waiting thread read them for the others.
COMBINED, DISPATCHED, POISONED, CLOCK, ABORTED, NUM_STATE = 0, 1, 2, 3, 4, 8
# The failure record: whether there is one, phase, layer, bits of the missing ranks, number of the exchange, and reason.
# SPENT: ns that a launch has waited, 0 if none waits or the wait has just begun; after a failed wait, its length.
# ABORT, in a line of its own, is written by the host only: end the wait.
FAILED, PHASE, LAYER, RANKS, EPOCH, REASON, SPENT, ABORT, NUM_FAULT = 0, 1, 2, 3, 4, 5, 6, LINE, 2 * LINE
SILENT, TOO_MANY = 0, 1
# Two ranks with the same expert take turns of this many rows of a source. A few rows stay on one rank: their cost is
# reading the weights of distinct experts, which both ranks would have to read.
ROWS_PER_TURN = 16
# One in this many exchanges is timed. A prime, so that every layer is sampled.
TIMED_ONE_IN = 67


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerViews:
    """One rank's memory as tensors; see `PeerShape`."""

    arrivals: torch.Tensor
    heads: torch.Tensor
    counts: torch.Tensor
    ids: torch.Tensor
    rows: torch.Tensor
    home: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PeerWindow:
    """Rank `rank`'s view of the memory of all ranks.

    memory: uint8 [num_bytes] of each rank, as this rank's device sees it. table: [W] int64, their addresses. Kernels
    read addresses from it, so a captured step continues after a peer is replaced. An expert may
    have two ranks, so owner, local: [E, 2] int32 hold its rank and its number there, for alternate turns of
    ROWS_PER_TURN rows of a source. state: [NUM_STATE] int64 on the device. fault: [NUM_FAULT] int64 in pinned host
    memory, which the device reads and writes. limit: the longest wait of a phase in nanoseconds.
    """

    rank: int
    shape: PeerShape
    dtype: torch.dtype
    memory: tuple[torch.Tensor, ...]
    table: torch.Tensor
    owner: torch.Tensor
    local: torch.Tensor
    state: torch.Tensor
    fault: torch.Tensor
    limit: int
    # Cached: a launch needs views several times, and making them takes a dozen torch calls.
    _views: dict[int, PeerViews] = field(init=False, repr=False, default_factory=dict)

    @property
    def hidden(self) -> int:
        return self.shape.row_bytes // self.dtype.itemsize

    def views(self, rank: int) -> PeerViews:
        """Return the memory of one rank as tensors."""
        if rank not in self._views:
            # The first caller may be in inference mode, but other callers write to the views.
            with torch.inference_mode(False):
                self._views[rank] = self._view(rank)
        return self._views[rank]

    def _view(self, rank: int) -> PeerViews:
        shape, memory = self.shape, self.memory[rank]

        def part(begin: int, dtype: torch.dtype, *sizes: int) -> torch.Tensor:
            return memory[begin : begin + torch.Size(sizes).numel() * dtype.itemsize].view(dtype).view(sizes)

        world, top_k, tokens = shape.world_size, shape.top_k, shape.max_tokens
        return PeerViews(
            arrivals=part(0, torch.int64, 2, LINE),
            heads=part(shape.heads_offset, torch.int64, 2, world, LINE),
            counts=part(shape.counts_offset, torch.int64, NUM_COUNTS),
            ids=part(shape.ids_offset, torch.int32, tokens, world, top_k),
            rows=part(shape.rows_offset, self.dtype, tokens, world, self.hidden),
            home=part(shape.home_offset, self.dtype, tokens, top_k, self.hidden),
        )

    def poison(self) -> None:
        """Stop sending and waiting until `reset`, so that steps can be captured without peers."""
        self.state[POISONED] = 1

    def abort(self) -> None:
        """Make this rank's waiting launches fail, naming the missing ranks, until `reset`. Safe in any thread."""
        # A plain store to host memory: a CUDA call could queue behind the waiting launch.
        self.fault[ABORT] = 1

    def reset(self) -> None:
        """Reset exchanges and failures, but not the counters. Call it before peers may write."""
        mine = self.views(self.rank)
        for x in (mine.arrivals, mine.heads, self.state, self.fault):
            x.zero_()


def check_memory(memory: Sequence[torch.Tensor], num_bytes: int) -> None:
    """Raise ValueError unless each rank's memory is uint8 [num_bytes]."""
    for rank, each in enumerate(memory):
        if each.dtype != torch.uint8 or each.shape != (num_bytes,):
            raise ValueError(f"rank {rank}: memory {each.dtype} {list(each.shape)}, expected uint8 [{num_bytes}]")


def addresses(memory: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the addresses of each rank's memory, [W] int64 on `device`."""
    return torch.tensor([each.data_ptr() for each in memory], dtype=torch.int64).to(device)


def open_window(
    shape: PeerShape,
    memory: Sequence[torch.Tensor],
    *,
    rank: int,
    dtype: torch.dtype,
    owner: Sequence[int],
    local: Sequence[int],
    seconds: float,
) -> PeerWindow:
    """Open the window of `rank` on `memory`. Expert e is number local[e] of rank owner[e]. A phase waits `seconds`.

    Raises ValueError for memory of another size.
    """
    check_memory(memory, shape.num_bytes)
    if len(memory) != shape.world_size or not 0 <= rank < shape.world_size:
        raise ValueError(f"memory of {len(memory)} ranks, rank {rank}, of {shape.world_size}")
    device, fault = memory[rank].device, torch.zeros(NUM_FAULT, dtype=torch.int64)
    return PeerWindow(
        rank=rank,
        shape=shape,
        dtype=dtype,
        memory=tuple(memory),
        table=addresses(memory, device),
        owner=_both(owner).to(device),
        local=_both(local).to(device),
        state=torch.zeros(NUM_STATE, dtype=torch.int64, device=device),
        fault=fault.pin_memory() if device.type == "cuda" else fault,
        limit=round(seconds * 1e9),
    )


def _both(of: Sequence[int]) -> torch.Tensor:
    """Return [E, 2] int32 with the same value for both turns."""
    return torch.tensor([[each, each] for each in of], dtype=torch.int32)
