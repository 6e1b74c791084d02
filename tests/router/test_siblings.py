"""Pages that routers on one port request from each other: an answer is complete, and counts outlive their router."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from tests.limits import HANG_SECONDS

from moeyard_router.http.siblings import Siblings, summed

PAGE = b'{"inflight": 3}' * 20_000  # more than a socket's buffer holds


def listed(living, ended):
    """Join pages so that all can be told apart."""
    return b"|".join([*living, b"ended", *ended])


@pytest.fixture
def fetch_pages(tmp_path, monkeypatch):
    """Return the pages that router 0 of three gets from router 1, which works, and router 2, which is `played`."""
    monkeypatch.setattr("moeyard_router.http.siblings._ANSWER_SECONDS", HANG_SECONDS)

    def fetch_pages(played):
        folder = tmp_path / played.__name__
        folder.mkdir()

        async def run():
            living, asking = Siblings(folder, index=1, count=3), Siblings(folder, index=0, count=3)
            living.offer("figures", lambda: PAGE, listed)
            asking.offer("figures", lambda: b"own", listed)
            await living.start()

            async def answer(reader, writer):
                await played(reader, writer)
                writer.close()

            server = await asyncio.start_unix_server(answer, folder / "router-2.sock")
            try:
                return await asking.joined("figures")
            finally:
                server.close()
                living.close()

        return asyncio.run(run())

    return fetch_pages


def test_router_killed_during_a_request_is_omitted(fetch_pages):
    """The router is killed before it reads the request, or after half of its answer."""

    async def nothing(reader, writer):
        await reader.readline()

    async def half(reader, writer):
        # Begin like a working router.
        theirs, ours = await asyncio.open_unix_connection(writer.get_extra_info("sockname").replace("-2", "-1"))
        ours.write(await reader.readline())
        writer.write(await theirs.readexactly(len(PAGE) // 2))
        await writer.drain()
        ours.close()

    for played in (nothing, half):
        assert fetch_pages(played) == b"own|" + PAGE + b"|ended"


def test_unknown_page_is_omitted(tmp_path, monkeypatch):
    monkeypatch.setattr("moeyard_router.http.siblings._ANSWER_SECONDS", HANG_SECONDS)

    async def run():
        living, asking = Siblings(tmp_path, index=1, count=2), Siblings(tmp_path, index=0, count=2)
        living.offer("empty", lambda: b"", listed)
        asking.offer("other", lambda: b"own", listed)
        asking.offer("empty", lambda: b"own", listed)
        await living.start()
        try:
            return await asking.joined("other"), await asking.joined("empty")
        finally:
            living.close()

    assert asyncio.run(run()) == (b"own|ended", b"own||ended")


class Router:
    """A router process on the port, which counts. `kill` ends it as SIGKILL does: nothing of it runs any more."""

    def __init__(self, directory, index):
        self.registry = CollectorRegistry()
        self.served = Counter("served", "Served.", registry=self.registry)
        self.seconds = Histogram("seconds", "Took.", buckets=(1.0,), registry=self.registry)
        self.open = Gauge("open", "Open.", registry=self.registry)
        self.siblings = Siblings(directory, index=index, count=3)
        self.siblings.offer("metrics", lambda: generate_latest(self.registry), summed)

    def serve(self, count):
        for _ in range(count):
            self.served.inc()
            self.seconds.observe(0.5)
        self.open.set(count)

    async def scrape(self):
        page = (await self.siblings.joined("metrics")).decode()
        families = text_string_to_metric_families(page)
        return {s.name: s.value for f in families for s in f.samples if s.labels.get("le") != "+Inf"}

    def kill(self):
        self.siblings._server.close()


def shown(samples):
    return samples["served_total"], samples["seconds_count"], samples["seconds_bucket"], samples["open"]


@pytest.fixture
def port(tmp_path, monkeypatch):
    """Run a scenario with three routers that have served 1, 10 and 100 requests."""
    monkeypatch.setattr("moeyard_router.http.siblings._ANSWER_SECONDS", HANG_SECONDS)

    def run(scenario):
        async def main():
            routers = [Router(tmp_path, index) for index in range(3)]
            for router, count in zip(routers, (1, 10, 100), strict=True):
                await router.siblings.start()
                router.serve(count)
            try:
                await scenario(routers)
            finally:
                for router in routers:
                    router.kill()

        asyncio.run(main())

    return run


def test_counts_of_a_killed_router_stay_and_its_gauges_vanish(port, tmp_path):
    """Also on a router that did not see them, after the next life of the index, and after the next loss."""

    async def scenario(routers):
        before = await routers[0].scrape()
        assert shown(before) == (111, 111, 111, 111)
        routers[2].serve(5)  # since the last scrape: these are lost
        routers[2].kill()
        for router in routers[:2]:
            assert shown(await router.scrape()) == (111, 111, 111, 11)
        for life in range(1, 4):
            routers[2] = Router(tmp_path, 2)
            await routers[2].siblings.start()
            assert shown(await routers[life % 2].scrape())[0] == 111 + 1000 * (life - 1)
            routers[2].serve(1000)
            for router in routers:
                now = await router.scrape()
                assert shown(now) == (*(111 + 1000 * life,) * 3, 1011)
                assert now["served_created"] == before["served_created"], "the series is as old as its oldest count"
            routers[2].kill()
            assert shown(await routers[0].scrape())[0] == 111 + 1000 * life

    port(scenario)


def test_router_killed_before_its_first_scrape_keeps_the_counts_of_the_one_before(port, tmp_path):
    async def scenario(routers):
        await routers[0].scrape()
        for _ in range(3):
            routers[2].kill()
            routers[2] = Router(tmp_path, 2)
            await routers[2].siblings.start()
        assert shown(await routers[1].scrape()) == (111, 111, 111, 11)

    port(scenario)


def test_router_that_does_not_answer_counts_as_at_its_last_scrape(port, monkeypatch):
    async def scenario(routers):
        await routers[0].scrape()
        routers[2].serve(5)
        with monkeypatch.context() as patch:
            patch.setattr("moeyard_router.http.siblings._ANSWER_SECONDS", 0.0)
            assert shown(await routers[2].scrape())[0] == 116, "a router always counts itself"
            assert shown(await routers[0].scrape())[0] == 116
        assert shown(await routers[0].scrape()) == (116, 116, 116, 16)

    port(scenario)


def test_router_that_ends_in_order_loses_nothing(port):
    async def scenario(routers):
        await routers[0].scrape()
        routers[2].serve(5)
        routers[2].siblings.close()
        assert shown(await routers[0].scrape()) == (116, 116, 116, 11)

    port(scenario)


def test_all_routers_are_replaced(port, tmp_path):
    async def scenario(routers):
        await routers[0].scrape()
        for router in routers:
            router.kill()
        alone = Router(tmp_path, 1)
        assert shown(await alone.scrape()) == (111, 111, 111, 0)

    port(scenario)


def test_full_disk_is_named_and_pages_are_answered(port, monkeypatch, caplog):
    async def scenario(routers):
        def full(path, data):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("pathlib.Path.write_bytes", full)
        assert shown(await routers[0].scrape()) == (111, 111, 111, 111)
        assert "the counts of router 0 are not stored: [Errno 28] No space left on device" in caplog.text

    port(scenario)
