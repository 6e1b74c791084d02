"""Who wants to know before a kernel is compiled or loaded is told, of Gluon's too, and nobody's cache is lost."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from triton import knobs
from triton.runtime.cache import FileCacheManager, get_cache_manager

from moeyard_kernels.common.compiling import before_compiling

SCRIPT = Path(__file__).with_name("compile_for_hopper.py")
# Builds a kernel in Gluon, which takes layouts, and one of Triton's; then says how often it was told.
TOLD = f"""
import runpy, sys
from moeyard_kernels.common.compiling import before_compiling
told = []
sys.argv = [{str(SCRIPT)!r}, "1", "head_linear", "rms_norm"]
with before_compiling(lambda: told.append(1)):
    runpy.run_path(sys.argv[0], run_name="__main__")
print("told", len(told))
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path) -> Iterator[None]:
    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path)
        yield


def ask(key: str = "ab") -> None:
    """What Triton asks its cache before it compiles a kernel, and the C code that launches it."""
    manager = get_cache_manager(key)
    manager.get_group("kernel.json")
    manager.get_file("launcher.so")


def test_who_compiles_tells_and_who_loads() -> None:
    told: list[int] = []
    with before_compiling(lambda: told.append(1)):
        ask()
        assert len(told) == 1
        manager = get_cache_manager("ab")
        manager.put_group("kernel.json", {"kernel.json": manager.put("{}", "kernel.json")})
        manager.put(b"", "launcher.so")
        ask()
        assert len(told) == 2
        ask("cd")
        assert len(told) == 3
    ask("ef")
    assert len(told) == 3
    assert knobs.cache.manager_class is None


def test_another_thread_tells_nothing() -> None:
    told: list[int] = []
    with before_compiling(lambda: told.append(1)):
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    assert not told


def test_a_cache_of_others_goes_on_before_and_behind() -> None:
    class Theirs(FileCacheManager):
        asked = 0

        def get_file(self, filename: str) -> str | None:
            Theirs.asked += 1
            return super().get_file(filename)

    told: list[int] = []
    knobs.cache.manager_class = Theirs
    with before_compiling(lambda: told.append(1)):
        ask()
        assert (len(told), Theirs.asked) == (1, 1)

        class Later(knobs.cache.manager_class):  # type: ignore[misc, name-defined]
            pass

        knobs.cache.manager_class = Later
    # Who came later stands on ours, which is left where it is.
    assert knobs.cache.manager_class is Later
    ask()
    assert (len(told), Theirs.asked) == (1, 2)
    knobs.cache.manager_class = Theirs
    with before_compiling(lambda: told.append(1)):
        pass
    assert knobs.cache.manager_class is Theirs


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is built here pretends to a GPU")
def test_kernels_that_are_built_or_loaded_are_told_of_once(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "TRITON_CACHE_DIR": str(tmp_path)}
    counts = []
    for _ in range(2):
        run = subprocess.run([sys.executable, "-c", TOLD], capture_output=True, text=True, env=environment)
        assert run.returncode == 0, run.stderr[-3000:]
        *built, last = run.stdout.splitlines()
        assert any("hopper" in line for line in built)
        counts.append(int(last.removeprefix("told ")))
    # From the second process on the cache holds them, and they are loaded.
    assert counts[0] == counts[1] >= len(built) > 0
