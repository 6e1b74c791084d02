"""Who is on a rank: requests that wait, run, or have ended while a step in flight still names them. Pure."""

from bisect import insort
from collections import deque
from collections.abc import Iterable

from moeyard_worker.scheduling.request import Request
from moeyard_worker.scheduling.step import Chunk, RequestKey

# More than ever enter a rank: requests that were begun elsewhere are older than all that come here new.
_BEGUN = 1 << 62


def _serial(request: Request) -> int:
    return request.serial


class Roster:
    """Owner of the queues; `waiting` and `running` are in order of arrival, whoever had to yield in between."""

    def __init__(self) -> None:
        self.live: dict[RequestKey, Request] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.leaving: list[Request] = []
        self._num_entered = 0
        self.held: float | None = None  # since when nothing runs, if nothing does

    def hold(self, now: float) -> None:
        """Nothing runs for a while: nobody is late for the time that this takes."""
        if self.held is None:
            self.held = now

    def resume(self, now: float) -> None:
        """It runs again, if it did not."""
        if self.held is not None:
            for request in self.waiting:
                request.excused += now - max(self.held, request.arrived)
            self.held = None

    def enter(self, request: Request) -> None:
        """A request waits: a new one behind all others, one that was begun elsewhere before all new ones."""
        request.serial = self._num_entered - (_BEGUN if request.output else 0)
        self._num_entered += 1
        self.live[request.key] = request
        insort(self.waiting, request, key=_serial)

    def late(self, arrived: float) -> list[Request]:
        """Those that have waited since `arrived` or longer and never ran, as they wait.

        One whose grammar took long stands behind others that came later.
        """
        if self.held is not None:
            return []
        new = (r for r in self.waiting if r.started is None and not r.output)
        return [r for r in new if r.arrived + r.excused <= arrived]

    def start_first(self) -> Request:
        """The first that waits runs."""
        request = self.waiting.popleft()
        request.running = True
        insort(self.running, request, key=_serial)
        return request

    def stand_back(self, request: Request) -> None:
        """A running request waits again: first of all as a rule, but behind those that came before it."""
        self.running.remove(request)
        request.running = False
        insort(self.waiting, request, key=_serial)

    def end(self, request: Request) -> None:
        """A live request ends; its key is free again, even while it is `leaving`."""
        del self.live[request.key]
        (self.running if request.running else self.waiting).remove(request)
        request.running, request.ended = False, True
        if request.in_flight:
            self.leaving.append(request)

    def holders(self) -> list[Request]:
        """All requests that may hold pages."""
        return [*self.waiting, *self.running, *self.leaving]

    def validate(self, named: Iterable[tuple[Request, Chunk]]) -> None:
        """Assert all invariants; `named` are the chunks of all steps in flight, oldest first."""
        queued = [*self.waiting, *self.running]
        assert len(queued) == len(self.live), "a request is lost or queued twice"
        assert {id(r) for r in queued} == {id(r) for r in self.live.values()}, "queues and live requests differ"
        for queue in (self.waiting, self.running):
            assert [r.serial for r in queue] == sorted(r.serial for r in queue), "first come is not first served"
        for r in self.waiting:
            assert (r.pages, r.state_slot, r.num_computed, r.running) == ([], -1, 0, False), f"{r.key} holds state"
            assert (r.drafts, r.in_flight, r.ended) == ((), [], False), f"waiting {r.key} is planned or has ended"
        for r in self.running:
            assert r.running, f"{r.key} runs and does not know"
            assert not r.ended, f"{r.key} runs after its end"
            assert r.pages, f"running {r.key} holds no page"
            assert r.num_computed < r.length, f"running {r.key} has nothing to compute"
            assert len(r.output) < max(r.sampling.max_tokens, 1), f"{r.key} has all its tokens and did not end"
        for r in self.leaving:
            assert r.ended, f"{r.key} leaves before its end"
            assert r.in_flight, f"{r.key} has left and still holds pages"
        in_flight: dict[int, list[Chunk]] = {id(r): [] for r in self.holders()}
        for request, chunk in named:
            in_flight[id(request)].append(chunk)
        for r in self.holders():
            assert list(map(id, r.in_flight)) == list(map(id, in_flight[id(r)])), f"{r.key} and its steps differ"
