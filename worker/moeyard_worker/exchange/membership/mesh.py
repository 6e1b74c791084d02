"""The control mesh: strict frames between all pairs of ranks, and a name for every failure.

One thread owns a mesh. A rank that finds a failure agrees with its peers on the failure's name before it raises, so
that all ranks fail at once and for the same reason. After that every call raises this reason again.
"""

import secrets
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import Literal, NoReturn

import zmq

from moeyard_worker.exchange.base import ExchangeError
from moeyard_worker.exchange.membership.agreement import (
    AFTER_STEP,
    OWN_FAULT,
    SETTLED,
    Agreement,
    Finding,
    PoisonFrame,
    cut_reason,
    encode_poison,
    is_poison,
    name_ranks,
    place_of,
    poison_of,
    where_in_step,
)
from moeyard_worker.exchange.membership.frames import (
    NO_LAYER,
    TAG_BYTES,
    Frame,
    Phase,
    Tag,
    decode_tag,
    name_frame,
    pack_tag,
)
from moeyard_worker.exchange.membership.liveness import Signs
from moeyard_worker.exchange.membership.rendezvous import (
    MeshEndpoint,
    check_endpoints,
    check_place,
    greet,
    host_identity,
)
from moeyard_worker.exchange.membership.shared_files import Folder, SharedFile, sweep
from moeyard_worker.exchange.membership.wires import LAST_LOOK_S, MeshLock, Wires

Transport = Literal["shm", "tcp"]

# Room for a frame's tag and counts. The largest payload is smaller than a slab.
FRAME_SLACK_BYTES = 1 << 16
# How often a wait checks whether this rank is leaving, and calls `while_waiting`.
SLICE_S = 0.05
# Share of the deadline for which a round of agreement waits for silent ranks. They receive the settled finding later.
PATIENCE_SHARE = 1 / 8


