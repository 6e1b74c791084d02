"""Programmatic dependent launch: a kernel starts while the previous one in the stream still runs.

A kernel launched with `dependent(x)` calls `wait_for_previous` before it reads or writes the caller's memory;
exceptions are explained where they occur. Its launch overlaps the end of the previous kernel: fully if that one called
`let_next_begin`, a little otherwise. Every program waits for the previous kernel to complete, so the whole stream
completes in order. Kernels of other libraries are not launched early, and wait for ours as usual. This needs Hopper or
later; elsewhere nothing changes.

Measurements decided what each kernel does (docs/journal.md):
- Kernels of few bytes call `let_next_begin` before they wait. A launch takes over a microsecond to start, and so starts
  while the large product before both still runs (4 % less for a step of one row).
- The skinny product calls it after its wait, the merge of splits while it has few programs.
- `mla_decode_hopper` waits, and lets the merge begin when its programs are at their last results.
- The experts' first product waits and lets the second begin. Without a layout the second does the same. For one token's
  pairs it first lets the next begin, and reads ids, or reads logits and writes the choice, before it waits
  (`grouped_slice`).
- Other products and sampling only wait.
- `gqa_decode` and `rope_gqa_decode` do both if their programs are few. With many programs, early ones are placed
  unevenly (315 us, not 270), so all other kernels launch as usual. The layout, with few programs, became slower too.
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
    """Wait until all writes of earlier launches are visible."""
    if not INTERPRETED:  # noqa: SIM102 - the interpreter would run the condition too
        if cuda_capability_geq(9, 0):
            tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_begin():
    """Let the next launch begin once all programs are here. It uses free multiprocessors and runs up to its wait."""
    if not INTERPRETED:  # noqa: SIM102 - as above
        if cuda_capability_geq(9, 0):
            tl.extra.cuda.gdc_launch_dependents()


def dependent(x: torch.Tensor) -> Mapping[str, bool]:
    """Return the launch options, on the device of x, of a kernel that calls `wait_for_previous`."""
    return _EARLY if capability(x) >= (9, 0) else _NEVER
