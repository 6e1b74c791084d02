"""Triton: a wait for peers with a time limit, and the record of a failed wait (`peer_window`)."""

import triton
import triton.language as tl

from moeyard_kernels.common.rounding import INTERPRETED
from moeyard_kernels.experts.peer_words import wide
from moeyard_kernels.types import peer_window

_POISONED, _ABORT = tl.constexpr(peer_window.POISONED), tl.constexpr(peer_window.ABORT)
_SPENT = tl.constexpr(peer_window.SPENT)
# Polls between two reads of the clock, about half a microsecond each.
_LOOKS = tl.constexpr(512)


@triton.jit
def fail(p_state, p_fault, epoch, layer, ranks, PHASE: tl.constexpr, REASON: tl.constexpr):
    """Write the failure record, in the order of `peer_window`, and poison this rank."""
    tl.store(p_fault + 1, PHASE)
    tl.store(p_fault + 2, wide(layer))
    tl.store(p_fault + 3, ranks)
    tl.store(p_fault + 4, epoch)
    tl.store(p_fault + 5, REASON)
    tl.store(p_fault, 1)
    tl.store(p_state + _POISONED, 1)


@triton.jit
def _told(p_word, value):
    """Broadcast one thread's value to all threads, whose clocks and reads of changing memory may differ."""
    tl.atomic_xchg(p_word, value, sem="relaxed", scope="gpu")
    return tl.atomic_add(p_word, tl.full((), 0, tl.int64), sem="relaxed", scope="gpu")


@triton.jit
def wait_for(p_word, goal, p_seen, p_fault, limit):
    """Wait until a growing counter reaches `goal`, for at most `limit` ns or until the host ends the wait.

    Returns the last value read, with acquire, and reports the wait's length to the host. p_seen: two scratch words of
    this program.
    """
    nothing = tl.full((), 0, tl.int64)
    # Atomics make one thread read each value that affects control flow, for all threads.
    seen = tl.atomic_add(p_word, nothing, sem="acquire", scope="sys")
    if not INTERPRETED:
        begun, spent = nothing, nothing
        while (seen < goal) & (spent < limit):
            looks = 0
            while (seen < goal) & (looks < _LOOKS):
                seen = tl.atomic_add(p_word, nothing, sem="acquire", scope="sys")
                looks += 1
            if seen < goal:
                now = _told(p_seen, tl.extra.cuda.globaltimer())
                begun = tl.where(begun == 0, now, begun)
                # A plain read: over PCIe an atomic on host memory is not atomic, and would overwrite the host's flag.
                aborted = _told(p_seen + 1, tl.load(p_fault + _ABORT, volatile=True))
                spent = tl.where(aborted != 0, wide(limit), now - begun)
                tl.store(p_fault + _SPENT, spent)
        # The length of a failed wait stays in the failure record.
        if (spent > 0) & (seen >= goal):
            tl.store(p_fault + _SPENT, nothing)
    return seen
