"""`moeyard doctor`: report this machine's resources, and problems of `moeyard serve` with the same flags."""

import argparse
import json
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
from moeyard.entry import load
from moeyard.listen import base_url, bind, file_limits, most_connections
from moeyard.local.before_start import check_before_start, needs
from moeyard.local.device_choice import choose_device, device_reason
from moeyard.local.model_source import hub_id
from moeyard.local.settings import api_settings, engine_config
from moeyard_worker.config.engine_config import format_size
from moeyard_worker.engine.memory.host_memory import available_memory
from moeyard_worker.models.shapes import served_model

OK, WARNING, PROBLEM = "ok", "warning", "problem"
# Packages with a line each. Others get a line only if there is a problem.
SHOWN = ("torch", "triton", "ray")
SHARED_MEMORY = Path("/dev/shm")
TEMPORARY = Path("/tmp")
CPUINFO, CPU_QUOTA = Path("/proc/cpuinfo"), Path("/sys/fs/cgroup/cpu.max")
CLOCK_SOURCE = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
DRIVER, CONTROL = Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl")
# Ray's smallest object store (ray_fleet.py) and a slab of the exchange per rank go there; containers give 64 MiB.
LEAST_SHARED = 160 * 1024**2
# One per connection, some for each worker and Ray's own.
LEAST_FILES, GOOD_FILES = 1024, 8192
# Ray stops to spill and to log where a disk is fuller than this.
FULL_DISK = 0.95
LEAST_MEMORY = 2 * 1024**3
SLOW_CLOCKS = frozenset(("hpet", "acpi_pm", "jiffies", "pit"))


@dataclass(frozen=True, slots=True)
class Verdict:
    """`level`: a problem keeps the server from starting or serving, a warning makes it slow or will bite later.

    `advice` is what to do about it, "" where nothing is.
    """

    level: str
    subject: str
    text: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.level:<8}{self.subject:<12}{self.text}" + (f"; {self.advice}" if self.advice else "")


def judged(sound: bool, subject: str, text: str, advice: str, *, otherwise: str = WARNING) -> Verdict:
    """Return a finding that is ok if `sound`, else one with another level and advice."""
    return Verdict(OK, subject, text) if sound else Verdict(otherwise, subject, text, advice)


def refused(subject: str, error: ValueError | OSError) -> Verdict:
    """Return the problem of a one-line error, which usually ends with advice."""
    named = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
    text, _, last = named.rpartition("; ")
    return Verdict(PROBLEM, subject, text or last, last if text else "")


def doctor(args: argparse.Namespace) -> int:
    """Print a line per finding, or one JSON object; 1 if there is a problem."""
    findings: list[Verdict] = []
    for finding in examine(args):
        findings.append(finding)
        if not args.json:
            print(finding, flush=True)
    counts = {level: sum(f.level == level for f in findings) for level in (PROBLEM, WARNING, OK)}
    if args.json:
        print(json.dumps({"findings": [asdict(f) for f in findings], **counts}, indent=1))
    else:
        print(f"\n{counts[PROBLEM]} problems, {counts[WARNING]} warnings")
    return 1 if counts[PROBLEM] else 0


def examine(args: argparse.Namespace) -> Iterator[Verdict]:
    """All findings, the quick ones first."""
    choose_device(args)
    yield from check_software()
    yield from check_processor(args.workers, on_cpu=args.device == "cpu")
    yield from check_memory()
    yield from check_limits(args.workers)
    yield check_port(args.host, args.port)
    yield check_clock()
    yield check_leftovers()
    if (why := device_reason(args)) is not None:
        yield Verdict(OK, "device", f"{args.device} ({why})")
    # Each machine of a Ray cluster has its own GPUs.
    yield from check_torch(args.device, args.workers if args.ray_address is None else 1)
    if args.model is not None or args.load_format == "dummy":
        yield from check_model(args)
    else:
        yield Verdict(OK, "model", "none is named, so flags and files of a model are not checked")


def check_software() -> Iterator[Verdict]:
    """The interpreter and every requirement of the installed package."""
    try:
        package = metadata.metadata("moeyard")
        requires = metadata.requires("moeyard") or []
    except metadata.PackageNotFoundError:
        text = f"{__version__}, not installed"
        yield Verdict(WARNING, "moeyard", text, "pip install it, so that its packages are checked")
        return
    yield Verdict(OK, "moeyard", __version__)
    yield check_python(platform.python_version(), package["Requires-Python"] or "")
    yield from check_packages(requires, installed)


def check_python(version: str, wanted: str) -> Verdict:
    if SpecifierSet(wanted).contains(version, prereleases=True):
        return Verdict(OK, "python", version)
    advice = "make the virtual environment with another one"
    return Verdict(PROBLEM, "python", f"{version}, moeyard wants {wanted}", advice)


