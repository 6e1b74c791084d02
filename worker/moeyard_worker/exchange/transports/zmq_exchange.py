"""The portable exchange: rows through shared memory on one host and TCP frames between hosts; ZMQ says when.

In both phases every rank sends every peer exactly one frame. For a peer of the same host, the frame is a doorbell of a
few bytes. The rank has written its ids and rows into its slab, and each peer reads the rows it needs. In `combine`, the
owners of the experts write the outputs directly to their places in the source's slab. For other peers, the frame
carries the ids, the distinct rows that the peer needs, and later the outputs, pair by pair. Both sides derive the same
routing from the same ids (routing.py), so rows need no addresses. Bits are only moved.

One slab per rank is enough, because the chain of a layer orders every access:

- A rank rewrites its ids and rows in the dispatch of the next layer. Before that, every peer has sent its combine frame
  for this layer, which a peer sends after it has read them.
- A peer writes outputs in the combine of the next layer. Before that, it has received this rank's dispatch frame for
  that layer, and the result of this layer's `combine` has been used to make that frame.

Ranks that compute on GPUs use it too: rows go to the host and back. The host then waits for the GPU in both phases of
every layer, so no step can be captured in a graph.
"""

import mmap
from dataclasses import dataclass
from struct import Struct
from time import perf_counter

import numpy as np
import torch
import zmq

from moeyard_worker.config.placement import Placement
from moeyard_worker.exchange.base import Dispatched, ExchangeError, ExchangeStats, ExchangeSteps, ExchangeTraits
from moeyard_worker.exchange.membership.frames import TAG_BYTES, Frame, Phase, pack_tag
from moeyard_worker.exchange.membership.mesh import Mesh
from moeyard_worker.exchange.shape import ExchangeShape
from moeyard_worker.exchange.transports.routing import Routing, check_placement, pairs_of, route, tables_of

# pyzmq copies smaller messages even with copy=False (zmq.COPY_THRESHOLD), so there is nothing to track.
COPY_BELOW_BYTES = 1 << 16
CPU = torch.device("cpu")
_COUNTS = Struct("<II")
_HEAD_BYTES = TAG_BYTES + _COUNTS.size
_NO_PAIRS = np.empty(0, np.int64)


class Slab:
    """Views of one slab: `ids` [max_tokens, top_k] int64, `rows` [max_tokens] and `results` [max_tokens * top_k].

    Items of `rows` and `results` are whole rows of raw bytes, which numpy moves with one memcpy each for any dtype.
    """

    __slots__ = ("ids", "results", "results_tensor", "rows")

    def __init__(self, shape: ExchangeShape, buffer: "mmap.mmap | bytearray") -> None:
        assert len(buffer) >= shape.slab_bytes, (len(buffer), shape)
        row, num_pairs = f"V{shape.row_bytes}", shape.max_tokens * shape.top_k
        self.ids: np.ndarray = np.ndarray((shape.max_tokens, shape.top_k), np.int64, buffer)
        self.rows: np.ndarray = np.ndarray((shape.max_tokens,), row, buffer, shape.rows_offset)
        self.results: np.ndarray = np.ndarray((num_pairs,), row, buffer, shape.results_offset)
        # [max_tokens * top_k, hidden] on the same memory.
        self.results_tensor = torch.frombuffer(
            buffer, dtype=getattr(torch, shape.dtype), count=num_pairs * shape.hidden, offset=shape.results_offset
        ).view(-1, shape.hidden)


class Outbox:
    """Two send buffers for one peer in turns, one for each phase of a layer; reused only when ZMQ has released them."""

    def __init__(self) -> None:
        self._buffers = [np.empty(0, np.uint8), np.empty(0, np.uint8)]
        self._trackers: list[zmq.MessageTracker | None] = [None, None]
        self._turn = 0

    def frame(self, num_bytes: int) -> np.ndarray:
        """Return a buffer of exactly `num_bytes` bytes to fill and `send`, never one that is still being sent."""
        self._turn = turn = 1 - self._turn
        tracker = self._trackers[turn]
        if self._buffers[turn].size < num_bytes or (tracker is not None and not tracker.done):
            # The message keeps a buffer that is still being sent alive.
            self._buffers[turn] = np.empty(num_bytes, np.uint8)
        self._trackers[turn] = None
        return self._buffers[turn][:num_bytes]

    def send(self, mesh: Mesh, peer: int, frame: np.ndarray) -> None:
        """Send the buffer that `frame` returned last."""
        if frame.size < COPY_BELOW_BYTES:
            mesh.send(peer, frame.data)
        else:
            self._trackers[self._turn] = mesh.send_in_place(peer, frame.data)


