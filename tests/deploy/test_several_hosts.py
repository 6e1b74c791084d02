"""The chapter docs/deployment.md#several-hosts, word for word, on hosts made of namespaces (drilling/hosts.py).

The tests run in order on one cluster, and each of them leaves it whole.
"""

import asyncio
import json
import re
import secrets
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from drilling.asks import Ask, make_asks
from drilling.hosts import Host, Network, missing
from drilling.load import Client, Exchange, Load, references
from drilling.server import Server
from drilling.streams import compare
from tests.limits import HANG_SECONDS
from tests.strangers import mechanism

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "deploy" / "demo"
FIRST, SECOND, LATER = "first", "second", "later"
PLACES = {"each host": (FIRST, SECOND), "the first host": (FIRST,), "each other host": (SECOND,)}
URL = "http://127.0.0.1:8000"
STREAMS = 4
ASKS: Sequence[Ask] = make_asks(52, 16, max_tokens=48)
# Established TCP connections of the ranks of a host, as (local address, remote address), and what they listen on.
LOOK = """
import json, psutil
links, doors = [], []
for process in psutil.process_iter():
    if process.cmdline()[:1] and process.cmdline()[0].startswith("ray::RankActor"):
        for each in process.net_connections("tcp"):
            if each.status == psutil.CONN_ESTABLISHED:
                links.append([list(each.laddr), list(each.raddr)])
            if each.status == psutil.CONN_LISTEN:
                doors.append(each.laddr.port)
print(json.dumps([links, doors]))
"""


def chapter() -> list[tuple[str, str]]:
    """Return the commands of the chapter in order, each with the place that its comment names."""
    text = (ROOT / "docs" / "deployment.md").read_text().partition("\n## Several hosts\n")[2].partition("\n## ")[0]
    lines = re.findall(r"^    (\S.*?) +# on (each host|the first host|each other host)$", text, re.M)
    assert len(lines) == len(re.findall(r"^    \S", text, re.M)), "every command says where to run it"
    return lines


def test_chapter_names_what_a_reader_replaces() -> None:
    commands = " ".join(command for command, _ in chapter())
    text = (ROOT / "docs" / "deployment.md").read_text()
    for word in set(re.findall(r"\b[A-Z]{3,}(?:_HOST)?\b(?![_=])", re.sub(r"RAY_\w+=", "", commands))):
        assert f"| {word} |" in text, f"the table must explain {word}"


