"""Listeners learn of a kernel before it is compiled or loaded, Gluon kernels included, and keep their own caches.
Launches in compile-only mode compile kernels without running them."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.limits import HANG_SECONDS
from triton import knobs
from triton.runtime.cache import FileCacheManager, get_cache_manager

from moeyard_kernels.common.compiling import before_compiling

SCRIPT = Path(__file__).with_name("compile_for_hopper.py")
# Builds a Gluon kernel, which takes layouts, and a Triton kernel, then prints how often the listener was called.
TOLD = f"""
import runpy, sys
from moeyard_kernels.common.compiling import before_compiling
told = []
sys.argv = [{str(SCRIPT)!r}, "1", "head_linear", "rms_norm"]
with before_compiling(lambda: told.append(1)):
    runpy.run_path(sys.argv[0], run_name="__main__")
print("told", len(told))
"""
# Launches a Triton kernel and some in Gluon with two configs in compile-only mode, then in earnest. Without a GPU the
# latter fails, and so does a launch from another thread meanwhile.
AT_ONCE = f"""
import runpy, threading
import torch
from moeyard_kernels.common.compiling import compiling_only
from moeyard_kernels.elementwise.rms_norm import rms_norm
from moeyard_kernels.elementwise.silu_mul import _silu_mul_kernel
from moeyard_kernels.linear.linear import linear
from triton import knobs

def launch(rows):
    with script["NoStorage"]():
        x = torch.empty(rows, 1024, dtype=torch.bfloat16, device="cuda")
        rms_norm(x, x[0], 1e-6)
        linear(x, torch.empty(4096, 1024, dtype=torch.bfloat16, device="cuda"))
        # These are one kernel, requested in two ways.
        for options in ({{}}, {{"num_stages": 3}}):
            _silu_mul_kernel[(rows, 1)](x, x, 1024, 512, BI=512, LIMIT=0.0, **options)

def launched():
    try:
        launch(8)
    except AttributeError as error:
        failed.append(str(error))

script = runpy.run_path({str(SCRIPT)!r})
script["pretend"]()
heard, failed = [], []
knobs.compilation.listener = lambda **what: heard.append(what["cache_hit"])
with compiling_only(2) as compiled:
    launch(512)
    launch(8)
    other = threading.Thread(target=launched)
    other.start()
    other.join()
with compiling_only(2) as again:
    launch(512)
launched()
kinds = {{type(kernel).__name__ for kernel in _silu_mul_kernel.device_caches[0][0].values()}}
print(compiled.count, again.count, heard.count(False), heard.count(True), *kinds, *failed, sep=";")
"""
# Loads kernels of two signatures with launchers like those of Triton 3.6: one name in one module, so a loader finds the
# module of the latest one. Prints the number of kernels, of launchers and of threads that made them, the number of
# kernels with another's launcher, and whether one thread loaded all.
LOADED = f"""
import runpy, threading, time
from collections import Counter
from types import SimpleNamespace
import torch
from moeyard_kernels.common.compiling import compiling_only
from moeyard_kernels.elementwise.rms_norm import rms_norm
from moeyard_kernels.elementwise.silu_mul import _silu_mul_kernel
from triton.runtime import driver

class Launcher:
    def __init__(self, src, metadata):
        makers[threading.get_ident()] += 1
        if len(makers) > 1:
            several.set()
        several.wait({HANG_SECONDS})
        self.signature = module.signature = tuple(src.signature.items())
        time.sleep(0.01)
        self.found = module.signature
        every.append(self)

def load_binary(*_):
    loaders.add(threading.get_ident())
    return 1, 1, 0, 0, 1024

script = runpy.run_path({str(SCRIPT)!r})
script["pretend"]()
module, makers, every, loaders, several = SimpleNamespace(), Counter(), [], set(), threading.Event()
driver.active.launcher_cls = Launcher
properties = {{"max_shared_mem": 232448}}
driver.active.utils = SimpleNamespace(load_binary=load_binary, get_device_properties=lambda _device: properties)
torch.cuda.set_device = lambda _device: None
with compiling_only(4, torch.device("cuda", 0)) as compiled, script["NoStorage"]():
    x = torch.empty(8, 1024, dtype=torch.bfloat16, device="cuda")
    for columns in (256, 512, 1024):
        rms_norm(x[:, :columns], x[0, :columns], 1e-6)
        _silu_mul_kernel[(8, 1)](x, x, 1024, 512, BI=columns, LIMIT=0.0)
wrong = [each for each in every[-compiled.count:] if each.found != each.signature]
made = len(every) - makers[threading.get_ident()]
print(compiled.count, made, len(makers) > 2, len(wrong), loaders == {{threading.get_ident()}}, sep=";")
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path) -> Iterator[None]:
    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path)
        yield


def ask(key: str = "ab") -> None:
    """Make the calls that Triton makes before it compiles a kernel and the C code that launches it."""
    manager = get_cache_manager(key)
    manager.get_group("kernel.json")
    manager.get_file("launcher.so")


def output_of(script: str, cache: Path) -> str:
    """Return the output of a new process that compiles with this cache."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "TRITON_CACHE_DIR": str(cache)}
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout


def test_compiling_and_loading_call_the_listener() -> None:
    told: list[int] = []
    # A worker of another test in this process may listen too.
    before = knobs.cache.manager_class
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
    assert knobs.cache.manager_class is before


def test_other_threads_do_not_call_the_listener() -> None:
    told: list[int] = []
    with before_compiling(lambda: told.append(1)):
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    assert not told


def test_other_cache_managers_stay_in_use() -> None:
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
    # A later manager extends ours, which stays in place.
    assert knobs.cache.manager_class is Later
    ask()
    assert (len(told), Theirs.asked) == (1, 2)
    knobs.cache.manager_class = Theirs
    with before_compiling(lambda: told.append(1)):
        pass
    assert knobs.cache.manager_class is Theirs


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="these builds pretend to have a GPU")
def test_each_built_or_loaded_kernel_calls_the_listener_once(tmp_path: Path) -> None:
    counts = []
    for _ in range(2):
        *built, last = output_of(TOLD, tmp_path).splitlines()
        assert any("hopper" in line for line in built)
        counts.append(int(last.removeprefix("told ")))
    # From the second process on the cache has the kernels, so they are loaded.
    assert counts[0] == counts[1] >= len(built) > 0


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="these builds pretend to have a GPU")
def test_kernels_are_compiled_in_parallel_and_not_launched(tmp_path: Path) -> None:
    compiled, again, missed, loaded, kind, *failed = output_of(AT_ONCE, tmp_path).strip().split(";")
    compiled_later, _, missed_later, loaded_later, *_ = output_of(AT_ONCE, tmp_path).strip().split(";")
    # Both listeners are called. Existing kernels are neither compiled nor loaded again, and launches find them.
    assert int(compiled) == int(missed) >= 3
    assert (again, loaded, compiled_later, missed_later) == ("0", "0", "0", "0")
    assert loaded_later == compiled
    assert kind == "CompiledKernel"
    assert len(failed) == 2
    assert all("launch" in error for error in failed)


@pytest.mark.skipif(torch.cuda.is_available(), reason="these builds pretend to have a GPU")
def test_every_kernel_gets_its_own_launcher(tmp_path: Path) -> None:
    compiled, made, *said_of_them = output_of(LOADED, tmp_path).strip().split(";")
    assert int(made) == int(compiled) >= 6
    assert said_of_them == ["True", "0", "True"]
