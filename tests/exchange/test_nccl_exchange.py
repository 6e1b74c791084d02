"""The exchange through torch's process groups: ranks in threads of this process, over gloo, torch's back end for CPUs.

`test_conformance.py` and `test_failures.py` test ranks in separate processes. `tests/gpu/test_one_answer_ranks.py` and
`tests/gpu/test_failures.py` test NCCL itself, streams and an abort.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoints import make_checkpoint
from tests.exchange.meshes import connect_all
from tests.exchange.test_nvlink_exchange import DEADLINE, SMALL, attach, together
from tests.exchange.test_staged_exchange import check_alone, fleet_of, rank_runner, run_steps, steps_of

from moeyard_worker.config.nccl_config import NCCL_ENVIRONMENT, set_nccl_environment
from moeyard_worker.config.placement import Placement, partition
from moeyard_worker.exchange.base import ExchangeError, PeerRows
from moeyard_worker.exchange.factory import build_exchange, build_mesh
from moeyard_worker.exchange.membership.frames import Phase, PlanFrame, encode_plan_frame
from moeyard_worker.exchange.membership.lockstep import Lockstep
from moeyard_worker.exchange.membership.mesh import Mesh
from moeyard_worker.exchange.transports.nccl import exchange as nccl
from moeyard_worker.exchange.transports.nccl import steps as nccl_steps
from moeyard_worker.exchange.transports.nccl.exchange import NcclExchange
from moeyard_worker.exchange.transports.nccl.group import Moved, RelayStore, TorchGroup, relay

CPU = torch.device("cpu")


def open_meshes(
    world: int,
    *,
    epoch: int = 1,
    deadline: float = DEADLINE,
    members: Sequence[int] | None = None,
    stall: float | None = None,
) -> list[Mesh]:
    members = range(world) if members is None else members
    times = {"deadline": deadline, "stall": stall, "patience": deadline}
    meshes = [
        build_mesh("nccl", shape=SMALL, rank=r, world_size=world, members=members, epoch=epoch, **times)  # type: ignore[arg-type]
        for r in members
    ]
    assert connect_all(meshes) == [None] * len(meshes)
    return meshes


def raised(call: Callable[[], Any]) -> str:
    with pytest.raises(ExchangeError) as caught:
        call()
    return str(caught.value)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("nccl"), "qwen3_moe", dtype=torch.bfloat16)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a runner uses an available GPU, whose rows gloo cannot move")
@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_equal_one_rank(checkpoint: Path, world: int) -> None:
    """Steps with prompts return computed results, others all (row, k); some ranks have no row."""
    shape, placement, plans = fleet_of(checkpoint, world)
    meshes = open_meshes(world)
    exchanges = [build_exchange("nccl", mesh=mesh, shape=shape, placement=placement) for mesh in meshes]
    runners = [rank_runner(checkpoint, exchange) for exchange in exchanges]
    for exchange, runner in zip(exchanges, runners, strict=True):
        # Before the ranks meet, a forward with or without prompts joins no exchange and leaves nothing behind.
        for prompts in ((), (38,) * world):
            exchange.steps.set_rows(PeerRows(38, prompts))
            runner.forward(steps_of(50)[0])
        assert exchange.stats.bytes_sent == 0
    attach(exchanges, meshes, placement)

    def run(rank: int) -> list[torch.Tensor]:
        exchange = exchanges[rank]

        def begin(number: int) -> None:
            exchange.steps.begin(number + 1)
            counts = tuple(plan[number].num_tokens for plan in plans)
            exchange.steps.set_rows(
                PeerRows(max(counts), tuple(plan[number].num_prefill_tokens for plan in plans), counts)
            )

        seen = run_steps(runners[rank], plans[rank], begin)
        exchange.steps.finish(6, lambda: True)
        return seen

    seen = together([lambda rank=rank: run(rank) for rank in range(world)])
    assert all((exchange.stats.bytes_sent > 0) == (world > 1) for exchange in exchanges[:2])
    for each in (*exchanges, *meshes):
        each.close()
    check_alone(checkpoint, seen)


def make_exchange(mesh: Mesh, group: Any = None, *, seconds: float = DEADLINE) -> NcclExchange:
    return NcclExchange(
        group or TorchGroup(CPU),
        rank=mesh.rank,
        world_size=mesh.world_size,
        shape=SMALL,
        device=CPU,
        seconds=seconds,
        placement=Placement.of_shards((4,), partition(6, mesh.world_size)),
    )


def round_trip(exchange: NcclExchange, ids: torch.Tensor, peers: PeerRows, layer: int) -> torch.Tensor:
    """Return combined rows whose values name the computing rank and expert: 10 * rank + local expert."""
    exchange.steps.set_rows(peers)
    x = torch.zeros(len(ids), 8, dtype=torch.bfloat16)
    got = exchange.dispatch(x, ids, layer=layer, num_prompt=peers.prompts[exchange.rank])
    out = torch.full((*got.experts.shape, 8), float("nan"), dtype=torch.bfloat16)
    here = got.experts >= 0
    out[here] = (10 * exchange.rank + got.experts[here]).to(torch.bfloat16)[:, None]
    return exchange.combine(out, got.handle)[..., 0]


@pytest.mark.parametrize(
    ("prompts", "whole"),
    [((0, 0, 0), 3 * 2 * 16), ((1, 0, 2), 1 << 20), ((0, 0, 0), 3 * 2 * 16 - 1)],
    ids=["few", "prompts", "many"],
)
def test_new_epoch_has_a_new_group_and_owners(
    prompts: tuple[int, int, int], whole: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new epoch may have fewer ranks; an id of -1 returns nothing. Both return paths are tested."""
    monkeypatch.setattr(nccl, "_MOST_WHOLE", whole)
    first = Placement.of_shards((4,), partition(6, 3))
    then = Placement((4,), ((2, 0, 2, 0, 0, 2),))
    ids = torch.tensor([[5, 1], [4, -1]])
    meshes = open_meshes(3)
    exchanges = [make_exchange(mesh) for mesh in meshes]
    attach(exchanges, meshes, first)

    def all_of(counts: tuple[int, int, int], which: Sequence[int]) -> list[list[list[float]]]:
        peers = PeerRows(2, prompts, counts)
        homes = together([lambda r=r: round_trip(exchanges[r], ids[: counts[r]], peers, 4) for r in which])
        return [home.tolist() for home in homes]

    [one, none, two] = all_of((1, 0, 2), (0, 1, 2))
    assert exchanges[0]._whole == (whole == 96)
    assert sum(e.stats.bytes_sent for e in exchanges) == sum(e.stats.bytes_received for e in exchanges)
    assert one == [[21.0, 1.0]]
    assert none == []
    assert two[0] == [21.0, 1.0]
    assert two[1][0] == 20.0
    for mesh in meshes:
        mesh.close()
    again = open_meshes(3, epoch=2, members=(0, 2))
    attach([exchanges[0], exchanges[2]], again, then)
    [one, two] = all_of((1, 0, 2), (0, 2))
    assert one == [[22.0, 0.0]]
    assert two[0] == [22.0, 0.0]
    assert two[1][0] == 2.0
    for each in (*exchanges, *again):
        each.close()