class Cluster:
    """Two hosts that follow the chapter, a host that may join later, and clients on the first host."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.network, self._folder = network, folder
        self._values = {
            "SECRET": secrets.token_hex(32),
            "FIRST_HOST": network.addresses[FIRST],
            "RANKS": "1",
            "ALL": "2",
            "/path/on/every/node": str(DEMO),
        }
        self.hosts = {name: Host(network, name) for name in network.addresses}
        self.server: subprocess.Popen[bytes] | None = None
        self._exports: dict[str, list[str]] = {name: [] for name in self.hosts}
        self._clients = ThreadPoolExecutor(2, initializer=network.enter, initargs=(FIRST,))
        network.at_end(self._clients.shutdown)

    def start(self) -> None:
        """Run all commands in order, each in a shell of its host with the host's exports."""
        for command, place in chapter():
            for name in PLACES[place]:
                self._run(name, command)
        self.wait(lambda: self.page("/readyz") is not None)

    def join(self, name: str) -> None:
        """Run the commands of another host."""
        self._exports[name] = []
        for command in (command for command, place in chapter() if SECOND in PLACES[place]):
            self._run(name, command)

    def _run(self, name: str, command: str) -> None:
        for word, value in self._values.items():
            command = re.sub(rf"(?<!\w){word}(?!\w)", value, command)
        if command.startswith("export "):
            self._exports[name].append(command)
            return
        with self.log(name).open("ab") as log:
            shell = self.hosts[name].start("\n".join([*self._exports[name], command]), out=log)
        if command.startswith("moeyard serve "):
            self.server = shell
        else:
            assert shell.wait(HANG_SECONDS) == 0, self.log(name).read_text()

    def log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def inside(self, work: Callable[[], Any]) -> Any:
        """Run a function in the network of the first host."""
        return self._clients.submit(work).result()

    def page(self, path: str) -> Any:
        """Return a JSON page of the server, None if there is none."""

        def get() -> Any:
            try:
                answer = httpx.get(URL + path, timeout=HANG_SECONDS)
                return answer.json() if answer.status_code == 200 else None
            except httpx.HTTPError:
                return None

        return self.inside(get)

    def wait(self, done: Callable[[], bool]) -> None:
        """Wait until `done()`. Fails with the server's log if that ends or takes too long."""
        limit = time.monotonic() + 2 * HANG_SECONDS
        while not done():
            waits = self.server is not None and self.server.poll() is None and time.monotonic() < limit
            assert waits, self.log(FIRST).read_text()[-4000:]
            time.sleep(0.25)

    def states(self) -> list[str]:
        """Return the state of each rank."""
        fleet = self.page("/v1/fleet")
        return [] if fleet is None else [worker["state"] for worker in fleet["workers"]]

    def whole(self) -> bool:
        return self.states() == ["ready", "ready"] and self.page("/readyz") is not None

    def places(self) -> list[str]:
        """Return the host of each rank that serves."""
        names = {address: name for name, address in self.network.addresses.items()}
        endpoints = [worker["endpoint"] for worker in self.page("/v1/fleet")["workers"]]
        return [names[endpoint.removeprefix("tcp://").partition(":")[0]] for endpoint in endpoints]

    def rank_of(self, name: str) -> int:
        """Return the rank on a host. Each host has one."""
        return self.places().index(name)

    def incidents(self, since: float) -> list[Mapping[str, Any]]:
        """Return incidents after a wall-clock time, the oldest first."""
        return [each for each in reversed(self.page("/v1/fleet/incidents")["incidents"]) if each["when"] >= since]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Exchange]:
    """The answers of a server on one host, with a private Ray."""
    server = Server(tmp_path_factory.mktemp("one-host"), [str(DEMO), "--workers", "2", "--port", "0"])
    try:
        server.wait_ready(2 * HANG_SECONDS)
        return asyncio.run(answers(server.url))
    finally:
        server.stop()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, expected: dict[str, Exchange]) -> Iterator[Cluster]:
    if (lacking := missing()) is not None:
        pytest.skip(lacking)
    with Network((FIRST, SECOND, LATER)) as network:
        cluster = Cluster(network, tmp_path_factory.mktemp("two-hosts"))
        cluster.start()
        yield cluster


async def answers(url: str) -> dict[str, Exchange]:
    """Return the answers to ASKS by name."""
    client = Client(url, seconds=HANG_SECONDS)
    async with client.http:
        return await references(client, ASKS, streams=STREAMS)


def under_load(cluster: Cluster, expected: Mapping[str, Exchange], incident: Callable[[], None]) -> int:
    """Run `incident` while requests run. None fails, and all answers are the expected ones. Returns their number."""

    async def run() -> list[Exchange]:
        client = Client(URL, seconds=2 * HANG_SECONDS)
        async with client.http:
            load = Load(client, ASKS, streams=STREAMS, seed=52, max_tokens=48)
            await more(load)
            await asyncio.to_thread(incident)
            await more(load)
            assert await load.pause(2 * HANG_SECONDS), "requests hang"
            await load.close(0.0)
        return load.history

    async def more(load: Load) -> None:
        end = len(load.history) + 2 * STREAMS
        while len(load.history) < end:
            await load.changed(1.0)

    history: list[Exchange] = cluster.inside(lambda: asyncio.run(run()))
    assert [each.answer.error for each in history if each.answer.error is not None] == []
    different = [
        e.ask.name for e in history if e.ask.name in expected and compare(expected[e.ask.name].answer, e.answer)
    ]
    assert different == []
    return len(history)


