"""Who wants to know before Triton compiles a kernel, which takes seconds; and many compiled at once, ahead of time."""

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
class Compiled:
    """How many kernels were compiled, and how many were in Triton's cache."""

    count: int = 0
    found: int = 0


@contextmanager
def before_compiling(tell: Callable[[], None]) -> Iterator[None]:
    """Call `tell` before whatever kernels this thread compiles meanwhile, or loads: a device may have to idle for that.

    Triton asks its cache for every kernel that it is about to make or to load, each once in a process, so it is the
    cache that tells. (Triton's hook for that purpose, `jit_cache_hook`, is given all arguments as JSON: kernels that
    take layouts do not build with it.) What manages the cache already, does so still.
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
        # Whoever has set another meanwhile may stand on this one, which then tells nobody any more, and keeps nobody.
        told.clear()
        if knobs.cache.manager_class is Telling:
            knobs.cache.manager_class = earlier


@contextmanager
def compiling_only(at_once: int, device: torch.device | None = None) -> Iterator[Compiled]:
    """Have kernels compiled, up to `at_once` beside each other, that this thread launches meanwhile; none is launched.

    When this ends all of them are there for launches to come, in this process and in Triton's cache, and loaded onto
    `device` if one is given. Until then what they were to write holds anything. Threads do, as Triton leaves Python's
    lock but for a thirteenth of a compilation (measured: two take 0.54 of the time of one). One such context at a time.
    Raises what a compilation raised.
    """
    launch, thread, compiled = JITFunction.run, threading.get_ident(), Compiled()
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
            # Of launches that differ in how options are given, and not in what they are, Triton keeps one kernel, and
            # of the others a promise of it, which cannot be launched.
            kernels.update({key: each.result() for key, each in kernels.items() if isinstance(each, FutureKernel)})
        if device is not None:
            found, launcher = {each for kernels in caches for each in kernels.values()}, driver.active.launcher_cls
            # What launches a kernel is C code of Triton 3.6: threads have it made (0.1 s each) and drop what they load.
            list(pool.map(lambda kernel: launcher(kernel.src, kernel.metadata), found))
            # One thread loads: all such modules have one name, and for one that was loaded before Python gives the last
            # of that name, with the functions of whoever asked last. Among threads a kernel may get another's.
            _ = [kernel.run for kernel in found]
