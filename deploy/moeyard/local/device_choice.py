"""Resolve `--device` on this machine before Ray starts or a download begins.

`python -m moeyard.local.device_choice DEVICE N` prints the GPUs of `--device DEVICE --workers N` as JSON. It is a
separate process because it imports torch, and the launcher never does.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from moeyard.entry import load

# NVIDIA's driver creates the first on Linux and the second on WSL.
_DRIVER_FILES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
# torch takes 2 s to import on a fast machine. A hung driver never answers.
_PROBE_SECONDS = 180.0


def choose_device(args: argparse.Namespace) -> None:
    """Replace `args.device` "auto" by "cuda" or "cpu", and store the reason in `args.device_why`.

    Without "auto" nothing changes, and `check_device` looks for the GPUs. A second call has no effect.
    """
    if args.device != "auto":
        return
    if args.ray_address is not None:
        args.device, args.device_why = "cpu", "auto: it takes no GPUs of a Ray cluster; --device cuda does"
    elif not any(file.exists() for file in _DRIVER_FILES):
        args.device, args.device_why = "cpu", "auto: no NVIDIA driver here"
    else:
        try:
            args.device, args.device_why = "cuda", f"auto: {find_gpus('cuda', args.workers)}"
        except ValueError as error:
            why = str(error).removeprefix("--device cuda: ").partition("; ")[0]
            args.device, args.device_why = "cpu", f"auto: {why}"


def check_device(args: argparse.Namespace) -> None:
    """Raise ValueError with one line if this machine lacks a GPU of `--device`.

    Skip "auto", which has been checked already, and a Ray cluster, whose GPUs are on other machines.
    """
    if args.device != "cpu" and args.ray_address is None and device_reason(args) is None:
        find_gpus(args.device, args.workers)


def device_reason(args: argparse.Namespace) -> str | None:
    """Return why "auto" chose `args.device`; None if the user named the device."""
    return getattr(args, "device_why", None)


def find_gpus(device: str, num_workers: int) -> str:
    """Return the names of the workers' GPUs. Raises ValueError with one line if one is missing or unsupported."""
    command = [sys.executable, "-P", "-m", "moeyard.local.device_choice", device, str(num_workers)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PROBE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise ValueError(
            f"--device {device}: torch does not find out within {_PROBE_SECONDS:.0f} s which GPUs are here; see what "
            "`nvidia-smi` says, or use --device cpu"
        ) from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ValueError(f"--device {device}: torch cannot look for GPUs: {last}; use --device cpu")
    found = json.loads(done.stdout.splitlines()[-1])
    if problem := found.get("problem"):
        raise ValueError(problem)
    names = found["gpus"]
    return names[0] if len(names) == 1 else f"{len(names)} x {names[0]}"


def probe(device: str, num_workers: int) -> dict[str, Any]:
    """Return {"gpus": names by worker}, or {"problem": one line} if a worker's GPU is missing or unsupported."""
    check_gpu = load("moeyard_worker.engine.assembly.device").check_gpu
    try:
        found = [check_gpu(device, gpu=rank, num_workers=num_workers) for rank in range(num_workers)]
    except ValueError as error:
        return {"problem": str(error)}
    return {"gpus": [load("torch").cuda.get_device_name(each.index) for each in found]}


if __name__ == "__main__":
    print(json.dumps(probe(sys.argv[1], int(sys.argv[2]))))
