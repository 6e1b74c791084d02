"""Refusals of the ZMQ exchange: calls that break its contract, and frames with a valid tag and an invalid body."""

from collections.abc import Iterator

import pytest
import torch
from tests.exchange.meshes import connect_all

from moeyard_worker.config.placement import Placement, partition
from moeyard_worker.exchange.base import ExchangeError
from moeyard_worker.exchange.factory import build_exchange, build_mesh, resolve_kind
from moeyard_worker.exchange.membership.frames import Phase, pack_tag
from moeyard_worker.exchange.membership.mesh import Mesh
from moeyard_worker.exchange.shape import ExchangeShape
from moeyard_worker.exchange.transports.local import LocalExchange
from moeyard_worker.exchange.transports.nccl.exchange import NcclExchange
from moeyard_worker.exchange.transports.zmq_exchange import ZmqExchange

SHAPE = ExchangeShape(num_experts=4, top_k=2, hidden=8, dtype="float32", max_tokens=3)


def placed(ranks: int, experts: int = 4) -> Placement:
    return Placement.of_shards(range(8), partition(experts, ranks))


X = torch.arange(16.0).view(2, 8)
IDS = torch.tensor([[0, 1], [2, 3]])


@pytest.fixture
def alone() -> Iterator[ZmqExchange]:
    """A fleet of one rank."""
    exchange = ZmqExchange(Mesh(rank=0, world_size=1, slab_bytes=SHAPE.slab_bytes), shape=SHAPE, placement=placed(1))
    yield exchange
    exchange.close()


@pytest.fixture(params=["zmq", "zmq-tcp"])
def with_peer(request: pytest.FixtureRequest) -> Iterator[tuple[str, ZmqExchange, Mesh]]:
    """Rank 0's exchange, and rank 1's bare mesh, which can send anything."""
    meshes = [build_mesh(request.param, shape=SHAPE, rank=rank, world_size=2, deadline=10) for rank in range(2)]
    assert connect_all(meshes) == [None, None]
    exchange = ZmqExchange(meshes[0], shape=SHAPE, placement=placed(2))
    exchange.steps.begin(9)
    yield request.param, exchange, meshes[1]
    exchange.close()
    meshes[1].close()


def test_more_rows_than_its_size(alone: ZmqExchange) -> None:
    with pytest.raises(AssertionError, match="4 tokens, the exchange was sized for 3"):
        alone.dispatch(torch.zeros(4, 8), torch.zeros(4, 2, dtype=torch.int64), layer=0, num_prompt=0)


@pytest.mark.parametrize(
    ("x", "ids"),
    [
        (X.double(), IDS),
        (torch.zeros(2, 9), IDS),
        (X, IDS[[0, 1, 0]]),
        (X, torch.tensor([[0, 1], [2, 4]])),
        (torch.zeros(8, 2).t(), IDS),
    ],
    ids=["dtype", "hidden", "tokens", "expert", "strides"],
)
def test_mismatched_inputs(alone: ZmqExchange, x: torch.Tensor, ids: torch.Tensor) -> None:
    with pytest.raises(AssertionError):
        alone.dispatch(x, ids, layer=0, num_prompt=0)


def test_dispatch_and_combine_alternate(alone: ZmqExchange) -> None:
    first = alone.dispatch(X, IDS, layer=0, num_prompt=0)
    with pytest.raises(AssertionError, match="dispatch of layer 1 before the combine of layer 0"):
        alone.dispatch(X, IDS, layer=1, num_prompt=0)
    with pytest.raises(AssertionError, match="step 1 begins before the combine of layer 0"):
        alone.steps.begin(1)
    with pytest.raises(AssertionError):
        alone.combine(torch.zeros(2, 1, 8), first.handle)
    alone.combine(torch.zeros(2, 2, 8), first.handle)
    with pytest.raises(AssertionError, match="once"):
        alone.combine(torch.zeros(2, 2, 8), first.handle)


def test_stats_count_time_and_bytes(alone: ZmqExchange) -> None:
    alone.combine(torch.zeros(2, 2, 8), alone.dispatch(X, IDS, layer=0, num_prompt=0).handle)
    assert [len(alone.stats.seconds[phase]) for phase in ("dispatch", "combine")] == [1, 1]
    assert (alone.stats.bytes_sent, alone.stats.bytes_received) == (0, 0)


HEAD = pack_tag(0, 9, 5, Phase.DISPATCH, 1)
ROW = b"r" * 32


ONE_TOKEN = bytes([1, 0, 0, 0, 0, 0, 0, 0])


def blamed(exchange: ZmqExchange) -> tuple[int, ...]:
    """Return the ranks that the launcher would replace."""
    assert exchange._mesh.finding is not None
    return exchange._mesh.finding.ranks


