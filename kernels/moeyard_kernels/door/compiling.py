"""The door to what tells of compilations, and has many done at once, for whoever has a GPU."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from moeyard_kernels.door.load import module
from moeyard_kernels.types.compiled import Compiled


def before_compiling(tell: Callable[[], None]) -> AbstractContextManager[None]:
    """Call `tell` before whatever this thread compiles while the context lasts; loads Triton."""
    watching: AbstractContextManager[None] = module("common.compiling").before_compiling(tell)
    return watching


def compiling_only(at_once: int, device: torch.device) -> AbstractContextManager[Compiled]:
    """Have what this thread launches while the context lasts compiled for `device`, and not launched; loads Triton."""
    compiling: AbstractContextManager[Compiled] = module("common.compiling").compiling_only(at_once, device)
    return compiling
