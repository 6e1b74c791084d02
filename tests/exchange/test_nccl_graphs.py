"""Behaviour of the process-group exchange that graphs need, tested without graphs, with ranks in threads.

Graphs and their communicators need GPUs (`tests/gpu/test_one_answer_ranks.py`, `tests/gpu/test_failures.py`).
`tests/engine/test_peer_steps.py` tests whole ranks, which repeat steps instead of graphs.
"""

from collections.abc import Iterator, Sequence

import pytest
import torch
from tests.exchange.test_nccl_exchange import CPU, FakeGpu, launch_one, make_exchange, open_meshes, raised, round_trip
from tests.exchange.test_nvlink_exchange import attach, together

from moeyard_worker.config.placement import Placement, partition
from moeyard_worker.exchange.base import PeerRows
from moeyard_worker.exchange.membership.mesh import Mesh
from moeyard_worker.exchange.transports.nccl import exchange as nccl
from moeyard_worker.exchange.transports.nccl.exchange import NcclExchange
from moeyard_worker.exchange.transports.nccl.group import Moved, TorchGroup, _Ticks


class CapturableGroup(TorchGroup):
    """A gloo group that claims to support graphs; no step of it is captured."""

    def __init__(self) -> None:
        super().__init__(CPU, captures=True)


@pytest.mark.parametrize(
    ("prompts", "sizes", "room"),
    [((0, 0, 0), (1, 4), 4), ((0, 0, 0), (1, 2), 2), ((0, 1, 2), (1, 4), None), ((0, 0, 0), (1,), None)],
    ids=["with padding", "without", "prompts", "more than fit"],
)
def test_ranks_send_equal_amounts_of_few_rows(
    prompts: tuple[int, ...], sizes: tuple[int, ...], room: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank sends as many rows as fit, even with fewer or no rows, so that launched steps match captured ones."""
    monkeypatch.setattr(nccl, "_ROW_SIZES", sizes)
    counts, ids = (0, 1, 2), torch.tensor([[5, 1], [4, -1]])
    meshes = open_meshes(3)
    exchanges = [make_exchange(mesh, CapturableGroup()) for mesh in meshes]
    assert [exchange.traits.row_sizes for exchange in exchanges] == [sizes] * 3
    attach(exchanges, meshes, Placement.of_shards((4,), partition(6, 3)))
    peers = PeerRows(2, prompts, counts)
    for _ in range(2):
        none, one, two = together(
            [lambda e=e, n=n: round_trip(e, ids[:n], peers, 4) for e, n in zip(exchanges, counts, strict=True)]
        )
        assert none.tolist() == []
        assert one.tolist() == [[21.0, 1.0]]
        assert two[0].tolist() == [21.0, 1.0]
        assert two[1, 0].item() == 20.0
    assert exchanges[0]._counts == ([*counts] if room is None else [room] * 3)
    for each in (*exchanges, *meshes):
        each.close()


def test_buffers_hold_all_possible_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """For three ranks, two experts per row and rows of 16 bytes; at most a step's rows. Gloo has no such buffers."""
    meshes = open_meshes(3)
    for each in meshes:
        each.close()
    mesh = meshes[0]
    assert make_exchange(mesh).traits.row_sizes == ()
    assert not make_exchange(mesh).traits.graphs_per_epoch
    assert make_exchange(mesh, CapturableGroup()).traits.row_sizes == (1, 4)
    monkeypatch.setattr(nccl, "_MOST_WHOLE", 3 * 2 * 16 * 4 - 1)
    held = make_exchange(mesh, CapturableGroup())
    assert held.traits.row_sizes == (1,)
    assert held.traits.graphs_per_epoch


class Replays(FakeGpu):
    """A GPU that has passed a set number of starts and ends of its graph's exchanges."""

    captures = True

    def __init__(self) -> None:
        super().__init__()
        self.ticks = _Ticks(CPU)
        self.did: list[str] = []

    def passes(self, count: int) -> None:
        for _ in range(count):
            self.ticks.tick()

    def replayed(self, count: int) -> Sequence[Moved]:
        return [self.ticks.next_move() for _ in range(count)]

    def abort(self) -> None:
        """Let waiting work continue to the end of what was launched."""
        self.did.append("abort")
        while self.ticks.passed() < self.ticks._launched:
            self.ticks.tick()

    def settle(self) -> None:
        self.did.append("settle")


@pytest.fixture
def replaying() -> Iterator[tuple[list[NcclExchange], list[Replays], list[Mesh]]]:
    """Two ranks, each with a launched graph of the exchanges of two layers in step 812."""
    meshes = open_meshes(2, deadline=1.0, stall=4.0)
    devices = [Replays() for _ in meshes]
    placement = Placement.of_shards((2, 5), partition(6, 2))
    exchanges = [make_exchange(mesh, device, seconds=2.0) for mesh, device in zip(meshes, devices, strict=True)]
    try:
        attach(exchanges, meshes, placement)
        for exchange, device, mesh in zip(exchanges, devices, meshes, strict=True):
            mesh.step = 812
            device.did.clear()
            exchange.steps.begin(812)
            exchange.steps.set_rows(PeerRows(3, (0, 0), (3, 1)))
            exchange.steps.replayed()
        yield exchanges, devices, meshes
    finally:
        for mesh in meshes:
            mesh.close()


Ranks = tuple[list[NcclExchange], list[Replays], list[Mesh]]


@pytest.mark.sampled(0)
@pytest.mark.parametrize(
    ("passed", "where"),
    [(1, "layer 2, dispatch"), (3, "layer 2, combine"), (5, "layer 5, dispatch"), (7, "layer 5, combine")],
)
def test_place_where_a_graph_waits_is_named(replaying: Ranks, passed: int, where: str) -> None:
    """Each rank is named at its place; an unheard rank is named as silent."""
    exchanges, devices, _ = replaying
    for device in devices:
        device.passes(passed)
    said = together([lambda e=e: raised(e.steps.drain) for e in exchanges])
    assert said == [f"ranks 0, 1 wait for each other's rows (2.0 s) at step 812, {where}: the network may be down"] * 2


def test_late_device_in_a_graph_is_named(replaying: Ranks) -> None:
    exchanges, devices, meshes = replaying
    devices[0].passes(2)
    devices[1].passes(3)
    said = together([lambda: raised(exchanges[0].steps.drain), lambda: raised(exchanges[1].steps.drain)])
    assert said == ["rank 0 silent (1.0 s) at step 812, layer 2, combine"] * 2
    assert {mesh.finding and mesh.finding.ranks for mesh in meshes} == {(0,)}


def test_finished_graph_is_no_longer_awaited(replaying: Ranks) -> None:
    """Events report later launches too. The bytes of both are counted, with padding."""
    exchanges, devices, _ = replaying
    for exchange, device in zip(exchanges, devices, strict=True):
        device.passes(7)
        assert exchange.steps._progress() == (1, True)
        device.passes(1)
        exchange.steps.drain()
        # Four rows go to the other rank: 8 values and two ids each; two results return, in each layer.
        assert exchange.stats.bytes_sent == exchange.stats.bytes_received == 2 * 4 * (16 + 8 + 2 * 16)
        device.ended = True
        launch_one(exchange)
        exchange.steps.drain()
        device.ended = False
        exchange.steps.replayed()
        assert exchange.steps._progress() == (4, False)


def test_graphs_are_freed_when_idle_and_before_their_group(replaying: Ranks) -> None:
    exchanges, devices, _ = replaying
    exchange, device = exchanges[0], devices[0]

    def forget() -> None:
        assert device.ticks.passed() == 8
        device.did.append("forget")

    exchange.steps.release_graphs = forget
    exchange.steps.abort()
    assert device.did == ["abort", "forget", "settle"]


def test_failed_device_still_ends_an_epoch(replaying: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of its events is reported elsewhere, and the later steps must still run."""
    exchange, device = replaying[0][0], replaying[1][0]
    monkeypatch.setattr(device, "abort", lambda: device.did.append("abort"))

    def fail() -> int:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(device.ticks, "passed", fail)
    exchange.close()
    assert device.did == ["abort", "settle"]
    assert not exchange.steps._marks
