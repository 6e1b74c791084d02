"""Files that an operator may change while the router runs."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

FileStamp = tuple[int, int, int]

_CHECK_SECONDS = 2.0


def stamp(path: Path) -> FileStamp:
    """What changes when a file is written, replaced (as Kubernetes does with mounted secrets) or made readable.

    (0, 0, 0) if there is none, which reading it will say.
    """
    try:
        stat = path.stat()
    except OSError:
        return 0, 0, 0
    return stat.st_ctime_ns, stat.st_ino, stat.st_size


async def keep_fresh(refresh: Sequence[Callable[[], None]]) -> None:
    """Call each of `refresh` every 2 s, in a thread: their files may lie on a network."""
    while refresh:
        await asyncio.sleep(_CHECK_SECONDS)
        for each in refresh:
            await asyncio.to_thread(each)
