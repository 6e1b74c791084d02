"""What ranks of a host need to fetch each other's missed experts: their memory, their hosts' stores, who takes part.

Below full residency a layer waits for the rank that misses most, whose own link to the host is at work alone. Here all
ranks tell all what they miss, and whoever misses less than the mean reads for who misses more, up to the mean: out of
the owner's host memory, which all ranks of the host map, into the owner's staging memory on its GPU.

**Who reads what** each finds from the same lists. Of the units that all ranks miss each rank may read a share, the
mean, rounded up. What a rank misses beyond its share it lends, from the end of its list and as far as it has room for
it; what others lack to theirs takes what is lent, both in the order of ranks. So nobody's bytes travel twice that need
not, and where all miss alike each reads its own.

**Why nothing is written over.** The lists and units of an exchange bear its number, which `dispatch` has settled, so
they need no count of their own. A rank writes to peers here only behind its `dispatch`, which has waited for all ranks'
packets of this exchange, and each of these was sent behind that rank's `combine` of the exchange before, hence behind
all that it fetched there. So when a list or a unit is written, whoever reads that place has done with what lay there.

**Why nobody waits for ever.** Whoever reads for others waits for nothing but the lists, which every rank sends before
it waits itself; whoever waits for units waits for those alone who read them. None of this waits for what is computed
on any GPU, and the few programs find room beside it. A list or unit that does not come in time, or not before the host
ends the wait, fails the exchange as a packet of rows does, and the rank reads by itself what it lacks: slots hold what
they are said to hold, whatever becomes of the step. So does a rank that has failed before, or whose peers cannot share.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moeyard_kernels.types.peer_shape import LINE, FetchShape
from moeyard_kernels.types.peer_window import PeerWindow

# In a head: the number of the exchange, how many experts are missed, and places in the store.
STAMP, MISSED, PLACES = 0, 1, 2
# In a rank's own state: whether ranks share; then for each program that waits what one of its threads has seen, a clock
# and the host's word.
SHARED, SEEN, MOST_PROGRAMS = 0, 8, 64
NUM_STATE = SEEN + 2 * MOST_PROGRAMS


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchViews:
    """One rank's memory as tensors; see `FetchShape`."""

    heads: torch.Tensor
    flags: torch.Tensor
    units: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FetchWindow:
    """Rank `peer.rank`'s part in it, in one layer.

    peer: the exchange's window: the number of the exchange, whether this rank takes part, and where failures are
    written. memory: of each rank, uint8 [num_bytes], as this rank's device sees it. table: [W] int64, their addresses.
    stores: [W] int64, the addresses of all ranks' host stores for this device. state: [NUM_STATE] int64. layer: the
    model's number of the layer, for failures.
    """

    peer: PeerWindow
    shape: FetchShape
    memory: tuple[torch.Tensor, ...]
    table: torch.Tensor
    stores: torch.Tensor
    state: torch.Tensor
    layer: int = 0

    def views(self, rank: int) -> FetchViews:
        """The memory of one rank."""
        shape, memory = self.shape, self.memory[rank]
        flags_end = shape.flags_offset + shape.staged_units * 8
        return FetchViews(
            heads=memory[: shape.flags_offset].view(torch.int64).view(shape.world_size, LINE),
            flags=memory[shape.flags_offset : flags_end].view(torch.int64),
            units=memory[shape.staging_offset :].view(shape.staged_units, shape.unit_bytes),
        )

    def part(self, expert_unit: int) -> tuple[int, int]:
        """Where a unit of an expert lies in its store, in bytes: its beginning and its end."""
        shape, down = self.shape, expert_unit - self.shape.up_units
        if down < 0:
            begin = expert_unit * shape.unit_bytes
            return begin, min(begin + shape.unit_bytes, shape.up_bytes)
        begin = shape.up_bytes + down * shape.unit_bytes
        return begin, min(begin + shape.unit_bytes, shape.up_bytes + shape.down_bytes)

    def share(self, together: bool) -> None:
        """Whether ranks fetch for each other from here on. Between steps, and all ranks alike."""
        self.state[SHARED] = int(together)

    def reset(self) -> None:
        """Begin anew, as exchanges are counted anew. For use before peers may write."""
        mine = self.views(self.peer.rank)
        mine.heads.zero_()
        mine.flags.zero_()


def open_fetch(shape: FetchShape, memory: Sequence[torch.Tensor], peer: PeerWindow) -> FetchWindow:
    """The window on `memory` of ranks that do not share yet. Raises ValueError for memory of another size."""
    for rank, each in enumerate(memory):
        if each.dtype != torch.uint8 or each.shape != (shape.num_bytes,):
            raise ValueError(f"rank {rank}: memory {each.dtype} {list(each.shape)}, expected uint8 [{shape.num_bytes}]")
    if len(memory) != shape.world_size or shape.world_size != peer.shape.world_size:
        raise ValueError(f"memory of {len(memory)} ranks of {shape.world_size}, rows of {peer.shape.world_size}")
    device = memory[peer.rank].device
    return FetchWindow(
        peer=peer,
        shape=shape,
        memory=tuple(memory),
        table=torch.tensor([each.data_ptr() for each in memory], dtype=torch.int64).to(device),
        stores=torch.zeros(shape.world_size, dtype=torch.int64, device=device),
        state=torch.zeros(NUM_STATE, dtype=torch.int64, device=device),
    )
