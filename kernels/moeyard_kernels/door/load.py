"""The one loader behind the door: what computes an op, chosen by where its tensors are."""

import functools
import importlib
from types import ModuleType
from typing import Any

import torch


@functools.cache
def module(name: str) -> ModuleType:
    """A module of the kernels, loaded when it is first asked for: it may want Triton."""
    return importlib.import_module(f"moeyard_kernels.{name}")


def kernel(name: str, x: torch.Tensor) -> Any:
    """The module of `name` ("linear.linear": folder and stem) for tensors where x is: Triton on CUDA, else the oracle.

    Both hold a function per op, with the arguments and results of the op itself. Triton is loaded only where there is a
    GPU to run it, hence not when this is imported.
    """
    return module(name if x.is_cuda else f"ref.{name.partition('.')[2]}")