def test_placement_requires_present_ranks() -> None:
    [mesh] = open_meshes(1)
    with pytest.raises(ValueError, match=r"a placement of 6 experts on ranks \(0, 1\): there are 6 and ranks \(0,\)"):
        make_exchange(mesh).attach(mesh, Placement.of_shards((0,), partition(6, 2)))
    mesh.close()


def test_broken_group_names_the_lost_rank() -> None:
    """The group's own error names neither rank nor place; if the mesh is whole, at least the place is named."""
    meshes = open_meshes(2, deadline=2.0)
    exchanges = [make_exchange(mesh) for mesh in meshes]
    placement = Placement.of_shards((0,), partition(6, 2))
    attach(exchanges, meshes, placement)
    exchanges[0].steps.begin(812)
    exchanges[0].close()
    peers, ids = PeerRows(1, (0, 0), (1, 1)), torch.tensor([[5, 1]])
    said = together([lambda: raised(lambda: round_trip(exchanges[0], ids, peers, 0)), lambda: listen(meshes[1])])
    assert said == ["rank 0 cannot move rows at step 812, layer 0, dispatch: the process group has ended"] * 2
    for each in (*exchanges, *meshes):
        each.close()


def listen(mesh: Mesh) -> str:
    def check_until_failure() -> None:
        while True:
            mesh.check_peers()
            time.sleep(0.01)

    return raised(check_until_failure)


