"""The arguments that a launcher gives one rank at its start. Imports no torch."""

from dataclasses import dataclass

from moeyard_worker.config.engine_config import EngineConfig
from moeyard_worker.config.placement import Placement
from moeyard_worker.keys import WorkerKeys


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """The arguments of one rank.

    epoch: a random number. Frames with another one are refused.
    model_name: label of its metrics.
    keys: CURVE keys of its sockets. None for a single rank in its own process, whose sockets are open.
    placement: the experts that the rank loads and the ranks that it meets. None: contiguous shards and all ranks.
    gpu: index of the rank's GPU among those that its process sees, if `config.device` is "cuda".
    peer_gpus: indices of all ranks' GPUs, if all are on this host. Empty on CPUs.
    """

    config: EngineConfig
    rank: int
    epoch: int
    host: str
    version: str
    model_name: str = ""
    metrics_port: int = 0
    keys: WorkerKeys | None = None
    placement: Placement | None = None
    gpu: int = 0
    peer_gpus: tuple[int, ...] = ()
