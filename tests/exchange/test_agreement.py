"""All surviving ranks settle on one finding, whatever crosses, dies or stops. No sockets, no clock."""

import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeyard_worker.exchange.membership.agreement import (
    AFTER_STEP,
    MAX_REASON_BYTES,
    OWN_FAULT,
    SETTLED,
    Agreement,
    Finding,
    PoisonFrame,
    cut_reason,
    place_of,
)
from moeyard_worker.exchange.membership.frames import Phase


def finding(number: int) -> Finding:
    return Finding(step=5, place=number, ranks=(number % 8,), reason=f"finding {number}")


class Network:
    """Ranks that agree over ordered connections; `seed` chooses the next event.

    budgets[r]: the number of frames that rank r sends before it dies, None for a survivor. A rank in `stopped` does
    nothing until `wake`, but frames that it sent earlier arrive.
    """

    def __init__(self, seed: int, findings: list[Finding | None], budgets: list[int | None]) -> None:
        self.random = random.Random(seed)
        self.findings = findings
        self.budgets = budgets
        self.ranks = range(len(findings))
        self.agreements: dict[int, Agreement] = {}
        self.found: dict[int, Finding] = {}
        self.queues: dict[tuple[int, int], deque[PoisonFrame]] = {
            (a, b): deque() for a in self.ranks for b in self.ranks if a != b
        }
        self.ended: set[tuple[int, int]] = set()
        self.stopped: set[int] = set()

    def alive(self, rank: int) -> bool:
        return self.budgets[rank] != 0

    def survivors(self) -> list[int]:
        return [rank for rank in self.ranks if self.alive(rank)]

    def join(self, rank: int, found: Finding) -> None:
        self.found[rank] = found
        self.agreements[rank] = Agreement([peer for peer in self.ranks if peer != rank], found)
        self.advance(rank)

    def advance(self, rank: int) -> None:
        peers = [peer for peer in self.ranks if peer != rank]
        for frame in self.agreements[rank].advance():
            # In random order, because a rank may die between any two sends.
            for peer in self.random.sample(peers, len(peers)):
                budget = self.budgets[rank]
                if budget == 0:
                    return
                if budget is not None:
                    self.budgets[rank] = budget - 1
                self.queues[rank, peer].append(frame)

    def possible(self) -> list[tuple[str, int, int]]:
        """Return the possible events: a rank starts with its own finding, reads a frame, or sees a peer's end."""
        awake = [rank for rank in self.survivors() if rank not in self.stopped]
        found = [("find", r, r) for r in awake if r not in self.agreements and self.findings[r] is not None]
        heard = [("hear", source, r) for source, r in self.queues if r in awake and self.queues[source, r]]
        ends = [
            ("end", source, r)
            for source, r in self.queues
            if r in awake and r in self.agreements and not self.alive(source) and not self.queues[source, r]
            if (source, r) not in self.ended
        ]
        return found + heard + ends

    def apply(self, kind: str, source: int, rank: int) -> None:
        if kind == "find":
            found = self.findings[rank]
            assert found is not None
            self.join(rank, found)
        elif kind == "hear":
            frame = self.queues[source, rank].popleft()
            if rank not in self.agreements:
                self.agreements[rank] = Agreement([peer for peer in self.ranks if peer != rank], frame.finding)
            self.agreements[rank].receive(source, frame)
            self.advance(rank)
        else:
            self.ended.add((source, rank))
            self.agreements[rank].leave(source)
            self.advance(rank)

    def run(self) -> None:
        """Run until no event is possible. Each step reads a frame or sees an end, so thousands of steps are a bug."""
        for _ in range(10_000):
            possible = self.possible()
            if not possible:
                return
            self.apply(*self.random.choice(possible))
        raise AssertionError("the agreement does not end")

    def run_to_the_end(self) -> None:
        """Like `run`; then ranks that still wait for a stopped one give up."""
        while True:
            self.run()
            waiting = [r for r in self.survivors() if r not in self.stopped and self.agreements[r].settled is None]
            if not waiting:
                return
            for rank in waiting:
                self.agreements[rank].give_up()
                self.advance(rank)

    def wake(self, rank: int) -> None:
        """Let a rank read everything that came while it was stopped before it sends."""
        self.stopped.discard(rank)
        queues = [(source, queue) for (source, to), queue in self.queues.items() if to == rank]
        if rank not in self.agreements:
            found = self.findings[rank] or next(queue[0].finding for _, queue in queues if queue)
            self.agreements[rank] = Agreement([source for source, _ in queues], found)
        for source, queue in queues:
            while queue:
                self.agreements[rank].receive(source, queue.popleft())
        self.advance(rank)

    def settled(self, ranks: list[int]) -> set[Finding | None]:
        return {self.agreements[rank].settled for rank in ranks}


