"""The admission machine without links, loop or clock: events in, instructions and deliveries out."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
from tests.router.scripted_worker import ready_snapshot

from moeyard_router.config import RouterConfig, WorkerAddress
from moeyard_router.errors import ApiError
from moeyard_router.fleet.admission import PAUSE_SECONDS, SOON_SECONDS, TICK_SECONDS, Admission
from moeyard_router.fleet.instructions import Carried, Connect, Disconnect, Lost, ReportLost, Run, Stop, WakeAt
from moeyard_router.fleet.orders import Drain, Hold
from moeyard_worker.protocol import Done, Rejected, SamplingParams, Tokens

RANKS = 2
NEW = tuple(WorkerAddress(rank=rank, endpoint=f"tcp://127.0.0.1:{rank + 20}") for rank in range(RANKS))


class MachineDriver:
    """The machine, driven by a test that plays time, clients and workers. It is validated after every event."""

    def __init__(self, *, ready=True, **changes):
        addresses = tuple(WorkerAddress(rank=rank, endpoint=f"tcp://127.0.0.1:{rank + 9}") for rank in range(RANKS))
        options = {"model_path": Path(), "workers": addresses, "max_model_len": 64, "vocab_size": 10}
        self.now = 100.0
        self.machine = Admission(self.now, RouterConfig(model_name="m", **{**options, "max_inflight": 8, **changes}))
        self.events = {}  # by sequence
        self.do("start", timed=False)
        for rank in range(RANKS if ready else 0):
            self.ready(rank)

    def do(self, event, *args, timed=True, **named):
        """Apply an event; return the instructions."""
        try:
            getattr(self.machine, event)(*([self.now] if timed else []), *args, **named)
        finally:
            for _, name, index, said in self.machine.deliveries:
                self.events.setdefault(f"{name}-{index}", []).append(said)
            done, self.machine.deliveries, self.machine.instructions = self.machine.instructions, [], []
            self.machine.validate()
        return done

    def ready(self, rank, epoch=0):
        self.do("connected", rank, timed=False)
        return self.do("heard", rank, [ready_snapshot(rank=rank, world_size=RANKS, epoch=epoch)])

    def submit(self, name, count=1, rank=None, key=None, names=frozenset()):
        sequences = [((1, 2), SamplingParams(max_tokens=9))] * count
        return self.do("submit", name, sequences, listener=name, client=None, key=key, rank=rank, names=names)

    def wait(self, seconds):
        self.now += seconds
        return self.do("time_passed")

    def end(self, name):
        flight = self.machine.flights.by_name[name]
        return self.do("heard", flight.rank, [replace(done(name), completion_tokens=9)])


def done(name, reason="length"):
    return Done(request_id=name, finish_reason=reason, prompt_tokens=2, cached_tokens=0, completion_tokens=1)


def of(kind, instructions):
    return [each for each in instructions if isinstance(each, kind)]


def where(instructions):
    """Return what runs: (rank, sequence, tokens of its output)."""
    return [(r.route.rank, r.submit.request_id, list(r.submit.output_token_ids)) for r in of(Run, instructions)]


def test_request_runs_and_client_gets_its_events():
    played = MachineDriver()
    (run,) = played.submit("a")
    assert where([run]) == [(0, "a-0", [])]
    tokens = Tokens(request_id="a-0", start=0, token_ids=(3, 4))
    assert played.do("heard", 0, [tokens, done("a-0")]) == []
    assert played.events == {"a-0": [tokens, done("a-0")]}


def test_requests_queue_until_a_rank_has_room_and_keys_take_turns():
    played = MachineDriver(worker_places=1)
    assert [len(of(Run, played.submit(f"r{i}", key="many"))) for i in range(4)] == [1, 1, 0, 0]
    assert of(Run, played.submit("few", key="few")) == []
    assert [run[1] for run in where(played.end("r0-0"))] == ["r2-0"]
    assert [run[1] for run in where(played.end("r1-0"))] == ["few-0"]


def test_a_wait_that_is_too_long_is_refused_at_a_tick():
    played = MachineDriver(worker_places=1, max_queue_seconds=0.2)
    wakes = [of(WakeAt, played.submit(f"r{i}")) for i in range(3)]
    assert wakes == [[], [], [WakeAt(played.now + TICK_SECONDS)]]
    assert played.wait(0.1) == [WakeAt(played.now + TICK_SECONDS)]
    assert played.wait(0.15) == []
    (refusal,) = played.events["r2-0"]
    assert (refusal.reason, refusal.message) == ("queue_timeout", "waited 0.2 s for its start")


def test_full_fleet_refuses_with_retry_after():
    played = MachineDriver(max_inflight=2)
    played.submit("a", 2)
    with pytest.raises(ApiError, match="2 of 2 sequences are in flight") as caught:
        played.submit("b")
    assert (caught.value.status, caught.value.retry_after) == (429, 5.0)


def test_lost_rank_is_reported_and_its_sequences_resume():
    played = MachineDriver()
    played.submit("a", 2)
    played.do("heard", 0, [Tokens(request_id="a-0", start=0, token_ids=(3,))])
    lost = played.do("lose", 0, "it died")
    assert of(Disconnect | ReportLost, lost) == [Disconnect(0), ReportLost(0, "it died")]
    assert of(Run, played.submit("b")) == [], "nothing runs while a rank is missing"
    new = (NEW[0], played.machine.ranks.addresses[1])
    assert of(Connect, played.do("replace", new, None)) == [Connect(NEW[0])]
    assert where(played.ready(0, epoch=1)) == []
    instructions = played.ready(1, epoch=1)
    assert sorted((name, output) for _, name, output in where(instructions)) == [("a-0", [3]), ("b-0", [])]
    assert of(Carried, instructions) == [Carried(1, 3)]


def test_broken_connection_is_retried_once():
    played = MachineDriver()
    played.submit("a")
    assert of(Connect, played.do("broke", 0, "cut")) == [Connect(played.machine.ranks.addresses[0], "cut")]
    assert where(played.ready(0)) == [(0, "a-0", [])]
    played.now += 0.1
    assert of(ReportLost, played.do("broke", 0, "cut")) == [ReportLost(0, "cut")]


def test_fleet_without_recovery_ends_all_requests():
    played = MachineDriver(recovery_timeout=0)
    played.submit("a")
    played.do("lose", 1, "it died")
    assert played.events == {"a-0": [Lost("it died")]}
    with pytest.raises(ApiError, match="the fleet has failed: it died"):
        played.submit("b")


def test_recovery_has_a_time_limit():
    played = MachineDriver(recovery_timeout=30)
    played.submit("a")
    assert WakeAt(played.now + 30) in played.do("lose", 1, "it died")
    played.wait(29)
    assert played.events == {}
    played.wait(1)
    assert played.events == {"a-0": [Lost("the fleet was not whole again within 30 s: it died")]}


def test_draining_moves_sequences_and_waits_for_confirmation():
    played = MachineDriver()
    played.submit("a")
    carried = played.do("drain", Drain(ranks=(0,), rank=0, carry=True))
    assert [of(Stop, carried), where(carried)] == [[Stop(0, "a-0")], [(1, "a-0", [])]]
    played.do("drain", Drain(ranks=(), rank=0))
    # The sequence returns to a rank that has not confirmed yet that it stopped.
    back = played.do("drain", Drain(ranks=(1,), rank=1, carry=True))
    assert (where(back), of(WakeAt, back)) == ([], [WakeAt(played.now + SOON_SECONDS)])
    played.do("heard", 0, [done("a-0", "abort")])
    assert where(played.wait(SOON_SECONDS)) == [(0, "a-0", [])]


def test_moved_sequence_pauses_at_a_full_queue():
    played = MachineDriver()
    played.submit("a")
    played.do("drain", Drain(ranks=(0,), rank=0, carry=True))
    full = Rejected(request_id="a-0", reason="queue_full", message="full")
    assert played.do("heard", 1, [full]) == [WakeAt(played.now + PAUSE_SECONDS)]
    assert where(played.wait(PAUSE_SECONDS)) == [(1, "a-0", [])]


def test_disconnect_frees_the_slot():
    played = MachineDriver(worker_places=1)
    for i in range(3):
        played.submit(f"r{i}")
    rank = played.machine.flights.by_name["r0-0"].rank
    assert played.do("abandon", "r0-0") == [Stop(rank, "r0-0")]
    played.do("abandon", "r2-0")
    assert where(played.do("heard", rank, [done("r0-0", "abort")])) == []
    assert sorted(played.machine.flights.by_name) == ["r1-0"]


def test_a_wait_for_the_fleet_itself_is_not_refused():
    """Orders and losses that overlap stop the clock together: it runs again when the last of them ends."""
    played = MachineDriver(worker_places=1, max_queue_seconds=0.5)
    played.do("drain", Drain(ranks=(0, 1), rank=0))
    played.submit("a")
    played.do("broke", 0, "cut")
    played.ready(0)
    assert played.machine.is_whole
    played.wait(9.0)
    assert played.events == {}, "every rank drains"
    assert where(played.do("drain", Drain(ranks=(), rank=0))) == [(0, "a-0", [])]


def test_a_wait_at_a_router_that_was_started_again_is_not_refused():
    """The fleet recovers while the new router connects."""
    played = MachineDriver(worker_places=1, max_queue_seconds=0.5, restarted=True, ready=False)
    played.submit("a")
    played.wait(9.0)
    assert played.events == {}
    played.ready(0)
    assert where(played.ready(1)) == [(0, "a-0", [])]


@pytest.mark.parametrize("places", [None, 1])
def test_random_walk(places):
    """All invariants hold after every event, and each sequence ends at most once."""
    ended = 0
    for seed in range(60):
        chance = random.Random(seed)
        played = MachineDriver(worker_places=places, max_queue_seconds=chance.choice([None, 0.5]))
        for step in range(150):
            played.now += chance.random() * 0.1
            walk(played, chance, step)
        played.do("end_all", "over")
        ends = [e for events in played.events.values() for e in events if not isinstance(e, Tokens)]
        assert len(ends) == sum(any(not isinstance(e, Tokens) for e in es) for es in played.events.values())
        ended += len(ends)
    assert ended > 100


def walk(played, chance, step):
    machine, rank = played.machine, chance.randrange(RANKS)
    flights = list(machine.flights.by_name.values())
    flight = chance.choice(flights) if flights else None
    event = chance.choice(["submit"] * 3 + ["tokens"] * 6 + ["done", "full", "abandon"] + ["ready"] * 4 + RARE)
    if event == "submit":
        try:
            played.submit(f"s{step}", chance.randint(1, 3), key=chance.choice("ab"))
        except ApiError as error:
            assert error.status in (429, 503)  # noqa: PT017
    elif event == "ready" and not machine.ranks[rank].lost:
        played.ready(rank, epoch=machine.generation)
    elif event == "replace":
        lost = [each.lost for each in machine.ranks]
        address = [replace(a, endpoint=f"tcp://127.0.0.1:{1000 + step}") for a in machine.ranks.addresses]
        new = zip(lost, address, machine.ranks.addresses, strict=True)
        played.do("replace", tuple(a if gone else old for gone, a, old in new), None)
    elif event == "lose":
        played.do("lose", rank, "it died")
    elif event == "broke" and not machine.ranks[rank].lost:
        played.do("broke", rank, "cut")
    elif event == "drain":
        played.do("drain", Drain(ranks=chance.choice([(), (0,), (1,), (0, 1)]), rank=rank, carry=chance.random() < 0.5))
    elif event == "hold":
        played.do("hold", Hold(mode=chance.choice([None, "keep", "abort"]), asleep=chance.choice([None, 0, 1])))
    elif event == "time":
        played.wait(chance.choice([0.01, 0.3, 4.0]))
    elif flight is not None and event == "abandon":
        played.do("abandon", flight.name)
    elif flight is not None and flight.rank is not None and event in ("tokens", "done", "full"):
        said = {
            "tokens": Tokens(request_id=flight.name, start=len(flight.output), token_ids=(3,)),
            "done": done(flight.name),
            "full": Rejected(request_id=flight.name, reason="queue_full", message="full"),
        }
        played.do("heard", flight.rank, [said[event]])


RARE = ["replace", "replace", "lose", "broke", "drain", "hold", "time"]
