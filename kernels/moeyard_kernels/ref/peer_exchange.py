"""Token rows to the ranks of their experts and results home, through memory that all ranks share. See `ops`."""

import torch

from moeyard_kernels.types.peer_shape import RECEIVED, SENT
from moeyard_kernels.types.peer_window import (
    ARRIVED,
    COMBINE,
    COMBINED,
    DISPATCH,
    DISPATCHED,
    FAILED,
    POISONED,
    ROWS_PER_TURN,
    SILENT,
    TOO_MANY,
    PeerWindow,
)


def dispatch_rows(
    x: torch.Tensor, topk_ids: torch.Tensor, window: PeerWindow, *, layer: int, max_rows: int, send: bool, wait: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `moeyard_kernels.ops.dispatch_rows`."""
    shape, rank, num_tokens = window.shape, window.rank, topk_ids.shape[0]
    epoch = int(window.state[COMBINED]) + 1
    mine = window.views(rank)
    if not window.state[POISONED]:
        for peer in range(shape.world_size) if send else ():
            theirs = window.views(peer)
            ids = _local_ids(topk_ids, window, peer)
            theirs.ids[:num_tokens, rank] = ids
            needed = (ids >= 0).any(1).nonzero().flatten()
            theirs.rows[needed, rank] = x[needed]
            theirs.heads[DISPATCH, rank, :2] = torch.tensor([epoch, num_tokens], device=x.device)
            theirs.arrivals[DISPATCH, 0] += ARRIVED
            if peer != rank:
                _count(window, peer, ids.nbytes + x[needed].nbytes)
        window.state[DISPATCHED] = epoch
        if wait and _arrived(window, DISPATCH, epoch, layer):
            counts = mine.heads[DISPATCH, :, 1]
            if counts.max() > max_rows:
                _fail(window, (DISPATCH, layer, _bits(counts > max_rows), epoch, TOO_MANY))
            beyond = torch.arange(max_rows, device=counts.device)[:, None] >= counts
            mine.ids[:max_rows][beyond] = -1
    return mine.rows[:max_rows].flatten(0, 1), mine.ids[:max_rows].flatten(0, 1)


def combine_rows(
    out: torch.Tensor | None, window: PeerWindow, *, layer: int, num_tokens: int, max_rows: int | None = None,
    send: bool, wait: bool,
) -> torch.Tensor:  # fmt: skip
    """See `moeyard_kernels.ops.combine_rows`."""
    shape, rank = window.shape, window.rank
    epoch = int(window.state[DISPATCHED])
    mine = window.views(rank)
    if not window.state[POISONED]:
        for peer in range(shape.world_size) if send else ():
            theirs = window.views(peer)
            count = int(mine.heads[DISPATCH, peer, 1])
            t, k = (mine.ids[:count, peer] >= 0).nonzero(as_tuple=True)
            if out is not None:
                theirs.home[t, k] = out.view(-1, shape.world_size, shape.top_k, window.hidden)[t, peer, k]
            theirs.heads[COMBINE, rank, 0] = epoch
            theirs.arrivals[COMBINE, 0] += ARRIVED
            if peer != rank:
                _count(window, peer, len(t) * shape.row_bytes)
        window.state[COMBINED] = epoch
        if wait:
            _arrived(window, COMBINE, epoch, layer)
    return mine.home[:num_tokens]


def _count(window: PeerWindow, peer: int, num_bytes: int) -> None:
    window.views(peer).counts[RECEIVED] += num_bytes
    window.views(window.rank).counts[SENT] += num_bytes


def _local_ids(topk_ids: torch.Tensor, window: PeerWindow, peer: int) -> torch.Tensor:
    """[T, K] int32: the experts of `peer` by their numbers there, -1 for all others."""
    chosen = topk_ids.long().clamp(min=0)
    turn = torch.arange(len(chosen), device=chosen.device)[:, None] // ROWS_PER_TURN % 2
    theirs = (topk_ids >= 0) & (window.owner[chosen, turn] == peer)
    return torch.where(theirs, window.local[chosen, turn], -1).int()


def _arrived(window: PeerWindow, phase: int, epoch: int, layer: int) -> bool:
    """Whether all packets are here. In one process nobody can wait for them."""
    mine = window.views(window.rank)
    if int(mine.arrivals[phase, 0]) >= epoch * ARRIVED * window.shape.world_size:
        return True
    _fail(window, (phase, layer, _bits(mine.heads[phase, :, 0] < epoch), epoch, SILENT))
    return False


def _fail(window: PeerWindow, record: tuple[int, ...]) -> None:
    window.fault[FAILED : 1 + len(record)] = torch.tensor([1, *record], device=window.fault.device)
    window.state[POISONED] = 1


def _bits(of: torch.Tensor) -> int:
    return sum(1 << rank for rank, one in enumerate(of.tolist()) if one)
