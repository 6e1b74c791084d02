"""Which exchange `auto` stands for where a rank is, and why; what keeps GPUs from one that was asked for by name."""

from dataclasses import replace

from moeyard_worker.config.engine_config import ExchangeKind
from moeyard_worker.config.worker_spec import WorkerSpec
from moeyard_worker.engine.device import Device
from moeyard_worker.exchange.factory import resolve_kind
from moeyard_worker.exchange.shape import ExchangeShape


def settle_exchange(spec: WorkerSpec, device: Device, shape: ExchangeShape) -> tuple[WorkerSpec, str]:
    """The spec with the exchange that its rank has, and why, in words. All ranks of a fleet find the same.

    Raises ValueError, in one line, where one that was asked for cannot be.
    """
    config = spec.config
    asked, count = config.exchange, config.num_workers
    kind: ExchangeKind
    if asked == "auto" and count > 1 and config.device != "cpu":
        problem = _problem(spec, device, shape)
        kind, why = ("zmq", problem) if problem else ("nvlink", f"{count} GPUs of one host that reach each other")
    else:
        kind, why = resolve_kind(asked, count), "asked for"
        if kind == "nvlink" and (problem := _problem(spec, device, shape)) is not None:
            raise ValueError(f"--exchange nvlink cannot be: {problem}; use --exchange zmq")
        if kind == "zmq" and config.device == "cpu":
            why = "ranks compute on CPUs"
        elif asked == "auto":
            why = "one rank"
    return replace(spec, config=replace(config, exchange=kind)), why


def _problem(spec: WorkerSpec, device: Device, shape: ExchangeShape) -> str | None:
    """What keeps rows from going straight from GPU to GPU, or None."""
    if spec.config.num_drafts:
        return "steps that verify drafts have no captured exchange so far"
    if spec.config.num_workers > 1:
        if not spec.peer_gpus:
            return "this process sees its own GPU only, not those of the other workers"
        if (problem := device.unreachable(spec.peer_gpus)) is not None:
            return problem
    try:
        shape.window(spec.config.num_workers)
    except ValueError as error:
        return str(error)
    return None
