"""A record of the builds of all kernels by ptxas, keyed by digests of their sources.

`PYTHONPATH=bench python -m tests.kernels.hopper_builds` builds the bench modules whose sources changed and writes the
record. `hopper_builds.json` is part of the tree. The fast tier builds modules that differ from it, and the whole suite
builds all. Triton has its own cache in `.cache/triton`, so an unchanged kernel is not compiled again.
"""

import hashlib
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import triton
from kernel_cases.model_steps import MODELS
from kernel_times import MODULES
from tests.imports import ROOT, closure, modules

SCRIPT = Path(__file__).with_name("compile_for_hopper.py")
RECORD = Path(__file__).with_name("hopper_builds.json")
CACHE = ROOT / ".cache" / "triton"
# The fields that tests read. They do not need shapes, bytes and digests of PTX.
FIELDS = (
    "kernel",
    "early",
    "static",
    "waits",
    "triggers_first",
    "always_waits",
    "serialized",
    "beside",
    "counts",
    "atomics",
)

Build = dict[str, Any]


def digest(module: str) -> str:
    """Return a digest of Triton's version, the models' sizes and the kernels' sources that a module imports.

    The worker's sources count only through the sizes that the bench takes from them.
    """
    files = {
        file
        for file in closure(modules()[f"kernel_cases.{module}"])
        if file.is_relative_to(ROOT / "kernels") or file.is_relative_to(ROOT / "bench")
    }
    h = hashlib.sha256(triton.__version__.encode() + SCRIPT.read_bytes() + repr(sorted(MODELS.items())).encode())
    for file in sorted(files):
        h.update(f"{file.relative_to(ROOT)}\n".encode() + file.read_bytes())
    return h.hexdigest()[:16]


def recorded() -> dict[str, Any]:
    """Return the digest and the builds of each module in the record."""
    return dict(json.loads(RECORD.read_text())) if RECORD.exists() else {}


def changed() -> list[str]:
    """Return the modules whose sources differ from those of the record."""
    record = recorded()
    return [name for name in MODULES if record.get(name, {}).get("sources") != digest(name)]


def other_triton(version: str) -> Path:
    """Install this Triton beside the cache unless it is there, and return the folder for PYTHONPATH."""
    folder = CACHE.with_name(f"triton-{version}")
    if not folder.exists():
        made = folder.with_name(f"{folder.name}.part")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", str(made)]
        subprocess.run([*pip, f"triton=={version}"], check=True)
        made.rename(folder)
    return folder


def build(names: Collection[str], *paths: Path) -> dict[str, list[Build]]:
    """Build the kernels of these modules, in as many processes at once as there are cores.

    `paths` come first on the module path. Raises AssertionError with the standard error of a module whose build fails.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join([*map(str, paths), str(ROOT), *sys.path])}
    environment |= {"TRITON_CACHE_DIR": str(CACHE)}
    record = recorded()

    def build_one(name: str) -> list[Build]:
        ops = importlib.import_module(f"kernel_cases.{name}").OPS
        run = subprocess.run([sys.executable, str(SCRIPT), "1", *ops], capture_output=True, text=True, env=environment)
        assert run.returncode == 0, f"{name}: {run.stderr[-3000:]}"
        return _without_repeats(json.loads(line) for line in run.stdout.splitlines())

    longest_first = sorted(names, key=lambda name: -len(record.get(name, {}).get("builds", ())))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(longest_first, pool.map(build_one, longest_first), strict=True))


def _without_repeats(lines: Iterable[Build]) -> list[Build]:
    builds = {json.dumps({field: line[field] for field in FIELDS}): None for line in lines}
    return [json.loads(line) for line in sorted(builds)]


def main() -> None:
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
