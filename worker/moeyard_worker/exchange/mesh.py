"""The control mesh: strict frames between all pairs of ranks, and a name for every failure.

One thread owns a mesh. A rank that finds a failure agrees with its peers on what to call it before it raises, so that
all ranks fail at once and with the same reason; after that every call raises that reason again.
"""

import secrets
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import Literal, NoReturn

import zmq

from moeyard_worker.exchange.base import ExchangeError
from moeyard_worker.exchange.finding import AFTER_STEP, OWN_FAULT, Finding, cut_reason
from moeyard_worker.exchange.frames import NO_LAYER, TAG_BYTES, Frame, Phase, Tag, decode_tag, pack_tag
from moeyard_worker.exchange.leftovers import Folder, sweep
from moeyard_worker.exchange.naming import is_poison, name_frame, name_ranks, place_of, told_by, where_in_step
from moeyard_worker.exchange.poisoning import agree_on_finding, tell_settled
from moeyard_worker.exchange.rendezvous import MeshEndpoint, check_endpoints, check_place, greet, host_identity
from moeyard_worker.exchange.signs import Signs
from moeyard_worker.exchange.slab import SharedFile
from moeyard_worker.exchange.wires import LAST_LOOK_S, MeshLock, Wires

Transport = Literal["shm", "tcp"]

FRAME_SLACK_BYTES = 1 << 16  # for a frame's tag and counts beside the largest payload, which is smaller than a slab
SLICE_S = 0.05  # a wait looks so often whether this rank is leaving, or at what is `beside`
# A round of agreeing waits so much of the deadline for ranks that do not speak; who looks later hears what was settled.
PATIENCE_SHARE = 1 / 8


