"""torch and the GPUs that it sees. Imports torch, so it is loaded late."""

from collections.abc import Iterator
from pathlib import Path

import torch

from moeyard.clients.doctor.machine import Finding, ok, problem, warning
from moeyard_worker.config.engine_config import format_size
from moeyard_worker.engine.assembly.device import check_gpu, unfit
from moeyard_worker.engine.loop.faults import out_of_memory

DRIVER, CONTROL = Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl")


def check_gpus(device: str, num_workers: int = 1) -> Iterator[Finding]:
    """The GPUs, of which none need be there to serve from the CPU, and then whether workers have theirs.

    `device`: what --device says; `num_workers` of this machine take a GPU each.
    """
    built = torch.version.cuda
    if not torch.cuda.is_available():
        wants = device != "cpu"
        if CONTROL.exists():
            text = f"a driver is there, torch {torch.__version__} sees no GPU"
            advice = (
                f"torch is built for CUDA {built}: does the driver know it?" if built else "install torch with CUDA"
            )
            yield (problem if wants else warning)("gpus", text, advice)
        elif wants:
            yield problem(
                "gpus", f"--device {device}: torch {torch.__version__} sees no GPU", "serve with --device cpu"
            )
        else:
            yield ok("gpus", "none: serves from the CPU")
        return
    if DRIVER.exists():
        yield ok("driver", f"{DRIVER.read_text().splitlines()[0].strip()}; torch is built for CUDA {built}")
    for index in range(torch.cuda.device_count()):
        yield _gpu(index)
    if device == "cpu":
        return
    try:
        for rank in range(num_workers):
            check_gpu(device, gpu=rank, num_workers=num_workers)
    except ValueError as error:
        text, _, advice = str(error).rpartition("; ")
        yield problem("gpus", text, advice)


def _gpu(index: int) -> Finding:
    """One of them, whoever wants it."""
    subject, why = f"cuda:{index}", unfit(index)
    if why is not None:
        return warning(subject, why, "serves nothing here")
    name = torch.cuda.get_device_name(index)
    try:
        free, total = torch.cuda.mem_get_info(index)
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        return warning(subject, f"{name}, so full that nothing can be asked of it", "end what runs there")
    return ok(subject, f"{name}, {format_size(free)} of {format_size(total)} free")
