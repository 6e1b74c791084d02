"""Triton: addresses in the memory of peers, the copy of a row, and counters for the host (`peer_exchange`).

Counters delay no rank. Bytes are added after the arrival that a peer waits for, and no kernel reads them, so the adds
are in flight while the launch waits for packets. One exchange in TIMED_ONE_IN is timed, by the program that waits; the
others pay for a comparison.
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
    """Convert an integer to 64 bits."""
    return tl.full((), 0, tl.int64) + i


@triton.jit
def int64_at(address, OFFSET: tl.constexpr):
    """Return a pointer to 8-byte integers OFFSET bytes after an address."""
    return tl.multiple_of((address + OFFSET).to(tl.pointer_type(tl.int64)), 16)


@triton.jit
def int32_at(address, OFFSET: tl.constexpr):
    """Return a pointer to 4-byte integers OFFSET bytes after an address."""
    return tl.multiple_of((address + OFFSET).to(tl.pointer_type(tl.int32)), 16)


@triton.jit
def put_row(p_from, p_to, N: tl.constexpr, BLOCK: tl.constexpr):
    """Copy N words of 4 bytes."""
    for i in tl.static_range(0, N, BLOCK):
        o = i + tl.arange(0, BLOCK)
        if N % BLOCK:
            tl.store(p_to + o, tl.load(p_from + o, mask=o < N), mask=o < N)
        else:
            tl.store(p_to + o, tl.load(p_from + o))


@triton.jit
def count_put(own, to, num_bytes, COUNTS: tl.constexpr):
    """Count this program's bytes of a packet, here and at the peer. No program waits for either add."""
    if num_bytes > 0:
        tl.atomic_add(int64_at(to, COUNTS) + _RECEIVED, num_bytes, sem="relaxed", scope="sys")
        tl.atomic_add(int64_at(own, COUNTS) + _SENT, num_bytes, sem="relaxed", scope="gpu")


@triton.jit
def clock_of(epoch):
    """Return the start of an exchange in nanoseconds if it is timed; otherwise 0."""
    begun = tl.full((), 0, tl.int64)
    if not INTERPRETED:  # noqa: SIM102 - the interpreter would run the condition too
        # In 32 bits the remainder is a product and a shift.
        if epoch.to(tl.int32) % _ONE_IN == 0:
            begun = tl.extra.cuda.globaltimer()
    return begun


@triton.jit
def note_time(own, begun, PHASE: tl.constexpr, COUNTS: tl.constexpr):
    """Store a phase's duration in place of the oldest. Only the waiting program calls it."""
    if not INTERPRETED:  # noqa: SIM102 - as above
        if begun != 0:
            p_counts = int64_at(own, COUNTS)
            number = tl.load(p_counts + _NUM_TIMES + PHASE)
            tl.store(p_counts + _TIMES + PHASE * _KEPT + (number & (_KEPT - 1)), tl.extra.cuda.globaltimer() - begun)
            tl.store(p_counts + _NUM_TIMES + PHASE, number + 1)
