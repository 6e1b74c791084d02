"""Unauthenticated connections to every port of a serving fleet fail no request, end no rank, and are counted."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import zmq
from prometheus_client.parser import text_string_to_metric_families
from tests.e2e.http_fleet import engine_config
from tests.fleet import Fleet, ProcessPool, start_fleet
from tests.limits import HANG_SECONDS
from tests.strangers import bad_messages, one_byte_and_gone, say, try_key

from moeyard_worker.protocol import Done

STRANGERS = 50


@pytest.fixture
def fleet(processes: ProcessPool, checkpoints: dict[str, Path]) -> Iterator[Fleet]:
    """Two ranks that exchange over TCP."""
    config = engine_config(checkpoints["gqa"], num_workers=2, exchange="zmq-tcp")
    with start_fleet(processes, config) as started:
        yield started


def refused(fleet: Fleet, rank: int) -> dict[tuple[str, str], float]:
    """Return a rank's refusals by port and reason, from its metrics page."""
    page = httpx.get(fleet.endpoints[rank]["metrics_url"], timeout=HANG_SECONDS).text
    families = text_string_to_metric_families(page)
    samples = next(family.samples for family in families if family.name == "moeyard_refused")
    return {(sample.labels["door"], sample.labels["reason"]): sample.value for sample in samples}


def test_strangers_at_every_port_of_a_serving_fleet(fleet: Fleet) -> None:
    client = fleet.client
    # Both ports of rank 0 are TCP: one for routers, one for the higher rank of the mesh.
    ports = ((fleet.endpoints[0]["frontend"], b"DEALER"), (fleet.endpoints[0]["mesh"]["tcp"][1], b"PAIR"))
    for rank in (0, 1):
        client.submit(rank, f"long-{rank}", range(1, 9), max_tokens=200, ignore_eos=True)
    client.wait_for(lambda: all(answer.token_ids for answer in client.answers.values()))
    for address, kind in ports:
        for _ in range(STRANGERS):
            one_byte_and_gone(address, kind)
        for parts in bad_messages(kind):
            say(address, *parts)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context:
        server = fleet.keys.workers.public
        assert try_key(context, zmq.DEALER, ports[0][0], server) == zmq.EVENT_HANDSHAKE_FAILED_AUTH
    for rank in (0, 1):
        client.submit(rank, f"after-{rank}", range(1, 9), max_tokens=8, ignore_eos=True)
    for answer in client.wait():
        assert isinstance(answer.end, Done)
        assert answer.end.finish_reason == "length", answer.end
    assert len(client.answers["long-0"].token_ids) == 200
    counts = refused(fleet, 0)
    assert counts["router", "handshake"] >= STRANGERS
    assert counts["peer", "handshake"] >= STRANGERS
    assert counts["router", "unknown_key"] == 1
    # Rank 1 connects to rank 0 for the exchange, and no stranger connected to its own ports.
    assert set(refused(fleet, 1).values()) == {0}
    assert all(rank.process.is_alive() for rank in fleet.ranks)
