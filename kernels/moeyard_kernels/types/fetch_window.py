"""State with which ranks of a host fetch each other's missed experts: shared memory, host stores and a switch.

Below full residency a layer waits for the rank that misses most, and only that rank's host link is busy. With sharing,
all ranks exchange their lists of misses. A rank that misses less than the mean reads for ranks that miss more, up to
the mean. It reads from the owner's host memory, which all ranks map, into staging memory on the owner's GPU.

**Assignment.** All ranks derive it from the same lists. Each rank's share is the mean number of missed units, rounded
up. A rank offers the units beyond its share, from the end of its list, as far as its staging memory allows. Ranks below
their share take the offered units; both sides are in rank order. So no byte travels twice without need, and ranks that
miss equally read only for themselves.

**No data is overwritten early.** Lists and units carry the number of the exchange, which `dispatch` has agreed. A rank
writes to peers here only after its `dispatch`, which waits for all ranks' packets of this exchange. Each rank sends
that packet after its `combine` of the previous exchange, hence after all of its fetches there. So every reader of the
previous contents has finished.

**No deadlock.** A rank that reads for others waits only for the lists, and every rank sends its list before it waits. A
rank that waits for units waits only for their readers. No wait depends on another computation of any GPU, and the few
programs find room on it. If a list or unit does not arrive in time, or the host ends the wait, the exchange fails as
for a missing packet of rows. The rank then reads the missing units itself, so slots hold the right experts even in a
failed step. A rank that failed before, or whose peers cannot share, does the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moeyard_kernels.types.peer_shape import LINE, FetchShape
from moeyard_kernels.types.peer_window import PeerWindow, addresses, check_memory

# Fields of a head: the number of the exchange, the number of missed experts, and places in the store.
STAMP, MISSED, PLACES = 0, 1, 2
# Fields of a rank's private state: whether ranks share; then, for each waiting program, a clock and the host's abort
# flag as one of its threads saw them.
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
    """One layer's state of rank `peer.rank`.

    peer: the exchange's window, with the number of the exchange, whether this rank takes part, and the failure record.
    memory: uint8 [num_bytes] of each rank, as this rank's device sees it. table: [W] int64, their addresses. stores:
    [W] int64, the addresses of all ranks' host stores for this device. state: [NUM_STATE] int64. layer: the layer's
    number in the model, for failure reports.
    """

    peer: PeerWindow
    shape: FetchShape
    memory: tuple[torch.Tensor, ...]
    table: torch.Tensor
    stores: torch.Tensor
    state: torch.Tensor
    layer: int = 0

    def views(self, rank: int) -> FetchViews:
        """Return the memory of one rank as tensors."""
        shape, memory = self.shape, self.memory[rank]
        flags_end = shape.flags_offset + shape.staged_units * 8
        return FetchViews(
            heads=memory[: shape.flags_offset].view(torch.int64).view(shape.world_size, LINE),
            flags=memory[shape.flags_offset : flags_end].view(torch.int64),
            units=memory[shape.staging_offset :].view(shape.staged_units, shape.unit_bytes),
        )

    def part(self, expert_unit: int) -> tuple[int, int]:
        """Return the bytes [begin, end) of a unit within an expert."""
        shape, down = self.shape, expert_unit - self.shape.up_units
        if down < 0:
            begin = expert_unit * shape.unit_bytes
            return begin, min(begin + shape.unit_bytes, shape.up_bytes)
        begin = shape.up_bytes + down * shape.unit_bytes
        return begin, min(begin + shape.unit_bytes, shape.up_bytes + shape.down_bytes)

    def share(self, together: bool) -> None:
        """Switch fetching for peers on or off. Call it between steps, on all ranks alike."""
        self.state[SHARED] = int(together)

    def reset(self) -> None:
        """Clear lists and flags, because exchanges are counted from 0 again. Call it before peers may write."""
        mine = self.views(self.peer.rank)
        mine.heads.zero_()
        mine.flags.zero_()


def open_fetch(shape: FetchShape, memory: Sequence[torch.Tensor], peer: PeerWindow) -> FetchWindow:
    """Open the window on `memory`, with sharing off. Raises ValueError for memory of another size."""
    check_memory(memory, shape.num_bytes)
    if len(memory) != shape.world_size or shape.world_size != peer.shape.world_size:
        raise ValueError(f"memory of {len(memory)} ranks of {shape.world_size}, rows of {peer.shape.world_size}")
    device = memory[peer.rank].device
    return FetchWindow(
        peer=peer,
        shape=shape,
        memory=tuple(memory),
        table=addresses(memory, device),
        stores=torch.zeros(shape.world_size, dtype=torch.int64, device=device),
        state=torch.zeros(NUM_STATE, dtype=torch.int64, device=device),
    )
