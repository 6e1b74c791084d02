"""Triton: addresses in the memory of peers, a row put there, and what is counted on the way (`peer_exchange`).

Counting keeps nobody waiting. Bytes are added behind the arrival that a peer waits for, and nothing reads them: the
adds are on their way while the launch waits for packets itself. One exchange in TIMED_ONE_IN is timed, by the program
that waits; the others pay for a comparison.
"""

import triton
import triton.language as tl

from moeyard_kernels.common.rounding import INTERPRETED
from moeyard_kernels.types import peer_shape, peer_window

_RECEIVED, _SENT = tl.constexpr(peer_shape.RECEIVED), tl.constexpr(peer_shape.SENT)
_NUM_TIMES, _TIMES = tl.constexpr(peer_shape.NUM_TIMES), tl.constexpr(peer_shape.TIMES)
_KEPT, _ONE_IN = tl.constexpr(peer_shape.KEPT_TIMES), tl.constexpr(peer_window.TIMED_ONE_IN)


@triton.jit
def wide(i):
    """An integer in 64 bits."""
    return tl.full((), 0, tl.int64) + i


@triton.jit
def int64_at(address, OFFSET: tl.constexpr):
    """What lies OFFSET bytes behind an address, as 8 byte integers."""
    return tl.multiple_of((address + OFFSET).to(tl.pointer_type(tl.int64)), 16)


@triton.jit
def int32_at(address, OFFSET: tl.constexpr):
    """The same as 4 byte integers."""
    return tl.multiple_of((address + OFFSET).to(tl.pointer_type(tl.int32)), 16)


@triton.jit
def put_row(p_from, p_to, N: tl.constexpr, BLOCK: tl.constexpr):
    """N words of 4 bytes."""
    for i in tl.static_range(0, N, BLOCK):
        o = i + tl.arange(0, BLOCK)
        if N % BLOCK:
            tl.store(p_to + o, tl.load(p_from + o, mask=o < N), mask=o < N)
        else:
            tl.store(p_to + o, tl.load(p_from + o))


@triton.jit
def count_put(own, to, num_bytes, COUNTS: tl.constexpr):
    """This program's share of a packet for a peer, here and there. Nobody waits for either add."""
    if num_bytes > 0:
        tl.atomic_add(int64_at(to, COUNTS) + _RECEIVED, num_bytes, sem="relaxed", scope="sys")
        tl.atomic_add(int64_at(own, COUNTS) + _SENT, num_bytes, sem="relaxed", scope="gpu")


@triton.jit
def clock_of(epoch):
    """When an exchange began, in nanoseconds, if it is one that is timed; otherwise 0."""
    begun = tl.full((), 0, tl.int64)
    if not INTERPRETED:  # noqa: SIM102 - the interpreter would run the condition too
        # In 32 bits the remainder is a product and a shift.
        if epoch.to(tl.int32) % _ONE_IN == 0:
            begun = tl.extra.cuda.globaltimer()
    return begun


@triton.jit
def note_time(own, begun, PHASE: tl.constexpr, COUNTS: tl.constexpr):
    """Keep what a phase took that began then, in place of the oldest. Only the program that waits does."""
    if not INTERPRETED:  # noqa: SIM102 - as above
        if begun != 0:
            p_counts = int64_at(own, COUNTS)
            number = tl.load(p_counts + _NUM_TIMES + PHASE)
            tl.store(p_counts + _TIMES + PHASE * _KEPT + (number & (_KEPT - 1)), tl.extra.cuda.globaltimer() - begun)
            tl.store(p_counts + _NUM_TIMES + PHASE, number + 1)
