"""Environment of processes that compute on a CPU. Imports no torch: it must be set before torch is loaded."""

import os
from types import MappingProxyType

# Variables of every process that computes, set before torch is loaded. An Intel Xeon needs the first two for one
# answer. Without them, MKL's order of summation depends on a row's place, and AMX's on the number of rows
# (cpu/linear.py of the kernels). The third makes torch align blocks of 2 MiB and more, and request huge pages. With
# glibc's placement, the peak memory of a step varied between processes from 1.0 to 1.7 times its tensors. Aligned, it
# was 1.0 to 1.35.
CPU_ENVIRONMENT = MappingProxyType(
    {
        "MKL_CBWR": "AVX512,STRICT",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
        "THP_MEM_ALLOC_ENABLE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
)


def set_cpu_environment() -> None:
    """Set CPU_ENVIRONMENT, and one OpenMP thread unless the user chose. Call this before torch is imported."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.update(CPU_ENVIRONMENT)


def missing_cpu_environment() -> list[str]:
    """Return the assignments of CPU_ENVIRONMENT on which bits may depend and that this process lacks."""
    wanted = {name: CPU_ENVIRONMENT[name] for name in ("MKL_CBWR", "ONEDNN_MAX_CPU_ISA")}
    return [f"{name}={value}" for name, value in wanted.items() if os.environ.get(name) != value]
