"""The fleet's bookkeeping under any order of events: one terminal event per sequence, counts that add up."""

import asyncio
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeyard_router.config import RouterConfig, WorkerAddress
from moeyard_router.errors import ApiError
from moeyard_router.fleet.fleet import Fleet
from moeyard_router.metrics import RouterMetrics
from moeyard_worker.protocol import Done, Rejected, SamplingParams, Snapshot, Tokens

RANKS = 2
SNAPSHOT = {
    "world_size": RANKS, "epoch": 0, "step": 1, "state": "ready", "failure": None, "num_running": 0, "num_waiting": 0,
    "num_waiting_tokens": 0, "kv_pages_total": 9, "kv_pages_free": 9, "page_size": 16, "max_model_len": 64,
    "vocab_size": 10,
}  # fmt: skip
OPERATIONS = ["submit", "tokens", "done", "reject", "abort", "close", "late", "other rank", "unknown", "take"]


class Client:
    """A request and what it was told."""

    def __init__(self, ticket, name, count):
        self.ticket = ticket
        self.names = [f"{name}-{i}" for i in range(count)]
        self.heard = [[] for _ in range(count)]
        self.silenced = set()

    async def take(self):
        self.ticket.wake()
        for _, index, event in await self.ticket.events():
            assert index not in self.silenced, "an aborted sequence says nothing more"
            self.heard[index].append(event)


async def play(operations, fails):
    addresses = tuple(WorkerAddress(rank=r, endpoint="tcp://127.0.0.1:9") for r in range(RANKS))
    config = RouterConfig(
        model_name="m", model_path=Path(), workers=addresses, max_model_len=64, vocab_size=10, max_inflight=5,
        max_waiting_tokens=8,
    )  # fmt: skip
    fleet = Fleet(config, RouterMetrics("m"))
    clients, ended = [], []
    running = {}  # name -> [rank, tokens sent]
    try:
        fleet.start()
        for rank in range(RANKS):
            fleet._members._up(rank)
            fleet._replies.take(rank, [Snapshot(rank=rank, **SNAPSHOT)])
        for number, (operation, pick) in enumerate(operations):
            names = sorted(running)
            name = names[pick % len(names)] if names else None
            rank, sent = running.get(name, (0, 0))
            if operation == "submit":
                count = 1 + pick % 3
                try:
                    ticket = fleet.submit(f"r{number}", [((1, 2), SamplingParams(max_tokens=9))] * count)
                except ApiError as error:
                    assert error.status == 429  # noqa: PT017 - both outcomes are fine
                    unread = 2 * sum(1 for f in fleet._flights.by_name.values() if not f.output)
                    assert fleet.num_inflight + count > 5 or 0 < unread > 8 - 2 * count
                    continue
                client = Client(ticket, f"r{number}", count)
                clients.append(client)
                running.update({n: (fleet._flights.by_name[n].rank, 0) for n in client.names})
            elif operation == "take":
                for client in clients:
                    await client.take()
            elif name is None:
                continue
            elif operation == "tokens":
                fleet._replies.take(rank, [Tokens(request_id=name, start=sent, token_ids=(3,))])
                running[name] = (rank, sent + 1)
            elif operation in ("done", "reject"):
                fleet._replies.take(rank, [done(name) if operation == "done" else rejected(name)])
                del running[name]
                ended.append((rank, name))
            elif operation in ("abort", "close"):
                client = next(c for c in clients if name in c.names)
                indexes = range(len(client.names)) if operation == "close" else [client.names.index(name)]
                client.silenced.update(i for i in indexes if client.names[i] in running)
                client.ticket.close() if operation == "close" else client.ticket.abort(indexes[0])
            elif operation == "late" and ended:
                old_rank, old = ended[pick % len(ended)]
                fleet._replies.take(
                    old_rank, [Tokens(request_id=old, start=0, token_ids=(3,)), done(old), rejected(old)]
                )
            elif operation == "other rank":
                fleet._replies.take(1 - rank, [Tokens(request_id=name, start=7, token_ids=(3,)), done(name)])
            elif operation == "unknown":
                fleet._replies.take(rank, [done("nobody")])
            fleet.validate()
        if fails:
            fleet.fail("rank 1 is lost")
        else:
            fleet.end_all("stopped")
        fleet.validate()
        assert fleet.num_inflight == 0
        for client in clients:
            await client.take()
            for index, events in enumerate(client.heard):
                terminal = [e for e in events if not isinstance(e, Tokens)]
                assert len(terminal) == (0 if index in client.silenced else 1)
                assert terminal == events[len(events) - len(terminal) :], "nothing follows the terminal event"
    finally:
        fleet.close()


def done(name):
    return Done(request_id=name, finish_reason="length", prompt_tokens=2, cached_tokens=0, completion_tokens=1)


def rejected(name):
    return Rejected(request_id=name, reason="queue_full", message="full")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 20)), max_size=40), st.booleans())
def test_any_order_of_events(operations, fails):
    asyncio.run(play(operations, fails))


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