@pytest.mark.parametrize(
    ("with_peer", "body"),
    [
        ("zmq", b""),
        ("zmq-tcp", b""),
        ("zmq", bytes([4, 0, 0, 0, 0, 0, 0, 0])),
        ("zmq-tcp", bytes([4, 0, 0, 0, 0, 0, 0, 0])),
        ("zmq", bytes([1, 0, 0, 0, 2, 0, 0, 0])),
        ("zmq", bytes(8) + b"x"),
        ("zmq-tcp", ONE_TOKEN + bytes(4)),
        ("zmq-tcp", ONE_TOKEN + bytes(8) + ROW[1:]),
    ],
    ids=[
        "shm-no_counts",
        "tcp-no_counts",
        "shm-too_many_tokens",
        "tcp-too_many_tokens",
        "shm-too_many_prompt_rows",
        "shm-long_doorbell",
        "tcp-half_ids",
        "tcp-part_of_a_row",
    ],
    indirect=["with_peer"],
)
def test_malformed_dispatch_is_named(with_peer: tuple[str, ZmqExchange, Mesh], body: bytes) -> None:
    _, exchange, peer = with_peer
    peer.send(0, HEAD + body)
    message = f"rank 1 sent a malformed frame of {20 + len(body)} bytes at step 9, layer 5, dispatch"
    with pytest.raises(ExchangeError, match=message):
        exchange.dispatch(X, IDS, layer=5, num_prompt=0)
    assert blamed(exchange) == (1,)


@pytest.mark.parametrize("with_peer", ["zmq-tcp"], indirect=True)
def test_unrequested_rows_are_named(with_peer: tuple[str, ZmqExchange, Mesh]) -> None:
    _, exchange, peer = with_peer
    ids_of_rank_1 = torch.tensor([2, 3], dtype=torch.int32).numpy().tobytes()
    peer.send(0, HEAD + bytes([1, 0, 0, 0, 0, 0, 0, 0]) + ids_of_rank_1 + ROW)
    with pytest.raises(ExchangeError, match="rank 1 sent 1 rows, its ids ask for 0"):
        exchange.dispatch(X, IDS, layer=5, num_prompt=0)
    assert blamed(exchange) == (1,)


def test_combine_of_the_wrong_size_is_named(with_peer: tuple[str, ZmqExchange, Mesh]) -> None:
    _, exchange, peer = with_peer
    peer.send(0, HEAD + bytes(8))
    handle = exchange.dispatch(X, IDS, layer=5, num_prompt=0).handle
    peer.send(0, pack_tag(0, 9, 5, Phase.COMBINE, 1) + ROW)
    with pytest.raises(ExchangeError, match="rank 1 sent a malformed frame of 52 bytes at step 9, layer 5, combine"):
        exchange.combine(torch.zeros(1, 2, 8), handle)


def test_kinds_of_exchanges() -> None:
    assert resolve_kind("auto", 1) == "local"
    assert resolve_kind("auto", 2) == "zmq"
    assert resolve_kind("zmq-tcp", 2) == "zmq-tcp"
    with pytest.raises(ValueError, match="the local exchange serves one rank, not 2"):
        resolve_kind("local", 2)
    assert resolve_kind("nccl", 2) == "nccl"
    with pytest.raises(ValueError, match="unknown exchange 'ib', known: auto, local, zmq, zmq-tcp, nvlink, nccl"):
        resolve_kind("ib", 2)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("auto", LocalExchange), ("local", LocalExchange), ("zmq", ZmqExchange), ("nccl", NcclExchange)],
)
def test_one_rank_builds_without_peers(kind: str, expected: type) -> None:
    mesh = build_mesh(kind, shape=SHAPE, rank=0, world_size=1)
    mesh.connect([mesh.endpoint()])
    exchange = build_exchange(kind, mesh=mesh, shape=SHAPE, placement=placed(1))
    assert type(exchange) is expected
    exchange.close()


@pytest.mark.parametrize("placement", [placed(2, experts=6), placed(3)], ids=["experts", "ranks"])
def test_placement_requires_these_experts_and_present_ranks(placement: Placement) -> None:
    mesh = build_mesh("zmq", shape=SHAPE, rank=0, world_size=4, members=(0, 1, 3))
    with pytest.raises(ValueError, match=r"there are 4 and ranks \(0, 1, 3\)"):
        ZmqExchange(mesh, shape=SHAPE, placement=placement)
    mesh.close()


@pytest.mark.parametrize("change", [{"top_k": 0}, {"dtype": torch.float16}], ids=["top_k", "dtype"])
def test_unsupported_shapes(change: dict[str, object]) -> None:
    sizes = {"num_experts": 4, "top_k": 2, "hidden": 8, "dtype": torch.float32, "max_tokens": 3}
    with pytest.raises(ValueError, match="got"):
        ExchangeShape(**(sizes | change))  # type: ignore[arg-type]
