"""Plant faults one at a time and show that the fast tier detects them: `python -m tests.mutants.run [NAME ...]`.

The YAML files in this folder hold the faults: a file, a text that it has exactly once, and the replacement. Each fault
is planted in a copy of the tree. Then the fast tier's tests that import the changed file run, nearest first, until one
fails. The table shows that test, which must pass without the fault. A fault whose old text does not occur exactly once
is an error.
"""

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

import yaml
from tests.imports import PACKAGES, ROOT, importers

# Catches a fault that makes a test hang; an uncaught fault runs all tests that import its file.
HANG_SECONDS = 3600


@dataclass(frozen=True, slots=True)
class Fault:
    """One planted fault: `old` becomes `new` in `file`, which breaks the promise that `breaks` names."""

    name: str
    file: str
    breaks: str
    old: str
    new: str
    # The reason why the fast tier may miss it, if it may.
    missed: str = ""

    def planted(self, text: str) -> str:
        """Return the text with the fault. Raise ValueError unless `old` occurs exactly once."""
        if self.old == self.new or text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.file} has the old text {text.count(self.old)} times, not once")
        return text.replace(self.old, self.new)


def read_faults() -> list[Fault]:
    """Return all faults, checked against this tree. Raise ValueError for a bad one."""
    faults = [
        Fault(**row)
        for file in sorted(Path(__file__).parent.glob("*.yaml"))
        for row in yaml.safe_load(file.read_text())
    ]
    if len({fault.name for fault in faults}) != len(faults):
        raise ValueError("two faults share a name")
    for fault in faults:
        ast.parse(fault.planted((ROOT / fault.file).read_text()))
    return faults


def tests_of(file: str) -> list[str]:
    """Return the test files that import a file directly or indirectly, nearest first."""
    start = ROOT / file
    distance, queue = {start: 0}, deque([start])
    while queue:
        current = queue.popleft()
        # A conftest.py applies to the test files in its folder.
        below = current.parent.rglob("test_*.py") if current.name == "conftest.py" else ()
        for other in (*importers().get(current, ()), *below):
            if other not in distance:
                distance[other] = distance[current] + 1
                queue.append(other)
    stem, room = start.stem, start.parent.name
    tests = [path for path in distance if path.name.startswith("test_") and path.is_relative_to(ROOT / "tests")]
    tests.sort(key=lambda path: (stem not in path.stem, room != path.parent.name, distance[path], str(path)))
    return [str(path.relative_to(ROOT)) for path in tests]


def copy_tree(to: Path) -> None:
    """Copy the tracked files and the untracked files that git does not ignore, and link the fetched programs."""
    if (ROOT / ".tools").exists():
        to.mkdir()
        (to / ".tools").symlink_to(ROOT / ".tools")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def run_tests(tree: Path, tests: list[str]) -> tuple[str, float]:
    """Run tests in a tree until one fails. Return that test (or "") and the seconds."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(str(tree / name) for name in (*PACKAGES, "bench"))
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-rfE", "--tb=no", *tests]
    begun = time.monotonic()
    run = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS)
    # A test's name may have spaces, and " - " begins the message.
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", run.stdout, re.MULTILINE)
    if run.returncode > 2 and not failed:
        raise RuntimeError(f"pytest ran no test, code {run.returncode}: {run.stdout[-300:]}{run.stderr[-300:]}")
    if run.returncode and not failed:
        failed = [f"pytest ended with {run.returncode}"]
    return (failed[0] if failed else ""), time.monotonic() - begun


def main() -> int:
    """Print the table. Return 1 if a fault without an excuse was missed."""
    parser = argparse.ArgumentParser(description="plant faults and see which tests of the fast tier fail")
    parser.add_argument("names", nargs="*", help="faults to plant (default: all)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="trees to work in at once")
    args = parser.parse_args()
    faults = read_faults()
    unknown = set(args.names) - {fault.name for fault in faults}
    if unknown:
        parser.error(f"no fault is called {', '.join(sorted(unknown))}")
    faults = [fault for fault in faults if not args.names or fault.name in args.names]
    missed = []
    with tempfile.TemporaryDirectory(prefix="moeyard-mutants-") as folder:
        trees: Queue[Path] = Queue()
        for job in range(args.jobs):
            copy_tree(Path(folder) / str(job))
            trees.put(Path(folder) / str(job))

        def plant(fault: Fault) -> tuple[Fault, str, float]:
            tree = trees.get()
            file = tree / fault.file
            whole = file.read_text()
            try:
                file.write_text(fault.planted(whole))
                test, seconds = run_tests(tree, tests_of(fault.file))
                file.write_text(whole)
                if "::" in test and run_tests(tree, [test])[0]:
                    raise RuntimeError(f"{test} fails without the fault {fault.name} too")
                return fault, test, seconds
            finally:
                file.write_text(whole)
                trees.put(tree)

        with ThreadPoolExecutor(args.jobs) as pool:
            for fault, test, seconds in pool.map(plant, faults):
                print(f"{fault.name:44} {seconds:6.0f} s  {test or 'MISSED ' + fault.missed}", flush=True)
                missed += [] if test else [fault]
    print(f"{len(faults) - len(missed)} of {len(faults)} faults caught")
    return int(any(not fault.missed for fault in missed))


if __name__ == "__main__":
    sys.exit(main())
