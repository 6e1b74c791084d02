"""How ranks find each other: the published endpoint of a rank, and the checks before it is used."""

import os
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from moeyard_worker.exchange.base import ExchangeError
from moeyard_worker.exchange.membership.agreement import is_poison, name_ranks
from moeyard_worker.exchange.membership.frames import Frame, FrameError, Handshake, decode_handshake, encode_handshake
from moeyard_worker.exchange.membership.shared_files import SHARED_DIRECTORY
from moeyard_worker.exchange.membership.wires import Wires

# How often a handshake is tried while its peer connects, which causes no event to wait for.
_CONNECT_SLICE_S = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshEndpoint:
    """The addresses by which peers reach a rank, as plain values that can be pickled or sent as a msgpack map.

    tcp, ipc: the addresses bound for each rank; "" for one that does not connect. The higher rank of a pair connects.
    pulse: address that answers heartbeats; "" in a fleet of one.
    slab_path: "" if the rank shares no memory.
    token: proof of possession of this object.
    """

    rank: int
    world_size: int
    members: tuple[int, ...]
    epoch: int
    host_id: str
    fingerprint: str
    token: str
    tcp: tuple[str, ...]
    ipc: tuple[str, ...]
    slab_path: str
    slab_bytes: int
    pulse: str = ""


def host_identity() -> str:
    """Equal for two processes exactly when they can share memory: same boot, same hostname, same /dev/shm mount."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{socket.gethostname()}:{os.stat(SHARED_DIRECTORY).st_dev}"


def check_endpoints(endpoints: Sequence[MeshEndpoint], own: MeshEndpoint) -> None:
    """Raise ExchangeError when `endpoints` is not all members in rank order, naming the first rank that disagrees."""
    if len(endpoints) != len(own.members):
        raise ExchangeError(f"{len(endpoints)} endpoints for {len(own.members)} ranks")
    for place, (rank, endpoint) in enumerate(zip(own.members, endpoints, strict=True)):
        if endpoint.rank != rank:
            raise ExchangeError(f"endpoint {place} is of rank {endpoint.rank}: give them in rank order")
        for name in ("world_size", "members", "epoch", "fingerprint", "slab_bytes"):
            theirs, ours = getattr(endpoint, name), getattr(own, name)
            if theirs != ours:
                raise ExchangeError(f"rank {rank} has {name} {theirs!r}, rank {own.rank} has {ours!r}")
    if endpoints[own.members.index(own.rank)] != own:
        raise ExchangeError(f"endpoint {own.rank} is not the one rank {own.rank} published")


def handshake_for(peer: MeshEndpoint, own: MeshEndpoint) -> bytes:
    """Return the first frame to `peer`."""
    return encode_handshake(Handshake(rank=own.rank, world_size=own.world_size, epoch=own.epoch, token=peer.token))


def check_handshake(frame: bytes | memoryview, peer: int, own: MeshEndpoint) -> str | None:
    """Return why the first frame of the connection to `peer` is wrong, or None. The text omits the secret token."""
    try:
        handshake = decode_handshake(bytes(frame))
    except FrameError as error:
        return f"rank {peer} sent no handshake: {error}"
    if handshake == Handshake(rank=peer, world_size=own.world_size, epoch=own.epoch, token=own.token):
        return None
    theirs = f"rank {handshake.rank} of {handshake.world_size}, epoch {handshake.epoch}"
    theirs += "" if handshake.token == own.token else ", without the token"
    return f"what connected as rank {peer} of {own.world_size}, epoch {own.epoch}, is {theirs}"


def greet(
    wires: Wires,
    endpoints: Sequence[MeshEndpoint],
    own: MeshEndpoint,
    *,
    timeout: float,
    poisoned: Callable[[int, Frame], object],
) -> tuple[Iterable[int], str] | None:
    """Exchange handshakes with all peers, and return None when all have answered.

    Otherwise return the ranks at fault and the reason. `poisoned` raises the failure that a first frame reports.
    """
    limit = perf_counter() + timeout
    unsent, unheard = set(wires.peers), set(wires.peers)
    handshakes = {endpoint.rank: handshake_for(endpoint, own) for endpoint in endpoints}
    while True:
        unsent -= {peer for peer in unsent if wires.send(peer, handshakes[peer])}
        if not unsent and not unheard:
            return None
        remaining = limit - perf_counter()
        wires.poll(min(remaining, _CONNECT_SLICE_S) if unsent else remaining)
        for peer in sorted(unheard):
            if wires.inbox[peer]:
                frame = wires.inbox[peer].popleft()
                if is_poison(frame):
                    poisoned(peer, frame)
                if (complaint := check_handshake(frame, peer, own)) is not None:
                    return [peer], complaint
                unheard.discard(peer)
            elif peer in wires.lost:
                return [peer], f"rank {peer} {wires.lost[peer]} while connecting"
        if remaining <= 0 and (who := unsent | unheard):
            return who, f"{name_ranks(who)} did not answer within {timeout:.1f} s of connecting"


def check_place(
    rank: int, world_size: int, members: Sequence[int], *, host: str, deadline: float, transport: str
) -> None:
    """Raise ValueError for a rank outside its fleet, no deadline, an unknown transport, or a wildcard host."""
    if transport not in ("shm", "tcp"):
        raise ValueError(f"transport must be shm or tcp, got {transport!r}")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} of {world_size}")
    if rank not in members or not set(members) <= set(range(world_size)):
        raise ValueError(f"rank {rank} of {world_size}, of whom {members} are there")
    if deadline <= 0:
        raise ValueError(f"the step deadline must be positive, got {deadline}")
    if host in ("", "*", "0.0.0.0", "::"):
        raise ValueError(f"ranks bind to one concrete address, got {host!r}")
