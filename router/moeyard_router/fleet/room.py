"""How much a fleet may hold, and what a client is told that finds no room. Pure: times are handed in."""

from moeyard_router.errors import ApiError
from moeyard_router.fleet.drain import DrainRate, retry_after


class Room:
    """Counts sequences in flight and the prompt tokens of those that have no token yet.

    At most `most` sequences, and `most_tokens` such tokens unless it is None. `now` is monotonic seconds.
    """

    def __init__(self, now: float, most: int, most_tokens: int | None) -> None:
        self.sequences = 0
        self.unread_tokens = 0
        self._most = most
        self._most_tokens = most_tokens
        self._ends, self._reads = DrainRate(now), DrainRate(now)  # of sequences, and of prompt tokens

    def resize(self, most: int) -> None:
        """From now on at most so many sequences; those that are there stay."""
        self._most = most

    def fits(self, count: int, tokens: int) -> bool:
        """Whether `count` sequences with `tokens` prompt tokens may come in."""
        most = self._most_tokens
        if self.sequences + count > self._most:
            return False
        return most is None or not self.unread_tokens or self.unread_tokens + tokens <= most

    def check(self, now: float, count: int, tokens: int) -> None:
        """Raise `ApiError` 429 unless `count` sequences with `tokens` prompt tokens may come in."""
        missing = self.sequences + count - self._most
        if missing > 0:
            message = f"{self.sequences} of {self._most} sequences are in flight, no room for {count} more"
            raise ApiError(429, message, reason="queue_full", retry_after=self.wait(now, missing))
        most = self._most_tokens
        # Where nothing waits a request of any size is let in, or it never would be.
        if most is not None and self.unread_tokens and self.unread_tokens + tokens > most:
            message = f"{self.unread_tokens} of {most} prompt tokens wait to be read, no room for {tokens} more"
            missing = min(self.unread_tokens + tokens - most, self.unread_tokens)
            wait = retry_after(missing, self._reads.per_second(now))
            raise ApiError(429, message, reason="queue_full", retry_after=wait)

    def wait(self, now: float, missing: int) -> float:
        """Seconds until `missing` sequences more will have ended, at the rate at which they do (`retry_after`)."""
        return retry_after(missing, self._ends.per_second(now))

    def entered(self, prompt: int) -> None:
        """A sequence with a prompt of so many tokens is at a worker."""
        self.sequences += 1
        self.unread_tokens += prompt

    def read(self, now: float, prompt: int) -> None:
        """Its first token is there."""
        self.unread_tokens -= prompt
        self._reads.left(now, prompt)

    def left(self, now: float, unread: int, *, ran: bool) -> None:
        """It has ended, with so many tokens of its prompt unread; one that was refused (`ran` false) made no room."""
        self.sequences -= 1
        self.unread_tokens -= unread
        if ran:
            self._ends.left(now)

    def cleared(self) -> None:
        """All have ended at once, for the fleet's own reasons."""
        self.sequences = self.unread_tokens = 0
