"""The machine without its GPUs: packages, processor, memory, limits, ports, clock, and what earlier runs left."""

import platform
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from moeyard import __version__
from moeyard.listen import base_url, bind, file_limits, most_connections
from moeyard_worker.config.engine_config import format_size
from moeyard_worker.engine.memory.host_memory import available_memory

OK, WARNING, PROBLEM = "ok", "warning", "problem"
# Packages named one by one; of the others only what is wrong is worth a line.
SHOWN = ("torch", "triton", "ray")
SHARED_MEMORY = Path("/dev/shm")
TEMPORARY = Path("/tmp")
CPUINFO, CPU_QUOTA = Path("/proc/cpuinfo"), Path("/sys/fs/cgroup/cpu.max")
CLOCK_SOURCE = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
# Ray's smallest object store (ray_fleet.py) and a slab of the exchange per rank go there; containers give 64 MiB.
LEAST_SHARED = 160 * 1024**2
# One per connection, some for each worker and Ray's own.
LEAST_FILES, GOOD_FILES = 1024, 8192
# Ray stops to spill and to log where a disk is fuller than this.
FULL_DISK = 0.95
LEAST_MEMORY = 2 * 1024**3
SLOW_CLOCKS = frozenset(("hpet", "acpi_pm", "jiffies", "pit"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """`level`: a problem keeps the server from starting or serving, a warning makes it slow or will bite later.

    `advice` is what to do about it, "" of what is ok.
    """

    subject: str
    level: str
    text: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.level:<8}{self.subject:<12}{self.text}" + (f"; {self.advice}" if self.advice else "")

    def as_json(self) -> dict[str, Any]:
        """Its fields."""
        return asdict(self)


def ok(subject: str, text: str) -> Finding:
    """Nothing to do."""
    return Finding(subject=subject, level=OK, text=text)


def warning(subject: str, text: str, advice: str) -> Finding:
    """Serves, but."""
    return Finding(subject=subject, level=WARNING, text=text, advice=advice)


def problem(subject: str, text: str, advice: str) -> Finding:
    """Does not serve."""
    return Finding(subject=subject, level=PROBLEM, text=text, advice=advice)


def check_software() -> Iterator[Finding]:
    """The interpreter and every requirement of the installed package."""
    try:
        package = metadata.metadata("moeyard")
        requires = metadata.requires("moeyard") or []
    except metadata.PackageNotFoundError:
        yield warning("moeyard", f"{__version__}, not installed", "pip install it, so that its packages are checked")
        return
    yield ok("moeyard", __version__)
    yield check_python(platform.python_version(), package["Requires-Python"] or "")
    yield from check_packages(requires, installed)


def check_python(version: str, wanted: str) -> Finding:
    """Whether this Python is one of those `wanted`."""
    if SpecifierSet(wanted).contains(version, prereleases=True):
        return ok("python", version)
    return problem("python", f"{version}, moeyard wants {wanted}", "make the virtual environment with another one")


def installed(name: str) -> str | None:
    """The version of a package, None if it is missing."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_packages(requires: Iterable[str], version_of: Callable[[str], str | None]) -> Iterator[Finding]:
    """Requirements that apply here, extras not among them; those that are met and not in SHOWN share a line."""
    sound = 0
    for requirement in map(Requirement, requires):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = version_of(requirement.name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            have = "missing" if version is None else version
            yield problem(
                requirement.name,
                f"{have}, moeyard wants {requirement.specifier or 'any'}",
                f"pip install '{requirement.name}{requirement.specifier}'",
            )
        elif requirement.name in SHOWN:
            yield ok(requirement.name, version)
        else:
            sound += 1
    yield ok("packages", f"{sound} others as required")


def check_processor(workers: int, *, on_cpu: bool) -> Iterator[Finding]:
    """Cores for so many workers, and the instructions that the kernels of a CPU like."""
    cores = usable_cores(len(psutil.Process().cpu_affinity() or (0,)), read(CPU_QUOTA))
    text = f"{cores:g} cores"
    # The router has one to itself while answers stream.
    if on_cpu and cores < workers:
        yield warning(
            "cores", f"{text} for {workers} workers and a router", "steps wait for each other; fewer --workers"
        )
    else:
        yield ok("cores", text)
    yield check_instructions(platform.machine(), read(CPUINFO), on_cpu=on_cpu)


def usable_cores(affinity: int, quota: str) -> float:
    """Cores that this process may use: those of its affinity, or its control group's share ("max 100000", in us)."""
    allowed, _, period = quota.partition(" ")
    return min(affinity, int(allowed) / int(period)) if allowed.isdigit() and period.strip().isdigit() else affinity


def check_instructions(machine: str, cpuinfo: str, *, on_cpu: bool) -> Finding:
    """AVX-512 is what one answer was measured on (kernels/moeyard_kernels/cpu/linear.py); AMX is kept out of it."""
    flags = next(
        (set(line.partition(":")[2].split()) for line in cpuinfo.splitlines() if line.startswith("flags")), set()
    )
    if not on_cpu:
        return ok("cpu", machine)
    if "avx512f" not in flags:
        return warning(
            "cpu",
            f"{machine} without AVX-512",
            "slow, and its sums were not measured: check with `moeyard verify` that one answer holds",
        )
    bf16 = "bfloat16 in hardware" if "avx512_bf16" in flags else "bfloat16 by conversion: --dtype float32 is faster"
    amx = "; AMX is there and left alone, because its sums depend on the number of rows" if "amx_bf16" in flags else ""
    return ok("cpu", f"{machine} with AVX-512, {bf16}{amx}")


def check_memory() -> Iterator[Finding]:
    """Memory that is free to us, shared memory and the disk of temporary files."""
    total, free = psutil.virtual_memory().total, available_memory()
    text = f"{format_size(free)} of {format_size(total)} free to us"
    if free < LEAST_MEMORY:
        yield warning(
            "memory", text, "Ray and a worker take 1 GiB before any weights; end what else runs, or raise the limit"
        )
    else:
        yield ok("memory", text)
    if SHARED_MEMORY.is_dir():
        yield check_shared(psutil.disk_usage(str(SHARED_MEMORY)).free)
    else:
        yield problem("shm", f"no {SHARED_MEMORY}", "ranks exchange tokens there; mount a tmpfs")
    disk = psutil.disk_usage(str(TEMPORARY))
    text = f"{TEMPORARY} has {format_size(disk.free)} free"
    if disk.free < (1 - FULL_DISK) * disk.total:
        yield warning("disk", f"{text}, less than 5 %", "Ray logs there and complains; make room")
    else:
        yield ok("disk", text)


def check_shared(free: int) -> Finding:
    """Bytes left in shared memory."""
    text = f"{SHARED_MEMORY} has {format_size(free)} free"
    if free < LEAST_SHARED:
        return problem(
            "shm", text, f"Ray and the exchange want {format_size(LEAST_SHARED)}; of a container raise --shm-size"
        )
    return ok("shm", text)


def check_limits(workers: int) -> Iterator[Finding]:
    """Open files and processes."""
    yield check_files(file_limits()[1], workers)
    threads = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if threads != resource.RLIM_INFINITY and threads < 4096:
        yield warning("processes", f"at most {threads}", "Ray has hundreds of threads; ulimit -u 4096 or more")


def check_files(files: int, workers: int) -> Finding:
    """The hard limit of open files, to which `moeyard serve` raises its own."""
    text = f"at most {files} open: each router serves {most_connections(files, workers)} connections at once"
    advice = "`ulimit -n 65536` before serving, or LimitNOFILE= of a service, gives more"
    if files < LEAST_FILES:
        return problem("files", text, advice)
    return warning("files", text, advice) if files < GOOD_FILES else ok("files", text)


def check_port(host: str, port: int) -> Finding:
    """Whether the API could listen."""
    try:
        bind(host, port).close()
    except ValueError as error:
        text, _, advice = str(error).partition("; ")
        return problem("port", text, advice)
    return ok("port", f"{base_url(host, port)} is free")


def check_clock() -> Finding:
    """How fine and how dear the clock is that steps are timed with."""
    source, resolution = read(CLOCK_SOURCE).strip(), time.get_clock_info("monotonic").resolution
    text = f"{source or platform.system()}, {resolution * 1e9:.0f} ns"
    if source in SLOW_CLOCKS or resolution > 1e-4:
        return warning("clock", text, "reading it is slow; boot with clocksource=tsc if the processor has a stable one")
    return ok("clock", text)


def check_leftovers() -> Finding:
    """Ray's daemons and our shared memory from runs that ended badly; a running server's are named too."""
    names: Mapping[str, list[int]] = {"raylet": [], "gcs_server": []}
    for process in psutil.process_iter(["name", "ppid"]):
        if process.info["name"] in names:
            names[process.info["name"]].append(process.pid)
    files = sorted(path.name for path in SHARED_MEMORY.glob("moeyard-*")) if SHARED_MEMORY.is_dir() else []
    found = [f"{name} (process {', '.join(map(str, pids))})" for name, pids in names.items() if pids]
    found += [f"{len(files)} files such as {SHARED_MEMORY / files[0]}"] if files else []
    if not found:
        return ok("leftovers", "no Ray runs here, nothing of ours lies in shared memory")
    return warning(
        "leftovers", ", ".join(found), "a running server's, or left by one that was killed: then `ray stop --force`"
    )


def read(path: Path) -> str:
    """A small file of the system, "" where there is none."""
    try:
        return path.read_text()
    except OSError:
        return ""
