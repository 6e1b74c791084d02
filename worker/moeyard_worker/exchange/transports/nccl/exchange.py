"""The exchange of GPUs of several hosts, or of one host without peer access: collectives of torch.distributed.

Every rank sends its rows and ids to all ranks. The plan frames contain the sizes. The rows of a member lie behind
those of the members before it. With few rows each member returns all (row, k) of a source, the source takes each from
its owner, and the host does not wait. With prompts or many rows the host looks once per layer how many results there
are, and only these travel. All ranks choose alike, by the agreed rows.

A graph holds the collectives with the communicator of one epoch, so captured graphs end with the epoch. With graphs,
members pad few rows to a few common sizes (`_ROW_SIZES`). Events in a graph tell a host nothing, so the device counts
its progress (group.py).

Collectives wait on the device, and only the host can end them. The host therefore waits only where it can watch the
mesh and its device (steps.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moeyard_kernels.types.peer_window import ROWS_PER_TURN
from moeyard_kernels.types.sending import to_device
from moeyard_worker.config.placement import Placement
from moeyard_worker.exchange.base import Dispatched, ExchangeStats, ExchangeTraits, PeerRows
from moeyard_worker.exchange.membership.frames import Phase
from moeyard_worker.exchange.membership.mesh import Mesh
from moeyard_worker.exchange.shape import ExchangeShape
from moeyard_worker.exchange.transports.nccl.group import TorchGroup
from moeyard_worker.exchange.transports.nccl.steps import NcclSteps, Place
from moeyard_worker.exchange.transports.routing import check_placement, tables_of

_ID = torch.int32  # expert ids in packets
# Bytes of a step's results up to which all members return all of them: a network moves these while a layer is launched.
_MOST_WHOLE = 32 << 20
# Rows per member to which steps without prompts are padded in graphs, if members may return all results of as many.
_ROW_SIZES = (1, 4, 16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class _Returned:
    """Where results go if members return only what they have computed.

    pairs: [P] of R * K, the results this member returns, by source.
    places: [Q] of T * K, the places of the results that come back, by owner.
    sent, received: counts by member.
    """

    pairs: torch.Tensor
    places: torch.Tensor
    sent: list[int]
    received: list[int]


@dataclass(frozen=True, slots=True)
class NcclHandle:
    """One layer. `owners`: [T, K] the member that owns each expert of this rank's tokens, -1 for none."""

    layer: int
    owners: torch.Tensor
    returned: _Returned | None


