"""Whether anybody is left behind an endpoint whose connection broke."""

import asyncio
import contextlib
from collections.abc import Callable
from urllib.parse import urlsplit

_FIRST_WAIT, _LONGEST_WAIT = 0.05, 1.0  # seconds between looks


async def refused(endpoint: str) -> bool:
    """Whether nobody listens there any more, by the word of a machine that is there: the process is gone.

    False where a connection can be made, and where nothing is heard: a machine that is out of reach may come back.
    """
    url = urlsplit(endpoint)
    if url.scheme != "tcp" or url.hostname is None or url.port is None:
        return False
    try:
        _, writer = await asyncio.open_connection(url.hostname, url.port)
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    writer.close()
    return False


async def gave_up(endpoint: str, seconds: float, answered: Callable[[], bool]) -> bool:
    """Wait until `answered`; True if that does not come within `seconds`, or nobody listens at `endpoint` any more."""
    wait = _FIRST_WAIT
    with contextlib.suppress(TimeoutError):  # boundary: it is what is waited for
        async with asyncio.timeout(seconds):
            while not answered():
                if await refused(endpoint):
                    return not answered()
                await asyncio.sleep(wait)
                wait = min(2 * wait, _LONGEST_WAIT)
    return not answered()