class Mesh:
    """This rank's connections to its peers. Life: construct (binds), publish `endpoint()`, `connect`, use, `close`.

    Ranks are numbers below `world_size`; `members` are those of this epoch (None: all). A peer without a sign of life
    for `deadline` seconds is lost. One that lives is waited for up to `stall` seconds (None: `deadline`) where it may
    be slow: when it meets the others, where rows go over TCP, and once it has said that it will be (`say`). Else up to
    `patience` seconds (None: `stall`). `transport` "shm" uses unix sockets and shared memory with peers of the same
    host and TCP with others; "tcp" TCP with all. `slab_bytes` is the size of the memory each rank shares, 0 if no rows
    go this way, `fingerprint` whatever else must be equal on all ranks. `host_id` overrides what tells hosts apart.
    `lock` is on TCP, None lets anyone in; `refused` counts by reason who was not.

    step: the lockstep step in progress, set by the owner, part of every tag. signs: what peers say beside their frames.
    failure: the reason this mesh is poisoned, or None; finding: with it the ranks and the place, as all agreed.
    leaving: for any thread to set when this rank ends: a meeting that waits for peers ends too.
    beside: what is called while plans are waited for, and may raise ExchangeError.
    peer_slabs: the mapped memory of each peer of this host; own_slab: this rank's, or None.
    """

    def __init__(
        self, *, rank: int, world_size: int, members: Sequence[int] | None = None, epoch: int = 0,
        host: str = "127.0.0.1", deadline: float = 5.0, stall: float | None = None, patience: float | None = None,
        transport: Transport = "shm", slab_bytes: int = 0, fingerprint: str = "", host_id: str | None = None,
        lock: MeshLock | None = None,
    ) -> None:  # fmt: skip
        self.members = tuple(range(world_size) if members is None else sorted(members))
        check_place(rank, world_size, self.members, host=host, deadline=deadline, transport=transport)
        self.rank, self.world_size, self.epoch, self.deadline = rank, world_size, epoch, deadline
        self._stall, self.slab_bytes, self.step = deadline if stall is None else stall, slab_bytes, 0
        self._patience = self._stall if patience is None else patience
        self.signs = Signs(epoch, deadline=deadline, stall=self._stall)
        # What was said last, if nothing else since, and when it is said again.
        self._said: tuple[Phase | None, float] = (None, 0.0)
        self.failure: str | None = None
        self.finding: Finding | None = None
        self.peer_slabs: dict[int, SharedFile] = {}
        self.own_slab: SharedFile | None = None
        self._folder: Folder | None = None
        self._wires: Wires | None = None
        self._connected = self._met = self.leaving = False
        self.beside: Callable[[], None] | None = None
        shared = self._shared = transport == "shm" and len(self.members) > 1
        if shared:
            sweep()
            self._folder = Folder()
        try:
            if shared and slab_bytes:
                self.own_slab = SharedFile.create(slab_bytes)
            if len(self.members) > 1:
                self._wires = Wires(
                    rank=rank, members=self.members, host=host,
                    ipc_directory=self._folder.path if self._folder else None,
                    # Where every wait is as short, it only names the dead link of an idle fleet.
                    heartbeat_timeout=2 * deadline if stall is None else deadline,
                    max_frame_bytes=slab_bytes + FRAME_SLACK_BYTES, hear=self.signs.hear, lock=lock,
                )  # fmt: skip
        except BaseException:
            self.close()
            raise
        self.peers: tuple[int, ...] = self._wires.peers if self._wires else ()
        self.one_host = False  # known from `connect` on
        self.refused: dict[str, int] = self._wires.refusals.counts if self._wires else {}
        self._endpoint = MeshEndpoint(
            rank=rank, world_size=world_size, members=self.members, epoch=epoch,
            host_id=host_id or host_identity(),
            fingerprint=f"{transport} {fingerprint}".strip(),
            token=secrets.token_hex(16),
            slab_path=self.own_slab.path if self.own_slab else "",
            slab_bytes=slab_bytes,
            **(self._wires.addresses() if self._wires else {"tcp": ("",), "ipc": ("",)}),
        )  # fmt: skip

    def endpoint(self) -> MeshEndpoint:
        """What the peers need for `connect`."""
        return self._endpoint

    def connect(self, endpoints: Sequence[MeshEndpoint], timeout: float = 20.0) -> None:
        """Connect to every peer, map its memory, exchange handshakes; `endpoints` of all members in rank order.

        Then no file of this mesh has a name. Raises ExchangeError naming the ranks that did not answer within `timeout`
        seconds, or the one that disagrees.
        """
        check_endpoints(endpoints, self._endpoint)
        self.one_host = {endpoint.host_id for endpoint in endpoints} == {self._endpoint.host_id}
        if self.slab_bytes and not (self._shared and self.one_host):
            # A step's rows go over TCP: encrypted, those of long prompts are a gigabyte, at a fifth of that a second.
            self._patience = self._stall
        if self._wires is None:
            return
        for endpoint in endpoints:
            if endpoint.rank != self.rank:
                self._connect_peer(self._wires, endpoint)
        wrong = greet(
            self._wires, endpoints, self._endpoint, timeout=timeout,
            poisoned=lambda peer, said: self._raise_unexpected(peer, said, self._tag(Phase.HANDSHAKE, None, peer)),
        )  # fmt: skip
        if wrong is not None:
            self._raise(OWN_FAULT, *wrong)
        # Whoever is not of this fleet has been told apart: what ends from here on is a peer's.
        for endpoint in endpoints:
            if endpoint.rank != self.rank:
                self._wires.feel(endpoint.rank, endpoint.pulse)
        self._connected = True
        self._remove_names()

    def send(self, peer: int, frame: Frame) -> None:
        """Queue one small frame (copied)."""
        self._said = None, 0.0
        if not self._open_wires().send(peer, frame):
            self._raise_undeliverable(peer, frame)

    def send_in_place(self, peer: int, frame: memoryview) -> zmq.MessageTracker:
        """Queue one large frame without copying it: rewrite `frame` only when the tracker is done."""
        self._said = None, 0.0
        tracker = self._open_wires().send_in_place(peer, frame)
        if tracker is None:
            self._raise_undeliverable(peer, frame)
        return tracker

    def say(self, sign: Phase) -> None:
        """Tell all peers, beside the frames that are due, that this rank will be slow (BUSY), or waits (WAITING). To be
        repeated as long as it is so, however often: they hear it once in half a deadline. Never blocks or raises."""
        now, (said, again) = perf_counter(), self._said
        if self.failure is None and self._wires is not None and (sign is not said or now >= again):
            self._said = sign, now + self.deadline / 2
            for peer in self.peers:
                self._wires.send(peer, pack_tag(self.epoch, self.step, NO_LAYER, sign, self.rank))

    def recv_all(self, phase: Phase, *, layer: int | None, since: float) -> list[Frame]:
        """One frame of every peer, by rank (b"" at other places), each with exactly the tag of the current step.

        `since` (perf_counter seconds) is when the wait began. Raises ExchangeError naming a peer that is lost, silent
        for too long, or sent anything else.
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

    def arrived(self) -> dict[int, Frame]:
        """The oldest frame of every peer that has one, left unread. Never blocks; raises as `check_peers`."""
        self.check_peers()
        return {peer: inbox[0] for peer, inbox in self._wires.inbox.items() if inbox} if self._wires else {}

    def poll_sockets(self) -> list["zmq.Socket[bytes]"]:
        """What an idle engine polls for input; on any event it calls `check_peers`, or `Lockstep.peer_started`."""
        return self._wires.sockets() if self._wires else []

    def check_peers(self, at: tuple[int, int, Phase] | None = None) -> None:
        """Raise ExchangeError when a peer is gone, or told of a failure; never blocks. `at`: step, layer, phase."""
        if self.failure is not None:
            raise ExchangeError(self.failure)
        if self._wires is None:
            return
        self._wires.drain()
        self._raise_if_told(self._wires)
        for peer in sorted(self._wires.lost):
            how = f"rank {peer} {self._wires.lost[peer]}"
            if at is not None:
                self.miss([peer], f"{how} at {where_in_step(*at)}", step=at[0], layer=at[1], phase=at[2])
            self._raise(AFTER_STEP, [peer], f"{how} after step {self.step}")

    def fail(self, reason: str, *, planned: bool = False, ranks: Sequence[int] | None = None) -> str:
        """Poison: end this epoch for `reason`; returns the reason that all ranks give, which may be another. Waits for
        peers as `agree_on_finding` says. The first reason stays. `planned`: nobody is lost. `ranks`: who is at fault
        (None: this one)."""
        return self._settle(AFTER_STEP if planned else OWN_FAULT, () if planned else ranks or [self.rank], reason)

    def miss(self, ranks: Iterable[int], reason: str, *, step: int, layer: int, phase: Phase) -> NoReturn:
        """Poison as `fail` for what peers did not send in a phase; raises ExchangeError with what all ranks name."""
        self._raise(place_of(layer, phase), ranks, reason, step=step)

    def close(self) -> None:
        """Close the sockets, drop the shared memory (it lives under views still held). Safe to call twice."""
        self.failure = self.failure or f"rank {self.rank} has closed its mesh"
        if self._wires is not None:
            self._wires.close()
            self._wires = None
        self._remove_names()
        self.own_slab = None
        self.peer_slabs = {}

    def _connect_peer(self, wires: Wires, peer: MeshEndpoint) -> None:
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
        """Wait on everything until `peer`, whose frame is due, has one."""
        wires = self._open_wires()
        # All have met when each has sent something: also where its plan is the first that a peer hears of it.
        patience = self._patience if self._met and phase is not Phase.MEETING else self._stall
        beside = self.beside if phase is Phase.PLAN else None
        look = self._stall if phase is not Phase.MEETING and beside is None else SLICE_S
        where, place = where_in_step(self.step, layer, phase), place_of(layer, phase)
        late, happened = set[int](), False
        while True:
            # Before the first wait too: an end may have been seen while another peer was waited for.
            if wires.inbox[peer]:
                return wires.inbox[peer].popleft()
            self._raise_if_told(wires)
            due = [other for other in self.peers if other >= peer and not wires.inbox[other]]
            for other in due:
                if other in wires.lost:
                    self._raise(place, [other], f"rank {other} {wires.lost[other]} at {where}")
            if late and not happened:
                seconds = self.signs.allowed(late, patience)
                self._raise(place, late, f"{name_ranks(late)} silent at {where} ({seconds:.1f} s)")
            if beside is not None:
                beside()
            if self.leaving and phase is Phase.MEETING:
                self._raise(OWN_FAULT, [self.rank], f"rank {self.rank} was stopped at {where}")
            limits, now = {other: max(since + patience, self.signs.until(other)) for other in due}, perf_counter()
            late = {other for other in due if now >= limits[other]}
            happened = wires.poll(LAST_LOOK_S if late else min(look, min(limits.values()) - now))

    def _open_wires(self) -> Wires:
        if self.failure is not None:
            raise ExchangeError(self.failure)
        assert self._wires is not None, "a mesh of one rank has nobody to talk to"
        return self._wires

    def _tag(self, phase: Phase, layer: int | None, source: int) -> Tag:
        return Tag(epoch=self.epoch, step=self.step, layer=layer, phase=phase, source=source)

    def _settle(self, place: int, ranks: Iterable[int], reason: str, *, step: int | None = None) -> str:
        """Agree on what ended the fleet, unless that has been done; this rank found `reason`."""
        if self.failure is None:
            self.failure = reason
            step = self.step if step is None else step
            finding = Finding(step=step, place=place, ranks=tuple(sorted(ranks)), reason=cut_reason(reason))
            tag = self._tag(Phase.POISON, None, self.rank)
            if self._wires is not None and self._connected:
                finding = agree_on_finding(self._wires, tag, finding, patience=PATIENCE_SHARE * self.deadline)
            elif self._wires is not None:
                tell_settled(self._wires, tag, finding)
            self.finding, self.failure = finding, finding.reason
        return self.failure

    def _raise(self, place: int, ranks: Iterable[int], reason: str, *, step: int | None = None) -> NoReturn:
        raise ExchangeError(self._settle(place, ranks, reason, step=step))

    def _raise_if_told(self, wires: Wires) -> None:
        for peer, inbox in wires.inbox.items():
            for frame in inbox:
                if is_poison(frame):
                    self._raise_unexpected(peer, frame, self._tag(Phase.POISON, None, peer))

    def _raise_unexpected(self, peer: int, frame: Frame, expected: Tag) -> NoReturn:
        """Join the agreement that a poison frame of `peer` belongs to; call any other frame by its name."""
        told = told_by(frame, peer, self.epoch)
        if told is None:
            reason = f"rank {peer} sent the wrong frame: expected {expected}, got {name_frame(frame)}"
            self._raise(place_of(expected.layer, expected.phase), [peer], reason)
        # It may be in the inbox no more, and to hear it twice changes nothing.
        self._open_wires().inbox[peer].appendleft(frame)
        found = told.finding
        self._raise(found.place, found.ranks, found.reason, step=found.step)

    def _raise_undeliverable(self, peer: int, frame: Frame) -> NoReturn:
        assert self._wires is not None
        self._wires.drain()
        self._raise_if_told(self._wires)
        tag = decode_tag(bytes(frame[:TAG_BYTES]))
        where = where_in_step(tag.step, tag.layer, tag.phase)
        end = self._wires.lost.get(peer, "takes no frames")
        self._raise(place_of(tag.layer, tag.phase), [peer], f"rank {peer} {end} at {where}")

    def _remove_names(self) -> None:
        if self._wires is not None:
            self._wires.unlink()
        if self.own_slab is not None:
            self.own_slab.unlink()
        if self._folder is not None:
            self._folder.remove()