class NcclExchange:
    """`Exchange` through a `TorchGroup`, among the members of the mesh. Before the first `attach` nothing moves.

    A rank whose device does not reach its next collective within `seconds` names itself silent. After a deadline of the
    mesh, a waiting rank names the peers that do not wait. After two deadlines, it reports that all ranks wait.
    """

    traits = ExchangeTraits()

    def __init__(
        self,
        group: TorchGroup,
        *,
        rank: int,
        world_size: int,
        shape: ExchangeShape,
        placement: Placement,
        seconds: float,
        device: torch.device,
    ) -> None:
        self.rank, self.world_size, self.stats = rank, world_size, ExchangeStats()
        self._group, self._shape, self._device = group, shape, device
        most = min(shape.max_tokens, _MOST_WHOLE // (world_size * shape.top_k * shape.row_bytes))
        sizes = tuple(rows for rows in _ROW_SIZES if rows <= most) if group.captures else ()
        self.traits = ExchangeTraits(capturable=group.captures, graphs_per_epoch=group.captures, row_sizes=sizes)
        self.steps = NcclSteps(group, rank=rank, seconds=seconds, on_rows=self._set_rows, on_replay=self._count_replay)
        self._dtype = getattr(torch, shape.dtype)
        self._packets = RowPackets(top_k=shape.top_k, hidden=shape.hidden, dtype=self._dtype)
        self._counts: list[int] = []
        # Whether each member returns all (row, k) of a source.
        self._whole = True
        self._prompt: torch.Tensor | None = None
        # [R, 1] added to a row's ids if experts have copies. Cached by counts, because graphs read them in place.
        self._turns: torch.Tensor | None = None
        self._turns_of: dict[tuple[int, ...], torch.Tensor] = {}
        self._write_owners(placement, tuple(range(world_size)))

    def attach(self, mesh: Mesh, placement: Placement) -> None:
        """Have the members make a group of their own. Raises ValueError for a placement that is not theirs."""
        check_placement(placement, self._shape.num_experts, mesh.members)
        # Captured graphs read the tables and hold the communicator of the previous epoch.
        self.steps.abort()
        self.world_size = mesh.world_size
        self.steps.open_epoch(mesh)
        self._write_owners(placement, mesh.members)
        self._group.meet(mesh)

    def _write_owners(self, placement: Placement, members: tuple[int, ...]) -> None:
        """Make the tables of a placement."""
        self._members, self._place = members, members.index(self.rank)
        self._copied = bool(placement.copies)
        # By layer, in order; owners as places among the members (`LayerTables`).
        self._owner, self._local = dict[int, torch.Tensor](), dict[int, torch.Tensor]()
        for layer, tables in tables_of(placement, self.rank, members).items():
            self._owner[layer] = torch.from_numpy(tables.owner).long().to(self._device)
            self._local[layer] = torch.from_numpy(tables.local).to(self._device)

    def _set_rows(self, rows: PeerRows) -> None:
        """Choose the counts of all members. Asserts that no rank brings more rows than were agreed on."""
        prompts = rows.prompts or (0,) * self.world_size
        sizes = () if any(prompts) else self.traits.row_sizes
        padded = next((size for size in sizes if size >= rows.most), None)
        known = padded is not None or len(rows.counts) == self.world_size
        assert known or self.steps.mesh is None or self.world_size == 1, f"{rows} of {self.world_size} ranks"
        counts = rows.counts or (rows.most,) * self.world_size
        if padded is not None:
            counts = (padded,) * len(counts)
        self._counts = [counts[rank] for rank in self._members]
        assert max(counts) <= self._shape.max_tokens, f"{rows} of {self._shape.max_tokens}"
        self._whole = not any(prompts) and sum(counts) * self._shape.top_k * self._shape.row_bytes <= _MOST_WHOLE
        self._prompt = self._turns = None
        if self._copied:
            self._turns = self._turns_of.get(tuple(self._counts))
            if self._turns is None:
                turns = [torch.arange(count)[:, None] // ROWS_PER_TURN % 2 for count in self._counts]
                self._turns = to_device(torch.cat(turns) * (self._shape.num_experts + 1), self._device)
            if padded is not None:
                self._turns_of[tuple(self._counts)] = self._turns
        if any(prompts):
            flags = [torch.arange(counts[rank]) < prompts[rank] for rank in self._members]
            self._prompt = to_device(torch.cat(flags), self._device)

    def dispatch(self, x: torch.Tensor, topk_ids: torch.Tensor, *, layer: int, num_prompt: int) -> Dispatched:
        """Bring all rows of all members, with padding. With few rows the host does not wait."""
        assert self.steps.rows is not None, f"dispatch of layer {layer} before `set_rows` of its step"
        self.steps.enter(layer)
        num_tokens, world, counts = topk_ids.shape[0], len(self._members), self._counts
        count = counts[self._place]
        assert topk_ids.shape == (min(num_tokens, count), self._shape.top_k), (topk_ids.shape, counts)
        assert x.shape[0] >= num_tokens, (x.shape, topk_ids.shape)
        assert (x.shape[1:], x.dtype) == ((self._shape.hidden,), self._dtype), (x.shape, x.dtype, self._shape)
        packet = self._packets.pack(x[:num_tokens], topk_ids, count)
        got = self._packets.empty(sum(counts), self._device, no_ids=self.steps.mesh is None)
        self._move((self.steps.step, layer, Phase.DISPATCH), packet.repeat(world, 1), [count] * world, got, counts)
        # NCCL's kernels leave an aborted collective with whatever lies in their buffers.
        chosen = self._packets.ids(got).clamp_(-1, self._shape.num_experts - 1)
        chosen = chosen if self._turns is None else chosen + self._turns
        experts, owners = self._local[layer][chosen], self._owner[layer][chosen]
        first = sum(counts[: self._place])
        returned = None if self._whole else self._count(experts, owners)
        handle = NcclHandle(layer, owners[first : first + num_tokens], returned)
        return Dispatched(
            rows=self._packets.rows(got), experts=experts, prompt=self._prompt, handle=handle, num_owners=world
        )

    def _count(self, experts: torch.Tensor, owners: torch.Tensor) -> _Returned:
        """Count the results between each two members; wait for the device."""
        top_k, members = self._shape.top_k, torch.arange(len(self._members), device=owners.device)
        # [W, W]: by source, the results of each member. bincount would wait for the device without the mesh.
        table = torch.stack([(part.reshape(-1, 1) == members).sum(0) for part in owners.split(self._counts)])
        self.steps.drain()
        known = table.tolist()
        first, mine = sum(self._counts[: self._place]), self._counts[self._place]
        order = torch.sort(owners[first : first + mine].flatten(), stable=True).indices
        received = known[self._place]
        return _Returned(
            pairs=(experts.flatten() >= 0).nonzero().flatten(),
            # Pairs without an owner come first.
            places=order[mine * top_k - sum(received) :],
            sent=[row[self._place] for row in known],
            received=received,
        )

    def combine(self, expert_out: torch.Tensor | None, handle: NcclHandle) -> torch.Tensor:
        assert expert_out is not None, "the nccl exchange has no result window"
        (num_tokens, top_k), world, hidden = handle.owners.shape, len(self._members), self._shape.hidden
        assert expert_out.shape == (sum(self._counts), top_k, hidden), (expert_out.shape, self._counts)
        assert expert_out.dtype == self._dtype, (expert_out.dtype, self._shape)
        self.steps.leave(handle.layer)
        at, pairs = (self.steps.step, handle.layer, Phase.COMBINE), self._counts[self._place] * top_k
        results, returned = expert_out.reshape(-1, hidden), handle.returned
        if returned is None:
            here = results.new_empty(world * pairs, hidden)
            self._move(at, results, [count * top_k for count in self._counts], here, [pairs] * world)
            of_pair = torch.arange(num_tokens * top_k, device=here.device)
            out = here.index_select(0, handle.owners.flatten().clamp(min=0) * pairs + of_pair)
        else:
            here = results.new_empty(sum(returned.received), hidden)
            self._move(at, results[returned.pairs], returned.sent, here, returned.received)
            out = results.new_empty(pairs, hidden)
            out[returned.places] = here
        return out.view(-1, top_k, hidden)[:num_tokens]

    def _move(
        self, at: Place, given: torch.Tensor, sent: Sequence[int], into: torch.Tensor, received: Sequence[int]
    ) -> None:
        """Launch a move of rows, as bytes. On a CPU the rows have arrived when this returns."""
        if self.steps.mesh is None or not sum(self._counts):
            return
        try:
            moved = self._group.move(given.view(torch.uint8), sent, into.view(torch.uint8), received)
        except RuntimeError as error:
            self.steps.fail(error, at)
        if moved is None:
            return
        num_bytes = given.shape[1] * given.itemsize
        self.stats.bytes_sent += (sum(sent) - sent[self._place]) * num_bytes
        self.stats.bytes_received += (sum(received) - received[self._place]) * num_bytes
        self.steps.launched(at, moved)

    def _count_replay(self) -> Sequence[int]:
        """Count the bytes of a replayed step. Return its layers, none if this member is alone."""
        if len(self._members) == 1:
            return ()
        rows = self._counts[self._place] * (len(self._members) - 1) * len(self._owner)
        num_bytes = rows * (self._packets.num_bytes + self._shape.top_k * self._shape.row_bytes)
        self.stats.bytes_sent += num_bytes
        self.stats.bytes_received += num_bytes
        return tuple(self._owner)

    def close(self) -> None:
        """End all waits and the group."""
        self.steps.abort()


class RowPackets:
    """Packets [n, width] of `dtype`: K ids as int32, a row of H values, and padding to whole ids.

    With few rows a second collective for the ids would cost its launch more than its bytes.
    """

    def __init__(self, *, top_k: int, hidden: int, dtype: torch.dtype) -> None:
        per_id = _ID.itemsize // dtype.itemsize
        self._begin = top_k * per_id
        self._end = self._begin + hidden
        self._width, self._dtype = self._end + -self._end % per_id, dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of one packet."""
        return self._width * self._dtype.itemsize

    def pack(self, rows: torch.Tensor, ids: torch.Tensor, count: int) -> torch.Tensor:
        """Make `count` packets of rows [n, H] and integer ids [n, K]. Packets beyond n have ids of -1."""
        packets = self.empty(count, rows.device, no_ids=count > len(rows))
        packets[: len(rows), : self._begin].view(_ID).copy_(ids)
        packets[: len(rows), self._begin : self._end] = rows
        return packets

    def empty(self, count: int, device: torch.device, *, no_ids: bool = False) -> torch.Tensor:
        """Make `count` unwritten packets; with `no_ids` all ids are -1."""
        packets = torch.empty(count, self._width, dtype=self._dtype, device=device)
        if no_ids:
            packets[:, : self._begin].view(_ID).fill_(-1)
        return packets

    def rows(self, packets: torch.Tensor) -> torch.Tensor:
        """Return the rows [n, H], contiguous."""
        return packets[:, self._begin : self._end].contiguous()

    def ids(self, packets: torch.Tensor) -> torch.Tensor:
        """Return a copy of the ids, [n, K] int64."""
        return packets[:, : self._begin].view(_ID).long()
