"""Memory that every rank of a host reads and writes directly: what lies where in it, and one rank's hold on it.

A rank's memory is what others put to it. Token rows go to a fixed place by source and by the source's own row, so that
a packet looks the same whatever the sizes of the steps that sender and receiver run; results go to their place at home.
An exchange has two phases, and in each every rank sends every rank, itself too, one packet, be it empty. As a phase
ends where all have arrived, nobody is ever two phases ahead: rows and results need no second copy.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from moeyard_kernels.types.peer_shape import LINE, NUM_COUNTS, PeerShape

DISPATCH, COMBINE = 0, 1
# A phase only in words: what is fetched between these two (`fetch_window`).
FETCH = 2
# What the programs that send a packet add to the receiver's count of arrivals, all together, however many they are.
ARRIVED = 1024
# In a rank's own state, which no peer reads: exchanges combined and dispatched so far, whether it has failed, and for
# the wait a clock and the host's word, as the one thread that looked at them has told the others.
COMBINED, DISPATCHED, POISONED, CLOCK, ABORTED, NUM_STATE = 0, 1, 2, 3, 4, 8
# In the record of a failure: whether there is one, phase, layer, bits of the ranks that are missing, the exchange's
# number, and what is wrong. Beside it for how many ns a launch has been waiting, 0 if none is or it has just begun, and
# what it was where that was in vain. Apart from them what only the host writes: that the wait is to end.
FAILED, PHASE, LAYER, RANKS, EPOCH, REASON, SPENT, ABORT, NUM_FAULT = 0, 1, 2, 3, 4, 5, 6, LINE, 2 * LINE
SILENT, TOO_MANY = 0, 1
# An expert with two ranks is computed by them in turn, so many rows of a source each. Few rows stay together: what they
# cost is the weights of distinct experts, and shared between two ranks both would read these.
ROWS_PER_TURN = 16
# One in so many exchanges is timed: a prime, so that every layer has its turn.
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
    """Rank `rank`'s hold on the memory of all.

    memory: of each rank, uint8 [num_bytes], as this rank's device sees it. table: [W] int64, their addresses: peers are
    found there, so that a captured step goes on with others in their place. owner, local: [E, 2] int32, each expert's
    rank and its number there, by turns of ROWS_PER_TURN rows of a source: an expert may have two ranks. state:
    [NUM_STATE] int64 on the device. fault: [NUM_FAULT] int64 in pinned memory of the host, which the device writes and
    reads. limit: nanoseconds that a phase waits.
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
    # What was asked for before: a launch asks several times, and it is a dozen calls of torch.
    _views: dict[int, PeerViews] = field(init=False, repr=False, default_factory=dict)

    @property
    def hidden(self) -> int:
        return self.shape.row_bytes // self.dtype.itemsize

    def views(self, rank: int) -> PeerViews:
        """The memory of one rank."""
        if rank not in self._views:
            # Whoever asks first may do so in inference mode, and others write.
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
        """Take no part until `reset`: launches neither send nor wait, so that steps can be captured without peers."""
        self.state[POISONED] = 1

    def abort(self) -> None:
        """End the wait of this rank's launches, until `reset`: they fail, naming who is missing. For any thread."""
        # A store to memory of the host: a call of CUDA could queue behind the launch that waits.
        self.fault[ABORT] = 1

    def reset(self) -> None:
        """Begin anew: no exchange so far, no failure. For use before peers may write. What was counted stays."""
        mine = self.views(self.rank)
        for x in (mine.arrivals, mine.heads, self.state, self.fault):
            x.zero_()


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
    """The window of `rank` on `memory`; expert e is number local[e] of rank owner[e] alone. A phase waits `seconds`.

    Raises ValueError for memory of another size.
    """
    for peer, each in enumerate(memory):
        if each.dtype != torch.uint8 or each.shape != (shape.num_bytes,):
            raise ValueError(f"rank {peer}: memory {each.dtype} {list(each.shape)}, expected uint8 [{shape.num_bytes}]")
    if len(memory) != shape.world_size or not 0 <= rank < shape.world_size:
        raise ValueError(f"memory of {len(memory)} ranks, rank {rank}, of {shape.world_size}")
    device, fault = memory[rank].device, torch.zeros(NUM_FAULT, dtype=torch.int64)
    return PeerWindow(
        rank=rank,
        shape=shape,
        dtype=dtype,
        memory=tuple(memory),
        table=torch.tensor([each.data_ptr() for each in memory], dtype=torch.int64).to(device),
        owner=_both(owner).to(device),
        local=_both(local).to(device),
        state=torch.zeros(NUM_STATE, dtype=torch.int64, device=device),
        fault=fault.pin_memory() if device.type == "cuda" else fault,
        limit=round(seconds * 1e9),
    )


def _both(of: Sequence[int]) -> torch.Tensor:
    """[E, 2] int32, the same in both turns."""
    return torch.tensor([[each, each] for each in of], dtype=torch.int32)
