"""The exchange of rows among GPUs of one host, through memory that all ranks share."""

import torch

from moeyard_kernels.ops.op import op
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


@op(
    "experts.peer_exchange",
    "T <= min(N, window.shape.max_tokens)",
    "1 <= max_rows <= window.shape.max_tokens",
    x="window.dtype [N, window.hidden]",
    topk_ids="int [T, window.shape.top_k]",
    **{"window.table": "int64 [_]"},
)
def dispatch_rows(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    window: PeerWindow,
    *,
    layer: int,
    max_rows: int,
    send: bool = True,
    wait: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Send the first T rows of x [any, H] to the ranks of the experts in topk_ids [T, K] (int64 or int32, -1: none).

    Return (rows [max_rows * W, H], ids [max_rows * W, K] int32) in this rank's memory, valid until its next
    `combine_rows`. Row t * W + s is row t of rank s. Its ids are local expert numbers, -1 for experts of other ranks. A
    row without a local expert is not sent, so its memory holds old values. The exchange fails if a rank has more than
    `max_rows` rows. Ranks may pass different limits.

    Every rank calls it for every layer, even without rows, and then `combine_rows`. A call sends and waits; the flags
    `send` and `wait` leave out one. On a CPU nothing arrives during a wait. There is no host sync. If a packet misses
    the window's time limit, the window records the failure, and the rank takes no further part.
    """
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


@op(
    "experts.peer_exchange",
    "N % (window.shape.world_size * window.shape.top_k) == 0",
    "0 <= num_tokens <= window.shape.max_tokens",
    **{"window.table": "int64 [_]", "out": "window.dtype [N, window.hidden]?"},
)
def combine_rows(
    out: torch.Tensor | None,
    window: PeerWindow,
    *,
    layer: int,
    num_tokens: int,
    max_rows: int | None = None,
    send: bool = True,
    wait: bool = True,
) -> torch.Tensor:
    """Return results out [max_rows * W * K, H] to the ranks of the last `dispatch_rows` -> [T, K, H].

    Without `out`, a `grouped_gemm` has already written them there (`home`), and ranks only signal it. `max_rows` bounds
    the rows of each rank as in `dispatch_rows`, if known. Result (t, k) is the row of the k-th expert of this rank's
    token t, or old values if its id was -1. Peers write this memory, which is valid until this rank's next
    `dispatch_rows`.
    """
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
    """Return [T, K] int32: the local numbers of the experts of `peer`, -1 for all others."""
    chosen = topk_ids.long().clamp(min=0)
    turn = torch.arange(len(chosen), device=chosen.device)[:, None] // ROWS_PER_TURN % 2
    theirs = (topk_ids >= 0) & (window.owner[chosen, turn] == peer)
    return torch.where(theirs, window.local[chosen, turn], -1).int()


def _arrived(window: PeerWindow, phase: int, epoch: int, layer: int) -> bool:
    """Whether all packets have arrived. A single process cannot wait for them."""
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
