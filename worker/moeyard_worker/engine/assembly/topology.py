"""The choice of a rank's exchange and its reason, the check of an exchange that a flag names, and the mesh."""

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

# Exchanges that `auto` tries, in order, for several GPUs of one host. The last always works. Graphs hold "nccl" in
# steps without prompts. Over "zmq" these steps are launched, and prompts take 40 times as long (docs/journal.md).
_AUTO: tuple[ExchangeKind, ...] = ("nvlink", "nccl", "zmq")
# The same on several hosts. There "nccl" needs its flag: it was never run between hosts, its variables must name a
# network, and it neither encrypts nor authenticates (docs/security.md).
_AUTO_APART: tuple[ExchangeKind, ...] = ("nvlink", "zmq")


def settle_exchange(spec: WorkerSpec, device: Device, shape: ExchangeShape) -> tuple[WorkerSpec, str]:
    """Return the spec with the chosen exchange and expert fetch, and the reason. All ranks of a fleet choose the same.

    Raises ValueError, in one line, if the exchange of a flag is not possible.
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
    """Return the seconds that a device waits for a peer's device, or a host for its own device, in an exchange.

    It is one deadline, except where the device waits by itself: the host cannot tell it that a peer compiles a step
    that was not captured.
    """
    unknown = config.enforce_eager or config.num_drafts > 0 or config.expert_host_store == "none"
    launched = config.exchange == "nvlink" and unknown
    return config.step_deadline * (STALL if launched else 1)


def host_patience(config: EngineConfig) -> float:
    """Return the seconds that a host waits for a frame of a living peer that has not reported that it compiles.

    It is one deadline if hosts of GPUs meet in the exchanges of every step (for `Mesh`, only if no rows go over TCP).
    Where the files are the store of experts, as on a CPU, a layer that reads them may take long. Over nvlink, a peer's
    plan may come only after its device has waited for others, and that wait ends by itself.
    """
    meet = config.device != "cpu" and config.exchange != "nvlink" and config.expert_host_store != "none"
    return config.step_deadline * (1 if meet else STALL)


def bind_mesh(spec: WorkerSpec, shape: ExchangeShape, epoch: int, placement: Placement, weights: str) -> Mesh:
    """Bind the rank's mesh of an epoch, not yet connected. Its members are the ranks that own experts then.

    weights: a digest of the weights. Ranks with other weights are refused.
    """
    config, keys = spec.config, spec.keys
    return build_mesh(
        # By the fleet's first size, because a fleet with one remaining rank may have peers again.
        resolve_kind(config.exchange, config.num_workers),
        shape=shape,
        rank=spec.rank,
        world_size=max(placement.ranks) + 1,
        members=placement.ranks,
        placement=placement,
        weights=weights,
        epoch=epoch,
        host=spec.host,
        deadline=config.step_deadline,
        stall=STALL * config.step_deadline,
        patience=host_patience(config),
        lock=None if keys is None else MeshLock(keys=keys, encrypt=config.mesh_encryption),
    )


def _settle_fetch(config: EngineConfig) -> ExpertFetch:
    """Return the fetch mode for the chosen exchange. "auto" means shared if ranks find that they can.

    Raises ValueError, in one line, if the mode of a flag is not possible.
    """
    if (store := config.expert_host_store) in ("none", "missing"):
        if config.expert_fetch == "shared":
            raise ValueError(f"--expert-fetch shared needs copies of all experts, not --expert-host-store {store}")
        return "alone"
    if config.exchange == "nvlink" and config.num_workers > 1:
        return config.expert_fetch
    if config.expert_fetch == "shared":
        why = "there is one rank" if config.num_workers == 1 else f"the exchange is {config.exchange}, not nvlink"
        raise ValueError(f"--expert-fetch shared cannot be: {why}; use --expert-fetch alone")
    return "alone"


def _choose(
    spec: WorkerSpec, device: Device, shape: ExchangeShape, kinds: Sequence[ExchangeKind]
) -> tuple[ExchangeKind, str]:
    """Return the first possible kind, and why it is possible or why the kinds before it are not."""
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
