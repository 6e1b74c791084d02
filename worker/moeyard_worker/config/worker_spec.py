"""What a launcher tells one rank at its start. Imports no torch."""

from dataclasses import dataclass

from moeyard_worker.config.engine_config import EngineConfig
from moeyard_worker.config.placement import Placement
from moeyard_worker.keys import WorkerKeys


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """What one rank is told at start. `epoch` is a random number of this fleet: frames of another one are refused.

    `model_name` labels its metrics.
    `placement` says which experts the rank loads, and which ranks it meets first (None: contiguous shards, all ranks).
    `keys` lock its sockets; without any, whoever reaches them may speak (a single rank in its own process).
    `gpu`: which of the GPUs that its process sees is its own, where `config.device` is "cuda"; `peer_gpus`: those of
    all ranks, if these are on one host, where it sees them all. On CPUs neither means anything.
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
