"""What ranks say to each other beside the frames that are due, so that who is slow is told from who is silent.

BUSY: what comes next may take long (a kernel is being compiled). WAITING: this rank waits, its device for rows of
others, or its host for work. Both may come between any two frames and are nobody's turn: they never reach an inbox.
Each keeps its sender from being called silent for some time from when it is heard; whatever else it says ends that.
"""

from collections.abc import Iterable
from time import perf_counter

from moeyard_worker.exchange.frames import TAG_BYTES, Frame, FrameError, Phase, decode_tag

_BESIDE = (Phase.BUSY, Phase.WAITING)


class Signs:
    """What one rank has heard in `epoch`: after BUSY a peer may take `stall` seconds, after WAITING a `deadline`."""

    def __init__(self, epoch: int, *, deadline: float, stall: float) -> None:
        self._epoch = epoch
        self._seconds = {Phase.BUSY: stall, Phase.WAITING: deadline}
        # By peer, its last word if that was a sign: which, and until when it counts.
        self._said: dict[int, tuple[Phase, float]] = {}

    def hear(self, peer: int, frame: Frame) -> bool:
        """Take a frame of `peer` if it is a sign. Any other frame ends what was said before it.

        One of another epoch or rank is like any frame that nobody expects.
        """
        if len(frame) != TAG_BYTES or frame[3] not in _BESIDE:
            self._said.pop(peer, None)
            return False
        try:
            tag = decode_tag(bytes(frame))
        except FrameError:
            return False
        if (tag.epoch, tag.source) != (self._epoch, peer):
            return False
        self._said[peer] = tag.phase, perf_counter() + self._seconds[tag.phase]
        return True

    def until(self, peer: int) -> float:
        """Until when (perf_counter seconds) the peer's last word counts, if that was a sign; else 0."""
        return self._said[peer][1] if peer in self._said else 0.0

    def of(self, peer: int) -> Phase | None:
        """The sign that was the peer's last word, if it counts still."""
        return self._said[peer][0] if self.until(peer) > perf_counter() else None

    def somebody_waits(self) -> bool:
        """Whether the last word of some peer is that it waits."""
        return any(self.of(peer) is Phase.WAITING for peer in self._said)

    def allowed(self, peers: Iterable[int], seconds: float) -> float:
        """How long these may take: `seconds`, or more if the last word of one was that it is slow."""
        slow = any(peer in self._said and self._said[peer][0] is Phase.BUSY for peer in peers)
        return max(seconds, self._seconds[Phase.BUSY]) if slow else seconds
