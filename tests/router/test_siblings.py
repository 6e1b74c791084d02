"""What routers on one port ask each other: an answer comes whole, or is left out."""

import asyncio

import pytest
from tests.limits import HANG_SECONDS

from moeyard_router.http.siblings import Siblings

PAGE = b'{"inflight": 3}' * 20_000  # more than a socket's buffer holds


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """The pages that router 0 of three hears of router 1, which lives, and of 2, which is `played`."""
    monkeypatch.setattr("moeyard_router.http.siblings._ANSWER_SECONDS", HANG_SECONDS)

    def asked(played):
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

    return asked


def test_a_router_that_ends_while_it_is_asked_is_left_out(asked):
    """Killed with the question in its socket, or with half of its answer out."""

    async def nothing(reader, writer):
        await reader.readline()

    async def half(reader, writer):
        # As a router that lives would begin.
        theirs, ours = await asyncio.open_unix_connection(writer.get_extra_info("sockname").replace("-2", "-1"))
        ours.write(await reader.readline())
        writer.write(await theirs.readexactly(len(PAGE) // 2))
        await writer.drain()
        ours.close()

    for played in (nothing, half):
        assert asked(played) == [PAGE]


def test_a_page_that_is_not_there_is_no_page(tmp_path, monkeypatch):
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
