"""The requests of a rank: waiting, running, or ended while a step in flight still uses them. Pure."""

from bisect import insort
from collections import deque
from collections.abc import Iterable

from moeyard_worker.scheduling.request import Request
from moeyard_worker.scheduling.step import Chunk, RequestKey

# Larger than the number of requests that ever enter a rank. Requests begun on other ranks precede all new ones.
_BEGUN = 1 << 62


def _serial(request: Request) -> int:
    return request.serial


class Roster:
    """Owner of the queues. `waiting` and `running` stay in order of arrival, also after preemptions."""

    def __init__(self) -> None:
        self.live: dict[RequestKey, Request] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.leaving: list[Request] = []
        self._num_entered = 0
        self.held: float | None = None  # when steps stopped; None while they run

    def hold(self, now: float) -> None:
        """Note that no steps run. This time does not count as waiting."""
        if self.held is None:
            self.held = now

    def resume(self, now: float) -> None:
        """Note that steps run again."""
        if self.held is not None:
            for request in self.waiting:
                request.excused += now - max(self.held, request.arrived)
            self.held = None

    def enter(self, request: Request) -> None:
        """Queue a request: a new one after all others, one that was begun on another rank before all new ones."""
        request.serial = self._num_entered - (_BEGUN if request.output else 0)
        self._num_entered += 1
        self.live[request.key] = request
        insort(self.waiting, request, key=_serial)

    def late(self, arrived: float) -> list[Request]:
        """Return the requests that have waited since `arrived` or longer and never ran, in queue order.

        A request whose grammar compiled slowly may be behind later ones.
        """
        if self.held is not None:
            return []
        new = (r for r in self.waiting if r.started is None and not r.output)
        return [r for r in new if r.arrived + r.excused <= arrived]

    def start_first(self) -> Request:
        """Move the first waiting request to the running ones."""
        request = self.waiting.popleft()
        request.running = True
        insort(self.running, request, key=_serial)
        return request

    def stand_back(self, request: Request) -> None:
        """Move a running request back to the queue, before all that arrived later."""
        self.running.remove(request)
        request.running = False
        insort(self.waiting, request, key=_serial)

    def end(self, request: Request) -> None:
        """End a live request. Its key is free at once, even while it is `leaving`."""
        del self.live[request.key]
        (self.running if request.running else self.waiting).remove(request)
        request.running, request.ended = False, True
        if request.in_flight:
            self.leaving.append(request)

    def holders(self) -> list[Request]:
        """Return all requests that may hold pages."""
        return [*self.waiting, *self.running, *self.leaving]

    def validate(self, named: Iterable[tuple[Request, Chunk]]) -> None:
        """Assert all invariants. `named` are the chunks of all steps in flight, oldest first."""
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
