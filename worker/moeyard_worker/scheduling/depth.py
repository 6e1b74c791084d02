"""How many tokens to draft in the next step, from what drafts and steps have cost and yielded so far. Pure.

A step that verifies and drafts k tokens per sequence yields 1 + q_1 + q_1 q_2 + ... + q_1 .. q_k of each, where q_j is
how often the j-th draft is right when those before it are. It takes the seconds that such steps took at about as many
sequences. The depth with the most tokens per second is taken, found by climbing: from one draft up or down for as long
as that is better. What stands beside the best is tried again now and then, since machines, neighbours and texts change.
(To try every depth at every number of sequences cost eight streams of 64 tokens a tenth of their pace.)
"""

from collections import deque
from collections.abc import Sequence

from moeyard_worker.scheduling.request import Accepted
from moeyard_worker.scheduling.step import Step

# How much of what was known of a draft's place is forgotten with every verification there.
_FORGET = 0.02
# Steps of one depth in a row when it is tried. The first still verifies what the depth before has drafted.
_TRIAL = 5
# Steps between two trials: each costs 5 of them at another pace, so that half the pace costs 2 %.
_REST = 240
# The latest times that are kept of a depth. Their lower quartile counts: a machine that is busy with something else
# makes steps longer, never shorter. (Of nine, five were slow ones at some moment, and their median left the best.)
_KEPT = 16
_ENOUGH = 4


class Depth:
    """Chooses among 0 to `most`. A rank's own: what others wish is agreed on elsewhere."""

    def __init__(self, most: int) -> None:
        self._most = most
        # Of each place: how often a draft there is right if those before it are. Hope, to begin with.
        self._right = [0.7] * most
        # By (sequences, rounded up to a power of two; depth).
        self._seconds: dict[tuple[int, int], deque[float]] = {}
        self._trying: tuple[int, int] | None = None
        self._left = 0
        self._rest = 0
        self._turn = 0
        # The depth of the step before, which is what the next one verifies.
        self._before = -1

    def choose(self, num_sequences: int) -> int:
        """The depth of a step of so many sequences."""
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
        """Tokens of each sequence per second."""
        times = sorted(self._seconds[size, depth])
        return self.tokens(depth) / times[len(times) // 4]

    def tokens(self, depth: int) -> float:
        """What a sequence is expected to get of a step that verifies so many drafts."""
        total = right = 1.0
        for share in self._right[:depth]:
            right *= share
            total += right
        return total

    def verified(self, num_drafts: int, num_accepted: int) -> None:
        """Of so many drafts of a sequence the first `num_accepted` were right; one behind a wrong one says nothing."""
        for place in range(min(num_drafts, num_accepted + 1)):
            found = float(place < num_accepted)
            self._right[place] += _FORGET * (found - self._right[place])

    def took(self, num_sequences: int, depth: int, seconds: float) -> None:
        """A step of output rows alone has verified what the step before drafted, and has drafted `depth` itself."""
        if depth == self._before and seconds > 0:
            times = self._seconds.setdefault((_rounded(num_sequences), depth), deque(maxlen=_KEPT))
            times.append(seconds)
        self._before = depth

    def interrupted(self) -> None:
        """A step of another kind: its time says nothing, nor does the next one's."""
        self._before = -1


class Drafting:
    """The depth of every step: `most` always, or if `adaptive` what `Depth` says. Steps are completed in their order.

    least: that of a step with prompt rows, since prompts are to have what drafts attend to.
    """

    def __init__(self, most: int, *, adaptive: bool) -> None:
        self._most, self.least = most, min(most, 1)
        self._depth = Depth(most) if adaptive and most else None
        self._completed = 0.0

    def wish(self, num_sequences: int) -> int:
        """What is to be drafted behind every token that a step of so many running sequences samples."""
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
        if step.prefill or not results:
            depth.interrupted()
        else:
            # Ranks may have agreed on more than this one wished.
            depth.took(len(results), max(len(result.drafts) for result in results), seconds)


def _rounded(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()
