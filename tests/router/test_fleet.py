"""The fleet's bookkeeping for any order of events: one terminal event per sequence, and correct counts."""

import asyncio
import dataclasses
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.router.scripted_worker import ready_snapshot

from moeyard_router.config import RouterConfig, WorkerAddress
from moeyard_router.errors import ApiError
from moeyard_router.fleet import admission
from moeyard_router.fleet.fleet import Fleet
from moeyard_router.fleet.link import WorkerLink
from moeyard_router.metrics import RouterMetrics
from moeyard_worker.protocol import Done, Rejected, SamplingParams, Submit, Tokens

RANKS = 2
DISASTERS = ["lose", "break", "ready", "recovering"]
OPERATIONS = ["submit", "tokens", "done", "reject", "abort", "close", "late", "other rank", "unknown", "take"]


class Client:
    """A request and its events."""

    def __init__(self, ticket, name, count):
        self.ticket = ticket
        self.names = [f"{name}-{i}" for i in range(count)]
        self.heard = [[] for _ in range(count)]
        self.silenced = set()

    async def take(self):
        self.ticket.wake()
        for _, index, event in await self.ticket.events():
            assert index not in self.silenced, "an aborted sequence must have no more events"
            self.heard[index].append(event)


def config(**changes):
    addresses = tuple(WorkerAddress(rank=r, endpoint="tcp://127.0.0.1:9") for r in range(RANKS))
    options = {"model_path": Path(), "workers": addresses, "max_model_len": 64, "vocab_size": 10, "max_inflight": 5}
    return RouterConfig(model_name="m", max_waiting_tokens=8, **{**options, **changes})