class FakeGpu:
    """A fake GPU: rows are in flight until the group is ended, and begin when the device reaches them."""

    host_waits = captures = False

    def __init__(self) -> None:
        self.comes, self.ended, self.launched = True, False, 0

    def meet(self, mesh: Mesh) -> None:
        pass

    def move(self, given: torch.Tensor, sent: Sequence[int], into: torch.Tensor, received: Sequence[int]) -> Moved:
        self.launched += 1
        # NCCL's kernels leave arbitrary buffer contents when they are ended.
        into.fill_(0x6B)
        return self

    def replayed(self, count: int) -> Sequence[Moved]:
        raise AssertionError("nothing was captured")

    def abort(self) -> None:
        self.ended = True

    def settle(self) -> None:
        pass

    def has_begun(self) -> bool:
        return self.comes

    def has_ended(self) -> bool:
        return self.ended

    def check(self) -> None:
        pass


@pytest.fixture
def on_devices() -> Iterator[tuple[list[NcclExchange], list[FakeGpu], list[Mesh]]]:
    """Three connected ranks whose rows never arrive. A rank that compiles has four seconds."""
    meshes = open_meshes(3, deadline=1.0, stall=4.0)
    devices = [FakeGpu() for _ in meshes]
    exchanges = [make_exchange(mesh, device, seconds=2.0) for mesh, device in zip(meshes, devices, strict=True)]
    attach(exchanges, meshes, Placement.of_shards((2,), partition(6, 3)))
    for exchange, mesh, device in zip(exchanges, meshes, devices, strict=True):
        mesh.step = 812
        device.ended = False
        exchange.steps.begin(812)
        exchange.steps.set_rows(PeerRows(1, (0, 0, 0), (1, 1, 1)))
        launch_one(exchange)
    yield exchanges, devices, meshes
    for mesh in meshes:
        mesh.close()


Ranks = tuple[list[NcclExchange], list[FakeGpu], list[Mesh]]


