"""Programmatic dependent launch: a kernel is launched while the one before it in the stream still runs.

Every kernel here calls `wait_for_previous` before it reads or writes memory of the caller (what may come first says so
where it stands) and is launched with `dependent(x)`. Only what precedes the call then overlaps: the launch itself and
the first instructions, about 1 us of each launch on an H200. A launch whose programs have all got here lets the next
one begin; as each waits for the completion of its predecessor, completion is still in order for the whole stream.
Kernels of others are not launched early, and wait for ours as ever. Needs Hopper or later; elsewhere nothing changes.
"""

import functools
from collections.abc import Mapping
from types import MappingProxyType

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.target_info import cuda_capability_geq

from moeyard_kernels.rounding import INTERPRETED

_NEVER: Mapping[str, bool] = MappingProxyType({})
_EARLY: Mapping[str, bool] = MappingProxyType({"launch_pdl": True})


@triton.jit
def wait_for_previous():  # type: ignore[no-untyped-def]
    """Wait until all memory that the launches before this one write is visible, then let the next one begin."""
    if not INTERPRETED:  # noqa: SIM102 - the interpreter would run the condition too
        if cuda_capability_geq(9, 0):
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()


@gluon.jit
def gluon_wait_for_previous():  # type: ignore[no-untyped-def]
    """`wait_for_previous` for kernels in Gluon, which are Hopper's."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@functools.cache
def _early(device: torch.device) -> Mapping[str, bool]:
    return _EARLY if torch.cuda.get_device_capability(device) >= (9, 0) else _NEVER


def dependent(x: torch.Tensor) -> Mapping[str, bool]:
    """Options for the launch, on the device of x, of a kernel that calls `wait_for_previous`."""
    return _early(x.device) if x.is_cuda else _NEVER
