"""Chooses how many tokens to draft in the next step, from measured acceptance and step times. Pure.

A step that verifies and drafts k tokens yields 1 + q_1 + q_1 q_2 + ... + q_1 .. q_k tokens per sequence. Here q_j is
the share of right drafts at place j when all before it are right. The time of such a step is measured at about the same
number of sequences. The depth with the most tokens per second is found by hill climbing from one draft. Its neighbours
are tried again now and then, because load and texts change. (Trying every depth at every number of sequences slowed
eight streams of 64 tokens by a tenth.)
"""

from collections import deque
from collections.abc import Sequence

from moeyard_worker.scheduling.request import Accepted
from moeyard_worker.scheduling.step import Step

# Weight of each new verification in the moving average of a place's acceptance.
_FORGET = 0.02
# Consecutive steps of a trial. The first one still verifies the drafts of the previous depth.
_TRIAL = 5
# Steps between two trials. A trial takes 5 steps, so a depth of half the speed costs 2 %.
_REST = 240
# Step times kept per depth. Their lower quartile counts, because other load makes steps longer and never shorter. (With
# nine times, five were slow ones at some moment, and the median then rejected the best depth.)
_KEPT = 16
_ENOUGH = 4


class Depth:
    """Chooses a depth from 0 to `most` for one rank. Ranks agree on the depth of a step through their plan frames."""

    def __init__(self, most: int) -> None:
        self._most = most
        # By place: the share of right drafts if those before are right. The initial value is a guess.
        self._right = [0.7] * most
        # By (number of sequences rounded up to a power of two, depth).
        self._seconds: dict[tuple[int, int], deque[float]] = {}
        self._trying: tuple[int, int] | None = None
        self._left = 0
        self._rest = 0
        self._turn = 0
        # The depth of the previous step, whose drafts the next one verifies.
        self._before = -1

    def choose(self, num_sequences: int) -> int:
        """Return the depth of a step with `num_sequences`."""
        size = _rounded(num_sequences)
        if self._left and self._trying is not None and self._trying[0] == size:
            self._left -= 1
            return self._trying[1]
        known = [k for k in range(self._most + 1) if len(self._seconds.get((size, k), ())) >= _ENOUGH]
        self._rest += 1
        if not known:
            return self._try(size, min(1, self._most))
        best = max(known, key=lambda k: self._rate(size, k))
        beside = [k for k in (best - 1, best + 1) if 0 <= k <= self._most]
        unknown = [k for k in beside if k not in known]
        if unknown:
            return self._try(size, unknown[0])
        if self._rest > _REST:
            self._turn += 1
            return self._try(size, beside[self._turn % len(beside)])
        return best

    def _try(self, size: int, depth: int) -> int:
        self._trying, self._left, self._rest = (size, depth), _TRIAL - 1, 0
        return depth

    def _rate(self, size: int, depth: int) -> float:
        """Return tokens per second of each sequence."""
        times = sorted(self._seconds[size, depth])
        return self.tokens(depth) / times[len(times) // 4]

    def tokens(self, depth: int) -> float:
        """Return the expected tokens per sequence of a step that verifies `depth` drafts."""
        total = right = 1.0
        for share in self._right[:depth]:
            right *= share
            total += right
        return total

    def verified(self, num_drafts: int, num_accepted: int) -> None:
        """Note that the first `num_accepted` of `num_drafts` were right. Drafts after a wrong one are ignored."""
        for place in range(min(num_drafts, num_accepted + 1)):
            found = float(place < num_accepted)
            self._right[place] += _FORGET * (found - self._right[place])

    def took(self, num_sequences: int, depth: int, seconds: float) -> None:
        """Note the time of a step without prompt rows that verified the previous drafts and made `depth` new ones."""
        if depth == self._before and seconds > 0:
            times = self._seconds.setdefault((_rounded(num_sequences), depth), deque(maxlen=_KEPT))
            times.append(seconds)
        self._before = depth

    def interrupted(self) -> None:
        """Note a step of another kind. Neither its time nor the next one's counts."""
        self._before = -1


class Drafting:
    """The depth of every step: always `most`, or the choice of `Depth` if `adaptive`. Steps complete in order.

    least: depth of a step with prompt rows, because prompts must store the keys that drafts attend to.
    """

    def __init__(self, most: int, *, adaptive: bool) -> None:
        self._most, self.least = most, min(most, 1)
        self._depth = Depth(most) if adaptive and most else None
        self._completed = 0.0

    def wish(self, num_sequences: int) -> int:
        """Return how many drafts to make per sampled token in a step with `num_sequences` running."""
        if not num_sequences:
            return self.least
        return self._most if self._depth is None else self._depth.choose(num_sequences)

    def completed(self, step: Step, results: Sequence[Accepted], now: float) -> None:
        """A step has ended and yielded this. From end to end is its time: those that matter follow one another."""
        seconds, self._completed = now - self._completed, now
        depth = self._depth
        if depth is None:
            return
        for chunk, result in zip(step.sampled, results, strict=True):
            depth.verified(chunk.num_sampled - 1, len(result.token_ids) - 1)
        if step.prefill or step.scored or not results:
            depth.interrupted()
        else:
            # Ranks may have agreed on a larger depth than this one wanted.
            depth.took(len(results), max(len(result.drafts) for result in results), seconds)


def _rounded(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()