def delayed(seconds: float, call: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> Any:
        time.sleep(seconds)
        return call()

    return run


def end_all(devices: Sequence[FakeGpu]) -> None:
    """Let all rows arrive."""
    for device in devices:
        device.ended = True


def test_late_device_is_named_by_all(on_devices: Ranks) -> None:
    """Its own rank knows that it is late, and the others know that it does not wait; they agree in either order."""
    exchanges, devices, meshes = on_devices
    devices[1].comes = False
    begun = time.monotonic()
    said = together([lambda e=e: raised(e.steps.drain) for e in exchanges])
    assert set(said) == {said[0]}
    assert said[0] == "rank 1 silent (1.0 s) at step 812, layer 2, dispatch"
    assert [mesh.finding.ranks for mesh in meshes if mesh.finding] == [(1,)] * 3
    assert all(device.ended for device in devices)
    assert time.monotonic() - begun >= 1.0


def test_late_device_is_named_by_its_own_rank(on_devices: Ranks) -> None:
    exchanges, devices, _ = on_devices
    devices[1].comes = False
    begun = time.monotonic()
    assert raised(exchanges[1].steps.drain).startswith("rank 1 silent (2.0 s) at step 812, layer 2, dispatch")
    assert time.monotonic() - begun >= 2.0


def test_waiting_devices_blame_the_network(on_devices: Ranks) -> None:
    exchanges, devices, meshes = on_devices
    begun = time.monotonic()
    said = together([lambda e=e: raised(e.steps.drain) for e in exchanges])
    where = "step 812, layer 2, dispatch"
    assert said == [f"ranks 0, 1, 2 wait for each other's rows (2.0 s) at {where}: the network may be down"] * 3
    assert [mesh.finding.ranks for mesh in meshes if mesh.finding] == [(0, 1, 2)] * 3
    assert all(device.ended for device in devices)
    assert time.monotonic() - begun >= 2.0


def test_late_host_is_named_by_the_waiting_ranks(on_devices: Ranks) -> None:
    """The rank lives but is busy elsewhere; only its silence distinguishes it."""
    exchanges, devices, meshes = on_devices
    begun = time.monotonic()
    said = together([lambda e=e: raised(e.steps.drain) for e in exchanges[:2]])
    assert said == ["rank 2 silent (1.0 s) at step 812, layer 2, dispatch"] * 2
    assert [mesh.finding.ranks for mesh in meshes if mesh.finding] == [(2,)] * 2
    assert time.monotonic() - begun >= 1.0
    assert [device.ended for device in devices] == [True, True, False]


def test_late_rank_is_awaited_until_its_rows_arrive(on_devices: Ranks) -> None:
    """It comes just before the others' limit, and its rows take a while longer."""
    exchanges, devices, meshes = on_devices
    calls = [e.steps.drain for e in exchanges[:2]]
    calls += [delayed(0.6, exchanges[2].steps.drain), delayed(1.5, lambda: end_all(devices))]
    together(calls)
    assert [mesh.failure for mesh in meshes] == [None] * 3


def test_compiling_rank_is_awaited_until_its_rows_arrive(on_devices: Ranks) -> None:
    """A long wait of the others does not blame the network."""
    exchanges, devices, meshes = on_devices
    meshes[2].send_sign(Phase.BUSY)
    calls = [e.steps.drain for e in exchanges[:2]]
    calls += [delayed(2.5, exchanges[2].steps.drain), delayed(3.0, lambda: end_all(devices))]
    together(calls)
    assert [mesh.failure for mesh in meshes] == [None] * 3


@pytest.mark.parametrize("busy", [True, False], ids=["one compiles", "one hangs"])
def test_idle_rank_is_never_named(on_devices: Ranks, busy: bool) -> None:
    """A rank without rows needs nothing of the late rank, and its loop is idle."""
    exchanges, devices, meshes = on_devices
    devices[1].ended = True
    exchanges[1].steps.drain()
    lockstep, over = Lockstep(meshes[1]), threading.Event()
    if busy:
        meshes[2].send_sign(Phase.BUSY)

    def idle() -> str:
        while not over.wait(0.01):
            assert not lockstep.peer_started(813)
        return "idle"

    calls: list[Callable[[], Any]] = [lambda: raised(exchanges[0].steps.drain), lambda: raised(idle)]
    if busy:
        calls = [exchanges[0].steps.drain, idle, delayed(1.5, lambda: (end_all(devices), over.set()))]
    said = together(calls)
    found = [mesh.finding and mesh.finding.ranks for mesh in meshes[:2]]
    assert found == ([None] * 2 if busy else [(2,)] * 2)
    assert busy or said[:2] == ["rank 2 silent (1.0 s) at step 812, layer 2, dispatch"] * 2


def test_rank_that_compiles_for_ever_is_named(on_devices: Ranks) -> None:
    exchanges, _, meshes = on_devices
    meshes[2].send_sign(Phase.BUSY)
    begun = time.monotonic()
    said = together([lambda e=e: raised(e.steps.drain) for e in exchanges[:2]])
    assert said == ["rank 2 silent (4.0 s) at step 812, layer 2, dispatch"] * 2
    assert time.monotonic() - begun >= 3.9


def test_rank_that_hangs_after_a_wait_is_named(on_devices: Ranks) -> None:
    """Its sign about the earlier exchange does not extend the wait in this one."""
    exchanges, devices, _ = on_devices

    def go_on(rank: int) -> str:
        exchanges[rank].steps.drain()
        devices[rank].ended = False
        return raised(lambda: (launch_one(exchanges[rank]), exchanges[rank].steps.drain()))

    calls: list[Callable[[], Any]] = [lambda: go_on(0), lambda: go_on(1), exchanges[2].steps.drain]
    begun = time.monotonic()
    said = together([*calls, delayed(0.7, lambda: end_all(devices))])
    assert said[:2] == ["rank 2 silent (1.0 s) at step 812, layer 2, dispatch"] * 2
    assert time.monotonic() - begun >= 1.7


def launch_one(exchange: NcclExchange) -> None:
    """Run one dispatch without its combine."""
    exchange.dispatch(torch.zeros(1, 8, dtype=torch.bfloat16), torch.tensor([[0, 5]]), layer=2, num_prompt=0)
    exchange.steps.leave(2)


def test_plan_of_the_next_step_ends_this_one(on_devices: Ranks) -> None:
    """The others have received its rows, so a rank that waits, waits for rows in between."""
    exchanges, _, meshes = on_devices
    plan = encode_plan_frame(PlanFrame(epoch=1, step=813, source=2, num_tokens=1))
    for peer in (0, 1):
        meshes[2].send(peer, plan)
    said = together([lambda e=e: raised(e.steps.drain) for e in exchanges[:2]])
    assert {text.split(" (")[0] for text in said} == {"ranks 0, 1, 2 wait for each other's rows"}


def test_host_is_not_far_ahead_of_a_waiting_device(
    on_devices: Ranks,
) -> None:
    """Too many waiting launches block for ever."""
    exchanges, devices, _ = on_devices

    def launch(exchange: NcclExchange) -> None:
        ids, peers = torch.tensor([[0, 5]]), PeerRows(1, (0, 0, 0), (1, 1, 1))
        for _ in range(1000):
            round_trip(exchange, ids, peers, 2)

    said = together([lambda e=e: raised(lambda: launch(e)) for e in exchanges])
    assert {text.split(" (")[0] for text in said} == {"ranks 0, 1, 2 wait for each other's rows"}
    assert {text.split(") at ")[1] for text in said} == {"step 812, layer 2, dispatch: the network may be down"}
    assert [device.launched for device in devices] == [nccl_steps._AHEAD + 1] * 3


def test_lost_peer_ends_the_waits_at_once(
    on_devices: Ranks,
) -> None:
    exchanges, devices, meshes = on_devices
    meshes[2].close()
    said = together([lambda e=e: raised(e.steps.drain) for e in exchanges[:2]])
    assert said == ["rank 2 lost at step 812, layer 2, dispatch"] * 2
    assert devices[0].ended
    assert devices[1].ended


def test_slow_device_after_its_exchanges_is_named(
    on_devices: Ranks,
) -> None:
    """A finished step waits for no peers."""
    exchanges, devices, _ = on_devices
    for device in devices:
        device.ended = True
    exchanges[0].steps.drain()
    [said, *_] = together(
        [
            lambda: raised(lambda: exchanges[0].steps.finish(812, lambda: False)),
            *(lambda e=e: raised(lambda: e.steps.finish(812, lambda: False)) for e in exchanges[1:]),
        ]
    )
    assert "silent (2.0 s) at step 812" in said


def test_stores_of_all_ranks_are_merged_while_they_connect() -> None:
    """Other threads set and await the keys; each begins after the one before."""
    meshes = open_meshes(3)

    def meet(rank: int) -> list[bytes]:
        store, ended, found = RelayStore(DEADLINE), list[str](), list[bytes]()

        def connect() -> None:
            if rank:
                store.wait([f"at/{rank - 1}"])
            else:
                store.set("id", "of all")
            store.set(f"at/{rank}", str(rank).encode())
            store.wait([f"at/{peer}" for peer in range(3)])
            found.extend([store.get("id"), *(store.get(f"at/{peer}") for peer in range(3))])
            assert store.check(["id", "at/2"])
            assert not store.check(["id", "at/3"])
            ended.append("")

        threading.Thread(target=connect, daemon=True).start()
        relay(meshes[rank], store, lambda: ended[0] if ended else None, seconds=DEADLINE)
        return found

    assert together([lambda r=r: meet(r) for r in range(3)]) == [[b"of all", b"0", b"1", b"2"]] * 3
    for mesh in meshes:
        mesh.close()


@pytest.mark.parametrize(
    ("ends", "seconds", "named"),
    [
        (("", "no route to host", ""), DEADLINE, "no route to host"),
        (("", None, ""), 0.2, "no connection within 0 s"),
    ],
    ids=["error", "late"],
)
def test_failed_meeting_has_one_reason_on_all_ranks(ends: tuple[str | None, ...], seconds: float, named: str) -> None:
    meshes = open_meshes(3, deadline=2.0)
    calls = [
        lambda m=m, end=end: raised(lambda: relay(m, RelayStore(1.0), lambda: end, seconds=seconds))
        for m, end in zip(meshes, ends, strict=True)
    ]
    assert together(calls) == [f"rank 1 did not meet the others: {named}"] * 3
    assert [mesh.finding.ranks for mesh in meshes if mesh.finding] == [(1,)] * 3
    for mesh in meshes:
        mesh.close()


def test_failed_meeting_leaves_a_group_to_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    meshes, groups = open_meshes(2, deadline=2.0), [TorchGroup(CPU, captures=False) for _ in range(2)]

    def no_route(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no route to host")

    made = object()
    monkeypatch.setattr(groups[0], "_connect", lambda *_, **__: made)
    monkeypatch.setattr(groups[1], "_connect", no_route)
    errors = together([lambda g=g, m=m: raised(lambda: g.meet(m)) for g, m in zip(groups, meshes, strict=True)])
    assert errors == ["rank 1 did not meet the others: no route to host"] * 2
    for group, mesh in zip(groups, meshes, strict=True):
        group.abort()
        mesh.close()
    assert [[backend for backend, _ in group._ended] for group in groups] == [[made], []]


def test_rank_that_leaves_a_meeting_is_named() -> None:
    meshes = open_meshes(2, deadline=2.0)
    meshes[1].close()
    assert raised(lambda: relay(meshes[0], RelayStore(1.0), lambda: "", seconds=2.0)).startswith("rank 1 ")
    meshes[0].close()


def test_missing_key_times_out() -> None:
    store = RelayStore(0.05)
    with pytest.raises(TimeoutError, match=r"nobody has set \['a'\] within 0.1 s"):
        store.get("a")


def test_nccl_uses_loopback_on_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator may name a network; between hosts NCCL chooses one."""
    for name in ("NCCL_SOCKET_IFNAME", "TORCH_NCCL_BLOCKING_WAIT", *NCCL_ENVIRONMENT):
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)
    set_nccl_environment(one_host=False)
    assert "NCCL_SOCKET_IFNAME" not in os.environ
    set_nccl_environment(one_host=True)
    assert os.environ["NCCL_SOCKET_IFNAME"] == "lo"
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth1")
    set_nccl_environment(one_host=True)
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth1"
    assert {name: os.environ[name] for name in NCCL_ENVIRONMENT} == dict(NCCL_ENVIRONMENT)
