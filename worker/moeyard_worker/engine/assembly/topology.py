"""The exchange of a rank: what `auto` stands for and why, why a named one cannot be, and the mesh that it needs."""

from collections.abc import Sequence
from dataclasses import replace

from moeyard_worker.config.engine_config import STALL, EngineConfig, ExchangeKind, ExpertFetch
from moeyard_worker.config.nccl_config import keep_to_loopback
from moeyard_worker.config.placement import Placement
from moeyard_worker.config.worker_spec import WorkerSpec
from moeyard_worker.engine.assembly.device import Device
from moeyard_worker.exchange.factory import build_mesh, missing_nccl, resolve_kind
from moeyard_worker.exchange.membership.mesh import Mesh
from moeyard_worker.exchange.membership.wires import MeshLock
from moeyard_worker.exchange.shape import ExchangeShape

# Exchanges that `auto` tries, in order, for several GPUs of one host; the last always works. Graphs hold
# "nccl" in steps without prompts; over "zmq" these are launched, and prompts take 40 times as long (docs/gpu.md).
_AUTO: tuple[ExchangeKind, ...] = ("nvlink", "nccl", "zmq")
# The same on several hosts. "nccl" is asked for by name there: it never ran between them, where its
# variables must name a network, on which it neither encrypts nor asks who speaks (docs/security.md).
_AUTO_APART: tuple[ExchangeKind, ...] = ("nvlink", "zmq")


def settle_exchange(spec: WorkerSpec, device: Device, shape: ExchangeShape) -> tuple[WorkerSpec, str]:
    """Return the spec with the settled exchange and expert fetch, and the reason in words. All ranks of a fleet find
    the same.

    Raises ValueError, in one line, where one that was asked for cannot be.
    """
    config = spec.config
    asked, count = config.exchange, config.num_workers
    kind: ExchangeKind
    if asked == "auto" and count > 1 and config.device != "cpu":
        kind, why = _choose(spec, device, shape, _AUTO if spec.peer_gpus else _AUTO_APART)
        if kind == "nccl":
            keep_to_loopback()
    else:
        kind, why = resolve_kind(asked, count), "asked for"
        if (problem := _problem(kind, spec, device, shape)) is not None:
            raise ValueError(f"--exchange {kind} cannot be: {problem}; use --exchange zmq")
        if kind == "zmq" and config.device == "cpu":
            why = "ranks compute on CPUs"
        elif asked == "auto":
            why = "one rank"
    config = replace(config, exchange=kind)
    return replace(spec, config=replace(config, expert_fetch=_settle_fetch(config))), why


def patience(config: EngineConfig) -> float:
    """Seconds that a rank's device waits for a peer's in an exchange, or its host for its own device to come to one.

    One deadline, except where the device waits by itself: the host cannot tell it that a peer is compiling a step that
    was not captured.
    """
    launched = config.exchange == "nvlink" and (config.enforce_eager or config.num_drafts > 0)
    return config.step_deadline * (STALL if launched else 1)


def host_patience(config: EngineConfig) -> float:
    """Seconds that a rank's host waits for a frame of a peer that lives and has not said that it is compiling.

    It is one deadline if hosts of GPUs meet in the exchanges of every step (for `Mesh`, only if no rows go over TCP).
    On a CPU a layer may take long, because it reads cold experts. Over nvlink, a peer's plan may come only after its
    device has waited for others, and that wait ends by itself.
    """
    meet = config.device != "cpu" and config.exchange != "nvlink"
    return config.step_deadline * (1 if meet else STALL)


def bind_mesh(spec: WorkerSpec, shape: ExchangeShape, epoch: int, placement: Placement) -> Mesh:
    """Bind the rank's mesh of an epoch, not yet connected, with the ranks that own experts then."""
    config, keys = spec.config, spec.keys
    return build_mesh(
        # By the fleet's first size: a fleet with one rank left may have peers again.
        resolve_kind(config.exchange, config.num_workers),
        shape=shape,
        rank=spec.rank,
        world_size=max(placement.ranks) + 1,
        members=placement.ranks,
        placement=placement,
        epoch=epoch,
        host=spec.host,
        deadline=config.step_deadline,
        stall=STALL * config.step_deadline,
        patience=host_patience(config),
        lock=None if keys is None else MeshLock(keys=keys, encrypt=config.mesh_encryption),
    )


def _settle_fetch(config: EngineConfig) -> ExpertFetch:
    """Return the fetch mode for the settled exchange; "auto" then means shared if ranks find that they can.

    Raises ValueError, in one line, where it was asked for and cannot be.
    """
    if config.exchange == "nvlink" and config.num_workers > 1:
        return config.expert_fetch
    if config.expert_fetch == "shared":
        why = "there is one rank" if config.num_workers == 1 else f"the exchange is {config.exchange}, not nvlink"
        raise ValueError(f"--expert-fetch shared cannot be: {why}; use --expert-fetch alone")
    return "alone"


def _choose(
    spec: WorkerSpec, device: Device, shape: ExchangeShape, kinds: Sequence[ExchangeKind]
) -> tuple[ExchangeKind, str]:
    """The first of `kinds` that can be: why it can, or why those before cannot."""
    problems = list[str]()
    for kind in kinds:
        problem = _problem(kind, spec, device, shape)
        if problem is None:
            break
        problems.append(f"{kind}: {problem}" if problems else problem)
    return kind, "; ".join(problems) or f"{spec.config.num_workers} GPUs of one host that reach each other"


def _problem(kind: ExchangeKind, spec: WorkerSpec, device: Device, shape: ExchangeShape) -> str | None:
    """Return why rows cannot go from GPU to GPU by such an exchange, or None."""
    if kind not in ("nvlink", "nccl"):
        return None
    if kind == "nccl":
        return "steps that verify drafts have no such exchange so far" if spec.config.num_drafts else missing_nccl()
    if spec.config.num_workers > 1:
        if not spec.peer_gpus:
            return "the workers are on several hosts"
        if (problem := device.unreachable(spec.peer_gpus)) is not None:
            return problem
    try:
        shape.window(spec.config.num_workers)
    except ValueError as error:
        return str(error)
    return None
