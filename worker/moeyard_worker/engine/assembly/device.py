"""The device of a rank, chosen once: its backend, its free memory, and how its steps are launched."""

import platform
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import permutations
from pathlib import Path

import torch

from moeyard_kernels.backend import Backend
from moeyard_kernels.cpu import footprint as cpu_footprint
from moeyard_kernels.cpu.backend import CpuBackend
from moeyard_kernels.cuda import footprint as cuda_footprint
from moeyard_kernels.cuda.backend import CudaBackend
from moeyard_kernels.types.footprint import Footprints
from moeyard_worker.checkpoint.reading import PinnedBuffers
from moeyard_worker.config.engine_config import EngineConfig
from moeyard_worker.engine.memory.host_memory import available_memory
from moeyard_worker.engine.memory.plan import MemoryPlan
from moeyard_worker.engine.steps.gpu_runner import GpuRunner
from moeyard_worker.engine.steps.runner import Runner

# Compute capability of Hopper: several kernels use its copies and products, which other GPUs lack.
CAPABILITY = (9, 0)
_CPUINFO = Path("/proc/cpuinfo")


def cpu_backend(page_size: int) -> Backend:
    """Return the backend of a CPU. Raises ValueError for a page size that does not divide the attention's block."""
    return CpuBackend(page_size=page_size)


class CpuDevice:
    """The CPUs of the host, which all its ranks share."""

    footprints: Footprints = cpu_footprint
    # Whether all ranks of a host share one memory.
    shared = True
    # Whether its steps are captured, unless --enforce-eager.
    captures = False

    def __init__(self, config: EngineConfig) -> None:
        self.backend = cpu_backend(config.page_size)

    @property
    def name(self) -> str:
        """The kind of device: its ranks compute the same bits."""
        lines = _CPUINFO.read_text().splitlines() if _CPUINFO.exists() else ()
        models = (line.partition(": ")[2] for line in lines if line.startswith("model name"))
        return f"{next(models, platform.machine())}, {torch.backends.cpu.get_cpu_capability()}"

    def available(self) -> int:
        """Return the free bytes of the memory that this rank computes in."""
        return available_memory()

    def available_at_start(self) -> int | None:
        """Return the bytes that would be free if this rank held none; None if ranks share the memory."""
        return None

    def unreachable(self, gpus: Sequence[int]) -> str | None:
        """Return why these GPUs, one per rank, cannot access each other's memory, or None."""
        return "ranks compute on CPUs"

    def activate(self) -> None:
        """Make this the device of the calling thread."""

    def before_compiling(self, notify: Callable[[], None]) -> AbstractContextManager[None]:
        """While the context lasts, call `notify` in the calling thread before work that may take many seconds."""
        return nullcontext()

    def staging(self) -> PinnedBuffers | None:
        """Return the buffers between weight files and this memory, or None if weights are read in place."""
        return None

    def finish(self) -> None:
        """Wait until everything that was launched has run."""

    def step_runner(self, runner: Runner, config: EngineConfig, plan: MemoryPlan) -> Runner | GpuRunner:
        """Return the runner that launches steps. Everything that must exist before the first step is made here."""
        return runner


class CudaDevice:
    """One GPU, for one rank. Methods are those of `CpuDevice`. Raises ValueError as `check_gpu`."""

    footprints: Footprints = cuda_footprint
    shared = False
    captures = True

    def __init__(self, config: EngineConfig, gpu: int) -> None:
        self._device = check_gpu(config.device, gpu=gpu, num_workers=config.num_workers)
        self.activate()
        self.backend = CudaBackend(page_size=config.page_size, device=self._device)

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self._device)

    def available(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[0])

    def available_at_start(self) -> int:
        return self.available() + torch.cuda.memory_reserved(self._device)

    def unreachable(self, gpus: Sequence[int]) -> str | None:
        """The result is the same on every rank."""
        count = torch.cuda.device_count()
        if len(set(gpus)) < len(gpus) or max(gpus) >= count:
            return f"workers on GPUs {', '.join(map(str, gpus))}, this process sees {count}"
        for one, other in permutations(gpus, 2):
            if not torch.cuda.can_device_access_peer(one, other):
                return f"GPU {one} has no peer access to GPU {other} (nvidia-smi topo -p2p rw shows who has)"
        return None

    def activate(self) -> None:
        torch.cuda.set_device(self._device)

    def before_compiling(self, notify: Callable[[], None]) -> AbstractContextManager[None]:
        """The first launch of a kernel compiles it."""
        return self.backend.before_compiling(notify)

    def staging(self) -> PinnedBuffers:
        return PinnedBuffers(event=torch.cuda.Event, pin_memory=True)

    def finish(self) -> None:
        torch.cuda.synchronize(self._device)

    def step_runner(self, runner: Runner, config: EngineConfig, plan: MemoryPlan) -> GpuRunner:
        """Capture the steps of all sizes, too."""
        if not config.enforce_eager and not runner.config.state_spec(runner.dtype.itemsize).bytes_per_sequence:
            self.backend.warm_compaction()
        max_pages = -(-plan.max_model_len // config.page_size)
        found = GpuRunner(
            runner,
            self.backend,
            max_sequences=config.max_num_seqs,
            max_pages=max_pages,
            max_prompt=config.max_batch_tokens,
            num_drafts=config.num_drafts,
            adaptive=config.draft_tokens is None,
            captures_prompts=not plan.stream_slots,
        )
        if not config.enforce_eager and runner.exchange.traits.capturable:
            runner.warm_recompute()
            found.capture()
        return found


Device = CpuDevice | CudaDevice


def check_gpu(device: str, *, gpu: int = 0, num_workers: int = 1) -> torch.device:
    """Return the GPU that `--device device` names, number `gpu` for "cuda". Called before anything is allocated.

    Raises ValueError, in one line, for a GPU that does not exist, or that the kernels do not support.
    """
    if not torch.cuda.is_available():
        raise ValueError(f"--device {device}: torch {torch.__version__} sees no CUDA GPU here; use --device cpu")
    number = device.removeprefix("cuda").removeprefix(":")
    if number and not number.isdecimal():
        raise ValueError(f"--device {device!r} is not cpu, cuda or cuda:N")
    index, count = int(number) if number else gpu, torch.cuda.device_count()
    if index >= count:
        asked, advice = f"--device {device}", "choose one of these"
        if num_workers > 1:
            asked, advice = f"{asked} --workers {num_workers} takes a GPU each", "lower --workers"
        raise ValueError(f"{asked}: there are {count} GPUs, the last is cuda:{count - 1}; {advice}")
    if problem := unfit(index):
        raise ValueError(f"--device {device}: {problem}; use another GPU or --device cpu")
    return torch.device("cuda", index)


def unfit(index: int) -> str | None:
    """Return why the kernels do not run on this GPU, with its name, or None."""
    capability = torch.cuda.get_device_capability(index)
    if capability == CAPABILITY:
        return None
    have, need = (".".join(map(str, each)) for each in (capability, CAPABILITY))
    missing = "wgmma" if capability > CAPABILITY else "TMA and wgmma"
    return (
        f"{torch.cuda.get_device_name(index)} has compute capability {have}, the kernels need {need} (Hopper's "
        f"{missing}, which it lacks)"
    )


def make_device(config: EngineConfig, gpu: int = 0) -> Device:
    """Return the device that `config.device` names, GPU number `gpu` for "cuda".

    Raises ValueError, in one line, if it is not available.
    """
    return CpuDevice(config) if config.device == "cpu" else CudaDevice(config, gpu)
