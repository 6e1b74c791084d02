"""The door to what tells of compilations, for whoever has a GPU."""

from collections.abc import Callable
from contextlib import AbstractContextManager

from moeyard_kernels.door.load import module


def before_compiling(tell: Callable[[], None]) -> AbstractContextManager[None]:
    """Call `tell` before whatever this thread compiles while the context lasts; loads Triton."""
    watching: AbstractContextManager[None] = module("common.compiling").before_compiling(tell)
    return watching
