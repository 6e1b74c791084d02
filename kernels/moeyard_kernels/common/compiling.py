"""Notice before Triton compiles a kernel, which takes seconds, and parallel compilation ahead of time."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from triton import AsyncCompileMode, FutureKernel, knobs
from triton.runtime import driver
from triton.runtime.cache import FileCacheManager
from triton.runtime.jit import JITFunction


@dataclass(slots=True)
class CompileCounts:
    """Numbers of kernels compiled, and found in Triton's cache."""

    count: int = 0
    found: int = 0


@contextmanager
def before_compiling(tell: Callable[[], None]) -> Iterator[None]:
    """Call `tell` before this thread compiles or loads a kernel: a device may have to idle for that.

    Triton looks in its cache for every kernel that it compiles or loads, once per process, so the cache manager calls
    `tell`. Triton's hook for this purpose, `jit_cache_hook`, gets all arguments as JSON, which fails for kernels that
    take layouts. An existing cache manager stays in use.
    """
    told, thread = [tell], threading.get_ident()
    earlier = knobs.cache.manager_class

    class Telling(earlier or FileCacheManager):  # type: ignore[misc, valid-type]
        """The cache of one kernel."""

        def get_group(self, filename: str) -> dict[str, str] | None:
            if told and threading.get_ident() == thread:
                told[0]()
            found: dict[str, str] | None = super().get_group(filename)
            return found

    knobs.cache.manager_class = Telling
    try:
        yield
    finally:
        # Another manager may have been derived from this one meanwhile. Clear `told`: it then calls nothing and holds
        # no reference.
        told.clear()
        if knobs.cache.manager_class is Telling:
            knobs.cache.manager_class = earlier


@contextmanager
def compiling_only(at_once: int, device: torch.device | None = None) -> Iterator[CompileCounts]:
    """Compile the kernels that this thread launches meanwhile, up to `at_once` in parallel, and launch none.

    Afterwards all of them are ready, in this process and in Triton's cache, and loaded onto `device` if given. Until
    then their outputs are undefined. Threads suffice: Triton holds Python's lock for a thirteenth of a compilation
    (measured: two threads take 0.54 of the time of one). Use one such context at a time. Raises a compilation's error.
    """
    launch, thread, compiled = JITFunction.run, threading.get_ident(), CompileCounts()
    earlier, lock, launched = knobs.compilation.listener, threading.Lock(), set[Any]()

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            launched.add(self)
            warmup = True
        return launch(self, *args, grid=grid, warmup=warmup, **kwargs)

    def listen(*, cache_hit: bool, **what: Any) -> None:
        with lock:
            compiled.count += not cache_hit
            compiled.found += cache_hit
        if earlier is not None:
            earlier(cache_hit=cache_hit, **what)

    begin = None if device is None else partial(torch.cuda.set_device, device)
    with ThreadPoolExecutor(at_once, "compile", begin) as pool:
        JITFunction.run, knobs.compilation.listener = compile_only, listen
        try:
            with AsyncCompileMode(pool):
                yield compiled
        finally:
            JITFunction.run, knobs.compilation.listener = launch, earlier
        caches = [cache[0] for function in launched for cache in function.device_caches.values()]
        for kernels in caches:
            # If launches give the same options in different ways, Triton keeps one kernel, and for the others a future
            # of it, which cannot be launched.
            kernels.update({key: each.result() for key, each in kernels.items() if isinstance(each, FutureKernel)})
        if device is not None:
            found, launcher = {each for kernels in caches for each in kernels.values()}, driver.active.launcher_cls
            # Triton 3.6 launches a kernel by C code. Threads compile it (0.1 s each) and drop the module.
            list(pool.map(lambda kernel: launcher(kernel.src, kernel.metadata), found))
            # Load launchers in one thread. All these modules share a name, and CPython can return the last one loaded
            # under it: among threads a kernel may get another kernel's launcher.
            _ = [kernel.run for kernel in found]