def installed(name: str) -> str | None:
    """The version of a package, None if it is missing."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_packages(requires: Iterable[str], version_of: Callable[[str], str | None]) -> Iterator[Verdict]:
    """Requirements that apply here, extras not among them; those that are met and not in SHOWN share a line."""
    sound = 0
    for requirement in map(Requirement, requires):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        name, wanted, version = requirement.name, requirement.specifier, version_of(requirement.name)
        if version is None or not wanted.contains(version, prereleases=True):
            text = f"{version or 'missing'}, moeyard wants {wanted or 'any'}"
            yield Verdict(PROBLEM, name, text, f"pip install '{name}{wanted}'")
        elif name in SHOWN:
            yield Verdict(OK, name, version)
        else:
            sound += 1
    yield Verdict(OK, "packages", f"{sound} others as required")


def check_processor(workers: int, *, on_cpu: bool) -> Iterator[Verdict]:
    """Yield findings on the cores for workers and on the CPU's instructions."""
    cores = usable_cores(len(psutil.Process().cpu_affinity() or (0,)), read(CPU_QUOTA))
    # The router has one to itself while answers stream.
    few = on_cpu and cores < workers
    text = f"{cores:g} cores" + (f" for {workers} workers and a router" if few else "")
    yield judged(not few, "cores", text, "steps wait for each other; fewer --workers")
    yield check_instructions(platform.machine(), read(CPUINFO), on_cpu=on_cpu)


def usable_cores(affinity: int, quota: str) -> float:
    """Cores that this process may use: those of its affinity, or its control group's share ("max 100000", in us)."""
    allowed, _, period = quota.partition(" ")
    return min(affinity, int(allowed) / int(period)) if allowed.isdigit() and period.strip().isdigit() else affinity


def check_instructions(machine: str, cpuinfo: str, *, on_cpu: bool) -> Verdict:
    """AVX-512 is what one answer was measured on (kernels/moeyard_kernels/cpu/linear.py); AMX is kept out of it."""
    lines = (line.partition(":")[2].split() for line in cpuinfo.splitlines() if line.startswith("flags"))
    flags = set(next(lines, ()))
    if not on_cpu:
        return Verdict(OK, "cpu", machine)
    if "avx512f" not in flags:
        advice = "slow, and its sums were not measured: check with `moeyard verify` that one answer holds"
        return Verdict(WARNING, "cpu", f"{machine} without AVX-512", advice)
    bf16 = "bfloat16 in hardware" if "avx512_bf16" in flags else "bfloat16 by conversion: --dtype float32 is faster"
    amx = "; AMX is there and left alone, because its sums depend on the number of rows" if "amx_bf16" in flags else ""
    return Verdict(OK, "cpu", f"{machine} with AVX-512, {bf16}{amx}")


def check_memory() -> Iterator[Verdict]:
    """Memory that is free to us, shared memory and the disk of temporary files."""
    total, free = psutil.virtual_memory().total, available_memory()
    text = f"{format_size(free)} of {format_size(total)} free to us"
    advice = "Ray and a worker take 1 GiB before any weights; end what else runs, or raise the limit"
    yield judged(free >= LEAST_MEMORY, "memory", text, advice)
    if SHARED_MEMORY.is_dir():
        yield check_shared(psutil.disk_usage(str(SHARED_MEMORY)).free)
    else:
        yield Verdict(PROBLEM, "shm", f"no {SHARED_MEMORY}", "ranks exchange tokens there; mount a tmpfs")
    disk = psutil.disk_usage(str(TEMPORARY))
    room = disk.free >= (1 - FULL_DISK) * disk.total
    text = f"{TEMPORARY} has {format_size(disk.free)} free" + ("" if room else ", less than 5 %")
    yield judged(room, "disk", text, "Ray logs there and complains; make room")


def check_shared(free: int) -> Verdict:
    """Bytes left in shared memory."""
    text = f"{SHARED_MEMORY} has {format_size(free)} free"
    advice = f"Ray and the exchange want {format_size(LEAST_SHARED)}; of a container raise --shm-size"
    return judged(free >= LEAST_SHARED, "shm", text, advice, otherwise=PROBLEM)


def check_limits(workers: int) -> Iterator[Verdict]:
    """Open files and processes."""
    yield check_files(file_limits()[1], workers)
    threads = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if threads != resource.RLIM_INFINITY and threads < 4096:
        advice = "Ray has hundreds of threads; ulimit -u 4096 or more"
        yield Verdict(WARNING, "processes", f"at most {threads}", advice)


def check_files(files: int, workers: int) -> Verdict:
    """The hard limit of open files, to which `moeyard serve` raises its own."""
    text = f"at most {files} open: each router serves {most_connections(files, workers)} connections at once"
    advice = "`ulimit -n 65536` before serving, or LimitNOFILE= of a service, gives more"
    return judged(files >= GOOD_FILES, "files", text, advice, otherwise=PROBLEM if files < LEAST_FILES else WARNING)


def check_port(host: str, port: int) -> Verdict:
    """Whether the API could listen."""
    try:
        bind(host, port).close()
    except ValueError as error:
        return refused("port", error)
    return Verdict(OK, "port", f"{base_url(host, port)} is free")