class World:
    """A fleet, its clients and its workers, which give each sequence the tokens 0, 1, 2 and so on."""

    def __init__(self, fleet):
        self.fleet = fleet
        self.clients, self.ended, self.sent = [], [], []
        self.epoch = 0
        self.port = 10000

    @property
    def running(self):
        return self.fleet.admission.flights.by_name

    def ready(self, rank, state="ready"):
        if not self.fleet.admission.ranks[rank].lost:
            self.fleet._up(rank)
            failure = None if state == "ready" else "a peer"
            said = ready_snapshot(rank=rank, world_size=RANKS, epoch=self.epoch, state=state, failure=failure)
            self.fleet._heard(rank, [said])

    def submit(self, number, count, key):
        try:
            ticket = self.fleet.submit(f"r{number}", [((1, 2), SamplingParams(max_tokens=9))] * count, key=key)
        except ApiError as error:
            if error.status == 503:
                assert self.fleet.admission.failure is not None
                return
            assert error.status == 429  # noqa: PT017
            unread = 2 * sum(1 for f in self.running.values() if not f.output)
            most = self.fleet.config.max_inflight
            assert self.fleet.num_inflight + count > most or 0 < unread > 8 - 2 * count
            return
        self.clients.append(Client(ticket, f"r{number}", count))

    def replace(self, everywhere):
        self.epoch += 1
        self.port += 1
        new = tuple(
            WorkerAddress(rank=w.number, endpoint=f"tcp://127.0.0.1:{self.port}" if w.lost else w.endpoint)
            for w in self.fleet.admission.ranks
        )
        self.fleet.replace(new)
        for rank in range(RANKS if everywhere else 0):
            self.ready(rank)

    def report(self, operation, name, pick):
        """Send a message about one sequence."""
        flight = self.running[name]
        rank, start = flight.rank, len(flight.output)
        right = Tokens(request_id=name, start=start, token_ids=(start % 10,))
        wrong = dataclasses.replace(right, token_ids=((start + 1) % 10,))
        if operation in ("abort", "close"):
            client = next(c for c in self.clients if name in c.names)
            indexes = range(len(client.names)) if operation == "close" else [client.names.index(name)]
            client.silenced.update(i for i in indexes if client.names[i] in self.running)
            client.ticket.close() if operation == "close" else client.ticket.abort(indexes[0])
        elif operation == "other rank":
            other = RANKS - 1 - (rank or 0)
            self.fleet._heard(other, [wrong, done(name)] if rank is not None else [])
        elif rank is None:
            # No rank runs the sequence, so every message about it is late.
            self.fleet._heard(pick % RANKS, [wrong, done(name)])
            assert self.running[name] is flight
        elif operation == "tokens" and flight.listener is not None:
            self.fleet._heard(rank, [right])
        elif operation in ("done", "reject"):
            self.fleet._heard(rank, [done(name) if operation == "done" else rejected(name)])
            if name not in self.running:
                self.ended.append((rank, name))

    def change_worker(self, operation, rank):
        """Change the state of one worker."""
        if operation == "lose":
            self.fleet._lose(rank, f"rank {rank} is lost")
        elif operation == "break" and not self.fleet.admission.ranks[rank].lost:
            self.fleet._broke(rank, f"rank {rank} is gone")
        elif operation in ("ready", "recovering"):
            self.ready(rank, operation)

    async def play(self, operations):
        for number, (operation, pick) in enumerate(operations):
            names = sorted(self.running)
            if operation == "submit":
                self.submit(number, 1 + pick % 3, "ab"[pick // 3 % 2])
            elif operation == "take":
                for client in self.clients:
                    await client.take()
            elif operation == "late" and self.ended:
                rank, old = self.ended[pick % len(self.ended)]
                self.fleet._heard(rank, [Tokens(request_id=old, start=0, token_ids=(3,)), done(old), rejected(old)])
            elif operation == "unknown":
                self.fleet._heard(pick % RANKS, [done("nobody")])
            elif operation == "replace":
                self.replace(everywhere=pick % 2)
            elif operation in DISASTERS:
                self.change_worker(operation, pick % RANKS)
            elif names:
                self.report(operation, names[pick % len(names)], pick)
            self.fleet.validate()

    async def check(self):
        """Nothing is left, and each client received tokens 0, 1, 2 and so on with one end, unless it disconnected."""
        self.fleet.validate()
        assert self.fleet.num_inflight == 0
        for client in self.clients:
            await client.take()
            for index, events in enumerate(client.heard):
                terminal = [e for e in events if not isinstance(e, Tokens)]
                assert len(terminal) == (0 if index in client.silenced else 1)
                assert terminal == events[len(events) - len(terminal) :], "the terminal event must be the last"
                said = [i for e in events if isinstance(e, Tokens) for i in e.token_ids]
                assert said == [i % 10 for i in range(len(said))], "a token is lost, repeated or wrong"


async def play(operations, ending, monkeypatch, **changes):
    fleet = Fleet(config(**changes), RouterMetrics("m"))
    world = World(fleet)

    def send(link, message):
        # A rank gets the output known so far, and the sequence continues after it.
        if isinstance(message, Submit):
            assert link is fleet._links[link.rank], "a sequence was sent to a lost worker"
            world.sent.append((link.rank, message.request_id, list(message.output_token_ids)))
            known = len(world.running[message.request_id].output)
            assert list(message.output_token_ids) == [i % 10 for i in range(known)]

    monkeypatch.setattr(WorkerLink, "send", send)
    monkeypatch.setattr(admission, "CALM_SECONDS", 0.0)
    try:
        fleet.start()
        for rank in range(RANKS):
            world.ready(rank)
        await world.play(operations)
        if ending == "recovery":
            for rank in range(RANKS):
                fleet._lose(rank, "all are lost")
            fleet.validate()
            world.replace(everywhere=True)
            fleet.validate()
            assert fleet.admission.incidents.open is None
            assert all(flight.pauses for flight in fleet.admission.flights.waiting())
            while fleet.num_inflight:
                # Sequences that two workers lost resume in a later turn of the event loop.
                await asyncio.sleep(0)
                for flight in [f for f in fleet.admission.flights.by_name.values() if f.rank is not None][:1]:
                    assert flight.listener is not None, "sequences without a listener must not move"
                    fleet._heard(flight.rank, [done(flight.name)])
        elif ending == "failure":
            fleet.give_up("rank 1 is lost")
        else:
            fleet.end_all("stopped")
        await world.check()
        return world
    finally:
        fleet.close()


def done(name):
    return Done(request_id=name, finish_reason="length", prompt_tokens=2, cached_tokens=0, completion_tokens=1)


def rejected(name):
    return Rejected(request_id=name, reason="queue_full", message="full")


SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@SETTINGS
@given(st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 20)), max_size=40), st.booleans(), st.booleans())
def test_any_order_of_events(monkeypatch, operations, fails, waits):
    places = 1 if waits else None
    asyncio.run(play(operations, "failure" if fails else "end", monkeypatch, recovery_timeout=0, worker_places=places))


@pytest.mark.parametrize("places", [None, 1])
def test_any_order_of_losses_and_recoveries(monkeypatch, places):
    events = [*OPERATIONS, *DISASTERS, *["submit"] * 2, *["tokens"] * 8, *["ready"] * 4, *["replace"] * 3]
    carried = 0
    for seed in range(80):
        chance = random.Random(seed)
        operations = [(chance.choice(events), chance.randrange(20)) for _ in range(150)]
        ending = chance.choice(["recovery", "failure", "end"])
        world = asyncio.run(play(operations, ending, monkeypatch, worker_places=places))
        carried += sum(bool(output) for _, _, output in world.sent)
    assert carried > 100, "hardly any sequence moved"


def test_bad_endpoint_is_named():
    async def main():
        addresses = (WorkerAddress(rank=0, endpoint="nonsense"),)
        config = RouterConfig(model_name="m", model_path=Path(), workers=addresses, max_model_len=64, vocab_size=10)
        fleet = Fleet(config, RouterMetrics("m"))
        try:
            with pytest.raises(ValueError, match="nonsense"):
                fleet.start()
        finally:
            fleet.close()

    asyncio.run(main())
