"""The exchange of GPUs of several hosts, or of one host without peer access: collectives of torch.distributed.

Every rank sends its rows and ids to all, in sizes that the plan frames have told: row t of a member lies behind those
of the members before it. Of few rows each member returns all (row, k) of a source, and home takes each from its owner;
nothing waits for the host. With prompts, or many rows, it looks once per layer how many were computed, and only they
travel. All ranks choose alike, by what was agreed on.

A graph holds them with the communicator, which is one epoch's: so captured steps are, too (`OfEpoch`). Members send
alike then, whatever they bring: of few rows, a few sizes for all (`_ROOMS`). As events in a graph tell a host nothing,
the device counts how far it is (row_group.py).

Collectives wait on the device, and end only if the host ends them. So it waits where it can watch (`drain`): it listens
to the mesh meanwhile, and knows by events how far its own device has come (watch.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from moeyard_kernels.types.peer_window import ROWS_PER_TURN
from moeyard_kernels.types.sending import to_device
from moeyard_worker.config.placement import Placement
from moeyard_worker.exchange.base import Dispatched, ExchangeStats, OfEpoch, PeerRows
from moeyard_worker.exchange.frames import Phase
from moeyard_worker.exchange.mesh import Mesh
from moeyard_worker.exchange.packets import RowPackets
from moeyard_worker.exchange.routing import tables_of
from moeyard_worker.exchange.row_group import RowGroup
from moeyard_worker.exchange.shape import ExchangeShape
from moeyard_worker.exchange.watch import Watch

# All results of a step that may travel by all members, in bytes: as many as a network moves while a layer is launched.
_MOST_WHOLE = 32 << 20
# Where a graph can hold it: rows of each member that a step without prompts has room for, where so many may all return.
_ROOMS = (1, 4, 16, 32, 64, 128, 256)
# How many collectives the host launches ahead of its device, two a layer. Where some thousand launches wait for a
# device that waits for a peer, the next one blocks, and nobody would watch.
_AHEAD = 16


@dataclass(frozen=True, slots=True)
class _Returned:
    """How results travel where only what was computed does. `pairs` [P]: of R * K, what this member returns, by source.
    `places` [Q]: where at home what comes belongs, of T * K, by owner; `sent`, `received`: how many, by member.
    """

    pairs: torch.Tensor
    places: torch.Tensor
    sent: list[int]
    received: list[int]


@dataclass(frozen=True, slots=True)
class NcclHandle:
    """One layer: `owners` [T, K], by member, of what this rank's tokens chose (-1: nobody)."""

    layer: int
    owners: torch.Tensor
    returned: _Returned | None


