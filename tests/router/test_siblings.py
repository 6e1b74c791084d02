"""Pages that routers on one port request from each other: an answer is complete or omitted."""

import asyncio

import pytest
from tests.limits import HANG_SECONDS

from moeyard_router.http.siblings import Siblings

PAGE = b'{"inflight": 3}' * 20_000  # more than a socket's buffer holds


@pytest.fixture
def fetch_pages(tmp_path, monkeypatch):
    """Return the pages that router 0 of three gets from router 1, which works, and router 2, which is `played`."""
    monkeypatch.setattr("moeyard_router.http.siblings._ANSWER_SECONDS", HANG_SECONDS)

    def fetch_pages(played):
        async def run():
            living, asking = Siblings(tmp_path, index=1, count=3), Siblings(tmp_path, index=0, count=3)
            living.offer("figures", lambda: PAGE)
            await living.start()

            async def answer(reader, writer):
                await played(reader, writer)
                writer.close()

            server = await asyncio.start_unix_server(answer, tmp_path / "router-2.sock")
            try:
                return await asking.ask("figures")
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
        assert fetch_pages(played) == [PAGE]


def test_unknown_page_is_omitted(tmp_path, monkeypatch):
    monkeypatch.setattr("moeyard_router.http.siblings._ANSWER_SECONDS", HANG_SECONDS)

    async def run():
        living, asking = Siblings(tmp_path, index=1, count=2), Siblings(tmp_path, index=0, count=2)
        living.offer("empty", lambda: b"")
        await living.start()
        try:
            return await asking.ask("other"), await asking.ask("empty")
        finally:
            living.close()

    assert asyncio.run(run()) == ([], [b""])