@dataclass(frozen=True, slots=True)
class ZmqHandle:
    """One layer's routing, and the places of the results that each far peer sends back."""

    layer: int
    num_tokens: int
    routing: Routing
    token_bounds: list[int]
    remote_pairs: dict[int, np.ndarray]


@dataclass(frozen=True, slots=True)
class _Source:
    """A rank's tokens as they arrived: `rows` holds all of them, or, if `picked`, only those that this rank needs."""

    ids: np.ndarray
    rows: np.ndarray
    num_prompt: int
    picked: bool


class ZmqExchange:
    """`Exchange` over a connected mesh, for rows on `device`.

    The ranks of a step are the mesh's `members`, also those that own no expert. On a CPU `rows` of a dispatch live in
    memory that is reused after the `combine` of the same layer, and the result of `combine` until the next `dispatch`.
    """

    traits = ExchangeTraits()

    def __init__(self, mesh: Mesh, *, shape: ExchangeShape, placement: Placement, device: torch.device = CPU) -> None:
        self.rank = mesh.rank
        self.stats = ExchangeStats()
        self.steps = ExchangeSteps()
        self._shape, self._device = shape, device
        self._row_bytes = shape.row_bytes
        self._row_type = np.dtype(f"V{shape.row_bytes}")
        self._dtype = getattr(torch, shape.dtype)
        self._rows = torch.empty(0, shape.hidden, dtype=self._dtype)
        self._raw_rows = self._as_rows(self._rows)
        nothing = np.empty((0, shape.top_k), np.int64)
        self._absent = _Source(nothing, self._raw_rows, 0, picked=False)
        self.attach(mesh, placement)

    def attach(self, mesh: Mesh, placement: Placement) -> None:
        """Use new shared memory only: a lost rank may still write to that of the previous mesh."""
        shape = self._shape
        assert (mesh.rank, mesh.slab_bytes) == (self.rank, shape.slab_bytes), shape
        check_placement(placement, shape.num_experts, mesh.members)
        self.world_size = mesh.world_size
        self._tables = tables_of(placement, mesh.rank)
        self._mesh = mesh
        self._slab = Slab(shape, mesh.own_slab.memory if mesh.own_slab else bytearray(shape.slab_bytes))
        self._result = self._slab.results_tensor[:0].view(0, shape.top_k, shape.hidden)
        self._near = {peer: Slab(shape, shared.memory) for peer, shared in mesh.peer_slabs.items()}
        self._far = {peer: Outbox() for peer in mesh.peers if peer not in self._near}
        self.steps.open_epoch(mesh)

    def dispatch(self, x: torch.Tensor, topk_ids: torch.Tensor, *, layer: int, num_prompt: int) -> Dispatched:
        """Asserts at most `max_tokens` rows, and expert ids in range."""
        start = perf_counter()
        num_tokens, shape = topk_ids.shape[0], self._shape
        x, ids = x[:num_tokens].cpu(), topk_ids.cpu().numpy()
        assert x.shape == (num_tokens, shape.hidden), (x.shape, ids.shape, shape)
        assert x.dtype == self._dtype, (x.dtype, shape)
        assert ids.shape == (num_tokens, shape.top_k), (ids.shape, shape)
        assert num_tokens <= shape.max_tokens, f"{num_tokens} tokens, the exchange was sized for {shape.max_tokens}"
        assert 0 <= num_prompt <= num_tokens, num_prompt
        own = _Source(ids, self._as_rows(x), num_prompt, picked=False)
        self.steps.enter(layer)
        remote_pairs = self._send_tokens(own, layer)
        frames = self._mesh.recv_all(Phase.DISPATCH, layer=layer, since=start)
        sources = [self._source(peer, frame, layer) if frame else self._absent for peer, frame in enumerate(frames)]
        sources[self.rank] = own
        token_bounds = [0]
        for source in sources:
            token_bounds.append(token_bounds[-1] + len(source.ids))
        routing = route(
            np.concatenate([source.ids for source in sources]),
            token_bounds=token_bounds,
            tables=self._tables[layer],
        )
        handle = ZmqHandle(layer, num_tokens, routing, token_bounds, remote_pairs)
        prompt = _prompt_rows(sources, routing, token_bounds)
        dispatched = Dispatched(
            rows=self._gather_rows(sources, routing, token_bounds).to(self._device),
            experts=torch.from_numpy(routing.experts).to(self._device),
            prompt=None if prompt is None else prompt.to(self._device),
            handle=handle,
        )
        self.stats.seconds["dispatch"].append(perf_counter() - start)
        return dispatched

    def combine(self, expert_out: torch.Tensor | None, handle: ZmqHandle) -> torch.Tensor:
        assert expert_out is not None, "the ZMQ exchange has no result window"
        start = perf_counter()
        expert_out = expert_out.cpu()
        shape, routing, bounds = self._shape, handle.routing, handle.routing.pair_bounds
        assert expert_out.shape == (*routing.experts.shape, shape.hidden), (expert_out.shape, shape)
        assert expert_out.dtype == self._dtype, (expert_out.dtype, shape)
        self.steps.leave(handle.layer)
        out = self._as_rows(expert_out.view(-1, shape.hidden))
        tag = pack_tag(self._mesh.epoch, self._mesh.step, handle.layer, Phase.COMBINE, self.rank)
        for peer in self._mesh.peers:
            first, last = bounds[peer], bounds[peer + 1]
            if peer in self._near:
                if first < last:
                    pairs = routing.pairs[first:last] - handle.token_bounds[peer] * shape.top_k
                    self._near[peer].results[pairs] = out.take(routing.row_pairs[first:last])
                self._mesh.send(peer, tag)
            else:
                frame = self._far[peer].frame(TAG_BYTES + (last - first) * self._row_bytes)
                frame[:TAG_BYTES] = np.frombuffer(tag, np.uint8)
                self._take(out, routing.row_pairs[first:last], frame[TAG_BYTES:])
                self._far[peer].send(self._mesh, peer, frame)
            self.stats.bytes_sent += (last - first) * self._row_bytes
        first, last = bounds[self.rank], bounds[self.rank + 1]
        if first < last:
            pairs = routing.pairs[first:last] - handle.token_bounds[self.rank] * shape.top_k
            self._slab.results[pairs] = out.take(routing.row_pairs[first:last])
        frames = self._mesh.recv_all(Phase.COMBINE, layer=handle.layer, since=start)
        for peer in self._mesh.peers:
            self._take_results(peer, frames[peer], handle)
        num_pairs = handle.num_tokens * shape.top_k
        self.stats.bytes_received += (num_pairs - (last - first)) * self._row_bytes
        if handle.num_tokens != self._result.shape[0]:
            self._result = self._slab.results_tensor[:num_pairs].view(handle.num_tokens, shape.top_k, shape.hidden)
        result = self._result.to(self._device)
        self.stats.seconds["combine"].append(perf_counter() - start)
        return result

    def close(self) -> None:
        """Close the mesh and drop the shared memory."""
        self._mesh.close()
        self._near = {}
        self._far = {}

    def _send_tokens(self, own: _Source, layer: int) -> dict[int, np.ndarray]:
        """Send every peer this rank's tokens; return the pairs whose results each far peer will send back."""
        num_tokens, row_bytes, top_k = len(own.ids), self._row_bytes, self._shape.top_k
        head = pack_tag(self._mesh.epoch, self._mesh.step, layer, Phase.DISPATCH, self.rank)
        head += _COUNTS.pack(num_tokens, own.num_prompt)
        if self._near:
            self._slab.ids[:num_tokens] = own.ids
            self._slab.rows[:num_tokens] = own.rows
            self.stats.bytes_sent += num_tokens * (top_k * 8 + row_bytes)
            for peer in self._near:
                self._mesh.send(peer, head)
        remote_pairs = {}
        tables = self._tables[layer]
        keys = tables.keys(own.ids, (0, num_tokens)) if self._far else own.ids
        for peer, outbox in self._far.items():
            pairs = pairs_of(keys, tables.owner, peer)
            tokens = np.unique(pairs // top_k)
            rows_start = _HEAD_BYTES + 4 * own.ids.size
            frame = outbox.frame(rows_start + tokens.size * row_bytes)
            frame[:_HEAD_BYTES] = np.frombuffer(head, np.uint8)
            np.ndarray(own.ids.shape, np.int32, frame, _HEAD_BYTES)[:] = own.ids
            self._take(own.rows, tokens, frame[rows_start:])
            outbox.send(self._mesh, peer, frame)
            self.stats.bytes_sent += frame.size
            remote_pairs[peer] = pairs
        return remote_pairs

    def _source(self, peer: int, frame: Frame, layer: int) -> _Source:
        """Parse a peer's dispatch frame; the tag is already checked."""
        if len(frame) < _HEAD_BYTES:
            raise self._malformed(peer, frame, layer, Phase.DISPATCH)
        num_tokens, num_prompt = _COUNTS.unpack_from(frame, TAG_BYTES)
        if not num_prompt <= num_tokens <= self._shape.max_tokens:
            raise self._malformed(peer, frame, layer, Phase.DISPATCH)
        near = self._near.get(peer)
        if near is not None:
            if len(frame) != _HEAD_BYTES:
                raise self._malformed(peer, frame, layer, Phase.DISPATCH)
            return _Source(near.ids[:num_tokens], near.rows[:num_tokens], num_prompt, picked=False)
        rows_start = _HEAD_BYTES + 4 * num_tokens * self._shape.top_k
        num_rows, rest = divmod(len(frame) - rows_start, self._row_bytes)
        if rest or num_rows < 0:
            raise self._malformed(peer, frame, layer, Phase.DISPATCH)
        ids: np.ndarray = np.ndarray((num_tokens, self._shape.top_k), np.int32, frame, _HEAD_BYTES)
        rows: np.ndarray = np.ndarray((num_rows,), self._row_type, frame, rows_start)
        return _Source(ids, rows, num_prompt, picked=True)

    def _gather_rows(self, sources: list[_Source], routing: Routing, token_bounds: list[int]) -> torch.Tensor:
        """Gather the rows that this rank needs, [R, H], sources in rank order."""
        num_rows = routing.row_bounds[-1]
        if num_rows > len(self._raw_rows):
            self._rows = torch.empty(2 * num_rows, self._shape.hidden, dtype=self._dtype)
            self._raw_rows = self._as_rows(self._rows)
        for rank, source in enumerate(sources):
            first, last = routing.row_bounds[rank], routing.row_bounds[rank + 1]
            if source.picked and len(source.rows) != last - first:
                reason = f"rank {rank} sent {len(source.rows)} rows, its ids ask for {last - first}"
                raise ExchangeError(self._mesh.fail(reason, ranks=[rank]))
            if first == last:
                continue
            into = self._raw_rows[first:last]
            if len(source.rows) == last - first:
                into[:] = source.rows
            else:
                source.rows.take(routing.row_tokens[first:last] - token_bounds[rank], 0, into, "clip")
            if rank != self.rank:
                self.stats.bytes_received += (last - first) * self._row_bytes
        return self._rows[:num_rows]

    def _take_results(self, peer: int, frame: Frame, handle: ZmqHandle) -> None:
        """Put a far peer's results in their places; a near peer has done so itself."""
        pairs = handle.remote_pairs.get(peer, _NO_PAIRS)
        num_bytes = pairs.size * self._row_bytes
        if len(frame) != TAG_BYTES + num_bytes:
            raise self._malformed(peer, frame, handle.layer, Phase.COMBINE)
        if num_bytes:
            self._slab.results[pairs] = np.ndarray((pairs.size,), self._row_type, frame, TAG_BYTES)

    def _take(self, rows: np.ndarray, index: np.ndarray, into: np.ndarray) -> None:
        """into [n * row_bytes] uint8 = rows[index]."""
        if index.size:
            rows.take(index, 0, np.ndarray((index.size,), self._row_type, into), "clip")

    def _as_rows(self, tensor: torch.Tensor) -> np.ndarray:
        """View a contiguous [n, H] tensor as n items of raw bytes."""
        assert tensor.is_contiguous(), tensor.stride()
        # numpy has no bfloat16.
        array = (tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor).numpy()
        return np.ndarray((len(array),), self._row_type, array)

    def _malformed(self, peer: int, frame: Frame, layer: int, phase: Phase) -> ExchangeError:
        where = f"step {self._mesh.step}, layer {layer}, {phase.name.lower()}"
        reason = f"rank {peer} sent a malformed frame of {len(frame)} bytes at {where}"
        return ExchangeError(self._mesh.fail(reason, ranks=[peer]))


def _prompt_rows(sources: list[_Source], routing: Routing, token_bounds: list[int]) -> torch.Tensor | None:
    """Return [R] bool, the prompt rows of their sources; None if there are none."""
    if not any(source.num_prompt for source in sources):
        return None
    prompt = np.zeros(token_bounds[-1], dtype=bool)
    for start, source in zip(token_bounds, sources, strict=False):
        prompt[start : start + source.num_prompt] = True
    return torch.from_numpy(prompt[routing.row_tokens])