class Mesh:
    """This rank's connections to its peers. Life: construct (binds), publish `endpoint()`, `connect`, use, `close`.

    rank, world_size, members: ranks are numbers below `world_size`; `members` are the ranks of this epoch (None: all).
    deadline: seconds without a sign of life after which a peer is lost.
    stall: seconds that a living peer has where it may be slow (None: `deadline`): in meetings, where rows go over TCP,
        and after it has sent a sign (`send_sign`).
    patience: seconds that it has elsewhere (None: `stall`).
    transport: "shm" uses unix sockets and shared memory with peers of the same host and TCP with others; "tcp" uses TCP
        with all.
    slab_bytes: shared memory of each rank, 0 for none.
    fingerprint: other text that must be equal on all ranks.
    host_id: replaces the host's identity.
    lock: locks TCP; None admits any connection.

    step: the lockstep step in progress, part of every tag. The owner sets it.
    signs: the signs that peers sent beside their frames.
    failure: why this mesh is poisoned, or None. finding: the agreed ranks and place of that failure.
    leaving: any thread sets it when this rank ends, so that a meeting that waits for peers ends, too.
    while_waiting: called while this rank waits for plans; may raise ExchangeError.
    refused: counts of refused connections by reason.
    one_host: whether all members share a host, known after `connect`.
    own_slab: this rank's shared memory, or None. peer_slabs: the mapped memory of each peer of this host.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        members: Sequence[int] | None = None,
        epoch: int = 0,
        host: str = "127.0.0.1",
        deadline: float = 5.0,
        stall: float | None = None,
        patience: float | None = None,
        transport: Transport = "shm",
        slab_bytes: int = 0,
        fingerprint: str = "",
        host_id: str | None = None,
        lock: MeshLock | None = None,
    ) -> None:
        self.members = tuple(range(world_size) if members is None else sorted(members))
        check_place(rank, world_size, self.members, host=host, deadline=deadline, transport=transport)
        self.rank, self.world_size, self.epoch, self.deadline = rank, world_size, epoch, deadline
        self._stall, self.slab_bytes, self.step = deadline if stall is None else stall, slab_bytes, 0
        self._patience = self._stall if patience is None else patience
        self.signs = Signs(epoch, deadline=deadline, stall=self._stall)
        # The sign that was the last frame sent, and when to repeat it.
        self._last_sign: tuple[Phase | None, float] = (None, 0.0)
        self.failure: str | None = None
        self.finding: Finding | None = None
        self.peer_slabs: dict[int, SharedFile] = {}
        self.own_slab: SharedFile | None = None
        self._folder: Folder | None = None
        self._connected = self._met = self.leaving = self.one_host = False
        self.while_waiting: Callable[[], None] | None = None
        self._shared = transport == "shm" and len(self.members) > 1
        if self._shared:
            sweep()
            self._folder = Folder()
        try:
            if self._shared and slab_bytes:
                self.own_slab = SharedFile.create(slab_bytes)
            self._wires = Wires(
                rank=rank,
                members=self.members,
                host=host,
                ipc_directory=self._folder.path if self._folder else None,
                # Without a stall every wait is as short, so heartbeats only name the dead link of an idle fleet.
                heartbeat_timeout=2 * deadline if stall is None else deadline,
                max_frame_bytes=slab_bytes + FRAME_SLACK_BYTES,
                take_sign=self.signs.take,
                lock=lock,
            )
        except BaseException:
            self._remove_names()
            raise
        self.peers = self._wires.peers
        self.refused = self._wires.refusals.counts
        self._endpoint = MeshEndpoint(
            rank=rank,
            world_size=world_size,
            members=self.members,
            epoch=epoch,
            host_id=host_id or host_identity(),
            fingerprint=f"{transport} {fingerprint}".strip(),
            token=secrets.token_hex(16),
            slab_path=self.own_slab.path if self.own_slab else "",
            slab_bytes=slab_bytes,
            **self._wires.addresses(),
        )

    def endpoint(self) -> MeshEndpoint:
        """Return what the peers need for `connect`."""
        return self._endpoint

    def connect(self, endpoints: Sequence[MeshEndpoint], timeout: float = 20.0) -> None:
        """Connect to every peer, map its memory, exchange handshakes; `endpoints` of all members in rank order.

        Afterwards no file of this mesh has a name. Raises ExchangeError naming the ranks that did not answer within
        `timeout` seconds, or the one that disagrees.
        """
        check_endpoints(endpoints, self._endpoint)
        self.one_host = {endpoint.host_id for endpoint in endpoints} == {self._endpoint.host_id}
        if self.slab_bytes and not (self._shared and self.one_host):
            # Rows of long prompts are a gigabyte a step, and encrypted TCP moves a fifth of that a second.
            self._patience = self._stall
        others = [endpoint for endpoint in endpoints if endpoint.rank != self.rank]
        for endpoint in others:
            self._connect_peer(endpoint)
        wrong = greet(
            self._wires,
            endpoints,
            self._endpoint,
            timeout=timeout,
            poisoned=lambda peer, frame: self._raise_unexpected(peer, frame, self._tag(Phase.HANDSHAKE, None, peer)),
        )
        if wrong is not None:
            self._raise(OWN_FAULT, *wrong)
        # Strangers have been refused by now: a connection that ends from here on is a peer's.
        for endpoint in others:
            self._wires.watch_pulse(endpoint.rank, endpoint.pulse)
        self._connected = True
        self._remove_names()

    def send(self, peer: int, frame: Frame) -> None:
        """Queue one small frame (copied)."""
        self._last_sign = None, 0.0
        if not self._open_wires().send(peer, frame):
            self._raise_undeliverable(peer, frame)

    def send_in_place(self, peer: int, frame: memoryview) -> zmq.MessageTracker:
        """Queue one large frame without copying it: rewrite `frame` only when the tracker is done."""
        self._last_sign = None, 0.0
        tracker = self._open_wires().send_in_place(peer, frame)
        if tracker is None:
            self._raise_undeliverable(peer, frame)
        return tracker

    def send_sign(self, sign: Phase) -> None:
        """Tell all peers, beside the frames that are due, that this rank is slow (BUSY) or waits (WAITING).

        Call it repeatedly meanwhile. It sends once in half a deadline, and never blocks or raises.
        """
        now, (last, again) = perf_counter(), self._last_sign
        if self.failure is None and (sign is not last or now >= again):
            self._last_sign = sign, now + self.deadline / 2
            for peer in self.peers:
                self._wires.send(peer, pack_tag(self.epoch, self.step, NO_LAYER, sign, self.rank))

    def recv_all(self, phase: Phase, *, layer: int | None, since: float) -> list[Frame]:
        """Receive one frame of every peer, by rank (b"" elsewhere), each with exactly the tag of the current step.

        `since` (perf_counter seconds) is when the wait began. Raises ExchangeError naming a peer that is lost, silent
        for too long, or sent another frame.
        """
        frames: list[Frame] = [b""] * self.world_size
        number = NO_LAYER if layer is None else layer
        for peer in self.peers:
            frame = self._open_wires().recv(peer)
            if frame is None:
                frame = self._wait(peer, phase=phase, layer=layer, since=since)
            if frame[:TAG_BYTES] != pack_tag(self.epoch, self.step, number, phase, peer):
                self._raise_unexpected(peer, frame, self._tag(phase, layer, peer))
            frames[peer] = frame
        self._met = True
        return frames

    def gather(self, payload: bytes) -> list[bytes]:
        """Exchange one payload of each rank with all; return them by rank. Every rank calls it, between steps.

        Raises ExchangeError naming a peer that is lost, silent for too long, or somewhere else.
        """
        begun, frame = perf_counter(), pack_tag(self.epoch, self.step, NO_LAYER, Phase.MEETING, self.rank) + payload
        for peer in self.peers:
            self.send(peer, frame)
        payloads = [bytes(theirs[TAG_BYTES:]) for theirs in self.recv_all(Phase.MEETING, layer=None, since=begun)]
        payloads[self.rank] = payload
        return payloads

    def arrived(self) -> dict[int, Frame]:
        """Return the oldest unread frame of every peer that has one. Never blocks; raises as `check_peers`."""
        self.check_peers()
        return {peer: inbox[0] for peer, inbox in self._wires.inbox.items() if inbox}

    def poll_sockets(self) -> list["zmq.Socket[bytes]"]:
        """Return what an idle engine polls; on any event it calls `check_peers`, or `Lockstep.peer_started`."""
        return self._wires.sockets()

    def check_peers(self, at: tuple[int, int, Phase] | None = None) -> None:
        """Raise ExchangeError if a peer is gone or reports a failure. Never blocks. `at`: step, layer, phase."""
        wires = self._open_wires()
        wires.drain()
        self._raise_if_poisoned()
        for peer in sorted(wires.lost):
            how = f"rank {peer} {wires.lost[peer]}"
            if at is not None:
                self.miss([peer], f"{how} at {where_in_step(*at)}", step=at[0], layer=at[1], phase=at[2])
            self._raise(AFTER_STEP, [peer], f"{how} after step {self.step}")

    def fail(self, reason: str, *, planned: bool = False, ranks: Sequence[int] | None = None) -> str:
        """Poison: end this epoch for `reason`; return the reason that all ranks give, which may be another.

        Waits for peers as `_agree` does. The first reason stays. `planned`: no rank is lost. `ranks`: the ranks at
        fault (None: this one).
        """
        return self._settle(AFTER_STEP if planned else OWN_FAULT, () if planned else ranks or [self.rank], reason)

    def miss(self, ranks: Iterable[int], reason: str, *, step: int, layer: int, phase: Phase) -> NoReturn:
        """Poison as `fail` because `ranks` did not send in a phase; raises ExchangeError with the agreed reason."""
        self._raise(place_of(layer, phase), ranks, reason, step=step)

    def close(self) -> None:
        """Close the sockets and drop the shared memory, which lives as long as its views. Safe to call twice."""
        self.failure = self.failure or f"rank {self.rank} has closed its mesh"
        self._wires.close()
        self._remove_names()
        self.own_slab = None
        self.peer_slabs = {}

    def _connect_peer(self, peer: MeshEndpoint) -> None:
        wires = self._wires
        here = self._shared and peer.host_id == self._endpoint.host_id
        if peer.rank < self.rank:
            wires.connect(peer.rank, peer.ipc[self.rank] if here else peer.tcp[self.rank])
        if peer.rank > self.rank and self._shared:
            wires.unbind(self._endpoint.tcp[peer.rank] if here else self._endpoint.ipc[peer.rank])
        if here and peer.slab_path:
            self.peer_slabs[peer.rank] = SharedFile.open(peer.slab_path, peer.slab_bytes)
        if not here:
            wires.read_in_place(peer.rank)

    def _wait(self, peer: int, *, phase: Phase, layer: int | None, since: float) -> Frame:
        """Wait on everything until `peer`, whose frame is due, has sent one."""
        wires = self._open_wires()
        # All ranks have met once each has sent something.
        patience = self._patience if self._met and phase is not Phase.MEETING else self._stall
        while_waiting = self.while_waiting if phase is Phase.PLAN else None
        look = self._stall if phase is not Phase.MEETING and while_waiting is None else SLICE_S
        where, place = where_in_step(self.step, layer, phase), place_of(layer, phase)
        late, happened = set[int](), False
        while True:
            # An end may have been seen before this wait, during the wait for another peer.
            if wires.inbox[peer]:
                return wires.inbox[peer].popleft()
            self._raise_if_poisoned()
            due = [other for other in self.peers if other >= peer and not wires.inbox[other]]
            for other in due:
                if other in wires.lost:
                    self._raise(place, [other], f"rank {other} {wires.lost[other]} at {where}")
            if late and not happened:
                seconds = self.signs.allowed(late, patience)
                self._raise(place, late, f"{name_ranks(late)} silent at {where} ({seconds:.1f} s)")
            if while_waiting is not None:
                while_waiting()
            if self.leaving and phase is Phase.MEETING:
                self._raise(OWN_FAULT, [self.rank], f"rank {self.rank} was stopped at {where}")
            limits, now = {other: max(since + patience, self.signs.until(other)) for other in due}, perf_counter()
            late = {other for other in due if now >= limits[other]}
            happened = wires.poll(LAST_LOOK_S if late else min(look, min(limits.values()) - now))

    def _open_wires(self) -> Wires:
        if self.failure is not None:
            raise ExchangeError(self.failure)
        return self._wires

    def _tag(self, phase: Phase, layer: int | None, source: int) -> Tag:
        return Tag(epoch=self.epoch, step=self.step, layer=layer, phase=phase, source=source)

    def _settle(self, place: int, ranks: Iterable[int], reason: str, *, step: int | None = None) -> str:
        """Agree on what ended the epoch, unless that has been done; this rank found `reason`."""
        if self.failure is None:
            self.failure = reason
            step = self.step if step is None else step
            finding = Finding(step=step, place=place, ranks=tuple(sorted(ranks)), reason=cut_reason(reason))
            if self._connected:
                finding = self._agree(finding)
            else:
                # Ranks that are still connecting have no peers to agree with.
                self._broadcast(PoisonFrame(round=SETTLED, finding=finding))
            self.finding, self.failure = finding, finding.reason
        return self.failure

    def _agree(self, finding: Finding) -> Finding:
        """Return the finding that all ranks name: this rank's own or a smaller one.

        Each round waits for PATIENCE_SHARE of the deadline: a rank that neither speaks nor loses its connection costs
        this once. Other frames are dropped, as their step is lost.
        """
        wires, patience = self._wires, PATIENCE_SHARE * self.deadline
        agreement = Agreement(wires.peers, finding)
        wires.drain()
        limit = perf_counter() + patience
        while True:
            for peer, inbox in wires.inbox.items():
                while inbox:
                    if (poison := poison_of(inbox.popleft(), peer, self.epoch)) is not None:
                        agreement.receive(peer, poison)
            for peer in wires.lost:
                agreement.leave(peer)
            for poison in agreement.advance():
                self._broadcast(poison)
                limit = perf_counter() + patience
            if agreement.settled is not None:
                return agreement.settled
            late = perf_counter() >= limit
            happened = wires.poll(LAST_LOOK_S if late else limit - perf_counter())
            if late and not happened:
                agreement.give_up()

    def _broadcast(self, poison: PoisonFrame) -> None:
        frame = encode_poison(self._tag(Phase.POISON, None, self.rank), poison)
        for peer in self.peers:
            self._wires.send(peer, frame)

    def _raise(self, place: int, ranks: Iterable[int], reason: str, *, step: int | None = None) -> NoReturn:
        raise ExchangeError(self._settle(place, ranks, reason, step=step))

    def _raise_if_poisoned(self) -> None:
        for peer, inbox in self._wires.inbox.items():
            for frame in inbox:
                if is_poison(frame):
                    self._raise_unexpected(peer, frame, self._tag(Phase.POISON, None, peer))

    def _raise_unexpected(self, peer: int, frame: Frame, expected: Tag) -> NoReturn:
        """Join the agreement of a poison frame of `peer`; name any other frame."""
        poison = poison_of(frame, peer, self.epoch)
        if poison is None:
            reason = f"rank {peer} sent the wrong frame: expected {expected}, got {name_frame(frame)}"
            self._raise(place_of(expected.layer, expected.phase), [peer], reason)
        # The frame may have left the inbox. Receiving it twice changes nothing.
        self._open_wires().inbox[peer].appendleft(frame)
        found = poison.finding
        self._raise(found.place, found.ranks, found.reason, step=found.step)

    def _raise_undeliverable(self, peer: int, frame: Frame) -> NoReturn:
        self._wires.drain()
        self._raise_if_poisoned()
        tag = decode_tag(bytes(frame[:TAG_BYTES]))
        where = where_in_step(tag.step, tag.layer, tag.phase)
        end = self._wires.lost.get(peer, "takes no frames")
        self._raise(place_of(tag.layer, tag.phase), [peer], f"rank {peer} {end} at {where}")

    def _remove_names(self) -> None:
        if self.own_slab is not None:
            self.own_slab.unlink()
        if self._folder is not None:
            self._folder.remove()
