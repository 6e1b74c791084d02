"""torch and the GPUs that it sees. Imports torch, so it is loaded late."""

from collections.abc import Iterator
from pathlib import Path

import torch

from moeyard.doctor.finding import Finding, ok, problem, warning
from moeyard_worker.config.engine_config import format_size
from moeyard_worker.engine.device import LEAST_CAPABILITY

DRIVER, CONTROL = Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl")


def check_gpus(device: str) -> Iterator[Finding]:
    """The GPUs, of which none need be there to serve from the CPU. `device`: what --device says."""
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
        free, total = torch.cuda.mem_get_info(index)
        name = f"{torch.cuda.get_device_name(index)}, {format_size(free)} of {format_size(total)} free"
        yield check_capability(f"cuda:{index}", name, torch.cuda.get_device_capability(index), wanted=device != "cpu")


def check_capability(subject: str, text: str, capability: tuple[int, int], *, wanted: bool) -> Finding:
    """Whether the kernels run on a GPU of this compute capability."""
    have, need = (".".join(map(str, each)) for each in (capability, LEAST_CAPABILITY))
    text = f"{text}, compute capability {have}"
    if capability >= LEAST_CAPABILITY:
        return ok(subject, text)
    return (problem if wanted else warning)(subject, text, f"the kernels need {need} (Hopper); serve with --device cpu")
