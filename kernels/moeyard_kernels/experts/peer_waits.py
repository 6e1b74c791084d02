"""Triton: a wait for what peers write, which ends by itself, and the record of one that was in vain (`peer_window`)."""

import triton
import triton.language as tl

from moeyard_kernels.common.rounding import INTERPRETED
from moeyard_kernels.experts.peer_words import wide
from moeyard_kernels.types import peer_window

_POISONED, _ABORT = tl.constexpr(peer_window.POISONED), tl.constexpr(peer_window.ABORT)
_SPENT = tl.constexpr(peer_window.SPENT)
# Looks between two at the clock, about half a microsecond each.
_LOOKS = tl.constexpr(512)


@triton.jit
def fail(p_state, p_fault, epoch, layer, ranks, PHASE: tl.constexpr, REASON: tl.constexpr):
    """Say what is wrong, in the order of `peer_window`, and poison this rank."""
    tl.store(p_fault + 1, PHASE)
    tl.store(p_fault + 2, wide(layer))
    tl.store(p_fault + 3, ranks)
    tl.store(p_fault + 4, epoch)
    tl.store(p_fault + 5, REASON)
    tl.store(p_fault, 1)
    tl.store(p_state + _POISONED, 1)


@triton.jit
def _told(p_word, value):
    """A value as one thread has it, for all threads: a timer and a look at what changes may differ between them."""
    tl.atomic_xchg(p_word, value, sem="relaxed", scope="gpu")
    return tl.atomic_add(p_word, tl.full((), 0, tl.int64), sem="relaxed", scope="gpu")


@triton.jit
def wait_for(p_word, goal, p_seen, p_fault, limit):
    """Wait until a word that only grows has reached `goal`, for `limit` ns at most or until the host ends it, who is
    told how long it lasts; what it was seen at last, with acquire. p_seen: two words of this program, of no meaning to
    others."""
    nothing = tl.full((), 0, tl.int64)
    # Whatever takes part in a decision is read by one thread, which tells the others.
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
                # Only read: an atomic on memory of the host is none over PCIe, and would write over the host's word.
                aborted = _told(p_seen + 1, tl.load(p_fault + _ABORT, volatile=True))
                spent = tl.where(aborted != 0, wide(limit), now - begun)
                tl.store(p_fault + _SPENT, spent)
        # One that was in vain stays written down beside the record of it.
        if (spent > 0) & (seen >= goal):
            tl.store(p_fault + _SPENT, nothing)
    return seen
