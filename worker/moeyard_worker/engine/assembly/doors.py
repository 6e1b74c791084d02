"""Where a rank listens: for its peers, for routers and for Prometheus, each behind its lock."""

from moeyard_worker.config.engine_config import STALL
from moeyard_worker.config.placement import Placement
from moeyard_worker.config.worker_spec import WorkerSpec
from moeyard_worker.engine.assembly.topology import host_patience
from moeyard_worker.engine.loop.frontend import Frontend
from moeyard_worker.engine.loop.metrics import WorkerMetrics
from moeyard_worker.exchange.factory import build_mesh, resolve_kind
from moeyard_worker.exchange.mesh import Mesh
from moeyard_worker.exchange.shape import ExchangeShape
from moeyard_worker.exchange.wires import MeshLock


def bind_mesh(spec: WorkerSpec, shape: ExchangeShape, epoch: int, placement: Placement) -> Mesh:
    """The rank's mesh of an epoch, which nobody has met yet: of the ranks that own experts then."""
    config, keys = spec.config, spec.keys
    return build_mesh(
        # Of the fleet as it began: with one rank left it is still one that had peers, and may have them again.
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


def bind_frontend(spec: WorkerSpec, max_model_len: int) -> Frontend:
    """The rank's socket for routers, which may ask for sequences of so many tokens."""
    return Frontend(spec.host, deadline=spec.config.step_deadline, max_model_len=max_model_len, keys=spec.keys)


def serve_metrics(spec: WorkerSpec) -> tuple[WorkerMetrics, int]:
    """The rank's metrics and the port they are served at. Raises ValueError when that is taken."""
    metrics = WorkerMetrics(model_name=spec.model_name, rank=spec.rank, version=spec.version)
    try:
        return metrics, metrics.serve(spec.host, spec.metrics_port)
    except OSError as error:
        raise ValueError(
            f"metrics of worker {spec.rank} cannot listen on {spec.host}:{spec.metrics_port}: {error.strerror}; "
            "choose another --metrics-port-base"
        ) from error
