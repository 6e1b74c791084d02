"""Choosing and building the exchange of a fleet, in the two phases that a rendezvous needs."""

from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist

from moeyard_worker.config.engine_config import EXCHANGES, ExchangeKind
from moeyard_worker.config.placement import Placement
from moeyard_worker.exchange.base import Exchange
from moeyard_worker.exchange.membership.mesh import Mesh
from moeyard_worker.exchange.membership.wires import MeshLock
from moeyard_worker.exchange.shape import ExchangeShape
from moeyard_worker.exchange.transports.local import LocalExchange
from moeyard_worker.exchange.transports.nccl.exchange import NcclExchange
from moeyard_worker.exchange.transports.nccl.group import TorchGroup
from moeyard_worker.exchange.transports.nvlink.exchange import NvlinkExchange
from moeyard_worker.exchange.transports.nvlink.expert_fetch import FetchOffer
from moeyard_worker.exchange.transports.nvlink.memory import GpuMemory
from moeyard_worker.exchange.transports.zmq_exchange import CPU, ZmqExchange

# Exchanges that move rows without the mesh, so that it needs no room for rows.
_BESIDE_MESH = ("local", "nvlink", "nccl")


def resolve_kind(kind: str, world_size: int) -> ExchangeKind:
    """Return the meaning of "auto": "local" for one rank, else "zmq" (shared memory within a host, TCP between hosts).

    `engine/assembly/topology.py` chooses faster ones for GPUs.

    Raises ValueError for an unknown kind, or for "local" with more than one rank.
    """
    if kind not in EXCHANGES:
        raise ValueError(f"unknown exchange {kind!r}, known: {', '.join(EXCHANGES)}")
    if kind == "local" and world_size > 1:
        raise ValueError(f"the local exchange serves one rank, not {world_size}")
    if kind == "auto":
        return "local" if world_size == 1 else "zmq"
    return cast(ExchangeKind, kind)


def missing_nccl() -> str | None:
    """Return why this torch has no NCCL, or None."""
    if not dist.is_available() or not dist.is_nccl_available():
        return f"torch {torch.__version__} has no NCCL"
    return None


def build_mesh(
    kind: str,
    *,
    shape: ExchangeShape,
    rank: int,
    world_size: int,
    members: Sequence[int] | None = None,
    placement: Placement | None = None,
    weights: str = "",
    epoch: int = 0,
    host: str = "127.0.0.1",
    deadline: float = 5.0,
    stall: float | None = None,
    patience: float | None = None,
    host_id: str | None = None,
    lock: MeshLock | None = None,
) -> Mesh:
    """First phase, on every rank: bind. Publish `mesh.endpoint()`, then call `mesh.connect` with all endpoints.

    Arguments are those of `Mesh`. If `placement` and `weights` (a digest) are given, they must be equal on all ranks.
    """
    kind = resolve_kind(kind, world_size)
    return Mesh(
        rank=rank,
        world_size=world_size,
        members=members,
        epoch=epoch,
        host=host,
        deadline=deadline,
        stall=stall,
        patience=patience,
        transport="tcp" if kind == "zmq-tcp" else "shm",
        slab_bytes=0 if kind in _BESIDE_MESH else shape.slab_bytes,
        fingerprint=shape.fingerprint
        + (f" placement={placement.fingerprint}" if placement else "")
        + (f" weights={weights}" if weights else "")
        + (f" exchange={kind}" if kind in ("nvlink", "nccl") else ""),
        host_id=host_id,
        lock=lock,
    )


def build_exchange(
    kind: str,
    *,
    mesh: Mesh,
    shape: ExchangeShape,
    placement: Placement,
    device: torch.device = CPU,
    seconds: float = 5.0,
    drafts: bool = False,
    fetch_offer: FetchOffer | None = None,
) -> Exchange:
    """Second phase: the exchange over a connected mesh. nvlink and nccl begin with `Exchange.attach`.

    device: where this rank computes.
    seconds: how long its launches wait for a peer's, if they wait at all.
    drafts: whether steps may have exchanges for drafts, too.
    fetch_offer: what this rank of an nvlink exchange offers to its peers' expert fetches.
    """
    kind = resolve_kind(kind, mesh.world_size)
    if kind == "local":
        return LocalExchange()
    if kind == "nvlink":
        memory = GpuMemory(shape.window(mesh.world_size).num_bytes, device)
        fetch = None
        if fetch_offer is not None:
            shares = fetch_offer.memory is not None
            buffer = GpuMemory(fetch_offer.shape.num_bytes, device, "moeyard-fetch") if shares else None
            fetch = (fetch_offer, buffer)
        return NvlinkExchange(
            memory,
            rank=mesh.rank,
            world_size=mesh.world_size,
            shape=shape,
            placement=placement,
            seconds=seconds,
            drafts=drafts,
            fetch=fetch,
        )
    if kind == "nccl":
        return NcclExchange(
            TorchGroup(device, captures=device.type == "cuda"),
            rank=mesh.rank,
            world_size=mesh.world_size,
            shape=shape,
            placement=placement,
            seconds=seconds,
            device=device,
        )
    return ZmqExchange(mesh, shape=shape, placement=placement, device=device)
