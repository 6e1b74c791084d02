"""How often a process is started again. Pure: times are given."""

from collections import deque

LIMIT, WINDOW_SECONDS = 3, 60.0


class RestartBudget:
    """At most `limit` restarts in any `seconds`, so that a fault that comes back at once does not go on for ever."""

    def __init__(self, limit: int = LIMIT, seconds: float = WINDOW_SECONDS) -> None:
        self.limit, self.seconds = limit, seconds
        self._taken: deque[float] = deque()

    def used(self, now: float) -> int:
        """Restarts within the last `seconds`."""
        return sum(at > now - self.seconds for at in self._taken)

    def renew(self, now: float) -> None:
        """Count all restarts so far as if they were now: the last of them has come to nothing yet."""
        self._taken = deque([now] * len(self._taken))

    def take(self, now: float) -> bool:
        """Count one more if there is one left."""
        while self._taken and self._taken[0] <= now - self.seconds:
            self._taken.popleft()
        if len(self._taken) >= self.limit:
            return False
        self._taken.append(now)
        return True


class RankBudgets:
    """The budgets of a fleet's ranks: one that is lost `limit` times within `seconds` is not replaced any more.

    Time passes only while a rank serves. So processes that each take long to fail are too many, too.
    """

    def __init__(self, limit: int, seconds: float) -> None:
        self._limit, self._seconds = limit, seconds
        self._budgets: dict[int, RestartBudget] = {}
        self._unproven: set[int] = set()  # ranks that were replaced, and have not served since

    def take(self, rank: int, now: float) -> str | None:
        """Count a loss of `rank`, which is replaced; or return why it is not."""
        budget = self._budgets.setdefault(rank, RestartBudget(self._limit - 1, self._seconds))
        lost = f"rank {rank} was lost {self._limit} times"
        if budget.used(now) >= self._limit - 1:
            return f"{lost} in {self._seconds:g} s"
        if rank in self._unproven:
            budget.renew(now)
        self._unproven.add(rank)
        return None if budget.take(now) else f"{lost} without serving in between"

    def serves(self, rank: int) -> None:
        """The process that came in the place of a lost one serves."""
        self._unproven.discard(rank)