@st.composite
def fleets(draw: st.DrawFn, *, deaths: bool) -> Network:
    """2 to 8 ranks; at least one survivor has a finding, and some ranks die after any number of frames.

    A seed chooses the order of events, because the events of 8 ranks are too many for hypothesis to draw.
    """
    size = draw(st.integers(2, 8))
    findings = draw(st.lists(st.one_of(st.none(), st.integers(1, 20).map(finding)), min_size=size, max_size=size))
    findings[0] = findings[0] or finding(draw(st.integers(1, 20)))
    budget = st.one_of(st.none(), st.integers(0, 3 * size)) if deaths else st.none()
    budgets = [None, *draw(st.lists(budget, min_size=size - 1, max_size=size - 1))]
    order = draw(st.permutations(range(size)))
    return Network(draw(st.integers(0, 2**32)), [findings[i] for i in order], [budgets[i] for i in order])


@given(fleets(deaths=True))
@settings(max_examples=300)
def test_all_survivors_settle_on_one_finding(network: Network) -> None:
    network.run()
    survivors = network.survivors()
    [settled] = network.settled(survivors)
    assert settled in network.findings
    # A survivor's own finding was read by others; a rank that received one first has none of its own.
    assert all(settled <= network.found[rank] for rank in survivors if rank in network.found)


@given(fleets(deaths=False))
def test_smallest_finding_wins_without_deaths(network: Network) -> None:
    for rank, found in enumerate(network.findings):
        if found is not None:
            network.join(rank, found)
    network.run()
    assert network.settled(network.survivors()) == {min(network.found.values())}


@given(fleets(deaths=True))
@settings(max_examples=300)
def test_stopped_ranks_adopt_the_settled_finding(network: Network) -> None:
    """A rank stops before or during the agreement; one with a finding continues."""
    finder = next(r for r in network.ranks if network.budgets[r] is None and network.findings[r] is not None)
    candidates = [r for r in network.survivors() if r != finder]
    for _ in range(network.random.randint(0, 10)):
        if possible := network.possible():
            network.apply(*network.random.choice(possible))
    network.stopped = {rank for rank in candidates if network.alive(rank) and network.random.random() < 0.4}
    if finder not in network.agreements:
        network.join(finder, network.findings[finder])  # type: ignore[arg-type]
    network.run_to_the_end()
    for rank in list(network.stopped):
        network.wake(rank)
    [settled] = network.settled(network.survivors())
    assert settled in network.findings


def test_loss_takes_two_rounds_and_other_faults_one() -> None:
    lost = Agreement([1, 2], finding(3))
    assert [frame.round for frame in lost.advance()] == [1]
    lost.leave(2)
    lost.receive(1, PoisonFrame(round=1, finding=finding(1)))
    assert [(frame.round, frame.finding) for frame in lost.advance()] == [(2, finding(1))]
    lost.receive(1, PoisonFrame(round=2, finding=finding(1)))
    assert [(frame.round, frame.finding) for frame in lost.advance()] == [(SETTLED, finding(1))]
    fault = Agreement([1], finding(1))
    fault.receive(1, PoisonFrame(round=1, finding=finding(2)))
    assert [frame.round for frame in fault.advance()] == [1, SETTLED]
    assert fault.settled == finding(1)


def test_settled_finding_is_adopted_and_final() -> None:
    agreement = Agreement([1, 2], finding(1))
    agreement.receive(2, PoisonFrame(round=SETTLED, finding=finding(9)))
    assert agreement.advance() == [PoisonFrame(round=SETTLED, finding=finding(9))]
    agreement.receive(1, PoisonFrame(round=1, finding=finding(0)))
    assert agreement.settled == finding(9)


def test_last_survivor_settles_at_once() -> None:
    agreement = Agreement([1, 2], finding(4))
    for peer in (1, 2):
        agreement.leave(peer)
    agreement.advance()
    assert agreement.settled == finding(4)


def test_findings_are_ordered_by_place() -> None:
    places = [
        OWN_FAULT,
        place_of(None, Phase.PLAN),
        place_of(0, Phase.DISPATCH),
        place_of(0, Phase.FETCH),
        place_of(0, Phase.COMBINE),
        place_of(17, Phase.DISPATCH),
        AFTER_STEP,
    ]
    assert places == sorted(set(places))
    made = [
        Finding(step=step, place=p, ranks=(rank,), reason="x") for step in (4, 5) for p in places for rank in (1, 2)
    ]
    assert made == sorted(made)


@pytest.mark.parametrize("reason", ["short", "ü" * 3000, "\ud800 alone"], ids=["short", "long", "surrogate"])
def test_reason_is_truncated_once(reason: str) -> None:
    cut = cut_reason(reason)
    assert len(cut.encode()) <= MAX_REASON_BYTES
    assert cut_reason(cut) == cut