class NcclExchange:
    """`Exchange` through a `RowGroup`, among the members of the mesh. Before the first `attach` nothing moves.

    A rank whose device does not come to its next exchange within `seconds` is silent, and says so; one that waits for
    others names after a deadline of the mesh who does not wait, too, and after two that all do.
    """

    warms = True
    stays = False

    def __init__(
        self, group: RowGroup, *, rank: int, world_size: int, shape: ExchangeShape, placement: Placement,
        seconds: float, device: torch.device,
    ) -> None:  # fmt: skip
        self.rank, self.world_size, self.stats = rank, world_size, ExchangeStats()
        self._group, self._shape, self._device = group, shape, device
        self.captures = self.places_rows = group.captures
        self.of_epoch: OfEpoch | None = self if group.captures else None
        self.forget: Callable[[], None] = _nothing
        most = min(shape.max_tokens, _MOST_WHOLE // (world_size * shape.top_k * shape.row_bytes))
        self.rooms = tuple(rows for rows in _ROOMS if rows <= most) if group.captures else ()
        self._watch = Watch(group, rank=rank, seconds=seconds)
        self._dtype, self._step = getattr(torch, shape.dtype), 0
        self._packets = RowPackets(top_k=shape.top_k, hidden=shape.hidden, dtype=self._dtype)
        self._counts: list[int] = []
        # Whether all (row, k) of a source return from each member, in the exchanges that are launched from here on.
        self._whole = True
        self._prompt: torch.Tensor | None = None
        # [R, 1], where experts have copies: added to a row's ids; by counts, of which graphs know where they are.
        self._turns: torch.Tensor | None = None
        self._turns_of: dict[tuple[int, ...], torch.Tensor] = {}
        self._mesh: Mesh | None = None
        self._put(placement, tuple(range(world_size)))

    def attach(self, mesh: Mesh, placement: Placement) -> None:
        """See `Exchange.attach`: the members make a group of their own.

        Raises ExchangeError naming who is not there, ValueError for a placement that is not theirs.
        """
        if placement.num_experts != self._shape.num_experts or not set(placement.ranks) <= set(mesh.members):
            raise ValueError(
                f"a placement of {placement.num_experts} experts on ranks {placement.ranks}: there are "
                f"{self._shape.num_experts} and ranks {mesh.members}"
            )
        # What was captured reads the tables and holds the communicator of the epoch before.
        self.abort()
        self._mesh, self.world_size = mesh, mesh.world_size
        self._watch.begin(mesh)
        self._put(placement, mesh.members)
        self._group.meet(mesh)

    def _put(self, placement: Placement, members: tuple[int, ...]) -> None:
        """Write down who owns what."""
        self._members, self._place = members, members.index(self.rank)
        self._copied = bool(placement.copies)
        # Of every layer, in their order, owners by their places among the members (`LayerTables`).
        self._owner, self._local = dict[int, torch.Tensor](), dict[int, torch.Tensor]()
        for layer, tables in tables_of(placement, self.rank, members).items():
            self._owner[layer] = torch.from_numpy(tables.owner).long().to(self._device)
            self._local[layer] = torch.from_numpy(tables.local).to(self._device)

    def begin_step(self, step: int) -> None:
        """See `Exchange.begin_step`."""
        self._step = step

    def expect(self, rows: PeerRows) -> None:
        """See `Exchange.expect`. More rows than were agreed on are an assertion."""
        prompts = rows.prompts or (0,) * self.world_size
        room = None if any(prompts) else next((each for each in self.rooms if each >= rows.most), None)
        told = room is not None or len(rows.counts) == self.world_size
        assert told or self._mesh is None or self.world_size == 1, f"{rows} of {self.world_size} ranks"
        counts = rows.counts or (rows.most,) * self.world_size
        if room is not None:
            counts = (room,) * len(counts)
        self._counts = [counts[rank] for rank in self._members]
        assert max(counts) <= self._shape.max_tokens, f"{rows} of {self._shape.max_tokens}"
        self._whole = not any(prompts) and sum(counts) * self._shape.top_k * self._shape.row_bytes <= _MOST_WHOLE
        self._prompt = self._turns = None
        if self._copied:
            self._turns = self._turns_of.get(tuple(self._counts))
            if self._turns is None:
                turns = [torch.arange(count)[:, None] // ROWS_PER_TURN % 2 for count in self._counts]
                self._turns = to_device(torch.cat(turns) * (self._shape.num_experts + 1), self._device)
            if room is not None:
                self._turns_of[tuple(self._counts)] = self._turns
        if any(prompts):
            flags = [torch.arange(counts[rank]) < prompts[rank] for rank in self._members]
            self._prompt = to_device(torch.cat(flags), self._device)

    def dispatch(self, x: torch.Tensor, topk_ids: torch.Tensor, *, layer: int, num_prompt: int) -> Dispatched:
        """See `Exchange.dispatch`: all rows of all members, with padding. Of few rows nothing waits for the host."""
        num_tokens, world, counts = topk_ids.shape[0], len(self._members), self._counts
        count = counts[self._place]
        assert topk_ids.shape == (min(num_tokens, count), self._shape.top_k), (topk_ids.shape, counts)
        assert x.shape[0] >= num_tokens, (x.shape, topk_ids.shape)
        assert (x.shape[1:], x.dtype) == ((self._shape.hidden,), self._dtype), (x.shape, x.dtype, self._shape)
        packet = self._packets.pack(x[:num_tokens], topk_ids, count)
        got = self._packets.to_come(sum(counts), self._device, nobody=self._mesh is None)
        self._move((self._step, layer, Phase.DISPATCH), packet.repeat(world, 1), [count] * world, got, counts)
        # Where an exchange is ended anything may have come: NCCL's kernels leave with what lies in their buffers.
        chosen = self._packets.ids(got).clamp_(-1, self._shape.num_experts - 1)
        chosen = chosen if self._turns is None else chosen + self._turns
        experts, owners = self._local[layer][chosen], self._owner[layer][chosen]
        first = sum(counts[: self._place])
        returned = None if self._whole else self._count(experts, owners)
        handle = NcclHandle(layer, owners[first : first + num_tokens], returned)
        return Dispatched(
            rows=self._packets.rows(got), experts=experts, prompt=self._prompt, handle=handle, one_in=world
        )

    def _count(self, experts: torch.Tensor, owners: torch.Tensor) -> _Returned:
        """How many results go from whom to whom; waits for the device."""
        top_k, members = self._shape.top_k, torch.arange(len(self._members), device=owners.device)
        # [W, W]: by source, what each member has of it. Not by bincount, which waits for the device by itself.
        table = torch.stack([(part.reshape(-1, 1) == members).sum(0) for part in owners.split(self._counts)])
        self.drain()
        known = table.tolist()
        first, mine = sum(self._counts[: self._place]), self._counts[self._place]
        order = torch.sort(owners[first : first + mine].flatten(), stable=True).indices
        received = known[self._place]
        return _Returned(
            pairs=(experts.flatten() >= 0).nonzero().flatten(),
            # Those of nobody come first.
            places=order[mine * top_k - sum(received) :],
            sent=[row[self._place] for row in known],
            received=received,
        )

    def combine(self, expert_out: torch.Tensor | None, handle: NcclHandle) -> torch.Tensor:
        """See `Exchange.combine`."""
        assert expert_out is not None, "nobody was told where home is"
        (num_tokens, top_k), world, hidden = handle.owners.shape, len(self._members), self._shape.hidden
        assert expert_out.shape == (sum(self._counts), top_k, hidden), (expert_out.shape, self._counts)
        assert expert_out.dtype == self._dtype, (expert_out.dtype, self._shape)
        at, pairs = (self._step, handle.layer, Phase.COMBINE), self._counts[self._place] * top_k
        results, returned = expert_out.reshape(-1, hidden), handle.returned
        if returned is None:
            here = results.new_empty(world * pairs, hidden)
            self._move(at, results, [count * top_k for count in self._counts], here, [pairs] * world)
            of_pair = torch.arange(num_tokens * top_k, device=here.device)
            home = here.index_select(0, handle.owners.flatten().clamp(min=0) * pairs + of_pair)
        else:
            here = results.new_empty(sum(returned.received), hidden)
            self._move(at, results[returned.pairs], returned.sent, here, returned.received)
            home = results.new_empty(pairs, hidden)
            home[returned.places] = here
        return home.view(-1, top_k, hidden)[:num_tokens]

    def _move(
        self, at: tuple[int, int, Phase], given: torch.Tensor, sent: Sequence[int], into: torch.Tensor,
        received: Sequence[int],
    ) -> None:  # fmt: skip
        """Launch rows, by their bytes, and wait if the host is too far ahead; on a CPU they have come then."""
        if self._mesh is None or not sum(self._counts):
            return
        try:
            moved = self._group.move(given.view(torch.uint8), sent, into.view(torch.uint8), received)
        except RuntimeError as error:
            self._watch.fail(error, at)
        if moved is None:
            return
        num_bytes = given.shape[1] * given.itemsize
        self.stats.bytes_sent += (sum(sent) - sent[self._place]) * num_bytes
        self.stats.bytes_received += (sum(received) - received[self._place]) * num_bytes
        self._watch.add(at, moved)
        ahead = 0 if self._group.host_waits else _AHEAD
        if len(self._watch) > ahead:
            self._watch.until(lambda: len(self._watch) <= ahead, step=self._step)

    def capturing(self) -> None:
        """See `OfEpoch.capturing`."""
        self.drain()
        if self._mesh is not None:
            self._mesh.say(Phase.BUSY)

    def replayed(self) -> None:
        """See `OfEpoch.replayed`: of as many rows as were expected last."""
        if len(self._members) == 1:
            return
        parts = [(self._step, layer, phase) for layer in self._owner for phase in (Phase.DISPATCH, Phase.COMBINE)]
        for at, moved in zip(parts, self._group.replayed(len(parts)), strict=True):
            self._watch.add(at, moved)
        rows = self._counts[self._place] * (len(self._members) - 1) * len(self._owner)
        num_bytes = rows * (self._packets.num_bytes + self._shape.top_k * self._shape.row_bytes)
        self.stats.bytes_sent += num_bytes
        self.stats.bytes_received += num_bytes

    def finish_step(self, step: int, has_run: Callable[[], bool]) -> None:
        """See `Exchange.finish_step`: what has exchanges was waited for where it was launched."""
        self._watch.until(has_run, step=self._step)

    def drain(self, has_run: Callable[[], bool] | None = None) -> None:
        """See `Exchange.drain`: the mesh is listened to, as a peer that is gone ends no wait of the device."""
        self._watch.until(has_run or (lambda: not len(self._watch)), step=self._step)

    def abort(self, lost: Sequence[int] = ()) -> None:
        """See `Exchange.abort`: what was captured holds the communicator, and it what waits on the device."""
        self._watch.end()
        self.forget()
        self._group.settle()

    def close(self) -> None:
        """See `Exchange.close`."""
        self.abort()


def _nothing() -> None:
    """Of who has captured nothing."""
