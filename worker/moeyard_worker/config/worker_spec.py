"""The arguments that a launcher gives one rank at its start. Imports no torch."""

from dataclasses import dataclass

from moeyard_worker.config.engine_config import EngineConfig
from moeyard_worker.config.placement import Placement
from moeyard_worker.keys import WorkerKeys
from moeyard_worker.protocol import FIRST_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedWeights:
    """The weights that all ranks of an epoch serve. Their config.json and tokenizer remain those of the config.

    version: the name of these weights in answers.
    directory: a directory of safetensors files, or a GGUF file if the config names one. If it is None, `files` are
        served, or else the checkpoint of the config.
    files: paths of safetensors files that hold all tensors, usually in shared memory. Empty: see `directory`.
    """

    version: str = FIRST_VERSION
    directory: str | None = None
    files: tuple[str, ...] = ()

    @property
    def replaced(self) -> bool:
        """Whether these are not the weights of the config."""
        return self.directory is not None or bool(self.files)

    def __str__(self) -> str:
        """The version and where it is stored."""
        files = f"{len(self.files)} files of {self.files[0].rpartition('/')[0]}" if self.files else None
        return f"version {self.version} ({self.directory or files or 'as started'})"


AS_STARTED = ServedWeights()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """The arguments of one rank.

    epoch: a random number. Frames with another one are refused.
    model_name: label of its metrics.
    keys: CURVE keys of its sockets. None for a single rank in its own process, whose sockets are open.
    placement: the experts that the rank loads and the ranks that it meets. None: contiguous shards and all ranks.
    gpu: index of the rank's GPU among those that its process sees, if `config.device` is "cuda".
    peer_gpus: indices of all ranks' GPUs, if all are on this host. Empty on CPUs.
    weights: the weights that the fleet serves now.
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
    weights: ServedWeights = AS_STARTED
