"""Router processes that share a port: each answers the others' questions over a Unix socket in a directory of theirs.

A question is a line with the name of a page; the answer is the number of the page's bytes, and these. A process that is
not there, ends before its answer does, or does not answer within a second, is left out.
"""

import asyncio
import contextlib
import struct
from collections.abc import Callable
from pathlib import Path

_ANSWER_SECONDS = 1.0
_MAX_NAME = 64  # bytes of a question
_SIZE = struct.Struct("<Q")


class Siblings:
    """What process `index` of `count` is asked and asks. Lives in one event loop: `start` it there, and `close` it."""

    def __init__(self, directory: Path, *, index: int, count: int) -> None:
        self._directory = directory
        self._others = [i for i in range(count) if i != index]
        self._index = index
        self._server: asyncio.Server | None = None
        self._pages: dict[str, Callable[[], bytes]] = {}

    def offer(self, name: str, page: Callable[[], bytes]) -> None:
        """Have a page to be asked for; it is made when it is."""
        self._pages[name] = page

    async def start(self) -> None:
        """Answer from now on; a socket left by a process that took this place before is replaced."""
        path = self._path(self._index)
        path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._answer, path, limit=_MAX_NAME)

    def close(self) -> None:
        """Answer no more."""
        if self._server is not None:
            self._server.close()
            self._path(self._index).unlink(missing_ok=True)

    async def ask(self, name: str) -> list[bytes]:
        """The others' pages of this name."""
        answers = await asyncio.gather(*(self._ask(index, name) for index in self._others))
        return [answer for answer in answers if answer is not None]

    async def _ask(self, index: int, name: str) -> bytes | None:
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                reader, writer = await asyncio.open_unix_connection(self._path(index))
                try:
                    writer.write(name.encode() + b"\n")
                    (size,) = _SIZE.unpack(await reader.readexactly(_SIZE.size))
                    return await reader.readexactly(size)
                finally:
                    writer.close()
        except (OSError, EOFError, TimeoutError):
            return None  # it ended, or is being started again

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, ValueError, TimeoutError):  # boundary: who asked has left or wrote nonsense
            async with asyncio.timeout(_ANSWER_SECONDS):
                name = (await reader.readline()).decode("ascii", "replace").strip()
                if name in self._pages:
                    page = self._pages[name]()
                    writer.write(_SIZE.pack(len(page)) + page)
                    await writer.drain()
        writer.close()

    def _path(self, index: int) -> Path:
        return self._directory / f"router-{index}.sock"