def test_answers_are_those_of_one_host(cluster: Cluster, expected: dict[str, Exchange]) -> None:
    found = cluster.inside(lambda: asyncio.run(answers(URL)))
    assert found.keys() == expected.keys() == {ask.name for ask in ASKS}
    assert not any(compare(expected[name].answer, found[name].answer) for name in expected)
    assert sorted(cluster.places()) == [FIRST, SECOND]


def test_ranks_exchange_over_tcp_with_curve(cluster: Cluster) -> None:
    links, doors = {}, set()
    for name in (FIRST, SECOND):
        host = cluster.hosts[name]
        looking = host.start(f"python -c '{LOOK}'", out=subprocess.PIPE)
        pairs, ports = json.loads(looking.communicate(timeout=HANG_SECONDS)[0])
        links[name] = {(tuple(local), tuple(remote)) for local, remote in pairs}
        doors |= {(cluster.network.addresses[name], port) for port in ports}
    # Both hosts see these connections, so a rank is at either end.
    between = links[FIRST] & {(remote, local) for local, remote in links[SECOND]}
    listeners = {end for pair in between for end in pair if end in doors}
    assert listeners, links
    for address, port in listeners:
        found = cluster.inside(lambda address=address, port=port: mechanism(f"tcp://{address}:{port}"))
        assert found.rstrip(b"\0") == b"CURVE", (address, port)


def check(loss: Mapping[str, Any], back: Mapping[str, Any], *, rank: int) -> None:
    """Check that two incidents name the loss and the return of a rank."""
    assert loss["ranks"] == [rank]
    assert re.match(rf"rank {rank} (lost|silent) ", loss["launcher"]["reason"]), loss
    assert back["launcher"]["reason"] == f"rank {rank} is back"


@pytest.mark.parametrize("seconds", [3.0, 30.0])
def test_cut_network_heals(cluster: Cluster, expected: dict[str, Exchange], seconds: float) -> None:
    """The step deadline is 5 s. TCP may notice up to a cut's duration later that the network is back."""
    since, lost = time.time(), cluster.rank_of(SECOND)

    def cut() -> None:
        end = time.monotonic() + seconds
        cluster.network.cut(SECOND)
        if seconds > 5.0:
            cluster.wait(lambda: cluster.states()[lost] == "away")
        time.sleep(max(0.0, end - time.monotonic()))
        cluster.network.heal(SECOND)
        cluster.wait(cluster.whole)

    under_load(cluster, expected, cut)
    cluster.wait(cluster.whole)
    found = cluster.incidents(since)
    assert len(found) == 2 or (seconds < 5.0 and not found)
    for loss, back in zip(found[::2], found[1::2], strict=True):
        check(loss, back, rank=lost)
    assert cluster.rank_of(SECOND) == lost


def test_lost_host_fails_no_request(cluster: Cluster, expected: dict[str, Exchange]) -> None:
    since, lost = time.time(), cluster.rank_of(SECOND)

    def kill() -> None:
        cluster.hosts[SECOND].stop()
        cluster.wait(lambda: "waits for a host" in cluster.log(FIRST).read_text())
        assert cluster.states()[lost] == "away", "the other rank serves"
        cluster.hosts[SECOND] = Host(cluster.network, SECOND)
        cluster.join(SECOND)
        cluster.wait(cluster.whole)

    under_load(cluster, expected, kill)
    check(*cluster.incidents(since), rank=lost)


def test_later_host_adds_a_worker(cluster: Cluster, expected: dict[str, Exchange]) -> None:
    def scale(size: int) -> None:
        scaling = cluster.hosts[FIRST].start(f"moeyard scale {size}", out=subprocess.PIPE)
        said, _ = scaling.communicate(timeout=2 * HANG_SECONDS)
        assert scaling.returncode == 0, said.decode()

    cluster.join(LATER)
    before = cluster.places()
    under_load(cluster, expected, lambda: scale(3))
    assert cluster.places() == [*before, LATER]
    under_load(cluster, expected, lambda: scale(2))
    assert cluster.places() == before