def check_clock() -> Verdict:
    """Yield the resolution and cost of the clock that times steps."""
    source, resolution = read(CLOCK_SOURCE).strip(), time.get_clock_info("monotonic").resolution
    text = f"{source or platform.system()}, {resolution * 1e9:.0f} ns"
    advice = "reading it is slow; boot with clocksource=tsc if the processor has a stable one"
    return judged(source not in SLOW_CLOCKS and resolution <= 1e-4, "clock", text, advice)


def check_leftovers() -> Verdict:
    """Yield leftover Ray daemons and shared memory of crashed runs. Those of a live server are listed, too."""
    names: Mapping[str, list[int]] = {"raylet": [], "gcs_server": []}
    for process in psutil.process_iter(["name", "ppid"]):
        if process.info["name"] in names:
            names[process.info["name"]].append(process.pid)
    files = sorted(path.name for path in SHARED_MEMORY.glob("moeyard-*")) if SHARED_MEMORY.is_dir() else []
    found = [f"{name} (process {', '.join(map(str, pids))})" for name, pids in names.items() if pids]
    found += [f"{len(files)} files such as {SHARED_MEMORY / files[0]}"] if files else []
    text = ", ".join(found) or "no Ray runs here, nothing of ours lies in shared memory"
    advice = "a running server's, or left by one that was killed: then `ray stop --force`"
    return judged(not found, "leftovers", text, advice)


def read(path: Path) -> str:
    """A small file of the system, "" where there is none."""
    try:
        return path.read_text()
    except OSError:
        return ""


def check_torch(device: str, num_workers: int) -> Iterator[Verdict]:
    """torch, if it can be loaded at all, and the GPUs that it sees."""
    try:
        load("moeyard_worker.engine.assembly.device")
    except (ImportError, OSError) as error:
        advice = "install it again, for this Python and this machine"
        yield Verdict(PROBLEM, "torch", f"cannot be loaded: {str(error).splitlines()[0]}", advice)
        return
    yield from check_gpus(device, num_workers)


def check_gpus(device: str, num_workers: int = 1) -> Iterator[Verdict]:
    """Yield findings on all GPUs, then on those of the workers. A CPU server needs none.

    `device`: what --device says; `num_workers` of this machine take a GPU each.
    """
    torch, devices = load("torch"), load("moeyard_worker.engine.assembly.device")
    built, wants = torch.version.cuda, device != "cpu"
    if not torch.cuda.is_available():
        if CONTROL.exists():
            text = f"a driver is there, torch {torch.__version__} sees no GPU"
            known = f"torch is built for CUDA {built}: does the driver know it?"
            advice = known if built else "install torch with CUDA"
            yield Verdict(PROBLEM if wants else WARNING, "gpus", text, advice)
        elif wants:
            text = f"--device {device}: torch {torch.__version__} sees no GPU"
            yield Verdict(PROBLEM, "gpus", text, "serve with --device cpu")
        else:
            yield Verdict(OK, "gpus", "none: serves from the CPU")
        return
    if DRIVER.exists():
        version = DRIVER.read_text().splitlines()[0].strip()
        yield Verdict(OK, "driver", f"{version}; torch is built for CUDA {built}")
    for index in range(torch.cuda.device_count()):
        yield _gpu(index, torch.cuda, devices)
    try:
        for rank in range(num_workers if wants else 0):
            devices.check_gpu(device, gpu=rank, num_workers=num_workers)
    except ValueError as error:
        yield refused("gpus", error)


def _gpu(index: int, cuda: Any, devices: Any) -> Verdict:
    """One of them, whether or not a worker takes it."""
    subject, why = f"cuda:{index}", devices.unfit(index)
    if why is not None:
        return Verdict(WARNING, subject, why, "serves nothing here")
    name = cuda.get_device_name(index)
    try:
        free, total = cuda.mem_get_info(index)
    except RuntimeError as error:
        if not load("moeyard_worker.engine.loop.faults").out_of_memory(error):
            raise
        return Verdict(WARNING, subject, f"{name}, so full that nothing can be asked of it", "end what runs there")
    return Verdict(OK, subject, f"{name}, {format_size(free)} of {format_size(total)} free")


def check_model(args: argparse.Namespace) -> Iterator[Verdict]:
    """Run the checks of `serve` before its start: model family, files, tokenizer and memory."""
    try:
        config = engine_config(args)
        model, api = served_model(config), api_settings(args, config)
        shape = f"{model.num_layers} layers, {model.num_experts} experts (top {model.top_k})"
        yield Verdict(OK, "model", f"{api.names[0]}: {shape}, up to {model.max_position} tokens")
        local, hub_model = args.ray_address is None, hub_id(args.model)
        checked = check_before_start(config, model, api=api, local=local, hub_model=hub_model)
    except (ValueError, OSError) as error:  # OSError: a file that may not be read
        yield refused("model", error)
        return
    if checked.download is not None:
        yield Verdict(OK, "download", f"{checked.download}; {needs(checked, config, model)}")
    elif checked.plan is None:
        yield Verdict(OK, "fit", "the files are whole; whether they fit is known where the workers run")
    else:
        yield Verdict(OK, "fit", f"{config.num_workers} workers, each: {checked.plan}")
