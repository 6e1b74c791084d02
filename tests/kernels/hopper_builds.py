"""What ptxas made of each op's kernels, kept by a digest of the sources: `python -m tests.kernels.hopper_builds`.

The record `hopper_builds.json` is part of the tree. The fast tier builds the modules of the bench whose sources have
changed since; the whole suite builds all of them. This command builds what has changed and writes the record.
Triton keeps its own cache in `.cache/triton`, so an unchanged kernel costs no compilation.
"""

import hashlib
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import triton
from tests.imports import ROOT, closure, modules

from moeyard_kernels.bench.__main__ import MODULES

SCRIPT = Path(__file__).with_name("compile_for_hopper.py")
RECORD = Path(__file__).with_name("hopper_builds.json")
CACHE = ROOT / ".cache" / "triton"
# The fields that tests read; shapes, bytes and digests of PTX are of no use to them.
FIELDS = ("kernel", "early", "static", "waits", "triggers_first", "always_waits", "serialized", "counts", "atomics")

Build = dict[str, Any]


def digest(module: str) -> str:
    """Of Triton's version and of all sources that a module of the bench can launch."""
    files = closure(modules()[f"moeyard_kernels.bench.{module}"])
    h = hashlib.sha256(triton.__version__.encode() + SCRIPT.read_bytes())
    for file in sorted(files):
        h.update(f"{file.relative_to(ROOT)}\n".encode() + file.read_bytes())
    return h.hexdigest()[:16]


def recorded() -> dict[str, Any]:
    """The record: of each module its digest and its builds."""
    return dict(json.loads(RECORD.read_text())) if RECORD.exists() else {}


def changed() -> list[str]:
    """Modules whose sources differ from those of the record."""
    record = recorded()
    return [name for name in MODULES if record.get(name, {}).get("sources") != digest(name)]


def build(names: Collection[str]) -> dict[str, list[Build]]:
    """Build the kernels of these modules, a module to a process, on all cores. Raises AssertionError with stderr."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "TRITON_CACHE_DIR": str(CACHE)}
    record = recorded()
    # The longest first.
    left = sorted(names, key=lambda name: len(record.get(name, {}).get("builds", ())))
    running: dict[str, subprocess.Popen[str]] = {}
    found = {}
    try:
        while left or running:
            while left and len(running) < (os.cpu_count() or 1):
                name = left.pop()
                ops = importlib.import_module(f"moeyard_kernels.bench.{name}").OPS
                command = [sys.executable, str(SCRIPT), "1", *ops]
                running[name] = subprocess.Popen(
                    command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
                )
            name = _ended(running)
            stdout, stderr = running[name].communicate()
            assert running.pop(name).returncode == 0, f"{name}: {stderr[-3000:]}"
            found[name] = _without_repeats(json.loads(line) for line in stdout.splitlines())
    finally:
        for process in running.values():
            process.kill()
            process.communicate()
    return found


def _ended(running: dict[str, "subprocess.Popen[str]"]) -> str:
    """Wait for one of them. Their output is short enough for the pipes."""
    while True:
        for name, process in running.items():
            if process.poll() is not None:
                return name
        time.sleep(0.05)


def _without_repeats(lines: Iterable[Build]) -> list[Build]:
    builds = {json.dumps({field: line[field] for field in FIELDS}): None for line in lines}
    return [json.loads(line) for line in sorted(builds)]


def main() -> None:
    """Write the record."""
    names, record = changed(), recorded()
    made = build(names)
    record |= {name: {"sources": digest(name), "builds": made[name]} for name in names}
    rows = (
        f'{json.dumps(name)}: {{"sources": {json.dumps(record[name]["sources"])}, "builds": [\n'
        + ",\n".join(map(json.dumps, record[name]["builds"]))
        + "\n]}"
        for name in MODULES
    )
    RECORD.write_text("{\n" + ",\n".join(rows) + "\n}\n")
    print(f"built {', '.join(names) or 'nothing'}")


if __name__ == "__main__":
    main()
