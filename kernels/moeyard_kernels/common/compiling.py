"""Who wants to know before Triton compiles a kernel, which takes seconds."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from triton import knobs
from triton.runtime.cache import FileCacheManager


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
