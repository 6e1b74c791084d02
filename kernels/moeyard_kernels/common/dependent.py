"""Programmatic dependent launch: a kernel is launched while the one before it in the stream still runs.

A kernel launched with `dependent(x)` calls `wait_for_previous` before it reads or writes memory of the caller (what may
come first says so where it stands). Its launch overlaps with the end of the kernel ahead: wholly, if that one called
`let_next_begin`, a little otherwise. As each waits for its predecessor to complete, in every program, completion stays
in order for the whole stream. Kernels of others are not launched early, and wait for ours as ever. Needs Hopper or
later; elsewhere nothing changes.

Which kernel does what was measured (docs/kernels.md). Kernels of few bytes let the next begin before they wait
themselves: a launch takes more than a microsecond to arrive, and so arrives while the large product ahead of both still
runs (a step of one row: 4 % less). The skinny product does it behind its wait, the merge of splits while its programs
are few. `mla_decode_hopper` waits, and lets the merge begin when its programs are at their last results. The experts'
first product waits and lets the second begin, which does the same where nothing was laid out, and first lets the next
begin for one token's pairs (`grouped_slice`, which reads ids, or logits, and writes the choice by these, before it
waits); other products and sampling only wait. The rest are launched as ever: programs of `gqa_decode` that come early
settle unevenly (315 us, 270 without); the layout, of few programs, took longer. If their programs are few,
`gqa_decode` and `rope_gqa_decode` do both.
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch
import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from moeyard_kernels.common.launch import capability
from moeyard_kernels.common.rounding import INTERPRETED

_NEVER: Mapping[str, bool] = MappingProxyType({})
_EARLY: Mapping[str, bool] = MappingProxyType({"launch_pdl": True})


@triton.jit
def wait_for_previous():
    """Wait until all memory that the launches before this one write is visible."""
    if not INTERPRETED:  # noqa: SIM102 - the interpreter would run the condition too
        if cuda_capability_geq(9, 0):
            tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_begin():
    """The next launch may begin, once all programs got here: in what multiprocessors have left, and up to its wait."""
    if not INTERPRETED:  # noqa: SIM102 - as above
        if cuda_capability_geq(9, 0):
            tl.extra.cuda.gdc_launch_dependents()


def dependent(x: torch.Tensor) -> Mapping[str, bool]:
    """Options for the launch, on the device of x, of a kernel that calls `wait_for_previous`."""
    return _EARLY if capability(x) >= (9, 0) else _NEVER
